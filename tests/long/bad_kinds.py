"""200 kinds of line that a job cannot run, each with a part of its error."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

LIMIT = 8 * 2**20  # most bytes of a line
EARLIER = "good-0"  # the id of the second good line before the bad one; the first has no id, so its id is its number, 0


class Kind(NamedTuple):
    """One kind of bad line.

    Attributes:
        line: the line, without its line end.
        says: a part of its error message.
        id: the id of its error row.
    """

    name: str
    line: bytes
    says: str
    id: str | None = None


def all_kinds() -> list[Kind]:
    """Returns all kinds, in a fixed order."""
    return [
        *_empty(),
        *_no_json(),
        *_no_utf8(),
        *_no_object(),
        *_large(),
        *_ids(),
        *_prompts(),
        *_sampling(),
        *_openai(),
    ]


def _empty() -> Iterator[Kind]:
    for name, line in (
        ("empty", b""),
        ("a space", b" "),
        ("a tab", b"\t"),
        ("CRLF alone", b"\r"),
        ("many spaces", b" " * 5000),
        ("form feed", b"\x0c"),
    ):
        yield Kind(f"empty: {name}", line, "this line is empty")


def _no_json() -> Iterator[Kind]:
    whole = b'{"id": "bad", "prompt": "a prompt", "max_tokens": 4}'
    for n in (1, 2, 5, 7, 13, 24, 30, len(whole) - 1):
        yield Kind(f"cut after {n} bytes", whole[:n], "this is not JSON")
    yield Kind("a byte is missing at the left", whole[1:], "this is not JSON")
    for name, line in {
        "a word": b"hello",
        "a sentence": b"What is the capital of France?",
        "single quotes": b"{'prompt': 'a'}",
        "a comma at the end": b'{"prompt": "a",}',
        "a comment": b'{"prompt": "a"} // why',
        "no colon": b'{"prompt" "a"}',
        "a bare name": b'{prompt: "a"}',
        "two objects": b'{"prompt": "a"} {"prompt": "b"}',
        "XML": b"<prompt>a</prompt>",
        "YAML": b"prompt: a",
        "CSV": b"7,a prompt,0.5",
        "Python's True": b'{"prompt": "a", "ignore_eos": True}',
        "Python's None": b'{"prompt": "a", "seed": None}',
        "undefined": b'{"prompt": "a", "seed": undefined}',
        "hexadecimal": b'{"prompt": "a", "seed": 0x10}',
        "a leading zero": b'{"prompt": "a", "seed": 007}',
        "a plus": b'{"prompt": "a", "seed": +7}',
        "half a number": b'{"prompt": "a", "temperature": 5.}',
        "NaN": b'{"prompt": "a", "temperature": NaN}',
        "Infinity": b'{"prompt": "a", "temperature": Infinity}',
        "-Infinity": b'{"prompt": "a", "logit_bias": {"1": -Infinity}}',
        "an escape that is none": rb'{"prompt": "\x41"}',
        "half an escape": rb'{"prompt": "\u12"}',
        "a tab in a text": b'{"prompt": "a\tb"}',
        "a return in a text": b'{"prompt": "a\rb"}',
        "CR between two lines": b'{"prompt": "a"}\r{"prompt": "b"}',
        "an end of text": b'{"prompt": "a"}\x1a',
        "zero bytes alone": b"\0" * 64,
        "a zero byte in a text": b'{"prompt": "a\0b"}',
        "a zero byte in front": b'\0{"prompt": "a"}',
        "a zero byte behind": b'{"prompt": "a"}\0',
        "a hole in the file": b'{"prompt": ' + b"\0" * 4096,
        "a no-break space in front": b'\xc2\xa0{"prompt": "a"}',
        "a zero-width space in front": b'\xe2\x80\x8b{"prompt": "a"}',
        "the same name twice": b'{"prompt": "a", "prompt": "b"}',
        "the same id twice in a line": b'{"id": "bad", "id": "worse", "prompt": "a"}',
        "the same role twice": b'{"messages": [{"role": "user", "role": "system", "content": "a"}]}',
        "5,000 digits": b'{"prompt": "a", "seed": ' + b"7" * 5000 + b"}",
        "a merge's mark": b"<<<<<<< HEAD",
    }.items():
        yield Kind(name, line, "this is not JSON")
    yield Kind("byte order mark", b'\xef\xbb\xbf{"prompt": "a"}', "byte order mark")
    yield Kind("byte order mark twice", b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": "a"}', "byte order mark")


def _no_utf8() -> Iterator[Kind]:
    for name, text in {
        "Latin-1": b"caf\xe9",
        "a continuation alone": b"\x80",
        "a long form of zero": b"\xc0\x80",
        "a long form of a slash": b"\xe0\x80\xaf",
        "a character cut off": b"\xe2\x82",
        "half a surrogate pair": b"\xed\xa0\x80",
        "beyond Unicode": b"\xf4\x90\x80\x80",
        "0xFF": b"\xff",
    }.items():
        yield Kind(f"no UTF-8: {name}", b'{"prompt": "' + text + b'"}', "not UTF-8 text: byte 1")
    yield Kind(
        "no UTF-8: a compressed line", gzip.compress(b'{"prompt": "a"}', mtime=0).replace(b"\n", b""), "not UTF-8"
    )
    yield Kind("UTF-16", '{"prompt": "a"}'.encode("utf-16"), "not UTF-8")
    yield Kind("UTF-16 without a mark", '{"prompt": "a"}'.encode("utf-16-le"), "not JSON")
    yield Kind("UTF-32", '{"prompt": "a"}'.encode("utf-32-be"), "not JSON")
    for name, line in {"prompt": rb'{"id": "bad", "prompt": "\ud83d"}', "name": rb'{"id": "bad", "\udc00": 1}'}.items():
        yield Kind(f"a lone surrogate in a {name}", line, "holds a lone surrogate", "bad")


def _no_object() -> Iterator[Kind]:
    for line, what in {
        b"null": "null",
        b"true": "true",
        b"false": "false",
        b"0": "a number",
        b"-1.5e3": "a number",
        b'"a prompt"': "a text",
        b'""': "a text",
        b"[]": "a list",
        b'["a", "b"]': "a list",
        b'[{"prompt": "a"}]': "a list",
    }.items():
        yield Kind(f"no object: {line.decode()}", line, f"this is {what}; write a JSON object")


def _large() -> Iterator[Kind]:
    ten = 10 * 10**6
    for name, line in {
        "10 MB of text": b'{"prompt": "' + b"a" * ten + b'"}',
        "10 MB of spaces": b'{"prompt": "a"}' + b" " * ten,
        "10 MB of zeros": b"\0" * ten,
        "10 MB of brackets": b"[" * ten,
        "10 MB of no UTF-8": b"\xff" * ten,
        "one byte too much": b'{"prompt": "' + b"a" * (LIMIT - 13) + b'"}',
        "20 MB of messages": json.dumps({"messages": [{"role": "user", "content": "a" * 40}] * 300_000}).encode(),
    }.items():
        yield Kind(name, line, f"bytes; allowed are up to {LIMIT}")
    for name, line in {
        "101 lists": b'{"prompt": ' + b"[" * 101 + b"]" * 101 + b"}",
        "100,000 lists": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "100,000 objects": b'{"a": ' * 100_000 + b"1" + b"}" * 100_000,
        "500 objects in a schema": b'{"prompt": "a", "structured_outputs": {"json": '
        + b'{"items": ' * 500 + b"{}" + b"}" * 502,
    }.items():  # fmt: skip
        yield Kind(f"deep: {name}", line, "nested more than 100 deep")


def _line(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _ids() -> Iterator[Kind]:
    yield Kind("a double id", _line(id=EARLIER, prompt="a"), f"the id '{EARLIER}' is taken by")
    yield Kind("a double custom_id", _line(custom_id=EARLIER, prompt="a"), f"the id '{EARLIER}' is taken by")


def _bad(name: str, says: str, **fields: Any) -> Kind:
    return Kind(name, _line(id="bad", **fields), says, "bad")


def _prompts() -> Iterator[Kind]:
    yield _bad("no prompt", "this one has none of them")
    yield _bad("no prompt, but a parameter", "this one has none of them", max_tokens=4)
    yield _bad("prompt and messages", "this one has prompt and messages", prompt="a", messages=[])
    yield _bad("prompt and input", "this one has prompt and input", prompt="a", input="a")
    yield _bad("the prompt null", "this one has none of them", prompt=None)
    for value in (5, True, {}, {"text": "a"}):
        yield _bad(f"the prompt {json.dumps(value)}", "prompt is ", prompt=value)
    yield _bad("the empty prompt", "prompt is empty", prompt="")
    yield _bad("no token", "prompt is an empty list", prompt=[])
    for value in (["a"], [1.5], [-1], [True], [2**40], [[1]], [None]):
        yield _bad(f"the token {json.dumps(value)}", "a token id of prompt is", prompt=value)
    yield _bad("the messages null", "this one has none of them", messages=None)
    for value in ({}, "hi", 5):
        yield _bad(f"the messages {json.dumps(value)}", "a conversation is a list of messages", messages=value)
    yield _bad("no message", "the conversation is empty", messages=[])
    user = {"role": "user", "content": "a"}
    for message in (5, [], {}, {"role": "user"}, {"content": "a"}, {"role": 1, "content": "a"}):
        yield _bad(f"the message {json.dumps(message)}", "a message is {", messages=[user, message])
    yield _bad("a number as content", "content of messages[0] is 5", messages=[{"role": "user", "content": 5}])
    film = {"type": "video_url", "video_url": {"url": "a"}}
    yield _bad("a film", "a part of type 'video_url'", messages=[{"role": "user", "content": [film]}])
    broken = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    yield _bad("a tool call without a function", "a tool call of messages[0] is", messages=[broken])
    yield _bad("tools that are none", "tools[0] is {}", messages=[user], tools=[{}])
    yield _bad("tools of a prompt", "tools goes with messages", prompt="a", tools=[])
    variable = {"raise_exception": 1}
    yield _bad("a variable that cannot be set", "has 'raise_exception'", messages=[user], chat_template_kwargs=variable)
    yield _bad("an input that is a number", "input is 5", input=5)
    yield _bad("an input with a temperature", "temperature does not go with input", input="a", temperature=1)


def _sampling() -> Iterator[Kind]:
    for name, meant in {
        "promt": "prompt",
        "mesages": "messages",
        "max_token": "max_tokens",
        "temprature": "temperature",
    }.items():
        yield _bad(f"the name {name}", f"there is no field '{name}'; did you mean '{meant}'", **{name: "a"})
    yield _bad("a name of another place", "give structured_outputs={'json'", prompt="a", json_schema={})
    for name, value in {
        "temperature": -1, "top_p": 1.5, "min_p": "0.1", "top_k": 2.5, "n": 0, "max_tokens": 0, "min_tokens": -1,
        "seed": -1, "stop": 5, "stop_token_ids": "a", "bad_words": [""], "logit_bias": {"a": 1}, "logprobs": -2,
        "ignore_eos": 1, "repetition_penalty": 0, "presence_penalty": 3, "frequency_penalty": [], "priority": "high",
        "deadline_s": -1, "overflow": "drop", "mirostat": 3, "structured_outputs": {"jso": {}},
        "logits_processors": ["f"],
    }.items():  # fmt: skip
        yield _bad(f"{name} = {json.dumps(value)}", name, prompt="a", **{name: value})
    for name, value in {
        "temperature": "hot", "top_p": [], "min_p": -0.1, "top_k": "all", "n": 1.5, "max_tokens": "many",
        "min_tokens": 0.5, "seed": "a", "stop": [""], "stop_token_ids": [-1], "logprobs": "all", "priority": [],
        "deadline_s": "soon",
    }.items():  # fmt: skip
        yield _bad(f"{name} = {json.dumps(value)}", name, prompt="a", **{name: value})
    yield Kind("a number too large", b'{"id": "bad", "prompt": "a", "temperature": 1e400}', "temperature is inf", "bad")
    yield _bad("a field under two names", "max_tokens is given twice", prompt="a", max_tokens=4, n_predict=4)
    yield _bad("more at least than at most", "must not exceed max_tokens", prompt="a", min_tokens=9, max_tokens=4)
    yield _bad(
        "a schema with ignore_eos",
        "ignore_eos is True beside structured_outputs",
        prompt="a",
        ignore_eos=True,
        structured_outputs={"json_object": True},
    )
    yield _bad(
        "a schema that is a number", "json of structured_outputs is 5", prompt="a", structured_outputs={"json": 5}
    )


def _batch(name: str, says: str, body: Any = None, **fields: Any) -> Kind:
    line = {"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": body or {"prompt": "a"}, **fields}
    return Kind(f"batch: {name}", json.dumps(line).encode(), says, "bad")


def _openai() -> Iterator[Kind]:
    line = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    yield Kind("batch: no custom_id", json.dumps(line).encode(), "needs a custom_id")
    yield Kind("batch: custom_id null", json.dumps({"custom_id": None, **line}).encode(), "needs a custom_id")
    yield Kind("batch: a double custom_id", json.dumps({"custom_id": EARLIER, **line}).encode(), "is taken by")
    yield _batch("GET", "method is 'GET'", method="GET")
    yield _batch("a url nobody knows", "did you mean '/v1/chat/completions'", url="/v1/chat/completion")
    yield _batch("a number as url", "url is 5", url=5)
    for value in ([1], "a", 5):
        yield _batch(f"the body {json.dumps(value)}", "body is ", body=value)
    yield _batch("a field beside the body", "a batch line has no field 'prompt'", prompt="a")
    yield _batch("no prompt", "needs 'prompt'", {"max_tokens": 4})
    yield _batch("messages to be completed", "needs 'prompt'", {"messages": [{"role": "user", "content": "a"}]})
    for name, value in {
        "stream": True,
        "echo": True,
        "suffix": "b",
        "n": 0,
        "tool_choice": "required",
        "max_token": 4,
    }.items():
        yield _batch(f"{name} = {json.dumps(value)}", name, {"prompt": "a", name: value})
    yield _batch("two prompts", "a list of 2", {"prompt": ["a", "b"]})
    yield _batch("a model that is a number", "model is 5", {"prompt": "a", "model": 5})
    chat: Any = {"messages": [{"role": "user", "content": "a"}]}
    url = "/v1/chat/completions"
    yield _batch("likeliest tokens alone", "needs logprobs", {**chat, "top_logprobs": 2}, url=url)
    yield _batch("the functions of old", "functions is", {**chat, "functions": [{"name": "f"}]}, url=url)
    yield _batch("dimensions", "dimensions is 8", {"input": "a", "dimensions": 8}, url="/v1/embeddings")
    yield _batch(
        "base64", "encoding_format is 'base64'", {"input": "a", "encoding_format": "base64"}, url="/v1/embeddings"
    )
