"""A server is killed at random moments while batches run, and started again each time."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx
import psutil

HOLDS = (
    "kill -9 at 4 random moments of a server with two batches of 600 lines, 100 in 25 servers: after the last start "
    "each batch completes by itself, each custom_id is in its results once, no engine is left behind, and 98 % of the "
    "greedy texts equal those of an unkilled run"
)
TOTAL = 25
QUICK = 1

KILLS = 4
N_LINES = 600
LEAST_EQUAL = 0.98
URL = "/v1/chat/completions"
_HELDOUT = Path(__file__).parents[2] / "models" / "tiny" / "heldout.jsonl"
_PATIENCE_S = 300.0
_MOST_UP_S = 3.0  # seconds from the start of a server to its kill


def case(number: int, folder: Path) -> None:
    """Starts servers on one data folder, one after another, and kills each."""
    rng = random.Random(number)
    data = folder / "data"
    lines = _lines()
    with Server(data) as first:
        file_id = first.upload(lines)
        batches = [first.create(file_id) for _ in range(2)]
        first.kill(rng.uniform(0.0, 1.0))
    for _ in range(KILLS - 1):
        with Server(data, wait=False) as server:
            server.kill(rng.uniform(0.0, _MOST_UP_S))
    with Server(data) as last:
        results = [last.results(each) for each in batches]
        undisturbed = last.results(last.create(file_id))
    wanted = {line["custom_id"] for line in lines}
    for found in (*results, undisturbed):
        ids = [each["custom_id"] for each in found]
        assert len(ids) == len(set(ids)) == N_LINES, f"{len(ids)} lines, {len(set(ids))} ids"
        assert set(ids) == wanted
    texts = _texts(undisturbed)
    for found in results:
        equal = sum(text == texts[name] for name, text in _texts(found).items())
        assert equal >= LEAST_EQUAL * N_LINES, f"{N_LINES - equal} texts differ"
    assert [path for path in (data / "batches").iterdir() if path.is_dir()] == []
    assert {path.suffix for path in (data / "files").iterdir()} == {".json", ".jsonl"}


def _lines() -> list[dict[str, Any]]:
    prompts = [json.loads(line)["messages"][-1:] for line in _HELDOUT.read_text(encoding="utf-8").splitlines()]
    return [
        {
            "custom_id": f"line {i}",
            "method": "POST",
            "url": URL,
            "body": {"messages": messages, "max_tokens": 16, "temperature": 0, "ignore_eos": True},
        }
        for i, messages in enumerate(islice(cycle(prompts), N_LINES))
    ]


def _texts(results: list[dict[str, Any]]) -> dict[str, str]:
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] or "" for each in results}


class Server:
    """A server in a process of its own. The context manager kills the process at its end.

    Args:
        wait: True: the constructor waits until the server answers.
    """

    def __init__(self, data: Path, *, wait: bool = True) -> None:
        worker = Path(__file__).parents[1] / "workers" / "batch_server.py"
        self._log = data.parent.joinpath("server.log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, str(worker), str(data), "n_slots=8", "n_ctx=512", "n_threads=1"],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=data.parent,
        )
        self._client = httpx.Client(timeout=60)
        self._wait = wait

    def __enter__(self) -> Server:
        if not self._wait:
            return self
        try:
            assert self._process.stdout is not None
            self._client.base_url = httpx.URL(self._process.stdout.readline().strip())
            self._until(lambda: self._client.get("/readyz").status_code == 200)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill(0.0)
        self._client.close()
        self._log.close()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def kill(self, after_s: float) -> None:
        """Kills the server, and waits until its engine has also ended."""
        if self._process.poll() is not None:
            return
        time.sleep(after_s)
        children = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        self._process.wait()
        until = time.monotonic() + _PATIENCE_S
        while any(map(_computes, children)):
            assert time.monotonic() < until, "an engine outlives its server"
            time.sleep(0.01)

    def upload(self, lines: list[dict[str, Any]]) -> str:
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        response = self._client.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
        return str(response.raise_for_status().json()["id"])

    def create(self, file_id: str) -> str:
        body = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"}
        return str(self._client.post("/v1/batches", json=body).raise_for_status().json()["id"])

    def batch(self, batch_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self._client.get(f"/v1/batches/{batch_id}").raise_for_status().json()
        return found

    def is_complete(self, batch_id: str) -> bool:
        return bool(self.batch(batch_id)["status"] == "completed")

    def results(self, batch_id: str) -> list[dict[str, Any]]:
        """Waits until a batch is complete, and returns its results."""
        self._until(lambda: self.is_complete(batch_id))
        batch = self.batch(batch_id)
        assert batch["request_counts"] == {"total": N_LINES, "completed": N_LINES, "failed": 0}
        text = self._client.get(f"/v1/files/{batch['output_file_id']}/content").raise_for_status().text
        return [json.loads(line) for line in text.splitlines()]

    def _until(self, condition: Any) -> None:
        until = time.monotonic() + _PATIENCE_S
        while not condition():
            assert self._process.poll() is None, "the server has ended"
            assert time.monotonic() < until
            time.sleep(0.05)


def _computes(process: psutil.Process) -> bool:
    """Returns True if the process lives. A zombie does not: its new parent may take seconds to reap it."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
