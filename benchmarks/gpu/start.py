#!/usr/bin/env python3
"""Makes an environment out of the bundle's wheels, without a network, and runs `benchmarks.gpu.check` in it.

In the bundle this file is the program `gpu-check`. In a checkout, `make gpu-check` runs this file, and the check runs
in the checkout's own environment. It uses the standard library only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
MANIFEST = "pack.json"
FOLDER = "environment"
_NOT_OURS = ("PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "PIP_TARGET", "PIP_USER", "PIP_PREFIX")


def main() -> int:
    bundle = next((folder for folder in (HERE, *HERE.parents) if (folder / MANIFEST).is_file()), None)
    if bundle is None:  # a checkout
        project = HERE.parents[1]
        python = project / ".venv" / "bin" / "python"
        if not python.exists():
            print("gpu-check: there is no .venv here: run `make setup` first.", file=sys.stderr)
            return 1
        environment = {**os.environ, "PYTHONPATH": str(project)}
        out = project / "build" / "gpu-check"
    else:
        project, out = bundle / "project", bundle / "results"
        environment = environment_of(bundle, os.environ)
        problem = prepare(bundle)
        if problem:
            print(f"gpu-check: {problem}", file=sys.stderr)
            return 1
        python = python_of(bundle)
    arguments = ["--out", str(out), *sys.argv[1:]]
    return subprocess.call([str(python), "-m", "benchmarks.gpu.check", *arguments], env=environment, cwd=project)


def environment_of(bundle: Path, given: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """Returns the environment variables for programs of a bundle: they use its cache and source, and no network."""
    manifest = json.loads((bundle / MANIFEST).read_text(encoding="utf-8"))
    [source] = (bundle / "sources").iterdir()
    return {
        **{name: value for name, value in given.items() if name not in _NOT_OURS},
        "PYTHONPATH": str(bundle / "project"),
        "LLAMABATCH_CACHE": str(bundle / "cache"),
        "LLAMABATCH_SOURCE": str(source),
        "LLAMABATCH_SOURCE_SHA256": manifest["source_sha256"],
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": (bundle / "wheels").as_uri(),  # without blanks, at which pip splits the variable
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def python_of(bundle: Path) -> Path:
    return bundle / FOLDER / "bin" / "python"


def prepare(bundle: Path) -> str:
    """Makes the environment if it is missing or stale; returns a description of the problem, or ""."""
    manifest = json.loads((bundle / MANIFEST).read_text(encoding="utf-8"))
    version = f"3.{sys.version_info.minor}"
    if version not in manifest["pythons"]:
        known = ", ".join(manifest["pythons"])
        first = manifest["pythons"][0]
        return f"it has wheels for Python {known}; this is {version}: start it as python{first} ./gpu-check"
    stamp = bundle / FOLDER / "ready.json"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == json.dumps([version, manifest["wheels"]]):
        return ""
    print(f"gpu-check: making an environment for Python {version}, once", file=sys.stderr)
    pip = sorted((bundle / "wheels").glob("pip-*.whl"))[-1]
    variables = {name: value for name, value in environment_of(bundle, os.environ).items() if name != "PYTHONPATH"}
    commands = (
        [sys.executable, "-m", "venv", "--clear", "--without-pip", str(bundle / FOLDER)],
        [
            str(python_of(bundle)), str(pip / "pip"), "install", "--quiet", "--no-index",
            "--find-links", str(bundle / "wheels"), *manifest["requirements"][version],
        ],
    )  # fmt: skip
    for command in commands:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"{' '.join(command[:4])} failed: {(done.stderr or done.stdout).strip()[-1000:]}"
    stamp.write_text(json.dumps([version, manifest["wheels"]]), encoding="utf-8")
    return ""


if __name__ == "__main__":
    sys.exit(main())
