"""`make cuda-build`: builds llama.cpp with the CUDA backend, also without a GPU, and tests that it loads and computes.

python -m tests.cuda [arguments of pytest]

The build is that of `llamabatch build --backend cuda`. It has a cache of its own, so that llamabatch does not use it
otherwise. The first run compiles for an hour or more on two cores; if it is stopped, the next run continues. Without a
driver, it compiles without optimisation, in a third of the time (tests/cuda/toolkit.py). Cards are those of compute
capability 9.0, unless CUDAARCHS names others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from llamabatch.native_build import source
from llamabatch.native_build.tools import SetupFailure, cache_dir, main_guard, say
from tests.cuda import toolkit

ROOT = Path(__file__).parents[2]
NAMED = "LLAMABATCH_TEST_CUDA"
"""Set for the tests of this folder: the package with CUDA. They are not collected without it."""


def main() -> None:
    environment = os.environ | toolkit.environment()
    package = built(environment)
    say(f"testing {package}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests" / "cuda")]
    sys.exit(subprocess.call([*command, *sys.argv[1:]], cwd=ROOT, env={**environment, NAMED: str(package)}))


def built(environment: dict[str, str]) -> Path:
    """Returns the package of `llamabatch build`, which makes it if it is missing."""
    home = cache_dir()
    known = home / "sources" / source.FILE_NAME
    own = {"LLAMABATCH_CACHE": str(home / "cuda")}
    if source.VARIABLE not in environment and known.is_file():
        own[source.VARIABLE] = str(known)
    command = [sys.executable, "-m", "llamabatch", "build", "--backend", "cuda"]
    done = subprocess.run(command, cwd=ROOT, env=environment | own, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SetupFailure(f"llamabatch build ended with {done.returncode}, see above.")
    return Path(done.stdout.strip())


if __name__ == "__main__":
    sys.exit(main_guard(main))
