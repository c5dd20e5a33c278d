"""Drives an engine in a child process, without HTTP: a child program of benchmarks/server_http.py.

"list" calls LLM.generate. "streamed" delivers each token to a sink and submits the next request when one ends, as
clients with one connection each do. "first" streams one request at a time and measures its first token.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import psutil
from cpu import cpu_s  # type: ignore[import-not-found]  # beside this file
from lines import Handler, serve  # type: ignore[import-not-found]  # beside this file


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Handler]:
    from llamabatch import LLM, SamplingParams
    from llamabatch.entrypoints.input_processor import InputProcessor

    llm = LLM(options["model"], isolate=True, **options["engine"])
    client = llm._client
    processor = InputProcessor(client, next_seed=client.next_seed)

    def params(job: dict[str, Any]) -> SamplingParams:
        return SamplingParams(max_tokens=job["generate"], ignore_eos=True, **options["sampling"])

    def as_list(jobs: list[dict[str, Any]]) -> int:
        outputs = llm.generate([job["prompt"] for job in jobs], [params(job) for job in jobs])
        failed = [output.error for output in outputs if output.error]
        if failed:
            raise RuntimeError(failed[0])
        return sum(len(output.token_ids) for output in outputs)

    def in_turn(jobs: list[dict[str, Any]], n_at_once: int) -> int:
        """Runs the jobs, `n_at_once` at a time; returns the number of their tokens."""
        ended = threading.Semaphore(0)
        tokens = 0
        errors: list[str] = []

        def sink(outputs: Sequence[Any]) -> None:
            nonlocal tokens
            for output in outputs:
                tokens += len(output.token_ids)
                if output.finished is not None:
                    errors.extend([output.finished.error] if output.finished.error else [])
                    ended.release()

        for number, job in enumerate(jobs):
            if number >= n_at_once:
                ended.acquire()
            client.submit(processor.prompts([job["prompt"]], params(job)).requests, sink, stream=True)
        for _ in jobs[:n_at_once]:
            ended.acquire()
        if errors:
            raise RuntimeError(errors[0])
        return tokens

    def first_tokens(jobs: list[dict[str, Any]]) -> list[float]:
        seconds = []
        for job in jobs:
            began = time.perf_counter()
            for output in llm.stream(job["prompt"], params(job)):
                if output.token_ids:
                    seconds.append(time.perf_counter() - began)
                    break
        return seconds

    def handle(message: dict[str, Any]) -> dict[str, Any]:
        way, jobs = message["way"], message["jobs"]
        if way == "first":
            return {"first_s": first_tokens(jobs)}
        own, engine = psutil.Process(), [psutil.Process(pid) for pid in client.pids]
        stats = vars(llm.stats()).copy()
        before, began = cpu_s(own), time.perf_counter()
        engine_before = sum(map(cpu_s, engine))
        tokens = as_list(jobs) if way == "list" else in_turn(jobs, message["at_once"])
        wall_s = time.perf_counter() - began
        counts = {name: n - stats[name] for name, n in vars(llm.stats()).items() if isinstance(n, int)}
        return {
            "counts": counts,
            "tokens": tokens,
            "wall_s": wall_s,
            "cpu_s": cpu_s(own) - before,
            "engine_cpu_s": sum(map(cpu_s, engine)) - engine_before,
        }

    config = {name: value for name, value in vars(llm.plan.config.requested()).items() if name != "model"}
    return {"options": config}, handle


if __name__ == "__main__":
    serve(start)
