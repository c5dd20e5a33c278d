"""A program that runs prompts on the devices of its environment: python -m tests.devices.case SETTINGS

SETTINGS is a JSON list of options of an LLM. "prompts" among the options is the number of prompts (default: 24; 0: the
model is only loaded). For each entry, the program writes a line of JSON: the error, or

- the greedy texts with log probabilities of their tokens, the texts of a run without log probabilities, and the plan;
- the bytes that llama.cpp says it reserved, by device and kind;
- how many calls returned only a device's likeliest tokens, how many returned whole rows, and how many reused the last
  graph;
- the values of is_ragged of the contexts in this process.

"lengths" among the options makes one request for each length instead, and counts the steps.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from dataclasses import replace
from typing import Any

from llamabatch import LLM, LlamaBatchError, SamplingParams
from llamabatch.llama import devices, library, log
from llamabatch.llama.context import Context
from llamabatch.sampling.top_rows import TopRows

PROMPTS = 24
_GREEDY = SamplingParams(max_tokens=24, temperature=0, logprobs=0)
_SIZE = re.compile(
    r"(?P<device>[A-Za-z]+[0-9]*)(?:_\w+)?(?:\[[^]]*\])? +(?P<kind>model|KV|compute) buffer size = +(?P<mib>[\d.]+) MiB"
)


def main() -> None:
    lines: list[str] = []
    kinds: list[bool] = []
    ragged: set[bool] = set()
    reused: list[int] = []
    read, close, is_ragged = Context.rows, Context.close, Context.is_ragged.fget

    def counted(self: Context) -> None:
        if self.handle:
            reused.append(library.load().llama_perf_context(self.handle).n_reused)
        close(self)

    def noted(self: Context, n_rows: int) -> object:
        rows = read(self, n_rows)
        kinds.append(isinstance(rows, TopRows))
        return rows

    def asked(self: Context) -> bool:
        ragged.add(answer := is_ragged(self))
        return answer

    setattr(Context, "rows", noted)  # noqa: B010
    setattr(Context, "is_ragged", property(asked))  # noqa: B010
    setattr(Context, "close", counted)  # noqa: B010
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    library.load()
    log.llama_logger.addHandler(handler)
    log.llama_logger.setLevel(logging.INFO)
    for options in json.loads(sys.argv[1]):
        lines.clear()
        kinds.clear()
        ragged.clear()
        reused.clear()
        try:
            found = run(options, lines)
        except LlamaBatchError as error:
            found = {"error": str(error), "type": type(error).__name__}
        sizes: dict[str, dict[str, int]] = {}
        for line in found.pop("lines", []):
            if match := _SIZE.search(line):
                of_device = sizes.setdefault(match["device"], {})
                of_device[match["kind"]] = of_device.get(match["kind"], 0) + int(float(match["mib"]) * 2**20)
        found |= {"reserved": sizes, "gpus": list(library.gpu_names()), "top": sum(kinds), "whole": kinds.count(False)}
        found["ragged"] = sorted(ragged)
        found["reused"] = sum(reused)
        print(json.dumps(found), flush=True)


def run(options: dict[str, Any], lines: list[str]) -> dict[str, Any]:
    lengths = options.pop("lengths", None)
    base = {"model": "tiny", "n_slots": 8, "n_ctx": 256, "n_threads": 1, "profile": False}
    number = options.pop("prompts", PROMPTS)
    with LLM(**{**base, **options}) as llm:
        # A copy: llama.cpp reserves and logs again when it changes between whole rows and a device's tokens.
        made = list(lines)
        if lengths is not None:
            params = [replace(_GREEDY, max_tokens=length, ignore_eos=True) for length in lengths]
            outputs = llm.generate([f"Number {n}:" for n in range(len(lengths))], params, progress=False)
            stats = llm.stats()
            return {
                "token_ids": [output.token_ids for output in outputs],
                "logprobs": [output.outputs[0].cumulative_logprob for output in outputs],
                "steps": stats.decode_calls,
                "passes": stats.decode_passes,
                "dummy_rows": stats.dummy_rows,
            }
        prompts = [f"What is {each} and {each + 3}?" for each in range(number)]
        conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
        bare = llm.chat(conversations, replace(_GREEDY, logprobs=None)) if conversations else []
        outputs = llm.chat(conversations, _GREEDY) if conversations else []
        return {
            "lines": made,
            "bare_texts": [output.text for output in bare],
            "texts": [output.text for output in outputs],
            "logprobs": [output.outputs[0].cumulative_logprob for output in outputs],
            "errors": [str(output.error) for output in outputs if output.error],
            "memory": llm.plan.memory.document(),
            "reasons": dict(llm.plan.reasons),
            "names": [device.name for device in devices.used(llm.plan.config, library.load())],
            "pids": list(getattr(llm._client, "pids", [])),
        }


if __name__ == "__main__":
    main()
