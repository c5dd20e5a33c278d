"""Copies of the checkout in which defects are planted, and runs of pytest there."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from llamabatch.native_build import recipe, sampler_library, source
from llamabatch.native_build.plan import MARKER
from tests.all import inputs
from tests.defects import Defect

PATIENCE_S = 900.0  # seconds; a defect can make a program wait for ever
KERNELS = "native_patches/kernels/"
SAMPLER = "native_patches/sampler/"
_BUILT = "llamabatch/sampling/" + sampler_library.LIBRARY


class Copy:
    """A copy of the checkout's files, with the sampler's library, in a folder of its own."""

    def __init__(self, folder: Path, native: Native) -> None:
        self.folder = folder
        self._native = native
        shutil.rmtree(folder, ignore_errors=True)
        for name in (*inputs.files(), _BUILT):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(inputs.ROOT / name, folder / name)
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)  # tests ask git for the files

    @contextlib.contextmanager
    def planted(self, defect: Defect) -> Iterator[dict[str, str]]:
        """Plants the defect for the duration of the block. Yields variables to add to the environment of the tests."""
        file = self.folder / defect.file
        before = file.read_text(encoding="utf-8")
        times = before.count(defect.old)
        assert times == 1, f"{defect.file} has {defect.old!r} {times} times: write the defect anew ({defect.what})"
        file.write_text(before.replace(defect.old, defect.new), encoding="utf-8")
        try:
            if defect.file.startswith(KERNELS):
                with self._native.built_with(file) as libraries:
                    yield {"LLAMA_CPP_LIB_PATH": str(libraries)}
                return
            if defect.file.startswith(SAMPLER):
                self._compile_sampler()
            yield {}
        finally:
            file.write_text(before, encoding="utf-8")
            shutil.copy2(inputs.ROOT / _BUILT, self.folder / _BUILT)

    def _compile_sampler(self) -> None:
        code = (
            "import sys; from pathlib import Path; from llamabatch.native_build import sampler_library\n"
            f"sys.exit(sampler_library.compile_library(Path({_BUILT!r})) or None)"
        )
        subprocess.run([sys.executable, "-c", code], cwd=self.folder, env=self._environment(), check=True)

    def pytest(self, arguments: Sequence[str], more: dict[str, str]) -> tuple[int | None, str]:
        """Runs pytest. Returns its exit code (None if it did not end in time) and its output."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "120", *arguments]
        process = subprocess.Popen(
            command, cwd=self.folder, env=self._environment() | more, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            out = process.communicate(timeout=PATIENCE_S)[0]
            return process.returncode, out
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _environment(self) -> dict[str, str]:
        """Returns the variables of this process, and a PYTHONPATH with which programs of tests import the copy."""
        return os.environ | {"PYTHONPATH": str(self.folder)}


class Native:
    """llama.cpp, compiled for this machine. A defect in a kernel recompiles only the files that it changes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def built_with(self, kernel: Path) -> Iterator[Path]:
        """Yields the folder of libraries in which this kernel replaces the kernel of the same name."""
        with self._mutex:
            place = self._tree / source.KERNELS[kernel.name] / kernel.name
            before = place.read_bytes()
            place.write_bytes(kernel.read_bytes())
            try:
                self._compile()
                yield self._libraries
            finally:
                place.write_bytes(before)

    @cached_property
    def _tree(self) -> Path:
        """The patched source. It is unpacked again only if the kernels or patches have changed."""
        wanted = inputs.digest(str(path.relative_to(inputs.ROOT)) for path in source.build_files())
        key = self._folder / "key"
        if not key.exists() or key.read_text() != wanted:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            source.patched_tree(self._folder / "log", self._folder)
            key.write_text(wanted)
        return self._folder / source.FOLDER

    def _compile(self) -> None:
        log = self._folder / "log"
        recipe.compile_tree(
            self._tree, self._folder / "build", log, (*recipe.FLAGS, *recipe.names_flags("")), ("llama",),
            recipe.with_cmake(self._folder, log),
        )  # fmt: skip

    @property
    def _libraries(self) -> Path:
        """A copy of the environment's libraries in which the compiled ones replace those of the same name."""
        package, folder = Path(sysconfig.get_path("platlib"), "llama_cpp"), self._folder / "libraries"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(package / "lib", folder)
        shutil.copy2(package / MARKER, folder)  # without the marker, tests of the patches are skipped
        for library in recipe.libraries(self._folder / "build", ""):
            if (folder / library.name).exists():
                shutil.copy2(library, folder / library.name)
        return folder
