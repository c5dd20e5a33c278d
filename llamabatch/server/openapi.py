"""/openapi.json: an OpenAPI 3.1 document, made from the application's routes and the tables of their body fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import BaseRoute, Route

from llamabatch.server.anthropic.messages_body import MESSAGES
from llamabatch.server.batches.records import LEAST_EXPIRY_S, MOST_EXPIRY_S, PURPOSE
from llamabatch.server.llama_server import completion_body as llama_completion
from llamabatch.server.llama_server import embedding as llama_embedding
from llamabatch.server.ollama import body as ollama_body
from llamabatch.server.ollama import embed as ollama_embed
from llamabatch.server.ollama.models import SHOW
from llamabatch.server.openai.batches import BATCH
from llamabatch.server.openai.completion_body import COMPLETION
from llamabatch.server.openai.embeddings import EMBEDDING
from llamabatch.server.openai.responses_body import RESPONSES
from llamabatch.server.openai.transcriptions import TRANSCRIPTION
from llamabatch.server.request.body import TEXT, TIMEOUT_HEADER, Field, Fields, Json
from llamabatch.server.request.chat_body import CHAT
from llamabatch.server.response.answer import json_response
from llamabatch.server.serving.serving import serving_of
from llamabatch.server.vllm import adapters as lora_files
from llamabatch.server.vllm.rerank import CLASSIFY, RERANK, SCORE
from llamabatch.server.vllm.tokenize import DETOKENIZE, TOKENIZE
from llamabatch.utils.version import __version__

_HELLO = [{"role": "user", "content": "Hello"}]
_EVENTS = "text/event-stream"
_LINES = "application/x-ndjson"


@dataclass(frozen=True)
class Operation:
    """The request body of a path.

    Attributes:
        fields: the table of the body's fields.
        required: names of required fields.
        examples: valid bodies by name.
        streams: the media type of a streamed answer; "": answers are never streamed.
        kind: the media type of the request body.
    """

    fields: Fields
    required: Sequence[str]
    examples: Mapping[str, Json] = field(default_factory=dict)
    streams: str = ""
    kind: str = "application/json"


_CHAT = Operation(
    CHAT,
    ["messages"],
    {
        "chat": {"messages": _HELLO, "max_tokens": 8, "temperature": 0},
        "streamed": {
            "messages": _HELLO,
            "max_tokens": 8,
            "seed": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        "two choices with logprobs": {
            "messages": _HELLO,
            "max_tokens": 4,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
        },
        "structured output": {
            "messages": [{"role": "user", "content": "A color?"}],
            "max_tokens": 8,
            "structured_outputs": {"choice": ["red", "blue"]},
        },
        "with a tool": {
            "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
            "max_tokens": 64,
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "weather",
                        "parameters": {
                            "type": "object",
                            "properties": {"city": {"enum": ["Paris", "Rome"]}},
                            "required": ["city"],
                        },
                    },
                }
            ],
            "tool_choice": "required",
        },
    },
    streams=_EVENTS,
)
_COMPLETION = Operation(
    COMPLETION,
    ["prompt"],
    {
        "completion": {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0},
        "several prompts": {"prompt": ["One", "Two"], "max_tokens": 4},
        "streamed": {"prompt": "One", "max_tokens": 4, "stream": True},
        "logprobs of the prompt": {"prompt": "Once upon a time", "max_tokens": 0, "echo": True, "logprobs": 1},
    },
    streams=_EVENTS,
)
_EMBEDDING = Operation(
    EMBEDDING,
    ["input"],
    {"floats": {"input": "Hello"}, "base64": {"input": ["Hello", "world"], "encoding_format": "base64"}},
)
_RERANK = Operation(
    RERANK,
    ["query"],
    {
        "documents": {"query": "What is a fox?", "documents": ["A small wild dog.", "A kind of bread."], "top_n": 1},
        "texts": {"query": "What is a fox?", "texts": ["A small wild dog.", "A kind of bread."]},
    },
)
_SCORE = Operation(
    SCORE, [], {"score": {"text_1": "What is a fox?", "text_2": ["A small wild dog.", "A kind of bread."]}}
)
_CLASSIFY = Operation(CLASSIFY, ["input"], {"classes": {"input": ["I like it.", "I do not."]}})
_TOKENIZE = Operation(
    TOKENIZE,
    [],
    {
        "of llama-server": {"content": "Hello world", "with_pieces": True},
        "of vLLM": {"prompt": "Hello world", "return_token_strs": True},
        "of a chat": {"messages": _HELLO},
    },
)
_LLAMA_COMPLETION = Operation(
    llama_completion.COMPLETION,
    ["prompt"],
    {
        "completion": {"prompt": "Once upon a time", "n_predict": 8, "temperature": 0},
        "streamed": {"prompt": "One", "n_predict": 4, "stream": True, "n_probs": 2},
        "mixed prompts": {"prompt": ["One", [10, "two", 11], {"prompt_string": "Three"}], "n_predict": 4},
        "some fields": {"prompt": "One", "n_predict": 4, "response_fields": ["content", "timings/predicted_n"]},
    },
    streams=_EVENTS,
)
_INFILL = Operation(llama_completion.INFILL, ["input_prefix", "input_suffix"], streams=_EVENTS)
_LLAMA_EMBEDDING = Operation(
    llama_embedding.EMBEDDING, [], {"text": {"content": "Hello"}, "texts": {"input": ["Hello", [10, 11]]}}
)
_LOAD = Operation(lora_files.LOAD, ["lora_name", "lora_path"])
_UNLOAD = Operation(lora_files.UNLOAD, ["lora_name"])
_DETOKENIZE = Operation(DETOKENIZE, ["tokens"], {"tokens": {"tokens": [10, 11, 12]}})
_TEMPLATE = Operation(CHAT, ["messages"], {"chat": {"messages": _HELLO}})

_UPLOAD = Operation(
    {
        "file": Field({"type": "string", "format": "binary"}, "lines of JSON"),
        "purpose": Field({"enum": [PURPOSE]}),
        "expires_after[anchor]": Field({"enum": ["created_at"]}),
        "expires_after[seconds]": Field({"type": "integer", "minimum": LEAST_EXPIRY_S, "maximum": MOST_EXPIRY_S}),
    },
    ["file", "purpose"],
    kind="multipart/form-data",
)
_TRANSCRIPTION = Operation(TRANSCRIPTION, ["file"], streams=_EVENTS, kind="multipart/form-data")
_BATCH = Operation(BATCH, ["input_file_id", "endpoint", "completion_window"])

_MESSAGES = Operation(
    MESSAGES,
    ["messages"],
    {
        "message": {"messages": _HELLO, "max_tokens": 8, "system": "Be short."},
        "streamed": {"messages": _HELLO, "max_tokens": 8, "stream": True},
        "with a tool": {
            "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
            "max_tokens": 64,
            "tools": [
                {
                    "name": "weather",
                    "input_schema": {
                        "type": "object",
                        "properties": {"city": {"enum": ["Paris", "Rome"]}},
                        "required": ["city"],
                    },
                }
            ],
            "tool_choice": {"type": "any"},
        },
    },
    streams=_EVENTS,
)

_RESPONSES = Operation(
    RESPONSES,
    ["input"],
    {
        "text": {"input": "Hello", "max_output_tokens": 8, "instructions": "Be short."},
        "streamed": {"input": _HELLO, "max_output_tokens": 8, "stream": True},
        "structured output": {
            "input": "A color?",
            "max_output_tokens": 32,
            "text": {"format": {"type": "json_schema", "name": "color", "schema": {"enum": ["red", "blue"]}}},
        },
        "with a tool": {
            "input": "What is the weather in Paris?",
            "max_output_tokens": 64,
            "tools": [
                {
                    "type": "function",
                    "name": "weather",
                    "parameters": {
                        "type": "object",
                        "properties": {"city": {"enum": ["Paris", "Rome"]}},
                        "required": ["city"],
                    },
                }
            ],
            "tool_choice": "required",
        },
    },
    streams=_EVENTS,
)

_OLLAMA_CHAT = Operation(
    ollama_body.CHAT,
    [],
    {
        "chat": {"messages": _HELLO, "stream": False, "options": {"num_predict": 8, "temperature": 0}},
        "streamed": {"messages": _HELLO, "options": {"num_predict": 8, "seed": 1}},
        "structured output": {
            "messages": [{"role": "user", "content": "A color?"}],
            "format": {"enum": ["red", "blue"]},
            "stream": False,
        },
    },
    streams=_LINES,
)
_GENERATE = Operation(
    ollama_body.GENERATE,
    [],
    {
        "message": {"prompt": "Hello", "system": "Be short.", "stream": False, "options": {"num_predict": 8}},
        "raw": {"prompt": "Once upon a time", "raw": True, "options": {"num_predict": 8}},
    },
    streams=_LINES,
)

# Operations by path. All paths with the same handler share an operation, so the table needs only one of these paths.
OPERATIONS: dict[str, Operation] = {
    "/v1/responses": _RESPONSES,
    "/v1/responses/input_tokens": Operation(RESPONSES, ["input"], {"count": {"input": "Hello"}}),
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": Operation(MESSAGES, ["messages"], {"count": {"messages": _HELLO}}),
    "/v1/chat/completions": _CHAT,
    "/v1/completions": _COMPLETION,
    "/v1/embeddings": _EMBEDDING,
    "/v1/rerank": _RERANK,
    "/v1/score": _SCORE,
    "/v1/classify": _CLASSIFY,
    "/tokenize": _TOKENIZE,
    "/detokenize": _DETOKENIZE,
    **dict.fromkeys(("/completion", "/completions"), _LLAMA_COMPLETION),
    **dict.fromkeys(("/embedding", "/embeddings"), _LLAMA_EMBEDDING),
    "/infill": _INFILL,
    "/v1/load_lora_adapter": _LOAD,
    "/v1/unload_lora_adapter": _UNLOAD,
    "/v1/files": _UPLOAD,
    "/v1/audio/transcriptions": _TRANSCRIPTION,
    "/api/chat": _OLLAMA_CHAT,
    "/api/generate": _GENERATE,
    "/api/embed": Operation(ollama_embed.EMBED, ["input"], {"texts": {"input": ["Hello", "world"]}}),
    "/api/embeddings": Operation(ollama_embed.EMBEDDINGS, [], {"text": {"prompt": "Hello"}}),
    "/api/show": Operation(SHOW, ["model"], {"show": {"model": "any"}}),
    "/v1/batches": _BATCH,
    **dict.fromkeys(
        ("/apply-template", "/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"), _TEMPLATE
    ),
}

_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": ["object", "string"],  # in ollama's format, the error is a text
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "code": {"type": ["string", "integer", "null"]},
                "param": TEXT,
            },
        }
    },
}


def document(routes: Sequence[BaseRoute], has_key: bool = False, root_path: str = "") -> Json:
    """Returns the OpenAPI document of an application.

    Args:
        routes: routes of the application. The document lists HTTP routes, with the first line of the handler's
            docstring.
        has_key: True: requests need a key.
        root_path: the path prefix of a proxy.
    """
    paths: dict[str, Json] = {}
    known = {
        route.endpoint: OPERATIONS[route.path]
        for route in routes
        if isinstance(route, Route) and route.path in OPERATIONS
    }
    for route in routes:
        if not isinstance(route, Route) or not route.include_in_schema:
            continue
        path = route.path_format
        for method in sorted((route.methods or {"GET"}) - {"HEAD", "OPTIONS"}):
            paths.setdefault(path, {})[method.lower()] = _operation(route, path, method, known)
    made: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "llamabatch",
            "version": __version__,
            "description": "X-Llamabatch-Ignored names the fields that are not known here, or without effect.",
        },
        "paths": paths,
        "components": {"schemas": {"Error": _ERROR}},
    }
    if root_path:
        made["servers"] = [{"url": root_path}]
    if has_key:
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"key": []}]
    return made


def _operation(route: Route, path: str, method: str, known: Mapping[Any, Operation]) -> Json:
    endpoint: Any = route.endpoint
    summary = (getattr(endpoint, "__doc__", None) or route.name).strip().split("\n")[0]
    made: Json = {
        "operationId": f"{method.lower()}{path.replace('/', '_').replace('{', '').replace('}', '').replace('-', '_')}",
        "summary": summary,
        "responses": {
            "200": {"description": "the answer", "content": {"application/json": {"schema": {}}}},
            "default": {
                "description": "an error",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            },
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in route.param_convertors
    ]
    operation = known.get(endpoint) if method == "POST" else None  # paths with the same handler share an operation
    if operation is not None:
        parameters.append(
            {
                "name": TIMEOUT_HEADER,
                "in": "header",
                "description": "seconds after which the request ends as an error",
                "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 1e9},
            }
        )
        made["requestBody"] = {"required": True, "content": {operation.kind: _body(operation)}}
        if operation.streams:
            made["responses"]["200"]["content"][operation.streams] = {"schema": {"type": "string"}}
    elif method in ("POST", "PUT", "PATCH"):
        made["requestBody"] = {"content": {"application/json": {"schema": {"type": "object"}}}}
    if parameters:
        made["parameters"] = parameters
    return made


def _body(known: Operation) -> Json:
    properties = {
        name: each.schema
        | ({"description": each.doc} if each.doc else {})
        | ({} if each.only is None or each.optional else {"enum": [*each.only, None]})
        for name, each in known.fields.items()
    }
    schema: Json = {"type": "object", "properties": properties}
    if known.required:
        schema["required"] = list(known.required)
    return {"schema": schema, "examples": {name: {"value": value} for name, value in known.examples.items()}}


async def openapi(request: HttpRequest) -> Any:
    """Returns this document."""
    options = serving_of(request).options
    return json_response(document(request.app.routes, bool(options.api_keys), options.root_path))


routes = [Route("/openapi.json", openapi, methods=["GET"])]
