"""A program: `python -m llamabatch.llama.try_binding` loads a build of llama.cpp and lists its GPUs.

The caller names the build in an environment variable. The last line of the output is JSON: `{"gpus": [...]}`, or
`{"problem": "..."}` for a build that does not fit. If the build crashes the process, the caller concludes that the
build does not fit.
"""

from __future__ import annotations

import json

from llamabatch.errors import SetupError
from llamabatch.llama import library
from llamabatch.planning import binding_choice


def main() -> None:
    try:
        library.import_build(binding_choice.choose().build)
        answer: dict[str, object] = {"gpus": list(library.gpu_names())}
    except SetupError as error:
        answer = {"problem": str(error)}
    print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
