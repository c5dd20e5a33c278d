"""Fixtures: servers for the tests of this folder, as programs of their own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.server.__main__ import CLIENTS

collect_ignore_glob = [] if CLIENTS in os.environ else ["test_*.py"]

START_S = 60


@contextlib.contextmanager
def running(folder: Path, arguments: Sequence[str] = (), **options: Any) -> Iterator[str]:
    """Starts a server, and yields its URL. Options are those of llamabatch.server.app. With `arguments`, the server is
    `llamabatch serve`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    python = os.environ.get("LLAMABATCH_SERVER_PYTHON", sys.executable)
    # one thread: on a busy machine, two threads that wait for each other are ten times slower
    given = {"data_dir": str(folder / f"data-{port}"), "n_threads": 1, "n_threads_batch": 1}
    options = given | options
    program = [python, str(Path(__file__).with_name("start.py")), str(port), json.dumps(options)]
    if arguments:
        program = [python, "-m", "llamabatch", "serve", "--port", str(port), *arguments]
    url, log = f"http://127.0.0.1:{port}", folder / f"server-{port}.log"
    with log.open("wb") as file:
        child = subprocess.Popen(program, cwd=folder, stdout=file, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + START_S
            while not _is_ready(url):
                assert child.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.1)
            yield url
            assert child.poll() is None, f"the server died: {log.read_text()[-2000:]}"
        finally:
            child.terminate()
            child.wait(60)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server of the bundled model."""
    with running(tmp_path_factory.mktemp("server"), model="tiny", n_slots=8) as found:
        yield found
