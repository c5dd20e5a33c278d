"""Helpers of the set-up programs: errors in one sentence, the cache folder, a lock, and commands with a heartbeat."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

COMPILER_CURE = (
    "Debian and Ubuntu: apt install build-essential; Fedora: dnf install gcc-c++; Arch: pacman -S base-devel; "
    "openSUSE: zypper install gcc-c++; Alpine: apk add build-base; macOS: xcode-select --install; Windows: WSL"
)


class SetupFailure(Exception):
    """The set-up cannot continue. The message is one sentence with a remedy."""


def cache_dir() -> Path:
    """Returns the folder outside the checkout for builds. llamabatch.utils.paths.cache_dir returns the same folder."""
    override = os.environ.get("LLAMABATCH_CACHE")
    if override:
        return Path(override).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "llamabatch"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
        return Path(local) / "llamabatch" / "Cache"
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".cache") / "llamabatch"


def say(text: str) -> None:
    """Prints a line to standard error, because standard output is for results."""
    print(text, file=sys.stderr, flush=True)


def make_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupFailure(
            f"The folder {path} cannot be made ({error.strerror}): set LLAMABATCH_CACHE to a folder that you may write."
        ) from error
    return path


def require_space(folder: Path, gigabytes: float) -> None:
    free = shutil.disk_usage(folder).free / 1e9
    if free < gigabytes:
        raise SetupFailure(
            f"The build needs {gigabytes:g} GB free in {folder}, which has {free:.1f}: free some space, "
            "or set LLAMABATCH_CACHE to a folder on another disk."
        )


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`. The system releases the lock when the process ends, even after a crash."""
    if sys.platform == "win32":  # without a lock, two parallel builds waste time but do no harm: the last rename wins
        yield
        return
    import fcntl

    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("  another build is under way, waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Display(Protocol):
    """A display of the progress of a long command."""

    def beat(self, progress: str) -> None:
        """Shows the progress: ninja's last `[7/83]`, make's `[ 45%]`, or "". Called several times a second."""

    def end(self) -> None:
        """Ends the display. Called when the command has ended or failed."""


class Heartbeat:
    """A Display that rewrites one line on a terminal, or else prints a line every 15 s."""

    PLAIN_INTERVAL_S = 15.0

    def __init__(self, title: str) -> None:
        self._title = title
        self._terminal = sys.stderr.isatty()
        self._start = self._last = time.monotonic()
        self._shown = False
        self._progress = ""

    def beat(self, progress: str) -> None:
        now = time.monotonic()
        if now - self._last < (1.0 if self._terminal else self.PLAIN_INTERVAL_S):
            return
        self._last = now
        self._shown = True
        minutes, seconds = divmod(int(now - self._start), 60)
        self._progress = progress or self._progress  # `progress` is "" if warnings fill the searched part of the log
        line = f"  {self._title}: {minutes}:{seconds:02d} {self._progress}".rstrip()
        sys.stderr.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
        sys.stderr.flush()

    def end(self) -> None:
        if self._shown and self._terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def run_logged(
    command: Sequence[str | Path],
    log: Path,
    title: str,
    environment: Mapping[str, str] | None = None,
    display: Display | None = None,
) -> int:
    """Runs a command with its output in `log` and its progress on stderr or in `display`. Returns its exit status."""
    with open(log, "ab") as output:
        output.write(("$ " + " ".join(map(str, command)) + "\n").encode())
        output.flush()
        start = output.tell()
        process = subprocess.Popen(
            [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env=environment, start_new_session=True,
        )  # fmt: skip
    heartbeat = display or Heartbeat(title)
    try:
        while process.poll() is None:
            heartbeat.beat(_progress(log, start))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
    finally:
        heartbeat.end()
        if process.poll() is None:  # after an interrupt, the compilers in the same process group must also end
            if sys.platform == "win32":
                process.terminate()
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    return process.returncode


def _progress(log: Path, start: int) -> str:
    """Returns ninja's last `[n/m]`, or make's last `[ p%]`, from the end of the log, or ""."""
    with open(log, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(start, end - 20_000))
        steps = re.findall(rb"\[\d+/\d+\]|^\[ *\d+%\]", file.read(), flags=re.MULTILINE)
    return steps[-1].decode() if steps else ""


_SYMPTOMS = (
    (r"No space left on device", "the disk is full: free some space, or set LLAMABATCH_CACHE to another disk"),
    (
        r"Temporary failure in name resolution|Name or service not known|NewConnectionError|ConnectTimeout|"
        r"Network is unreachable|nodename nor servname|Failed to establish a new connection|"
        r"Max retries exceeded|ProxyError|SSLError|Connection refused",
        "the package index cannot be reached: check the network connection and pip's settings",
    ),
    (
        r"No matching distribution found|Could not find a version",
        "the package index has no fitting version: check the network connection and pip's index settings",
    ),
    (
        r"Killed signal terminated program|out of memory allocating|cannot allocate memory",
        "the compiler ran out of memory: close programs, or set CMAKE_BUILD_PARALLEL_LEVEL=1",
    ),
    (
        r"No CMAKE_C(XX)?_COMPILER could be found|CMAKE_C(XX)?_COMPILER not set",
        f"no C++ compiler was found: install one ({COMPILER_CURE})",
    ),
    (
        r"links to:\s+CUDA::|Could NOT find CUDAToolkit|CUDA Toolkit not found|Failed to detect a default CUDA",
        "the CUDA toolkit is not complete (cuBLAS belongs to it): install all of it, or choose the cpu backend",
    ),
    (r"Permission denied", "a file may not be written: check the owner of the folders"),
)


def explain(log: Path, fallback: str) -> str:
    """Returns the reason for a command's failure if its log contains a known error message, else `fallback`."""
    with open(log, "rb") as file:
        text = file.read().decode("utf-8", "replace").rpartition("\n$ ")[2]
    for pattern, words in _SYMPTOMS:
        if re.search(pattern, text, re.IGNORECASE):
            return words
    return fallback


def main_guard(main: Callable[[], None]) -> int:
    """Runs `main()` and returns the exit status: 1 after a SetupFailure or OSError, 130 after Ctrl-C or SIGTERM."""
    # SIGTERM must raise an exception, because only run_logged's exception handling ends the compilers' process group.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except SetupFailure as failure:
        say(f"Set-up failed: {failure}")
        return 1
    except KeyboardInterrupt:
        say("Stopped. What is built is kept for the next run.")
        return 130
    except OSError as error:
        say(f"Set-up failed: {error.strerror or error} ({error.filename or 'no file'}): check disk and permissions.")
        return 1
    return 0
