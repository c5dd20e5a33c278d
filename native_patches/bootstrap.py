"""Makes the checkout ready to use: .venv, the patched llama-cpp-python, llamabatch itself. `make setup` runs this.

    python -m native_patches.bootstrap [--backend auto|cpu|cuda|metal]

A second run finds everything in place and returns at once.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from llamabatch.native_build import machine, sampler_library
from llamabatch.native_build.tools import SetupFailure, cache_dir, explain, main_guard, make_folder, run_logged, say
from native_patches import local_wheel

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "llamabatch-setup.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m native_patches.bootstrap", description=__doc__.split("\n\n", maxsplit=1)[0]
    )
    parser.add_argument("--backend", choices=("auto", *machine.BACKENDS), default="auto", help="default: what is here")
    options = parser.parse_args()
    require_python()
    plan = machine.make_plan(options.backend)
    built = local_wheel.kept(plan)
    if built and is_current(stamp_text(built)):
        return
    log = make_folder(cache_dir() / "logs") / f"setup-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]}.log"
    log.write_bytes(b"")
    make_venv(log)
    install(local_wheel.wheel(plan, python=str(PYTHON)), log)


def require_python() -> None:
    """Raises SetupFailure if this Python cannot make environments, as on Debian and Ubuntu without python3-venv.

    The Makefile has checked the version.
    """
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupFailure(
            f"This Python lacks {' and '.join(missing)}: install it (Debian and Ubuntu: "
            f"apt install python3.{sys.version_info.minor}-venv) and run the set-up again."
        )


def stamp_text(wheel: Path) -> str:
    """Returns the facts that .venv depends on. The folder is one of them, since a moved environment does not work."""
    facts = {
        "project": hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest(),
        "helper": hashlib.sha256(b"".join(path.read_bytes() for path in sampler_library.sources())).hexdigest(),
        "wheel": wheel.name,
        "folder": str(VENV),
    }
    return json.dumps(facts, indent=2) + "\n"


def is_current(stamp: str) -> bool:
    return STAMP.is_file() and PYTHON.exists() and STAMP.read_text(encoding="utf-8") == stamp


def make_venv(log: Path) -> None:
    """Makes .venv, or keeps one that works. Replaces a broken one if a set-up made it. Raises SetupFailure."""
    if VENV.exists() and not _venv_works():
        if not STAMP.is_file():
            raise SetupFailure(
                f"The folder {VENV} is there, but its Python is too old, lacks pip or is not of here: remove it first."
            )
        say("The old .venv does not work here any more, making a new one")
        shutil.rmtree(VENV)
    if not VENV.exists():
        _make_venv(log)
    STAMP.write_text("{}\n", encoding="utf-8")  # a set-up made .venv, but has not finished


def _make_venv(log: Path) -> None:
    try:
        made = run_logged([sys.executable, "-m", "venv", str(VENV)], log, "making .venv") == 0
    except BaseException:
        shutil.rmtree(VENV, ignore_errors=True)
        raise
    if not made:
        shutil.rmtree(VENV, ignore_errors=True)
        raise SetupFailure(f".venv could not be made: {explain(log, 'python -m venv failed')} (log: {log}).")


def _venv_works() -> bool:
    """Returns True if .venv's Python starts, is new enough and has pip, and if its commands name .venv's folder."""
    question = "import sys, pip; sys.exit(sys.version_info < (3, 10))"
    try:
        answer = subprocess.run([str(PYTHON), "-c", question], capture_output=True, check=False, timeout=60)
        script = (VENV / "bin" / "pip").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return answer.returncode == 0 and re.search(rf"[!\"' ]{re.escape(str(VENV))}/", script) is not None


def install(wheel: Path, log: Path) -> None:
    """Installs the patched wheel, then llamabatch with its tools. A constraint stops pip from replacing the wheel."""
    say("Installing llamabatch into .venv")
    pip: list[str | Path] = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    version = wheel.name.split("-")[1]
    constraint = VENV / "llamabatch-constraint.txt"
    constraint.write_text(f"llama-cpp-python=={version}\n", encoding="utf-8")
    commands: tuple[list[str | Path], ...] = (
        [*pip, "--no-deps", "--force-reinstall", wheel],
        [*pip, "--constraint", constraint, "--editable", f"{ROOT}[dev]"],
        [PYTHON, "-m", "compileall", "-q", ROOT / "llamabatch"],  # pip does this for packages that are not editable
    )
    for command in commands:
        if run_logged(command, log, "installing") != 0:
            raise SetupFailure(f"The packages could not be installed: {explain(log, 'pip failed')} (log: {log}).")
    STAMP.write_text(stamp_text(wheel), encoding="utf-8")
    say("Set up. `make compare` compares the strategies, `make test` runs the checks, `make help` lists the rest.")


if __name__ == "__main__":
    sys.exit(main_guard(main))
