"""How the benchmark talks to a child program: one JSON object a line, on standard input and output.

Standard library only, and no import from this project: programs of other environments and revisions use it, too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

Handler = Callable[[dict[str, Any]], dict[str, Any]]

_answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # what libraries print to standard output must not mix with answers


def messages() -> Iterator[dict[str, Any]]:
    """What the benchmark asks, until it is gone."""
    for line in sys.stdin:
        yield json.loads(line)


def answer(message: dict[str, Any]) -> None:
    print(json.dumps(message), file=_answers, flush=True)


def serve(start: Callable[[dict[str, Any]], tuple[dict[str, Any], Handler]]) -> None:
    """The first message starts the peer; every other one is answered by what `start` gave.

    An exception is answered with its text, and ends the program.
    """
    asked = messages()
    try:
        facts, handle = start(next(asked))
        answer({"ready": True, **facts})
        for message in asked:
            answer(handle(message))
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise
