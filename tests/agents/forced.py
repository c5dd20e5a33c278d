"""`llamabatch serve` with answers that a file forces: python -m tests.agents.forced FOLDER [arguments of serve].

FOLDER/script.json has the answers: {"needs": text, "turns": [[mark, answer], …], "else": answer}. A prompt without the
text `needs`, for example one that asks for a title, gets `else`. Any other prompt gets the answer of the first turn
whose mark it does not contain. The engine is the usual one, in its child process. It computes the prompt, and a grammar
that allows one text forces the answer. For the answer "", the model writes freely until max_tokens.

Each request to the API is written to FOLDER/bodies.jsonl with its answer, when the answer has ended.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from llamabatch.__main__ import main
from llamabatch.client.connect import connect
from llamabatch.client.front_client import FrontClient
from llamabatch.config import EngineConfig
from llamabatch.engine.hooks import Sink
from llamabatch.request.request import Request
from llamabatch.request.structured_outputs import structure
from llamabatch.server import application, run


def answer_of(script: dict[str, Any], prompt: str) -> str:
    """Returns the answer to a prompt."""
    if script["needs"] not in prompt:
        return str(script["else"])
    return str(next((answer for mark, answer in script["turns"] if mark not in prompt), script["else"]))


def forced(folder: Path, config: EngineConfig) -> FrontClient:
    """Returns the server's client. It adds to each request a structured output that allows only the forced answer."""
    front = connect(config)
    submit = front.inner.submit

    def with_form(request: Request) -> Request:
        script = json.loads((folder / "script.json").read_text())
        text = answer_of(script, front.model.detokenize(list(request.prompt_token_ids)))
        form = {"structured_outputs": structure({"choice": [text]})} if text else {"ignore_eos": True}
        return replace(request, params=replace(request.params, **form))

    def submit_forced(requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        submit([with_form(request) for request in requests], sink, stream=stream)

    front.inner.submit = submit_forced  # type: ignore[method-assign]
    return front


class Recorder:
    """Middleware that writes each POST request and its answer to a file."""

    def __init__(self, app: Any, path: Path) -> None:
        self.app = app
        self.path = path

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        asked, answered = bytearray(), bytearray()
        head: dict[str, Any] = {"status": None, "headers": []}

        async def heard() -> Any:
            message = await receive()
            asked.extend(message.get("body", b""))
            return message

        async def sent(message: Any) -> None:
            head.update(message)
            answered.extend(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, heard, sent)
        finally:
            record = {
                "path": scope["path"],
                "headers": _text(scope["headers"]),
                "body": json.loads(asked or "null"),
                "status": head["status"],
                "answer_headers": _text(head["headers"]),
                "answer": answered.decode(),
                "whole": not head.get("more_body", True),
            }
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")


def _text(headers: Any) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in headers}


def serve(folder: Path, arguments: list[str]) -> None:
    def make(config: EngineConfig, options: Any) -> Any:
        made = application.make_app(config, options, partial(forced, folder))
        made.add_middleware(Recorder, path=folder / "bodies.jsonl")
        return made

    run.make_app = make
    sys.argv = ["llamabatch", "serve", *arguments]
    main()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2:])
