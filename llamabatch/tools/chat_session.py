"""A conversation with its messages and parameters, and the `/` commands that change them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

from llamabatch.chat.messages import check_conversation
from llamabatch.entrypoints.llm import LLM
from llamabatch.errors import InputError, PromptError
from llamabatch.request.outputs import RequestOutput, SequenceOutput
from llamabatch.request.parameter_names import ALIASES
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.utils.atomic_file import write_text
from llamabatch.utils.checks import counted, nearest, reason, show
from llamabatch.utils.format import seconds, significant
from llamabatch.utils.paths import absolute, shown

COMMANDS = {
    "/help": "this list",
    "/system TEXT": "set the system message; without TEXT: remove it",
    "/set NAME VALUE": "set a parameter: /set temperature 0.2; without NAME: show all; VALUE default: the model's own",
    "/regen": "answer the last message again",
    "/stats": "tokens and times of the last answer",
    "/save FILE": "write the conversation and the parameters as JSON",
    "/load FILE": "go on with a saved conversation",
    "/reset": "forget the conversation, but for the system message",
    "/exit": "leave, as Ctrl-D does",
}
NAMES = tuple(line.split()[0] for line in COMMANDS)
_MOST_BYTES = 64 * 2**20


class Leave(Exception):
    """The user wants to leave."""


class ChatSession:
    """One conversation with a model.

    Args:
        sampling: fields of SamplingParams. Without max_tokens an answer may use the rest of n_ctx.
        system: the text of the system message.
        options: further arguments of LLM.stream, such as chat_template and adapters.

    Attributes:
        messages: the conversation so far.
        last: the last answer if it is complete, else None.

    Raises:
        SamplingError: a field is wrong.
    """

    def __init__(
        self, llm: LLM, sampling: Mapping[str, Any], system: str | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        self._llm = llm
        self._sampling: dict[str, Any] = {"max_tokens": None, **sampling}
        self._params = SamplingParams(**self._sampling)
        self._options = dict(options or {})
        self.messages: list[dict[str, Any]] = []
        self.last: RequestOutput | None = None
        self._set_system(system or "")

    def answer(self, text: str) -> Generator[SequenceOutput, None, None]:
        """Sends a user message and yields the pieces of the answer. Raises as LLM.stream.

        Closing the generator early aborts the request. The text so far stays in the conversation. If there is no text,
        the message is removed from the conversation.
        """
        self.messages.append({"role": "user", "content": text})
        parts: list[str] = []
        self.last = None
        try:
            with contextlib.closing(self._stream()) as pieces:
                for piece in pieces:
                    parts.append(piece.text)
                    self.last = piece.finished
                    yield piece
        finally:
            answer = "".join(parts)
            if answer or self.last is not None:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def _stream(self) -> Generator[SequenceOutput, None, None]:
        yield from self._llm.stream(self.messages, self._params, **self._options)

    def command(self, line: str) -> str | Generator[SequenceOutput, None, None]:
        """Runs a command, a line that starts with "/". Returns a text to show, or the pieces of an answer.

        Raises:
            Leave: the command is /exit.
            InputError: the command is unknown, or its argument is wrong.
        """
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/exit", "/quit", "/bye"):
            raise Leave
        if name not in _RUN:
            raise InputError(f"there is no command {show(name)}{nearest(name, NAMES)}")
        return _RUN[name](self, rest)

    def _help(self, rest: str) -> str:
        width = max(map(len, COMMANDS))
        lines = [f"{line:<{width}}  {text}" for line, text in COMMANDS.items()]
        keys = "A line that ends with \\ goes on in the next. Ctrl-C ends an answer, Ctrl-D leaves."
        return "\n".join([*lines, keys])

    def _set_system(self, text: str) -> str:
        rest = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest
        return "the system message is set" if text else "there is no system message now"

    def _reset(self, rest: str) -> str:
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self.last = None
        return "the conversation is forgotten"

    def _set(self, rest: str) -> str:
        if not rest:
            return "\n".join(f"{name} = {json.dumps(value)}" for name, value in self._sampling.items())
        name, _, text = rest.partition(" ")
        name, text = name.replace("-", "_"), text.strip().removeprefix("=").strip()
        if not text:
            raise InputError(f"/set {name} needs a value, as /set temperature 0.2")
        field = ALIASES.get(name, name)
        sampling = {key: value for key, value in self._sampling.items() if ALIASES.get(key, key) != field}
        if text == "default":
            SamplingParams(**{name: None} if name in ALIASES else {name: getattr(SamplingParams(), name, None)})
        else:
            try:
                sampling[name] = None if text.lower() == "none" else json.loads(text)
            except ValueError:
                sampling[name] = text
        params = SamplingParams(**sampling)
        if params.n != 1 or params.best_of is not None:
            raise InputError("a chat has one answer at a time; n and best_of stay as they are")
        self._params, self._sampling = params, sampling
        return f"{field} is the default" if text == "default" else f"{field} = {json.dumps(sampling[name])}"

    def _regen(self, rest: str) -> Generator[SequenceOutput, None, None]:
        at = next((i for i in reversed(range(len(self.messages))) if self.messages[i]["role"] == "user"), None)
        if at is None:
            raise InputError("there is no message yet to answer again")
        text = self.messages[at]["content"]
        del self.messages[at:]
        return self.answer(text)

    def _stats(self, rest: str) -> str:
        if self.last is None:
            return "there is no whole answer yet"
        times, n_prompt = self.last.timings, len(self.last.prompt_token_ids)
        lines = [f"prompt {counted(n_prompt, 'token')}, {self.last.num_cached_tokens:,} of them from the cache"]
        lines.append(f"answer {counted(len(self.last.token_ids), 'token')}, ended by {self.last.finish_reason.value}")
        if times.ttft_s is not None:
            lines.append(f"first token after {seconds(times.ttft_s)}, whole answer after {seconds(times.total_s)}")
        if times.generation_tps is not None:
            lines.append(f"{significant(times.generation_tps)} tokens/s")
        used = n_prompt + len(self.last.token_ids)
        return "\n".join([*lines, f"{used:,} of n_ctx = {self._llm.n_ctx:,} are used"])

    def _save(self, rest: str) -> str:
        if not rest:
            raise InputError("/save needs the name of a file")
        if not self.messages:
            raise InputError("there is no message yet to save")
        path = Path(absolute(rest))
        document = {"messages": self.messages, "sampling": self._sampling}
        try:
            write_text(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
        except (OSError, ValueError) as error:
            raise InputError(f"{shown(path)} cannot be written: {reason(error)}") from error
        return f"{counted(len(self.messages), 'message')} are in {shown(path)}"

    def _load(self, rest: str) -> str:
        if not rest:
            raise InputError("/load needs the name of a file")
        path = Path(absolute(rest))
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise InputError(f"{shown(path)} is larger than {_MOST_BYTES >> 20} MiB, the limit")
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise (
                error if isinstance(error, InputError) else InputError(f"{shown(path)} cannot be read: {reason(error)}")
            ) from error
        messages = found.get("messages") if isinstance(found, dict) else found
        sampling = found.get("sampling", {}) if isinstance(found, dict) else {}
        if not isinstance(sampling, dict):
            raise InputError(f"{shown(path)}: sampling is {show(sampling)}; give names and values")
        try:
            checked = [dict(message) for message in check_conversation(messages)]
        except PromptError as error:
            raise InputError(f"{shown(path)} holds no conversation: {error}") from error
        sampling = {**self._sampling, **sampling}
        self._params, self._sampling = SamplingParams(**sampling), sampling
        self.messages, self.last = checked, None
        return f"{counted(len(checked), 'message')} from {shown(path)}"


_RUN: dict[str, Callable[[ChatSession, str], str | Generator[SequenceOutput, None, None]]] = {
    "/help": ChatSession._help,
    "/system": ChatSession._set_system,
    "/set": ChatSession._set,
    "/regen": ChatSession._regen,
    "/stats": ChatSession._stats,
    "/save": ChatSession._save,
    "/load": ChatSession._load,
    "/reset": ChatSession._reset,
}
