"""Requests a second of lm_eval with llamabatch and with lm_eval's own `gguf` backend. `make test-scale` installs both.

    .venv-scale/bin/python -m pip install fastapi uvicorn sse-starlette starlette-context pydantic-settings
    .venv-scale/bin/python -m benchmarks.evaluation model.gguf [--questions 32] [--backend-questions 1] [--json FILE]

The backend sends one request after another to llama-cpp-python's server. This program starts that server with the same
threads and flash attention. Both backends score the same questions, each with three endings, and generate greedily.

The server sorts the whole vocabulary in Python for each prompt token that it scores. With a vocabulary of 151,936
tokens, one ending takes half a minute, so give `--backend-questions 1` with such a model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

N_SLOTS = 32
ENDINGS = (" a small house by the river", " the king of a far land", " nothing that anyone had seen")
SUBJECTS = ("girl", "boy", "dog", "cat", "bird", "fish", "fox", "bear")
GENERATED = 16  # tokens; the server's default, since the backend's requests name no number
_START_S = 300


def requests(n: int) -> dict[str, list[Any]]:
    """Returns lm_eval's requests by kind: three "loglikelihood" and one "generate_until" for each question."""
    from lm_eval.api.instance import Instance

    starts = [
        f"Story {i}. Long ago, in a valley between two mountains, there lived a {SUBJECTS[i % 8]} who every morning "
        f"walked down to the water and looked for stones. One day {i + 2} stones lay in a row, and behind them was"
        for i in range(n)
    ]
    limits = {"until": ["\n\n"], "max_gen_toks": GENERATED}

    def asked(kind: str, *arguments: Any) -> Any:
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    return {
        "loglikelihood": [asked("loglikelihood", start, ending) for start in starts for ending in ENDINGS],
        "generate_until": [asked("generate_until", start, limits) for start in starts],
    }


def measure(lm: Any, asked: dict[str, list[Any]]) -> dict[str, Any]:
    """Returns requests a second and the answers of each kind. One request of each kind runs before as a warm-up."""
    found: dict[str, Any] = {}
    for kind, instances in asked.items():
        getattr(lm, kind)(instances[:1], disable_tqdm=True)
        start = time.perf_counter()
        answers = getattr(lm, kind)(instances, disable_tqdm=True)
        seconds = time.perf_counter() - start
        found[kind] = {"requests": len(instances), "seconds": seconds, "per_s": len(instances) / seconds}
        found[kind]["answers"] = answers
    return found


@contextlib.contextmanager
def server(model: Path, threads: int) -> Iterator[str]:
    """Starts llama-cpp-python's server and yields its address. Raises RuntimeError if the server does not answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        **{"model": model, "host": "127.0.0.1", "port": port, "n_ctx": 2048, "n_threads": threads},
        **{"n_threads_batch": threads, "flash_attn": "true", "logits_all": "true", "verbose": "false"},
    }
    command = [sys.executable, "-m", "llama_cpp.server"]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=tempfile.gettempdir())
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url)
            yield url
        finally:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/v1/models", timeout=5).close()
            return
        time.sleep(0.2)
    raise RuntimeError(f"llama_cpp.server did not come up within {_START_S} s (exit code {process.poll()})")


def compare(model: Path, n: int, n_backend: int) -> dict[str, Any]:
    """Returns the figures of both backends, and the ratio of our requests a second to those of lm_eval's backend.

    Args:
        n: number of questions.
        n_backend: number of questions for lm_eval's backend. It runs one request at a time, at any number.
    """
    from lm_eval.models.gguf import GGUFLM

    from llamabatch.integrations.lm_eval import LlamaBatchLM

    asked, threads = requests(n), len(os.sched_getaffinity(0))
    ours = LlamaBatchLM(str(model), n_slots=N_SLOTS, n_ctx=2048, flash_attn="on")
    try:
        fast = measure(ours, asked)
    finally:
        ours.close()
    with server(model, threads) as url:
        slow = measure(GGUFLM(base_url=url), requests(n_backend))
    for answers in (fast, slow):  # tests/integrations compares them with llama_cpp.Llama's own logits
        answers["loglikelihood"].pop("answers")
    same = [
        one.strip() == other
        for one, other in zip(
            fast["generate_until"].pop("answers"), slow["generate_until"].pop("answers"), strict=False
        )
    ]
    return {
        "model": model.name,
        "questions": n,
        "backend_questions": n_backend,
        "n_slots": N_SLOTS,
        "threads": threads,
        "load_average": os.getloadavg()[0],
        "llamabatch": fast,
        "gguf": slow,
        "times": {kind: fast[kind]["per_s"] / slow[kind]["per_s"] for kind in asked},
        "equal_texts": sum(same),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluation", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--backend-questions", type=int, help="of them for the backend; by default all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` ends the server
    n_backend = options.questions if options.backend_questions is None else options.backend_questions
    found = compare(options.model.resolve(), options.questions, n_backend)
    for kind, times in found["times"].items():
        ours, theirs = found["llamabatch"][kind]["per_s"], found["gguf"][kind]["per_s"]
        print(f"{kind}: {ours:.1f} requests/s, gguf backend {theirs:.2f}: {times:.1f} times")
    print(f"equal texts: {found['equal_texts']} of {n_backend}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
