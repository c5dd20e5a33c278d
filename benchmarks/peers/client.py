"""A light HTTP client for servers. Each request has a thread, which sleeps until the answer arrives."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.base import Result, gaps
from benchmarks.process import PeerFailure, Program
from benchmarks.programs.countdown import Countdown
from benchmarks.workloads import Job

# More than the slots, so that requests always wait in the server, and few enough for its thread pool and backlog.
_MOST_CONNECTIONS = 64
_POLL_S = 0.05

Payload = Callable[[Job, bool], dict[str, Any]]
Count = Callable[[dict[str, Any], Job], int]


@dataclass
class _Stream:
    """The pieces of an answer: `seen` has the time and the line of each piece, `began_s` is the time of the request.

    Times are seconds since the start.
    """

    endless: bool
    seen: list[tuple[float, bytes]] = field(default_factory=list)
    began_s: float = 0.0

    def last(self) -> dict[str, Any]:
        """Returns the JSON of the last piece. Raises ValueError if there is no piece."""
        answer: dict[str, Any] = json.loads(self.seen[-1][1].removeprefix(b"data: ") if self.seen else b"")
        return answer

    def token_times(self) -> list[float]:
        """Returns a time for each token.

        llama.cpp's server sends nothing for a token that ends within a character, and counts that token in the next
        piece. The time since the piece before is then spread evenly over the piece's tokens.
        """
        times: list[float] = []
        counted = 0
        for seen_s, line in self.seen:
            count = json.loads(line.removeprefix(b"data: ")).get("tokens_predicted", counted + 1)
            n_new = max(1, count - counted)
            before = times[-1] if times else seen_s
            times += [before + (seen_s - before) * (at + 1) / n_new for at in range(n_new)]
            counted = count
        return times


class HttpSession:
    """A session with a running server.

    Args:
        program: the server; `close` ends it.
        payload: (job, whether to stream) -> the body of the request.
        count: (answer or summary of a stream, job) -> the number of generated tokens. The number of pieces may be
            smaller, since the server holds back bytes of half a character.
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
        streams = [_Stream(job.endless) for job in jobs]
        begin = time.perf_counter()
        ended = Countdown(sum(not job.endless for job in jobs))
        talking = Countdown(sum(job.endless for job in jobs))

        def one(job: Job, body: bytes, stream: _Stream) -> int:
            if not job.endless and any(other.endless for other in jobs):
                talking.done.wait(timeout_s)
                time.sleep(job.arrival_s)
            time.sleep(max(0.0, begin + job.arrival_s - time.perf_counter()))
            stream.began_s = time.perf_counter() - begin
            try:
                answer = self._request(body, stream, begin, streamed, timeout_s, talking.less, ended.done)
            finally:
                if not job.endless:
                    ended.less()
                elif not stream.seen:
                    talking.less()
            return self._count(answer, job)

        with self._program.limit(timeout_s), ThreadPoolExecutor(min(len(jobs), _MOST_CONNECTIONS)) as pool:
            try:
                tokens = list(pool.map(one, jobs, bodies, streams))
            except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
                pool.shutdown(wait=False, cancel_futures=True)
                self._program.close()  # frees the threads that still wait for an answer
                if self._program.ended:
                    raise PeerFailure(f"{type(error).__name__}: {error}; {self._program.failure()}") from error
                raise PeerFailure(f"{type(error).__name__}: {error}") from error
            except BaseException:  # interrupted, or refused by the server, while threads wait for answers
                pool.shutdown(wait=False, cancel_futures=True)
                self._program.close()
                raise
        if self._program.ended:  # killed or crashed, but its streams seem to end normally
            raise self._program.failure()
        wall_s = time.perf_counter() - begin
        if not streamed:
            return Result(wall_s, tokens)
        times = [stream.token_times() for stream in streams]
        return Result(wall_s, tokens, gaps(times, jobs), times_s=times, began_s=[stream.began_s for stream in streams])

    def _request(
        self, body: bytes, stream: _Stream, begin: float, streamed: bool, timeout_s: float,
        talks: Callable[[], None], over: threading.Event,
    ) -> dict[str, Any]:  # fmt: skip
        """Returns the answer, the summary that ends a stream, or the last piece of a stream that is cut off."""
        connection = http.client.HTTPConnection(*self._address, timeout=timeout_s)
        try:
            connection.request("POST", self._path, body, {"Content-Type": "application/json", "Connection": "close"})
            response = connection.getresponse()
            if response.status != 200:
                raise PeerFailure(f"HTTP {response.status}: {response.read(300).decode('utf-8', 'replace')}")
            if not streamed:
                answer: dict[str, Any] = json.loads(response.read())
                return answer
            for line in response:
                if line.startswith(b"data: {"):  # one token; parsed later, as others wait now
                    stream.seen.append((time.perf_counter() - begin, line))
                    if stream.endless and len(stream.seen) == 1:
                        talks()
                    if stream.endless and over.is_set():
                        return stream.last()
            summary = stream.last()
            del stream.seen[-1:]
            return summary
        finally:
            connection.close()

    def close(self) -> None:
        self._program.close()


def wait_until_up(program: Program, address: tuple[str, int], path: str, timeout_s: float) -> None:
    """Waits until a server answers 200. Raises PeerFailure if the server ends or takes too long."""
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
