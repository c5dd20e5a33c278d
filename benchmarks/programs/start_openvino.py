"""Runs OpenVINO GenAI's ContinuousBatchingPipeline on a GGUF file, as a child program in its own environment."""

from __future__ import annotations

import time
from typing import Any

from lines import Handler, serve  # type: ignore[import-not-found]  # beside this file


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Handler]:
    began = time.perf_counter()
    import numpy as np
    import openvino
    import openvino_genai as genai

    imported = time.perf_counter()
    scheduler = genai.SchedulerConfig()
    for name, value in options["scheduler"].items():
        setattr(scheduler, name, value)
    pipeline = genai.ContinuousBatchingPipeline(options["model"], scheduler, "CPU", options["properties"])
    loaded = time.perf_counter()
    n_asked = 0

    def config(n: int) -> Any:
        made = genai.GenerationConfig()
        made.max_new_tokens, made.ignore_eos, made.do_sample = n, True, True
        for name, value in options["sampling"].items():
            setattr(made, name, value)
        return made

    def handle(message: dict[str, Any]) -> dict[str, Any]:
        nonlocal n_asked
        begin = time.perf_counter()
        going = []
        for job in message["jobs"]:
            ids = openvino.Tensor(np.array([job["prompt"]], np.int64))
            going.append(pipeline.add_request(n_asked, ids, config(job["generate"])))
            n_asked += 1
        times: list[list[float]] = [[] for _ in going]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter() - begin
            for seen, request in zip(times, going):  # noqa: B905
                while request.can_read():
                    seen += [now] * sum(len(output.generated_ids) for output in request.read().values())
        wall_s = time.perf_counter() - begin
        return {"wall_s": wall_s, "tokens": [len(seen) for seen in times], "times": times, "began": [0.0] * len(times)}

    facts = {"import_s": imported - began, "load_s": loaded - imported, "version": genai.__version__}
    return {**facts, "options": {**options["scheduler"], **options["properties"]}}, handle


if __name__ == "__main__":
    serve(start)
