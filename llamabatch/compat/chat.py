"""Chats as in llama_cpp.Llama: named chat formats, forced tool calls, and response dictionaries."""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from llamabatch.chat.conversation import ChatModel, render
from llamabatch.chat.messages import MEDIA_MARK, Conversation, check_conversation, media_kind
from llamabatch.chat.options import ChatOptions
from llamabatch.chat.template import BoundedTemplate, describe
from llamabatch.errors import ConfigError, PromptError
from llamabatch.media.files import is_address
from llamabatch.media.prompt import MARK
from llamabatch.request.media import IMAGE
from llamabatch.request.structured_outputs import Structure, structure
from llamabatch.utils.checks import show

Json = dict[str, Any]

_TEMPLATE = "tokenizer.chat_template"
_DEFAULT = "chat_template.default"  # llama_cpp's name for the template of the GGUF
_FALLBACK = "llama-2"  # llama_cpp's format for a model without a template

# Keys: SHA-256 of chat templates. Values: formats. llama_cpp.Llama uses the format in place of the template.
_GUESSED = {
    "153280e3ff55d19da1398bdb3914ee2a51b80429bfaedde11d7d216c39db80f3": "chatml",
    "7e995b379ec01747807246483647cd99030abf331653f1119e16d7ac041a3495": "mistral-instruct",
    "26a59556925c987317ce5291811ba3b7f32ec4c647c400c6cc7e3a9993007ba7": "mistral-instruct",
    "ba03a121d097859c7b5b9cd03af99aafe95275210d2876f642ad9929a150f122": "llama-3",
}


@dataclass(frozen=True)
class Rendered:
    """The prompt of a conversation.

    Attributes:
        text: the prompt, with special tokens written as names.
        stop: strings that end the answer, in addition to the caller's.
        add_special: True if the tokenizer must add special tokens such as BOS; False if the template has written them.
    """

    text: str
    stop: list[str]
    add_special: bool


@dataclass(frozen=True)
class Format:
    """A named chat format.

    Attributes:
        turns: the text of a message for each role, with {} for the content.
        ending: the text after the last message.
        stop: strings that end the answer.
        system: the text of the system message, with {} for the content. The text comes first, even if the conversation
            has no system message. "": `turns` alone decides about system messages.
        default_system: the content of the system message if the conversation has none.
    """

    turns: Mapping[str, str]
    ending: str
    stop: list[str] = field(default_factory=list)
    system: str = ""
    default_system: str = ""

    def render(self, messages: Conversation) -> Rendered:
        """Returns the prompt of a conversation. Messages with an unknown role are left out, as in llama_cpp."""
        system = next((_content(m) for m in messages if m["role"] == "system"), "") or self.default_system
        known = [message for message in messages if message["role"] in self.turns]
        turns = [self.turns[message["role"]].format(_content(message)) for message in known]
        return Rendered(self.system.format(system) + "".join(turns) + self.ending, self.stop, True)


class _Llama2(Format):
    """The format of Llama 2, which puts the system message into the first turn."""

    def render(self, messages: Conversation) -> Rendered:
        system = next((_content(m) for m in messages if m["role"] == "system"), "")
        text = (self.system.format(system) if system else "") + " "
        for i, message in enumerate(message for message in messages if message["role"] in self.turns):
            turn = "{} " if system and i == 0 else self.turns[message["role"]]
            text += turn.format(_content(message))
        return Rendered(text + self.ending, self.stop, True)


_CHATML = {role: f"<|im_start|>{role}\n{{}}<|im_end|>\n" for role in ("user", "assistant")}
_LLAMA3 = "<|start_header_id|>{}<|end_header_id|>\n\n"
FORMATS: dict[str, Format] = {
    "llama-2": _Llama2(
        {"user": "<s>[INST]{}  ", "assistant": "[/INST]{} </s>"}, "[/INST]", system="[INST] <<SYS>>\n{}\n<</SYS>>"
    ),
    "llama-3": Format(
        {role: _LLAMA3.format(role) + "{}<|eot_id|>" for role in ("system", "user", "assistant")},
        _LLAMA3.format("assistant"),
        ["<|eot_id|>"],
    ),
    "chatml": Format(_CHATML, "<|im_start|>assistant\n", ["<|im_end|>"], "<|im_start|>system\n{}<|im_end|>\n"),
    "qwen": Format(
        _CHATML,
        "<|im_start|>assistant\n",
        ["<|endoftext|>"],
        "<|im_start|>system\n{}<|im_end|>\n",
        "You are a helpful assistant.",
    ),
    "mistral-instruct": Format({"user": "[INST] {}", "assistant": " [/INST]{}</s>"}, " [/INST]", ["</s>"]),
    "zephyr": Format(
        {"user": "<|user|>\n\n{}</s>\n", "assistant": "<|assistant|>\n\n{}</s>\n"},
        "<|assistant|>\n\n",
        ["</s>"],
        "<|system|>\n{}</s>\n",
    ),
    "gemma": Format(
        {
            "user": "<start_of_turn>user\n{}<end_of_turn>\n",
            "assistant": "<start_of_turn>model\n{}<end_of_turn>\n",
        },
        "<start_of_turn>model\n",
        ["<end_of_turn>\n"],
    ),
    "alpaca": Format({"user": "### Instruction: {}\n\n", "assistant": "### Response: {}</s>"}, "", system="{}\n\n"),
}


def _content(message: Mapping[str, Any]) -> str:
    """Returns the text of a message. Raises PromptError for anything but text."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)) and all(isinstance(part, Mapping) for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise PromptError(f"content is {show(content)}; give a text")


def format_of(name: str | None, metadata: Mapping[str, str]) -> str:
    """Returns the name of the chat format: `name`, or else the format that llama_cpp.Llama would choose for the model.

    Raises:
        ConfigError: `name` is neither a known format nor a template of the file.
    """
    if name is None:
        template = metadata.get(_TEMPLATE)
        if template is None:
            return _FALLBACK
        return _GUESSED.get(hashlib.sha256(template.encode()).hexdigest(), _DEFAULT)
    known = [*FORMATS, *_templates(metadata)]
    if name not in known:
        raise ConfigError(
            f"chat_format is {show(name)}; known are {', '.join(known)}; for another of llama_cpp's formats give "
            "chat_handler=llama_cpp.llama_chat_format.get_chat_completion_handler(name), or leave it out: the model's "
            "own template is then used"
        )
    return name


def _templates(metadata: Mapping[str, str]) -> dict[str, str]:
    """Returns the file's templates as a dictionary. Keys: llama_cpp's names of the templates. Values: their texts."""
    found = {key[len("tokenizer.") :]: text for key, text in metadata.items() if key.startswith(f"{_TEMPLATE}.")}
    return found | ({_DEFAULT: metadata[_TEMPLATE]} if _TEMPLATE in metadata else {})


def prompt_of(
    model: ChatModel, metadata: Mapping[str, str], name: str, messages: Any, tools: Sequence[Any] | None
) -> Rendered:
    """Returns the prompt of a conversation in the format `name`. Raises PromptError."""
    if name in FORMATS:
        return FORMATS[name].render(check_conversation(messages))
    source = _templates(metadata)[name]
    bos, eos = model.special_token("bos"), model.special_token("eos")
    # As in llama_cpp, a template that does not read `tools` gets no tools.
    options = ChatOptions(tools=tools if tools and "tools" in source else None)
    return Rendered(render(source, messages, bos, eos, options), [eos] if eos else [], False)


def mmproj_of(handler: Any) -> str | None:
    """Returns the mmproj file of a llama_cpp handler that reads pictures; None for any other handler."""
    path = getattr(handler, "clip_model_path", None)
    return os.fspath(path) if isinstance(path, (str, os.PathLike)) else None


def pictured(
    handler: Any, model: ChatModel, metadata: Mapping[str, str], messages: Any, tools: Sequence[Any] | None
) -> tuple[Rendered, list[Any]]:
    """Returns the prompt and the pictures of a conversation, for a llama_cpp handler that reads pictures. The prompt
    has MARK in place of each picture. Raises PromptError."""
    source, system = getattr(handler, "CHAT_FORMAT", None), getattr(handler, "DEFAULT_SYSTEM_MESSAGE", None)
    found: list[Any] = []
    marked = [_marked(message, found, as_text=source is None) for message in _checked(messages)]
    if source is None:
        return prompt_of(model, metadata, format_of(None, metadata), marked, tools), found
    if system is not None and not any(message["role"] == "system" and message.get("content") for message in marked):
        marked.insert(0, {"role": "system", "content": system})
    bos, eos = model.special_token("bos"), model.special_token("eos")
    variables = {"messages": marked, "add_generation_prompt": True, "bos_token": bos, "eos_token": eos}
    try:
        return Rendered(BoundedTemplate(source).render(variables), [], True), found
    except Exception as error:  # a template can raise anything
        raise PromptError(f"the chat format of {type(handler).__name__} fails: {describe(error)}") from error


def _checked(messages: Any) -> Conversation:
    return check_conversation(messages, media=True)


def _marked(message: Mapping[str, Any], found: list[Any], *, as_text: bool) -> dict[str, Any]:
    """Returns the message with MARK in place of each picture, and adds the pictures to `found`.

    Args:
        as_text: True writes MARK as a media part, for the model's template. False writes MARK as image_url, for a
            handler's template.
    """
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return dict(message)
    parts: list[Any] = []
    for part in content:
        if media_kind(part) != IMAGE:
            parts.append(part)
            continue
        address = part.get("image_url")
        address = address.get("url") if isinstance(address, Mapping) else address
        found.append(part.get("image") if address is None else _given_at(address))
        parts.append({"type": MEDIA_MARK, MEDIA_MARK: MARK} if as_text else {"type": "image_url", "image_url": MARK})
    return {**message, "content": parts}


def _given_at(address: Any) -> Any:
    """Returns the path of a file:// address, as in llama_cpp. Returns other addresses unchanged. Raises PromptError."""
    if not isinstance(address, str) or not is_address(address):
        raise PromptError(f"image_url is {show(address)}; give an address, data:image/png;base64,… or file:///a/path")
    parts = urlsplit(address) if address.startswith("file:") else None
    if parts is None:
        return address
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise PromptError(f"image_url is {show(address)}, which is not a file on this machine; give file:///a/path")
    return Path(url2pathname(parts.path))


def called_tool(
    functions: Any, function_call: Any, tools: Any, tool_choice: Any
) -> tuple[list[Json] | None, str | None, Structure | None]:
    """Returns the tools, the name of the tool that the answer must call, and the structure of the call's arguments.

    Raises:
        PromptError: the named tool is missing, or `tool_choice` or `function_call` has a form that llama_cpp.Llama
            silently ignores.
    """
    if functions is not None:
        tools = [{"type": "function", "function": function} for function in functions]
    if function_call in ("none", "auto"):
        tool_choice = function_call
    elif isinstance(function_call, Mapping) and "name" in function_call:
        tool_choice = {"type": "function", "function": {"name": function_call["name"]}}
    elif function_call is not None:
        raise PromptError(f"function_call is {show(function_call)}; give 'none', 'auto' or {{'name': …}}")
    if tool_choice is None or tool_choice in ("none", "auto") or tools is None:
        return tools, None, None
    if not isinstance(tool_choice, Mapping) or not isinstance(tool_choice.get("function"), Mapping):
        raise PromptError(
            f"tool_choice is {show(tool_choice)}; give 'none', 'auto' or {{'type': 'function', 'function': {{'name': "
            "…}}; Llama.llm.chat(messages, tools=…, tool_choice='required') lets the model choose the tool"
        )
    name = tool_choice["function"].get("name")
    for tool in tools:
        if tool["function"]["name"] == name:
            schema = tool["function"].get("parameters") or {"type": "object"}
            return tools, name, structure({"json": schema})
    raise PromptError(f"Tool choice '{name}' not found in tools.")


def response_form(given: Any) -> Structure | None:
    """Returns the structure for a response_format in llama_cpp's or OpenAI's shape. Raises SamplingError."""
    if given is None or structure(given) is None:
        return None
    inner = given.get("json_schema")
    schema = given.get("schema") if inner is None else inner["schema"]
    return structure(given if schema is None else {"json": schema})


def whole(completion: Json, tool: str | None) -> Json:
    """Turns a "text_completion" dictionary into a "chat.completion" dictionary."""
    [choice] = completion["choices"]
    text, finish_reason = choice["text"], choice["finish_reason"]
    message: Json = {"role": "assistant", "content": text}
    if tool is not None:
        function = {"name": tool, "arguments": text}
        calls = [{"id": f"call__0_{tool}_{completion['id']}", "type": "function", "function": function}]
        message = {"role": "assistant", "content": None, "function_call": dict(function), "tool_calls": calls}
        finish_reason = "tool_calls"
    found = {"message": message, "logprobs": _logprobs(choice["logprobs"]), "finish_reason": finish_reason}
    return {
        "id": f"chat{completion['id']}",
        "object": "chat.completion",
        "created": completion["created"],
        "model": completion["model"],
        "choices": [{"index": 0, **found}],
        "usage": completion["usage"],
    }


def chunks(given: Iterator[Json], tool: str | None) -> Iterator[Json]:
    """Turns the chunks of a completion into "chat.completion.chunk" dictionaries."""
    empty: Json = {"role": None, "content": None, "function_call": None, "tool_calls": None}
    is_first = True
    for chunk in given:
        [choice] = chunk["choices"]
        if is_first:
            first = {"role": "assistant"} if tool is None else {**empty, "role": "assistant"}
            yield _chunk(chunk, first, None, None)
            is_first = False
        reason = choice["finish_reason"]
        if reason is not None and tool is not None:
            yield _chunk(chunk, dict(empty), None, "tool_calls")
        else:
            delta = _delta(chunk, tool) if reason is None else {}
            yield _chunk(chunk, delta, _logprobs(choice["logprobs"]), reason)


def _delta(chunk: Json, tool: str | None) -> Json:
    text = chunk["choices"][0]["text"]
    if tool is None:
        return {"content": text}
    function = {"name": tool, "arguments": text}
    call = {"index": 0, "id": f"call__0_{tool}_{chunk['id']}", "type": "function", "function": function}
    return {"role": None, "content": None, "function_call": dict(function), "tool_calls": [call]}


def _chunk(chunk: Json, delta: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {
        "id": f"chat{chunk['id']}",
        "object": "chat.completion.chunk",
        "created": chunk["created"],
        "model": chunk["model"],
        "choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}],
    }


def _logprobs(given: Json | None) -> Json | None:
    """Turns the logprobs of a completion into the logprobs of a chat."""
    if given is None:
        return None
    content = []
    for token, logprob, likeliest in zip(given["tokens"], given["token_logprobs"], given["top_logprobs"], strict=True):
        top = [{"token": text, "logprob": value, "bytes": None} for text, value in likeliest.items()]
        content.append({"token": token, "bytes": None, "logprob": logprob, "top_logprobs": top})
    return {"content": content, "refusal": None}


def openai_v1(make: Callable[[], Any], stream: bool) -> Any:
    """Calls `make`, and turns its dictionaries into objects of the openai package. May raise ImportError."""
    try:
        types = importlib.import_module("openai.types.chat")
    except ImportError as error:
        raise ImportError("create_chat_completion_openai_v1 needs the openai package: pip install openai") from error
    if stream:
        return (types.ChatCompletionChunk(**chunk) for chunk in make())
    return types.ChatCompletion(**make())
