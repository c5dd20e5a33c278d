"""Advice on how to get a patched build names only ways that this installation has."""

import platform
import sys

import pytest

from llamabatch.utils import cures


@pytest.mark.parametrize(
    ("system", "machine", "libc", "python", "there"),
    [
        ("linux", "x86_64", ("glibc", "2.28"), "CPython", True),
        ("linux", "aarch64", ("glibc", "2.41"), "CPython", True),
        ("linux", "x86_64", ("glibc", "2.17"), "CPython", False),
        ("linux", "x86_64", ("", ""), "CPython", False),  # musl
        ("linux", "riscv64", ("glibc", "2.41"), "CPython", False),
        ("linux", "x86_64", ("glibc", "2.41"), "PyPy", False),
        ("darwin", "arm64", ("", ""), "CPython", False),
        ("win32", "AMD64", ("", ""), "CPython", False),
    ],
)
def test_wheels_are_for_linux_with_glibc(system, machine, libc, python, there, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    monkeypatch.setattr(platform, "python_implementation", lambda: python)
    assert cures.has_wheels() == there


def test_a_checkout_is_known_by_its_files_and_an_installed_package_is_none(tmp_path, monkeypatch):
    assert cures.in_checkout()
    assert "make setup" in cures.patched_build()
    monkeypatch.setattr(cures, "_ROOT", tmp_path)
    assert not cures.in_checkout()
    assert "make" not in cures.patched_build()
    assert "llamabatch build --backend cuda" in cures.patched_build("cuda")
