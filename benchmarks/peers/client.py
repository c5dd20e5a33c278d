"""A light HTTP client for servers: a thread a request, which sleeps until the answer comes."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.peers.base import Result, gaps
from benchmarks.process import PeerFailure, Program
from benchmarks.workloads import Job

# More than the slots, so that requests always wait in the server, and few enough for its thread pool and backlog.
_MOST_CONNECTIONS = 64
_POLL_S = 0.05

Payload = Callable[[Job, bool], dict[str, Any]]
Count = Callable[[dict[str, Any], Job], int]


class HttpSession:
    """A server that is up.

    Args:
        program: the server; it is ended with the session.
        payload: the body of a request for a job; with True, of one that streams.
        count: the generated tokens, from an answer or from the summary of a stream. Its pieces are no measure: bytes
            of half a character are held back.
    """

    def __init__(
        self, program: Program, address: tuple[str, int], path: str, payload: Payload, count: Count,
        facts: dict[str, Any],
    ) -> None:  # fmt: skip
        self.facts = facts
        self._program, self._address, self._path = program, address, path
        self._payload, self._count = payload, count

    @property
    def pids(self) -> list[int]:
        return self._program.pids

    def run(self, jobs: list[Job], *, streamed: bool, timeout_s: float) -> Result:
        bodies = [json.dumps(self._payload(job, streamed)).encode() for job in jobs]
        times: list[list[float]] = [[] for _ in jobs]
        begin = time.perf_counter()

        def one(job: Job, body: bytes, seen: list[float]) -> int:
            time.sleep(max(0.0, begin + job.arrival_s - time.perf_counter()))
            answer = self._request(body, seen, begin, streamed, timeout_s)
            return self._count(answer, job)

        with self._program.limit(timeout_s), ThreadPoolExecutor(min(len(jobs), _MOST_CONNECTIONS)) as pool:
            try:
                tokens = list(pool.map(one, jobs, bodies, times))
            except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
                pool.shutdown(wait=False, cancel_futures=True)
                self._program.close()  # frees the threads that still wait for it
                if self._program.ended:
                    raise PeerFailure(f"{type(error).__name__}: {error}; {self._program.failure()}") from error
                raise PeerFailure(f"{type(error).__name__}: {error}") from error
            except BaseException:  # interrupted, or refused: the threads wait for answers without a reader
                pool.shutdown(wait=False, cancel_futures=True)
                self._program.close()
                raise
        if self._program.ended:  # killed or crashed: streams then end like good ones
            raise self._program.failure()
        wall_s = time.perf_counter() - begin
        return Result(wall_s, tokens, gaps(times, jobs) if streamed else [])

    def _request(
        self, body: bytes, seen: list[float], begin: float, streamed: bool, timeout_s: float
    ) -> dict[str, Any]:
        """The answer, or the summary that ends a stream."""
        connection = http.client.HTTPConnection(*self._address, timeout=timeout_s)
        try:
            connection.request("POST", self._path, body, {"Content-Type": "application/json", "Connection": "close"})
            response = connection.getresponse()
            if response.status != 200:
                raise PeerFailure(f"HTTP {response.status}: {response.read(300).decode('utf-8', 'replace')}")
            last = b"" if streamed else response.read()
            for line in response if streamed else ():
                if line.startswith(b"data: {"):  # a token each; not parsed while others wait
                    seen.append(time.perf_counter() - begin)
                    last = line
            if streamed and seen:
                seen.pop()  # the last one is the summary
            answer: dict[str, Any] = json.loads(last.removeprefix(b"data: "))
            return answer
        finally:
            connection.close()

    def close(self) -> None:
        self._program.close()


def wait_until_up(program: Program, address: tuple[str, int], path: str, timeout_s: float) -> None:
    """Until a server answers 200. Raises PeerFailure if it ends or takes too long."""
    with program.limit(timeout_s):
        while not program.ended:
            if _answers(address, path):
                return
            threading.Event().wait(_POLL_S)
    raise program.failure()


def _answers(address: tuple[str, int], path: str) -> bool:
    connection = http.client.HTTPConnection(*address, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
