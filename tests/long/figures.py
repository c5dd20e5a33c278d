"""The figures: modules of this folder that define HOLDS, a sentence, and TOTAL, the number of cases."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGE = "tests.long"

_HOLDS = re.compile(r"^HOLDS\b", re.MULTILINE)
_IMPORTS = re.compile(r"^\s*from tests\.long(?:\.(\w+))? import (.+)", re.MULTILINE)


@dataclass(frozen=True)
class Figure:
    """A promise that is tested by many cases: one row of the published table.

    Attributes:
        name: the name of its module.
        holds: the promise, in one sentence.
        total: number of cases. Cases are numbered from 0.
        quick: number of cases that the test suite runs.
        timeout_s: limit of one case, seconds.
        needs: a package that some environments lack; None: the figure runs anywhere.
        digest: hash of the module and of the modules of this folder that it imports. If it changes, outcomes of cases
            no longer count.
    """

    name: str
    holds: str
    total: int
    quick: int
    timeout_s: float
    digest: str
    needs: str | None = None

    @property
    def can_run(self) -> bool:
        return self.needs is None or importlib.util.find_spec(self.needs) is not None


def find(folder: Path = HERE, package: str = PACKAGE) -> list[Figure]:
    """Returns all figures by name. Figures whose single case takes an hour come last."""
    names = sorted(path.stem for path in folder.glob("*.py") if _HOLDS.search(path.read_text(encoding="utf-8")))
    figures = [_figure(folder, load(folder, name, package), name) for name in names]
    return sorted(figures, key=lambda figure: (figure.timeout_s > DEFAULT_TIMEOUT_S, figure.name))


def load(folder: Path, name: str, package: str = PACKAGE) -> ModuleType:
    """Returns the module of a figure. Tests of the framework pass another folder than this one."""
    if folder == HERE:
        return importlib.import_module(f"{package}.{name}")
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DEFAULT_TIMEOUT_S = 900.0


def _figure(folder: Path, module: ModuleType, name: str) -> Figure:
    case: Callable[..., None] = module.case
    total, quick = int(module.TOTAL), int(module.QUICK)
    if not callable(case) or not 0 <= quick <= total or total < 1 or not str(module.HOLDS).strip():
        raise ValueError(f"{name}: HOLDS, TOTAL, QUICK and case do not go together")
    timeout_s = float(getattr(module, "TIMEOUT_S", DEFAULT_TIMEOUT_S))
    needs = getattr(module, "NEEDS", None)
    return Figure(name, " ".join(str(module.HOLDS).split()), total, quick, timeout_s, digest(folder, name), needs)


def digest(folder: Path, name: str) -> str:
    """Returns a hash of the module's text, and of the modules in the folder that it imports directly or indirectly."""
    found, todo = dict[str, bytes](), [name]
    while todo:
        path = folder / f"{todo.pop()}.py"
        if path.stem in found or not path.is_file():
            continue
        found[path.stem] = path.read_bytes()
        for module, names in _IMPORTS.findall(found[path.stem].decode()):
            todo += [module] if module else [word.strip() for word in names.split(",")]
    whole = hashlib.sha256()
    for stem in sorted(found):
        whole.update(stem.encode() + b"\0" + found[stem] + b"\0")
    return whole.hexdigest()[:16]
