"""Defects that the tests must catch: `make test-defects` plants each, runs what should catch it, and takes it out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """A change of one place in the code that a user would suffer from.

    Attributes:
        what: the defect, as its user would tell of it.
        file: where, relative to the checkout.
        old: the text there, which occurs once.
        new: what it becomes.
        tests: files and folders of tests that should catch it.
        cpu: a feature that the CPU must have for this code to run, in Linux's names; "": any x86 of AVX2.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    cpu: str = ""
