"""JSON bodies: reads the bytes of a request as an object, within limits of size, depth and digits. The bytes of a body
and the headers are the only parts of HTTP in this module."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from llamabatch.server.http.errors import ApiError
from llamabatch.server.request.body import Json
from llamabatch.utils.checks import show

SCOPE_BODY = "llamabatch.body"  # key of an ASGI scope; the value is the JSON object of a body that was already read
MAX_DEPTH = 128  # limit of nested lists and objects; all code on the stack shares Python's recursion limit of 1,000
MAX_DIGITS = 40  # limit of digits in a whole number; the time to read a number grows with the square of its digits
MAX_SIZE = 2**20  # limit of values in a body; lists, objects and named values count as several values each

_OF_A_LIST = 4  # a list or an object counts as this many values
_OF_A_NAME = 8  # a value with a name counts as this many values, because the name becomes a string and is looked up
_MAYBE_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # the escape of a surrogate, whose other half may be missing
_HALF = re.compile("[\ud800-\udfff]")
_CURL_TYPE = "application/x-www-form-urlencoded"
_JSON_TYPE = re.compile(r"application/(?:[\w.+-]+\+)?json", re.IGNORECASE)


class Pause:
    """A callable that sleeps for as long as the previous step took. A worker thread calls it between two steps.

    A step holds the interpreter lock. The event loop needs this lock again after each of its system calls. The sleep
    lets the event loop make several system calls.
    """

    def __init__(self) -> None:
        self._before = time.thread_time()

    def __call__(self) -> None:
        time.sleep(time.thread_time() - self._before)
        self._before = time.thread_time()


def read_json(
    data: bytes | bytearray, headers: Mapping[str, str] | None = None, pause: Callable[[], None] = lambda: None
) -> Json:
    """Returns the JSON object in the body of a request.

    Args:
        headers: the headers of the request, with names in lower case; None: the content type is not checked.
        pause: called between the steps of reading. A step takes about 20 ms for a body of 20 MB.

    Raises:
        ApiError: 415: the content type is not JSON in UTF-8. 413: the body has more than MAX_SIZE values. 400: the body
            is not a JSON object in UTF-8; an object has a name twice; a number is NaN, too long or too large; a text
            has half a surrogate pair; or lists and objects are nested more than MAX_DEPTH deep.
    """
    if headers is not None:
        _check_type(headers)
    try:
        text = data.decode("utf-8-sig")  # some programs send a byte order mark
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is no UTF-8: {error.reason} at byte {error.start}") from None
    pause()
    _check_size(data)
    pause()
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {show(value)}; give a JSON object")
    pause()
    # A regex search blocks all other threads (for 0.1 s in 32 MB), so the quick tests come first.
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH or (b"\\u" in data and _MAYBE_HALF.search(text)):
        _check_values(value)
    return value


def _check_size(data: bytes | bytearray) -> None:
    """Raises ApiError for more than MAX_SIZE values. Parsing more values would block all other threads and need
    gigabytes: `[]` has two bytes as JSON and 64 bytes as a Python object."""
    if _size(data) <= MAX_SIZE:
        return
    size = end = 0
    while size <= MAX_SIZE and (start := data.find(b'"', end)) >= 0:
        size += _size(data[end:start])
        end = _end_of_text(data, start)  # a string counts as one value, whatever its characters
    if size + _size(data[end:]) > MAX_SIZE:
        raise ApiError(
            413,
            f"the body has more than {MAX_SIZE:,} values, where a list or an object counts as {_OF_A_LIST} and a value "
            f"with a name as {_OF_A_NAME}; send it in parts",
        )


def _end_of_text(data: bytes | bytearray, start: int) -> int:
    """Returns the index after the end of a string. The string begins with the quotation mark at `start`."""
    end = start
    while (end := data.find(b'"', end + 1)) >= 0:
        before = end
        while data[before - 1] == ord("\\"):
            before -= 1
        if (end - before) % 2 == 0:
            return end + 1
    return len(data)


def _size(data: bytes | bytearray) -> int:
    lists, names = data.count(b"[") + data.count(b"{"), data.count(b":")
    return data.count(b",") + _OF_A_LIST * lists + (_OF_A_NAME - 1) * names


def _check_type(headers: Mapping[str, str]) -> None:
    given, _, parameters = headers.get("content-type", "application/json").partition(";")
    charset = re.search(r"charset\s*=\s*\"?([\w.-]+)", parameters, re.IGNORECASE)
    is_json = _JSON_TYPE.fullmatch(given.strip()) or _is_of_curl(given, headers)
    if not is_json or (charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii")):
        raise ApiError(
            415,
            f"Content-Type is {show(headers['content-type'])}; give application/json "
            "(curl: -H 'Content-Type: application/json')",
        )
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, f"Content-Encoding is {show(headers['content-encoding'])}; send the body as it is")


def _is_of_curl(given: str, headers: Mapping[str, str]) -> bool:
    """True if the content type is the default of `curl -d` and no web page has sent the request.

    llama-server accepts this type. A web page can send this type to any server without a preflight, but the headers
    then show that a page has sent the request.
    """
    from_page = "origin" in headers or any(name.startswith("sec-fetch-") for name in headers)
    return given.strip().lower() == _CURL_TYPE and not from_page


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits; at most {MAX_DIGITS} are allowed")
    return int(text)


def _decimal(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:20]} is too large; allowed are up to 1.8e308")
    return value


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> Json:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {show(twice)} stands twice in one object")
    return value


_DECODER = json.JSONDecoder(
    parse_int=_whole, parse_float=_decimal, parse_constant=_no_number, object_pairs_hook=_object
)


def _too_deep() -> ApiError:
    return ApiError(400, f"the body has lists or objects within each other, more than {MAX_DEPTH} deep")


def _check_values(value: object) -> None:
    """Raises ApiError for values nested too deep, and for strings with half a surrogate pair."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for each in level:
            below += (*each, *each.values()) if isinstance(each, dict) else each
        for text in below:
            if isinstance(text, str) and (half := _HALF.search(text)):
                raise ApiError(400, f"a text of the body has a lone surrogate, \\u{ord(half[0]):x}, at {half.start()}")
        level = [each for each in below if isinstance(each, (dict, list))]
        if not level:
            return
    raise _too_deep()
