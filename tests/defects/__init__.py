"""Defects that the tests must catch. `make test-defects` plants each one, runs the tests that should catch it, and
removes it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """A change at one place of the code that would harm a user.

    Attributes:
        what: the defect, as a user would describe it.
        file: the changed file, relative to the checkout.
        old: the text to replace. It occurs once in the file.
        new: the text that replaces it.
        tests: files and folders of tests that should catch the defect.
        cpu: the features that the CPU needs to run this code, by Linux's names; those with "-" in front it must lack.
            "": any x86 CPU with AVX2 runs it.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    cpu: str = ""

    def runs_on(self, flags: Collection[str]) -> bool:
        """True if a CPU with these features runs the code."""
        return all((name.lstrip("-") in flags) is not name.startswith("-") for name in self.cpu.split())
