"""The protocol between the benchmark and a child program: one JSON object a line, on standard input and output.

This file imports only the standard library, since programs of other environments and revisions use it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

Handler = Callable[[dict[str, Any]], dict[str, Any]]

_answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # output of libraries must not mix with answers


def messages() -> Iterator[dict[str, Any]]:
    """Yields the messages of the benchmark, until the benchmark ends."""
    for line in sys.stdin:
        yield json.loads(line)


def answer(message: dict[str, Any]) -> None:
    print(json.dumps(message), file=_answers, flush=True)


def serve(start: Callable[[dict[str, Any]], tuple[dict[str, Any], Handler]]) -> None:
    """Passes the first message to `start`, and every later one to the function that `start` returns.

    The program answers an exception with its text, and ends.
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
