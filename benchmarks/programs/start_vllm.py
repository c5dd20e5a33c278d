"""Runs vllm.LLM with random weights in BF16, as a child program in its own environment."""

from __future__ import annotations

import time
from typing import Any

from lines import Handler, serve  # type: ignore[import-not-found]  # beside this file


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Handler]:
    began = time.perf_counter()
    import vllm

    imported = time.perf_counter()
    fixed = {"load_format": "dummy", "dtype": "bfloat16", "skip_tokenizer_init": True, "enable_prefix_caching": True}
    engine = vllm.LLM(**options["engine"], **fixed, disable_log_stats=True).llm_engine
    loaded = time.perf_counter()
    n_asked = 0

    def handle(message: dict[str, Any]) -> dict[str, Any]:
        nonlocal n_asked
        begin = time.perf_counter()
        names = {}
        for at, job in enumerate(message["jobs"]):
            params = vllm.SamplingParams(
                max_tokens=job["generate"], ignore_eos=True, detokenize=False, **options["sampling"]
            )
            names[str(n_asked)] = at
            engine.add_request(str(n_asked), {"prompt_token_ids": job["prompt"]}, params)
            n_asked += 1
        times: list[list[float]] = [[] for _ in names]
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - begin
            for output in outputs:
                seen = times[names[output.request_id]]
                seen += [now] * (len(output.outputs[0].token_ids) - len(seen))
        wall_s = time.perf_counter() - begin
        return {"wall_s": wall_s, "tokens": [len(seen) for seen in times], "times": times, "began": [0.0] * len(times)}

    facts = {"import_s": imported - began, "load_s": loaded - imported, "version": vllm.__version__}
    shown = {name: value for name, value in options["engine"].items() if name != "model"}
    return {**facts, "options": {**shown, **fixed}}, handle


if __name__ == "__main__":
    serve(start)
