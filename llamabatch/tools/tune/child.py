"""The program of a measuring child process: `python -m llamabatch.tools.tune.child`.

The first line of stdin is a configuration as JSON, and each further line is a job. Each line of stdout is an answer as
JSON: figures, or an error. The program exits when stdin ends, so that it does not outlive its parent.
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
    """Loads the model with the configuration in the first line. Then answers jobs until stdin ends."""
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
