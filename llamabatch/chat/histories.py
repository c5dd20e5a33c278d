"""Rewrites the tool calls and roles of a conversation into a form that its template can write.

Templates expect calls in different forms. The arguments are values or JSON text, and the content next to a call is None
or "". Some templates silently drop calls. So a small trial conversation is rendered once in each form, and the forms
with the fewest faults are used. A rendering without faults contains every word of the conversation once, in order, and
contains neither None nor null.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from llamabatch.chat import tool_prompts
from llamabatch.chat.messages import Message, Tools
from llamabatch.chat.tool_formats import ToolFormat, written
from llamabatch.errors import PromptError
from llamabatch.request.tool_calls import object_of
from llamabatch.utils.checks import show

if TYPE_CHECKING:
    from llamabatch.chat.template import BoundedTemplate

_NINE = re.compile("[0-9A-Za-z]{9}")
_NATIVE: tuple[Literal["values", "text"], ...] = ("values", "text")


class Form(NamedTuple):
    """A form in which a template receives calls and the results of tools.

    Attributes:
        calls: "values": the arguments are an object; "text": the arguments are JSON text; "content": the call is part
            of the text of the message, as the model would write the call.
        bare: the content of a message with calls but no text.
        short_ids: the id of a call has nine letters and digits, as Mistral's templates demand.
        one_each: each message has one call, and the call's result follows directly.
        answers_of: the role of messages with the result of a tool.
    """

    calls: Literal["values", "text", "content"]
    bare: str | None = None
    short_ids: bool = False
    one_each: bool = False
    answers_of: Literal["tool", "user"] = "tool"

    def of(self, messages: Sequence[Message], tool_format: ToolFormat) -> list[Message]:
        """Returns the messages in this form. Raises PromptError for arguments that cannot be written as JSON."""
        return [self._of(message, tool_format) for message in (_one_each(messages) if self.one_each else messages)]

    def _of(self, message: Message, tool_format: ToolFormat) -> Message:
        content, calls = message["content"], message.get("tool_calls")
        if message["role"] == "tool" and self.answers_of == "user":
            return {**message, "role": "user", "content": f"The function returned: {content or ''}"}
        if self.short_ids and message.get("tool_call_id") is not None:
            message = {**message, "tool_call_id": _short(message["tool_call_id"])}
        if not calls:  # some templates treat an empty list like a call
            return {**_without_calls(message), "content": "" if content is None else content}
        if self.calls == "content":
            named = [(_name(call["function"]), _values(call["function"])) for call in calls]
            text = "\n".join(filter(None, (content, written(tool_format, named))))
            return {**_without_calls(message), "content": text}
        arguments = _values if self.calls == "values" else _text
        made = []
        for call in calls:
            function = call["function"]
            function = {**function, "name": _name(function), "arguments": arguments(function)}
            made.append({**call, "function": function})
        if self.short_ids:
            made = [{**call, "id": _short(call.get("id"))} for call in made]
        return {**message, "content": self.bare if content is None else content, "tool_calls": made}


_FOREIGN = Form("content")  # calls as text, and the results of tools in the role "tool"

# The preferred forms come first. `one_each` matters only if a message has several calls.
FORMS = (
    *(
        Form(calls, bare, short_ids, one_each)
        for one_each in (False, True)
        for calls in _NATIVE
        for bare in (None, "")
        for short_ids in (False, True)
    ),
    _FOREIGN,
    Form("content", answers_of="user"),
)


def _one_each(messages: Sequence[Message]) -> list[Message]:
    """Splits messages with several calls into messages with one call, each followed by the result of its call."""
    made: list[Message] = []
    left = deque(messages)
    while left:
        message = left.popleft()
        answers: list[Message] = []
        while left and left[0]["role"] == "tool":
            answers.append(left.popleft())
        content = message["content"]
        for call in message.get("tool_calls") or ():
            made.append({**message, "content": content, "tool_calls": [call]})
            content = None
            if own := next((each for each in answers if each.get("tool_call_id") == call.get("id")), None):
                made.append(own)
                answers.remove(own)
        made += answers if message.get("tool_calls") else [message, *answers]
    return made


def _short(call_id: object) -> str:
    """Converts the id of a call to nine letters and digits. Equal ids give equal results."""
    text = str(call_id)
    return text if _NINE.fullmatch(text) else hashlib.sha256(text.encode(errors="replace")).hexdigest()[:9]


def _without_calls(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _name(function: Mapping[str, Any]) -> str:
    given = function.get("name")
    return "" if given is None else str(given)


def _values(function: Mapping[str, Any]) -> Mapping[str, Any]:
    given = function.get("arguments")
    return given if isinstance(given, Mapping) else object_of(_text(function))


def _text(function: Mapping[str, Any]) -> str:
    """Returns the arguments of a call as JSON text, unchanged if they are text."""
    given = function.get("arguments")
    if given is None or (isinstance(given, str) and not given.strip()):
        return "{}"
    if isinstance(given, str):
        return given
    try:
        return json.dumps(given, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        name = show(function.get("name"))
        raise PromptError(f"the arguments of tool call {name} cannot be written as JSON: {error}") from error


_NOBODYS = ("None", "null", "{'")
_SYSTEM = {"role": "system", "content": "Answer."}
_NAME = "qx_function"


def _trial(several: bool) -> tuple[list[Message], list[str]]:
    """Returns a trial conversation, and its words in order. No template contains these words.

    Args:
        several: True: one message has two calls; False: each message with calls has one call.
    """
    numbers = itertools.count()
    words: list[str] = []

    def word() -> str:
        words.append(f"qx {next(numbers)} word")  # no word is a part of another word
        return words[-1]

    def calls(content: str | None, count: int) -> Iterator[Message]:
        ids = [f"call_qx{next(numbers)}" for _ in range(count)]
        made = [
            {"id": each, "type": "function", "function": {"name": _NAME, "arguments": {"place": word()}}}
            for each in ids
        ]
        yield {"role": "assistant", "content": content, "tool_calls": made}
        for each in ids:
            yield {"role": "tool", "tool_call_id": each, "name": _NAME, "content": word()}

    messages: list[Message] = [{"role": "user", "content": word()}]
    messages += calls(None, 2 if several else 1)
    messages += calls("Well.", 1)
    messages.append({"role": "assistant", "content": word()})
    messages.append({"role": "user", "content": word()})
    return messages, words


def _faults(text: str, words: list[str]) -> int:
    """Returns the number of faults of a rendered trial. Faults are a word that is not found exactly once, a wrong
    order, a missing function name, and a text that is not in the conversation, such as None."""
    missing = sum(text.count(word) != 1 for word in words)
    first, last, between = text.find(words[0]), text.find(words[-1]), [text.find(word) for word in words[1:-1]]
    in_order = all(first < at < last for at in between) and between[-1] == max(between)
    return missing + (not in_order) + (_NAME not in text[first:]) + sum(word in text for word in _NOBODYS)


def best_forms(template: BoundedTemplate, source: str, several: bool) -> list[Form]:
    """Returns the forms with the fewest faults in the template's output, at most one for each value of Form.calls.

    Args:
        several: as for _trial().
    """
    from llamabatch.chat.template_prices import TemplateLimit  # imports jinja2, which only chats need

    messages, words = _trial(several)
    tool_format = ToolFormat.of(source)
    place = {"type": "string", "description": "Where."}
    schema = {"type": "object", "properties": {"place": place}, "required": ["place"]}
    function = {"name": _NAME, "description": "Looks it up.", "parameters": schema}
    for start in ([], [_SYSTEM]):  # some templates require a system message
        faults = {}
        for form in FORMS:
            if (form.one_each and not several) or (form == _FOREIGN and "tool" not in source):
                continue  # a template without the word "tool" belongs to a model that does not know this role
            variables = {
                "messages": [*start, *form.of(messages, tool_format)],
                "tools": [{"type": "function", "function": function}],
                "add_generation_prompt": True,
                "bos_token": "",
                "eos_token": "",
            }
            try:
                faults[form] = _faults(template.render(variables), words)
            except TemplateLimit:
                return [FORMS[0]]  # the other forms, and the conversation itself, would also exceed the budget
            except Exception:  # a template is a program: it can raise any exception
                continue
        if faults:
            best = [form for form in faults if faults[form] == min(faults.values())]
            return [*{form.calls: form for form in reversed(best)}.values()][::-1]
    return [*FORMS]  # the template refuses the trial, but may accept another conversation


def most_calls(messages: Sequence[Message]) -> int:
    """Returns the maximum number of calls in a message. The result of a tool counts as one call."""
    return max(len(message.get("tool_calls") or ()) or (message["role"] == "tool") for message in messages)


def shown(
    messages: Sequence[Message], source: str, template: BoundedTemplate, tools: Tools | None, forms: Sequence[Form]
) -> Iterator[list[Message]]:
    """Yields the messages in each form that the template may accept, the best first.

    The last forms are changed so that the roles alternate, because some templates demand this.

    Args:
        forms: the forms of the template, from best_forms().
    """
    tool_format = ToolFormat.of(source)
    made: list[list[Message]] = []
    changes: tuple[Callable[[list[Message]], list[Message]], ...] = (list, _joined, _without_system)
    for change in changes:
        for form in forms:
            plain = form.of(messages, tool_format)
            described = tools and "tools" not in template.variables
            for given in tool_prompts.described(plain, tools or (), tool_format) if described else [plain]:
                changed = change(given)
                if changed not in made:
                    made.append(changed)
                    yield changed


def _without_system(messages: list[Message]) -> list[Message]:
    """Joins messages as _joined does, and moves the system message into the first user message, because some templates
    refuse system messages."""
    messages = _joined(messages)
    if len(messages) < 2 or [message["role"] for message in messages[:2]] != ["system", "user"]:
        return messages
    system, user, *rest = messages
    return [{**user, "content": f"{system['content']}\n\n{user['content']}"}, *rest]


def _joined(messages: list[Message]) -> list[Message]:
    """Joins neighbouring messages of the same role, except results of tools. A system message after a message of
    another role becomes a user message. Agents send conversations that are not joined, and some templates refuse such
    conversations."""
    made: list[dict[str, Any]] = []
    for message in messages:
        last = made[-1] if made else None
        if message["role"] == "system" and last is not None and last["role"] != "system":
            message = {**message, "role": "user"}
        if last is not None and message["role"] == last["role"] != "tool":
            texts = (last["content"], message["content"])
            made[-1] = {**last, **message, "content": "\n\n".join(text for text in texts if text)}
            if calls := [*(last.get("tool_calls") or ()), *(message.get("tool_calls") or ())]:
                made[-1]["tool_calls"] = calls
        else:
            made.append(dict(message))
    return [*made]
