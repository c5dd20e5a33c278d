"""`make test-vulkan`: builds llama.cpp with the Vulkan backend, and runs the tests here and tests of the model on it.

python -m tests.vulkan [arguments of pytest for the tests of the model]

The wheel is that of `make setup BACKEND=vulkan`. It is unpacked into the cache, so that .venv keeps its own build. The
first run compiles for some minutes. It also compiles every shader that it uses; shaders stay in the cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from llamabatch.native_build import machine
from llamabatch.native_build.tools import SetupFailure, cache_dir, main_guard, say
from llamabatch.planning.binding_choice import VARIABLE
from native_patches import local_wheel
from tests.vulkan import unpacked
from tests.vulkan.driver import CHOICE, environment

ROOT = Path(__file__).parents[2]
MODEL_TESTS = ("test_prefix_cache.py", "test_stops.py")
NAMED = "LLAMABATCH_TEST_VULKAN"
"""Set for the tests of this folder: the package with Vulkan. They are not collected without it."""


def main() -> None:
    os.environ |= environment()
    package = unpacked.package(local_wheel.wheel(machine.make_plan("vulkan")), cache_dir() / "vulkan" / "packages")
    on_vulkan = {VARIABLE: str(package)}
    if not devices(on_vulkan):
        os.environ.setdefault(CHOICE, "0")  # allows a driver that computes on the CPU
        if not devices(on_vulkan):
            raise SetupFailure("Vulkan finds no device: install a driver (Debian: apt install mesa-vulkan-drivers).")
    if len(devices(on_vulkan)) > 1:
        os.environ.setdefault(CHOICE, "0")
    say("on " + ", ".join(devices(on_vulkan)))
    status = pytest([str(ROOT / "tests" / "vulkan")], {NAMED: str(package)})
    say("tests of the model:")
    path = os.pathsep.join(filter(None, (str(package.parent), os.environ.get("PYTHONPATH"))))
    on_vulkan["PYTHONPATH"] = path  # some tests import llama_cpp themselves
    chosen = sys.argv[1:] or [str(ROOT / "tests" / "model" / name) for name in MODEL_TESTS]
    sys.exit(status or pytest(chosen, on_vulkan))


def devices(on_vulkan: dict[str, str]) -> list[str]:
    """Returns the descriptions of the GPUs that llama.cpp finds."""
    code = (
        "from llamabatch.llama import devices, library\n"
        "for device in devices.gpus(library.load()): print(device.name, device.description, sep=': ')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | on_vulkan, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SetupFailure(f"the build does not load: {done.stderr.strip()[-1000:]}")
    return done.stdout.splitlines()


def pytest(arguments: list[str], more: dict[str, str]) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=3600", *arguments]
    return subprocess.call(command, cwd=ROOT, env=os.environ | more)


if __name__ == "__main__":
    sys.exit(main_guard(main))
