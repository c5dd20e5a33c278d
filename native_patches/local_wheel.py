"""Builds the wheel of llama-cpp-python that `make setup` installs, once: with our patches, for this CPU's instructions.

    python -m native_patches.local_wheel [--backend auto|cpu|cuda|...] [--force]

The command prints the path of the wheel. The wheel is in the user's cache, in a folder whose name depends on the
source, the patches, the flags, the compiler, the compiler's description of this CPU, and the backend.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import shutil
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from llamabatch.native_build import recipe, source
from llamabatch.native_build.machine import BACKENDS, make_plan
from llamabatch.native_build.plan import MARKER, Plan
from llamabatch.native_build.sampler_library import platform_tag
from llamabatch.native_build.tools import SetupFailure, cache_dir, lock, main_guard, make_folder, require_space, say

GIGABYTES = 3.0


def folder(plan: Plan) -> Path:
    """Returns the folder of a plan's wheel. The folder need not exist."""
    return cache_dir() / "wheels" / plan.key


def kept(plan: Plan) -> Path | None:
    """Returns the wheel in the cache, or None if it has not been built."""
    return next(iter(sorted(folder(plan).glob("*.whl"))), None)


def wheel(plan: Plan, force: bool = False, python: str = sys.executable) -> Path:
    """Returns the wheel, from the cache or built now.

    Args:
        python: an interpreter whose pip fetches the source, and cmake if that is missing.

    Raises:
        SetupFailure: the build failed.
    """
    if not force and (found := kept(plan)):
        return found
    make_folder(folder(plan).parent)
    with lock(folder(plan).parent / "lock"):
        if force or not kept(plan):  # another build may have made it while we waited
            _build(plan, python)
    found = kept(plan)
    if found is None:
        raise SetupFailure(f"The build left no wheel in {folder(plan)}: run the set-up again.")
    return found


def _build(plan: Plan, python: str) -> None:
    home = folder(plan)
    require_space(home.parent, GIGABYTES)
    log = make_folder(cache_dir() / "logs") / f"build-{plan.key}.log"
    log.write_text(plan.marker(), encoding="utf-8")
    start = time.monotonic()
    say(f"Building llama.cpp for this machine ({plan.backend}), once; this takes some minutes. Log: {log}")
    with tempfile.TemporaryDirectory(dir=home.parent, prefix="build-", ignore_cleanup_errors=True) as temporary:
        place = Path(temporary)
        tree = source.patched_tree(log, place, python)
        flags = (*plan.flags, *recipe.names_flags(""))
        environment = recipe.with_cmake(place, log, python)
        build = place / "build"
        recipe.compile_tree(tree, build, log, flags, recipe.LIBRARIES, environment, is_cuda=plan.backend == "cuda")
        ready = make_folder(place / "wheel")
        pack(tree, recipe.libraries(build, ""), plan, ready)
        shutil.rmtree(home, ignore_errors=True)
        os.replace(ready, home)
    minutes, seconds = divmod(int(time.monotonic() - start), 60)
    say(f"Built in {minutes}:{seconds:02d}, kept in {home}")


def pack(tree: Path, libraries: list[Path], plan: Plan, out: Path) -> Path:
    """Writes the wheel into the folder `out`: the Python files of `tree`, the libraries, the headers, and the marker.

    Raises:
        SetupFailure: the source does not state its version in the expected way.
    """
    _set_version(tree, plan.version)
    name = f"llama_cpp_python-{plan.version}"
    package = tree / "llama_cpp"
    contents: dict[str, bytes] = {
        f"llama_cpp/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.suffix in (".py", ".typed")
    }
    contents |= {f"llama_cpp/lib/{path.name}": path.read_bytes() for path in libraries}
    llama = tree / "vendor" / "llama.cpp"  # the checks of kernels include its headers
    headers = (path for folder in ("include", "ggml/include") for path in sorted((llama / folder).glob("*.h")))
    contents |= {f"llama_cpp/include/{path.name}": path.read_bytes() for path in headers}
    contents[f"llama_cpp/{MARKER}"] = plan.marker().encode()
    facts = (tree / "PKG-INFO").read_text(encoding="utf-8")
    facts = facts.replace(f"\nVersion: {source.VERSION}\n", f"\nVersion: {plan.version}\n", 1)
    tag = f"py3-none-{platform_tag()}"
    described = f"Wheel-Version: 1.0\nGenerator: llamabatch\nRoot-Is-Purelib: false\nTag: {tag}\n"
    contents |= {
        f"{name}.dist-info/METADATA": facts.encode(),
        f"{name}.dist-info/WHEEL": described.encode(),
        f"{name}.dist-info/licenses/LICENSE.md": (tree / "LICENSE.md").read_bytes(),
    }
    record = f"{name}.dist-info/RECORD"
    lines = [f"{path},sha256={_digest(data)},{len(data)}" for path, data in contents.items()]
    contents[record] = "\n".join((*lines, f"{record},,", "")).encode()
    wheel = out / f"{name}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in contents.items():
            archive.writestr(path, data)
    return wheel


def _digest(data: bytes) -> str:
    """Returns the SHA-256 in the form of a wheel's RECORD: URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _set_version(tree: Path, version: str) -> None:
    init = tree / "llama_cpp" / "__init__.py"
    old = init.read_text(encoding="utf-8")
    new = old.replace(f'__version__ = "{source.VERSION}"', f'__version__ = "{version}"')
    if new == old:
        raise SetupFailure(
            f"llama_cpp/__init__.py has no version {source.VERSION} to replace: adapt _set_version in local_wheel.py."
        )
    init.write_text(new, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m native_patches.local_wheel", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--backend", choices=("auto", *BACKENDS), default="auto", help="default: what this machine has")
    parser.add_argument("--force", action="store_true", help="build even where the cache has the wheel")
    options = parser.parse_args()
    print(wheel(make_plan(options.backend), options.force))


if __name__ == "__main__":
    sys.exit(main_guard(main))
