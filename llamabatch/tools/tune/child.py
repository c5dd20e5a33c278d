"""A program, not a module to import: `python -m llamabatch.tools.tune.child` measures one model, job after job.

A line of JSON in is a job, a line of JSON out its figures, or why there are none. It ends when its stdin does, so that
nothing stays behind when the parent goes.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from typing import Any

from llamabatch.config import ResolvedConfig
from llamabatch.errors import LlamaBatchError
from llamabatch.gguf.resolve import resolve
from llamabatch.llama.decode_bench import Bench
from llamabatch.llama.library import uses_libgomp
from llamabatch.llama.model import Model
from llamabatch.utils.lifetime import leave_signals_to_parent


def main() -> None:
    """Serves until there are no more jobs. The first line is the configuration of the load."""
    leave_signals_to_parent()
    try:
        config = ResolvedConfig(**json.loads(sys.stdin.readline()))
        model = Model(resolve(config.model), config)
    except LlamaBatchError as error:
        _answer({"error": str(error), "kind": type(error).__name__})
        return
    with closing(model), closing(Bench(model)) as bench:
        _answer({"libgomp": uses_libgomp()})
        for line in sys.stdin:
            job = json.loads(line)
            try:
                config = ResolvedConfig(**job.pop("config"))
                figures = bench.measure(config, **{**job, "rows": tuple(job["rows"])})
            except LlamaBatchError as error:
                _answer({"error": str(error), "kind": type(error).__name__})
            else:
                _answer({"figures": figures})


def _answer(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
