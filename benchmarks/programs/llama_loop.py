"""A loop over llama_cpp.Llama, one request after another, as a child program.

It calls Llama.generate, since create_completion cannot ignore the end-of-generation token and is a little slower.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

from lines import Handler, serve  # type: ignore[import-not-found]  # beside this file


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Handler]:
    began = time.perf_counter()
    from llama_cpp import Llama

    imported = time.perf_counter()
    llama = Llama(options["model"], verbose=False, **options["engine"])
    loaded = time.perf_counter()

    def handle(message: dict[str, Any]) -> dict[str, Any]:
        begin = time.perf_counter()
        times: list[list[float]] = []
        for job in message["jobs"]:
            llama.reset()  # else llama would reuse the prefix of the previous prompt
            tokens = llama.generate(job["prompt"], **options["sampling"])
            times.append([time.perf_counter() - begin for _ in itertools.islice(tokens, job["generate"])])
        wall_s = time.perf_counter() - begin
        return {"wall_s": wall_s, "tokens": [len(seen) for seen in times], "times": times}

    return {"import_s": imported - began, "load_s": loaded - imported, "options": options["engine"]}, handle


if __name__ == "__main__":
    serve(start)
