"""/tokenize, /detokenize and /tokenizer_info, in the formats of llama-server and vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from llamabatch.errors import PromptError
from llamabatch.jobs.input.lines import text_or_ids
from llamabatch.llama.model import Model
from llamabatch.request.sampling_params import MAX_TOKEN_ID
from llamabatch.server.request.body import BOOLEAN, RULES, Body, Field, Fields, Json, Rules, reads
from llamabatch.server.request.chat_body import CHAT, ChatBody, read_chat
from llamabatch.server.request.reading import read_body
from llamabatch.server.response.answer import json_response, large_response
from llamabatch.server.response.json_text import Rows
from llamabatch.server.serving.bounded_model import MAX_TEXT, for_tokens
from llamabatch.server.serving.serving import Serving, serving_of
from llamabatch.utils.checks import integer, show

_MIXED: Json = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]}},
    ]
}
_OF_CHATS = (
    *("messages", "tools", "tool_choice", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
    *("continue_final_message", "reasoning_effort", "parallel_tool_calls", "functions", "function_call"),
)
_CHATS: Fields = {name: CHAT[name] for name in _OF_CHATS}

TOKENIZE: Fields = {
    **_CHATS,
    "model": CHAT["model"],
    "content": Field(_MIXED, "llama-server's form: a text, or a list of texts and token ids"),
    "prompt": Field({"type": "string"}, "vLLM's form: a text"),
    "add_special": Field(BOOLEAN, "with content: put BOS in front where the model wants it; false unless given"),
    "parse_special": Field(BOOLEAN, "read <|im_end|> and its like as the tokens that they name; true unless given"),
    "with_pieces": Field(BOOLEAN, "with content: the text of each token, bytes where it is no UTF-8"),
    "add_special_tokens": Field(BOOLEAN, "with prompt: the same as add_special; true unless given"),
    "return_token_strs": Field(BOOLEAN, "the text of each token as the vocabulary has it"),
}
DETOKENIZE: Fields = {
    "model": CHAT["model"],
    "tokens": Field({"type": "array", "items": {"type": "integer", "minimum": 0}}, "token ids"),
}


@dataclass(frozen=True)
class TokenizeBody:
    """A request to tokenize a text or a conversation.

    Attributes:
        parts: texts and token ids, one after another.
        chat: a conversation in place of `parts`; None: the request has `parts`.
        add_special, parse_special: as in Model.tokenize.
        pieces: llama-server's with_pieces. strs: vLLM's return_token_strs.
        llama_server: True: the response has llama-server's format. False: vLLM's format.
        ignored: names of unknown fields.
    """

    parts: tuple[str | int, ...] = ()
    chat: ChatBody | None = None
    add_special: bool = True
    parse_special: bool = True
    pieces: bool = False
    strs: bool = False
    llama_server: bool = False
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class DetokenizeBody:
    """A request to turn token ids into text.

    Attributes:
        ignored: names of unknown fields.
    """

    tokens: tuple[int, ...]
    ignored: tuple[str, ...] = ()


@reads
def read_tokenize(body: Mapping[str, Any], rules: Rules = RULES) -> TokenizeBody:
    """Reads a TokenizeBody from a request body. Raises ApiError with the field, its value and the allowed values."""
    given = Body(body, TOKENIZE, rules)
    given.label("model")
    kinds = [name for name in ("content", "prompt", "messages") if name in given]
    if len(kinds) != 1:
        found = " and ".join(kinds) or "none of them"
        raise PromptError(f"a body has one of content (llama-server), prompt and messages (vLLM); this one has {found}")
    special, pieces = given.take("add_special"), given.boolean("with_pieces")
    llama_server = kinds == ["content"]
    names = {"add_special": special, "add_special_tokens": given.take("add_special_tokens")}
    add_special = _one_of(names, llama_server is False and kinds != ["messages"])
    parse_special = given.boolean("parse_special", True)
    strs = given.boolean("return_token_strs")
    chat = _chat(body, rules) if kinds == ["messages"] else None
    ignored = (*given.ignored, *(chat.ignored if chat is not None else ()))
    parts: tuple[str | int, ...] = ()
    if chat is None:
        parts = _parts(kinds[0], given.take(kinds[0]))
    return TokenizeBody(parts, chat, add_special, parse_special, pieces, strs, llama_server, ignored)


def _one_of(values: Mapping[str, object], default: bool) -> bool:
    for name, value in values.items():
        if value is not None:
            if not isinstance(value, bool):
                raise PromptError(f"{name} is {show(value)}; give true or false")
            return value
    return default


def _parts(name: str, given: object) -> tuple[str | int, ...]:
    if isinstance(given, str):
        return (given,)
    if name == "prompt" or not isinstance(given, list):
        what = "a text" if name == "prompt" else "a text, or a list of texts and token ids"
        raise PromptError(f"{name} is {show(given)}; give {what}")
    if len(given) > MAX_TEXT:
        raise PromptError(f"{name} has {len(given)} parts; allowed are up to {MAX_TEXT}")
    for each in given:
        if not isinstance(each, str):
            integer(PromptError, f"a part of {name}", each, 0, MAX_TOKEN_ID)
    return tuple(given)


def _chat(body: Mapping[str, Any], rules: Rules) -> ChatBody:
    return read_chat({name: value for name, value in body.items() if name in _OF_CHATS}, rules)


@reads
def read_detokenize(body: Mapping[str, Any], rules: Rules = RULES) -> DetokenizeBody:
    """Reads a DetokenizeBody from a request body. Raises ApiError with the field, its value and the allowed values."""
    given = Body(body, DETOKENIZE, rules)
    given.label("model")
    tokens = given.needed("tokens", "a list of token ids")
    if not isinstance(tokens, list):
        raise PromptError(f"tokens is {show(tokens)}; give a list of token ids")
    if len(tokens) > MAX_TEXT:
        raise PromptError(f"tokens is a list of {len(tokens)}; allowed are up to {MAX_TEXT}")
    ids = text_or_ids("tokens", tokens) if tokens else ()
    assert isinstance(ids, tuple)
    return DetokenizeBody(ids, tuple(given.ignored))


def tokenize_response(serving: Serving, body: TokenizeBody) -> Json:
    """Returns the response in the format of the body, llama-server's or vLLM's. Raises InputError."""
    model = serving.model
    ids = body.chat.rendered(model)[1] if body.chat is not None else _ids(model, body)
    if body.llama_server:
        if not body.pieces:
            return {"tokens": ids}
        return {"tokens": Rows(ids, lambda token_id: {"id": token_id, "piece": _piece(model, token_id)})}
    strs = Rows(ids, model.token_text) if body.strs else None
    return {"count": len(ids), "max_model_len": serving.plan.config.n_ctx, "tokens": ids, "token_strs": strs}


def _ids(model: Model, body: TokenizeBody) -> list[int]:
    ids: list[int] = []
    bounded = for_tokens(model)
    for index, part in enumerate(body.parts):
        if isinstance(part, int):
            model.token_text(part)  # raises for an id outside the vocabulary
            ids.append(part)
        else:
            add_special = body.add_special and index == 0
            ids += bounded.tokenize(part, add_special=add_special, parse_special=body.parse_special)
    return ids


def _piece(model: Model, token_id: int) -> str | list[int]:
    data = model.piece(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def detokenize_response(serving: Serving, body: DetokenizeBody) -> Json:
    """Returns the text, with special tokens, in the fields of both llama-server and vLLM. Raises PromptError."""
    text = serving.model.detokenize(list(body.tokens), skip_special=False) if body.tokens else ""
    return {"content": text, "prompt": text}


def tokenizer_info(model: Model) -> Json:
    """Returns vLLM's description of a tokenizer: the names of special tokens and the chat template."""
    metadata = model.metadata
    eos = model.special_token("eos")
    return {
        "tokenizer_class": f"GGUF/{metadata.get('tokenizer.ggml.model', '')}",
        "vocab_size": model.n_vocab,
        "bos_token": model.special_token("bos") or None,
        "eos_token": eos or None,
        "pad_token": eos or None,
        "unk_token": None,
        "add_bos_token": model.vocabulary.bos is not None,
        "eos_token_ids": list(model.eog_ids),
        "chat_template": model.chat_template,
    }


async def tokenize(request: HttpRequest) -> Any:
    """Turns a text into token ids."""
    serving = serving_of(request)
    body = await read_body(request, serving, read_tokenize)
    return await large_response(serving, tokenize_response, serving, body, ignored=body.ignored)


async def detokenize(request: HttpRequest) -> Any:
    """Turns token ids into a text."""
    serving = serving_of(request)
    body = await read_body(request, serving, read_detokenize)
    return await large_response(serving, detokenize_response, serving, body, ignored=body.ignored)


async def info(request: HttpRequest) -> Any:
    """Returns the names of special tokens, and the chat template."""
    serving = serving_of(request)
    serving.check_ready()
    return json_response(tokenizer_info(serving.model))


routes = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/tokenizer_info", info, methods=["GET"]),
]
