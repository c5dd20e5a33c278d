"""Finds the files on which a test depends: the modules and programs that it imports or starts, and their imports."""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
from collections.abc import Iterable
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEEN_BY_ALL = ("pyproject.toml", "Makefile", "models/*", "native_patches/*", "tests/data/*", "tests/gate/*.py")
_DOTTED = re.compile(r"\b(?:llamabatch|tests|benchmarks|native_patches)(?:\.\w+)+")


@cache
def files() -> tuple[str, ...]:
    """Returns the files of the checkout, including untracked files that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE
    ).stdout.split("\0")
    return tuple(sorted(name for name in set(listed) if (ROOT / name).is_file()))


@cache
def _modules() -> dict[str, str]:
    """Returns the Python files by the names of their modules."""
    return {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name
        for name in files()
        if name.endswith(".py")
    }


@cache
def _by_base_name() -> dict[str, set[str]]:
    """Returns the files that are not Python, by their names without a folder."""
    found: dict[str, set[str]] = {}
    for name in files():
        if not name.endswith(".py"):
            found.setdefault(name.rpartition("/")[2], set()).add(name)
    return found


@cache
def _edges(file: str) -> frozenset[str]:
    """Returns the files that a file imports or names in a string: modules that it starts, and documents."""
    if not file.endswith(".py"):
        return frozenset()
    known = _modules()
    named: set[str] = set()
    documents: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named |= {*_DOTTED.findall(node.value)}
            documents |= _by_base_name().get(node.value.rpartition("/")[2], set())
            # A test that names the command may start it. The command may import any module of the package.
            if node.value == "llamabatch" and file.startswith("tests/"):
                named |= {name for name in known if name.startswith("llamabatch.")}
    parents = {".".join(parts[:n]) for parts in (name.split(".") for name in named) for n in range(1, len(parts))}
    return frozenset(known[name] for name in named | parents if name in known) | documents


def seen_by(tests: Iterable[str], also: Iterable[str] = ()) -> set[str]:
    """Returns all files on which a run of tests depends.

    Args:
        tests: the files of the tests.
        also: patterns of further files, for example documents that the tests read.
    """
    conftests = {name for name in files() if name.rpartition("/")[2] == "conftest.py"}
    new = {*tests}
    new |= {each for each in conftests for test in tests if test.startswith(each.removesuffix("conftest.py"))}
    seen: set[str] = set()
    while new:
        seen |= new
        new = {edge for file in new for edge in _edges(file)} - seen
    patterns = (*SEEN_BY_ALL, *also)
    seen |= {name for name in files() if any(fnmatch(name, pattern) for pattern in patterns)}
    return seen | {name for name in files() if name.startswith("llamabatch/") and not name.endswith(".py")}


def digest(names: Iterable[str]) -> str:
    """Returns one hash of the names and the contents of files."""
    total = hashlib.sha256()
    for name in sorted(names):
        total.update(f"{name}\0{hashlib.sha256((ROOT / name).read_bytes()).hexdigest()}\0".encode())
    return total.hexdigest()
