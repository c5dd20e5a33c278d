"""The bodies of /api/chat and /api/generate and their readers, without HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.entrypoints.submission import Submission
from llamabatch.errors import ConfigError, PromptError
from llamabatch.request.media import IMAGE
from llamabatch.request.parameter_names import ALIASES
from llamabatch.request.sampling_params import MAX_TOKEN_ID, PARAMETERS
from llamabatch.server.http.errors import ApiError
from llamabatch.server.ollama.keep_alive import take_keep_alive
from llamabatch.server.request.body import BOOLEAN, RULES, TEXT, Body, Field, Fields, Json, Rules, reads
from llamabatch.server.request.chat_body import ChatBody, effort_kwargs, is_begun, read_as_chat, thinking_kwargs
from llamabatch.server.request.generation import Generation, read_generation
from llamabatch.server.request.generation_fields import GENERATION
from llamabatch.server.request.infill import Gap, infill_ids, missing_marks
from llamabatch.server.request.media import content_of, media_part
from llamabatch.server.request.optional import behind, media_text
from llamabatch.server.request.prompts import as_prompts
from llamabatch.utils.checks import choice, integer, show

EFFORTS = ("low", "medium", "high")

_NAMES = {"num_predict": "max_tokens", "num_keep": "n_keep"}
# Options for loading a model. A request to this server cannot change these options.
_OF_LOADING = frozenset(
    (
        *("numa", "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only"),
        *(
            "use_mmap",
            "use_mlock",
            "embedding_only",
            "num_thread",
            "penalize_newline",
            "num_gqa",
            "rope_frequency_base",
        ),
    )
)
_OF_ANSWERS = ("n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs", "n_probs", "structured_outputs")

_SHARED: Fields = {
    "model": Field(TEXT, "the model"),
    "stream": Field(BOOLEAN, "false: one document, and no lines"),
    "format": Field({}, 'the structure of the text: "json" or a JSON schema'),
    "options": Field(
        {"type": ["object", "null"], "additionalProperties": {}},
        "num_predict, num_keep, seed, stop, temperature, top_k, top_p, min_p, repeat_penalty, … by ollama's names",
    ),
    "keep_alive": Field({}, "with several models: how long this one stays loaded; otherwise without effect"),
    "think": Field({"enum": [True, False, *EFFORTS, None]}, "think, or how much"),
    "logprobs": Field(BOOLEAN, "give the logprob of each token"),
    "top_logprobs": Field({"type": ["integer", "null"], "minimum": 0, "maximum": 20}, "and of so many likeliest"),
    "truncate": Field(BOOLEAN, "the default: a chat that is too long loses its oldest turns, a text its beginning"),
    "shift": Field({}, "without effect: the text ends where the context is full", (False,), "", optional=True),
    "cache_salt": GENERATION["cache_salt"],
}
CHAT: Fields = {
    **_SHARED,
    "messages": Field(
        {"type": ["array", "null"], "items": {"type": "object"}}, "the conversation; none: nothing is done"
    ),
    "tools": Field({"type": ["array", "null"], "items": {"type": "object"}}, "functions that the model may call"),
}
GENERATE: Fields = {
    **_SHARED,
    "prompt": Field(TEXT, "the message of a user; with raw the text that is continued; none: nothing is done"),
    "system": Field(TEXT, "a message before it"),
    "raw": Field(BOOLEAN, "no chat template"),
    "suffix": Field(TEXT, "the text after a gap; the prompt is the text before it, and the answer fills the gap"),
    "template": Field({}, "", ("",), "a template is a program; this server uses the template of its own options only"),
    "context": Field(
        {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0}},
        "the context of an earlier answer, which the prompt continues",
    ),
    "images": Field({"type": ["array", "null"], "items": {"type": "string"}}, "pictures in base64"),
}


@dataclass(frozen=True)
class RawBody(Generation):
    """A request to continue the text `prompt` without a chat template."""

    prompt: str = ""

    def submission(self, processor: InputProcessor, loaded: Sequence[str] = ()) -> Submission:
        given = as_prompts(processor, [self.prompt], longest=None if self.cuts else processor.n_ctx)
        return processor.prompts(given, self.params_for(processor), self.adapter_scales(loaded), "raise")


@dataclass(frozen=True)
class GapBody(Generation):
    """A request to fill the gap between two texts.

    Attributes:
        gap: the two texts.
        before: the token ids in front of the prompt.
    """

    gap: Gap = Gap()
    before: tuple[int, ...] = ()

    @property
    def cuts(self) -> bool:
        """Always True: if the text around the gap is too long, parts of the text are left out."""
        return True

    def submission(self, processor: InputProcessor, loaded: Sequence[str] = ()) -> Submission:
        if missing := missing_marks(processor.special_ids):
            raise ConfigError(f"suffix cannot be used with this model: its vocabulary has no {', '.join(missing)}")
        ids = infill_ids(self.gap, processor, self.params.max_tokens, self.before)
        return processor.prompts(ids, self.params_for(processor), self.adapter_scales(loaded), "raise")


@dataclass(frozen=True)
class EmptyBody:
    """A body without a prompt. It asks to load the model, or with keep_alive 0 to unload it."""

    model: str | None = None
    unload: bool = False
    stream: bool = True
    ignored: tuple[str, ...] = ()
    # with_model reads these two fields.
    adapters: Mapping[str, float] | None = None
    lora: tuple[tuple[int, float], ...] | None = None


@reads
def read_ollama_chat(body: Mapping[str, Any], rules: Rules = RULES) -> Generation | EmptyBody:
    """Reads the body of /api/chat. Raises ApiError with the field, its value and the allowed values."""
    given = Body(body, CHAT, rules)
    messages = given.take("messages")
    if not isinstance(messages, (list, type(None))):
        raise PromptError(f"messages is {show(messages)}; give a list of messages")
    if not messages:
        return _empty(given)
    chat: Json = {"messages": list(_messages(messages, given))}
    if is_begun(chat["messages"]):
        chat["continue_final_message"] = True
    if (tools := given.take("tools")) is not None:
        chat["tools"] = tools or None
    return _chat(given, chat, rules)


@reads
def read_generate(body: Mapping[str, Any], rules: Rules = RULES) -> Generation | EmptyBody:
    """Reads the body of /api/generate. Raises ApiError, as read_ollama_chat does."""
    given = Body(body, GENERATE, rules)
    prompt, suffix, system = given.text("prompt") or "", given.text("suffix") or "", given.text("system")
    raw, context = given.boolean("raw"), _context(given.take("context"))
    if not prompt and not suffix:
        return _empty(given)
    images = given.take("images")
    if not raw and not suffix:
        first = [{"role": "system", "content": system}] if system else []
        content = _with_images("images", images, prompt, given)
        chat = _chat(given, {"messages": [*first, {"role": "user", "content": content}]}, rules)
        return replace(chat, before=context)
    if images:
        raise PromptError("images is given with raw or suffix, which have no place for pictures; leave one out")
    for name, value in {"suffix": suffix, "system": system, "context": list(context)}.items():
        if raw and value:
            cure = "leave it out, or raw" if name == "context" else "put it into the prompt"
            raise PromptError(f"{name} is {show(value)} with raw, which has no place for it; {cure}")
    without_template = {"think": given.take("think"), "system": system or None}
    for name, value in without_template.items():
        if value is not None:
            given.ignore(name, value, "the prompt has no template that reads it")
    fields = _fields(given)
    inner = Body(fields, GENERATION, rules)
    ignored = tuple(given.ignored)
    found = read_generation(inner, rules)
    found["form"] = found["form"] and "format"
    found |= {"ignored": (*ignored, *found["ignored"]), "ping_s": 0.0}
    return RawBody(prompt=prompt, **found) if raw else GapBody(gap=Gap(prompt, suffix), before=context, **found)


def _context(given: object) -> tuple[int, ...]:
    if given is None:
        return ()
    if not isinstance(given, list):
        raise PromptError(f"context is {show(given)}; give the context of an earlier answer, a list of token ids")
    return tuple(integer(PromptError, "a token id of context", each, 0, MAX_TOKEN_ID) for each in given)


def _empty(given: Body) -> EmptyBody:
    unloads = take_keep_alive(given) == 0
    return EmptyBody(given.label("model"), unloads, given.boolean("stream", True), tuple(given.ignored))


def _chat(given: Body, chat: Json, rules: Rules) -> ChatBody:
    """Returns a body as a ChatBody. `chat` contains the messages and tools of the body, in OpenAI's format."""
    think = given.take("think")
    if isinstance(think, bool):
        kwargs = thinking_kwargs(given, rules, "think", "enabled" if think else "disabled")
        chat |= {"chat_template_kwargs": kwargs, "include_reasoning": think}
    elif think is not None:
        effort = choice(PromptError, "think", think, EFFORTS)
        chat["chat_template_kwargs"] = effort_kwargs(given, rules, "think", effort)
    fields = _fields(given)
    if "logprobs" in fields:  # a ChatBody has two fields for this value
        chat |= {"logprobs": True, "top_logprobs": fields.pop("logprobs")}
    names = {own: f"options.{name}" for name, own in _NAMES.items()} | {"stop": "options.stop"}
    names |= {"response_format": "format", "guided_json": "format"}
    return replace(read_as_chat({**fields, **chat}, rules, names, given.ignored), ping_s=0.0)


def _fields(given: Body) -> Json:
    """Returns fields of a Generation, from a body and its `options`."""
    found = {**_options(given), "model": given.label("model"), "stream": given.boolean("stream", True)}
    found["cache_salt"] = given.take("cache_salt")
    form = given.take("format")
    if form == "json":
        found["response_format"] = {"type": "json_object"}
    elif isinstance(form, Mapping):
        found["guided_json"] = form
    elif form not in (None, ""):
        raise PromptError(f"format is {show(form)}; give 'json' or a JSON schema")
    top = given.integer("top_logprobs", 0, 20)
    if given.boolean("logprobs"):
        found["logprobs"] = top or 0
    elif top:
        raise PromptError(f"top_logprobs is {top}; it needs logprobs to be true")
    if given.boolean("truncate", True):
        found["overflow"] = "truncate"
    take_keep_alive(given)
    return {name: value for name, value in found.items() if value is not None}


def _options(given: Body) -> Json:
    """Returns the options of a body as fields of a Generation. Options for loading and unknown options are ignored."""
    options = given.take("options")
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise PromptError(f"options is {show(options)}; give an object")
    found: Json = {}
    for name, value in options.items():
        own = _NAMES.get(str(name), str(name))
        if value is None:
            continue
        if name in _OF_LOADING:
            given.ignore(f"options.{name}", value, "it is an option of the server")
        elif ALIASES.get(own, own) not in _OF_ANSWERS and (own in PARAMETERS or own == "tfs_z"):
            found[own] = -1 if own == "max_tokens" and value == -2 else value  # ollama's -2: until the context is full
        else:
            given.ignore(f"options.{name}", value, "it is not known")
    return found


def _messages(messages: list[Any], given: Body) -> Iterator[Json]:
    """Yields the messages in OpenAI's format. A tool result gets the id of an open call of the same function."""
    n_calls = 0
    asked = behind(
        [n for n, each in enumerate(messages) if isinstance(each, Mapping) and each.get("role") == "assistant"]
    )
    open_calls: list[tuple[str, str]] = []  # ids and names of the latest calls that have no result yet
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise PromptError(f"{place} is {show(message)}; give an object with role and content")
        content = message.get("content")
        if message.get("images"):
            is_history = index < asked or message.get("role") == "tool"
            content = _with_images(f"{place}.images", message["images"], content or "", given, is_history=is_history)
        made: Json = {"role": message.get("role"), "content": "" if content is None else content}
        if message.get("thinking"):
            made["reasoning_content"] = message["thinking"]
        calls = message.get("tool_calls")
        if calls:
            if not isinstance(calls, list):
                raise PromptError(f"{place}.tool_calls is {show(calls)}; give a list of calls")
            made["tool_calls"] = [_call(f"{place}.tool_calls[{n}]", call, n_calls + n) for n, call in enumerate(calls)]
            n_calls += len(calls)
            open_calls = [(each["id"], each["function"]["name"]) for each in made["tool_calls"]]
        if made["role"] == "tool":
            made["tool_call_id"] = message.get("tool_call_id") or _answered(open_calls, message.get("tool_name"))
        yield made


def _with_images(place: str, images: object, text: Any, given: Body, *, is_history: bool = False) -> Any:
    """Returns the content of a message with images before its text. If the model reads no images, images in the history
    become short texts. Raises PromptError, ApiError."""
    if not images:
        return text
    if IMAGE not in given.reads and is_history and isinstance(images, list):
        return "\n".join([*(media_text(given, f"{place}[{n}]", IMAGE) for n in range(len(images))), str(text)])
    if IMAGE not in given.reads:
        raise ApiError(
            400,
            f"{place} are given, which this model cannot read; messages are text",
            code="unsupported_content_part",
            param=place.partition("[")[0],
        )
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images) or not isinstance(text, str):
        raise PromptError(f"{place} is {show(images)}; give a list of pictures in base64, beside a text")
    pictures = ({"type": "image_url", "image_url": f"data:image;base64,{each}"} for each in images)
    found = [media_part(place, picture, given) for picture in pictures]
    return content_of([*found, text])


def _call(place: str, call: object, number: int) -> Json:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise PromptError(f"{place} is {show(call)}; give an object with a function")
    arguments = {} if function.get("arguments") is None else function["arguments"]
    if not isinstance(arguments, (str, Mapping)):
        raise PromptError(f"{place}.function.arguments is {show(arguments)}; give an object")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    made = {"name": function.get("name"), "arguments": text}
    return {"id": str(call.get("id") or f"call_{number}"), "type": "function", "function": made}


def _answered(open_calls: list[tuple[str, str]], name: object) -> str:
    """Removes the first open call of `name`, or the first open call if `name` is None. Returns the id of the call, or
    "call_0" if there is no such call."""
    for place, (call_id, called) in enumerate(open_calls):
        if name is None or called == name:
            del open_calls[place]
            return call_id
    return "call_0"
