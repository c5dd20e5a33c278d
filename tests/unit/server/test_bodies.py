"""Converts the text of a body to values, by a table of its fields."""

import json
import logging

import pytest

from llamabatch.server.http.errors import ApiError
from llamabatch.server.request import body as bodies
from llamabatch.server.request.body import Body, Field, Rules, ignored_headers, log_ignored, param_of, timeout_of
from llamabatch.server.request.json_body import MAX_DEPTH, MAX_SIZE, read_json

JSON = {"content-type": "application/json"}


def refused(data: bytes, headers=None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_json(data, headers)
    return caught.value


def nested(depth: int) -> bytes:
    return b'{"a": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_a_body_is_an_object():
    assert read_json(b'{"prompt": "a", "n": 2, "x": [1.5, null, true]}', JSON) == {
        "prompt": "a",
        "n": 2,
        "x": [1.5, None, True],
    }
    assert read_json('{"prompt": "ä😀"}'.encode()) == {"prompt": "ä😀"}
    assert read_json(b'{"prompt": "\\ud83d\\ude00"}') == {"prompt": "😀"}


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"[1]", "give a JSON object"),
        (b"null", "give a JSON object"),
        (b'{"a": -Infinity}', "-Infinity is no number"),
        (b'{"a": 1e999}', "is too large"),
        (b'{"a": ' + b"1" * 100_000 + b"}", "a number of 100000 digits"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' stands twice"),
        (b'{"a": "\\ud800"}', "a lone surrogate, \\ud800"),
        (b'{"\\uDFFF": 1}', "a lone surrogate, \\udfff"),
        (b'{"a": "\xff"}', "no UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "no UTF-8"),
        (nested(MAX_DEPTH + 1), "deep"),
        (nested(100_000), "deep"),
        (b'{"a": ' * 50_000, "deep"),
        (b'{"a": 1} {"a": 2}', "no JSON"),
    ],
)
def test_what_is_no_such_object_is_refused(data, part):
    error = refused(data)
    assert error.status == 400
    assert part in error.message
    assert len(error.message) < 300


def test_lists_in_lists_are_allowed_to_a_depth():
    read_json(nested(MAX_DEPTH))


def test_the_type_is_json_in_utf8():
    for given in ("application/json", "Application/JSON; charset=UTF-8", "application/vnd.api+json"):
        assert read_json(b"{}", {"content-type": given}) == {}
    assert read_json(b"{}", {}) == {}
    for given in ("text/plain", "multipart/form-data", "application/json; charset=latin-1", ""):
        assert refused(b"{}", {"content-type": given}).status == 415
    assert refused(b"{}", {**JSON, "content-encoding": "gzip"}).status == 415


def test_curl_needs_no_header_and_a_page_that_claims_to_be_curl_is_refused():
    curl = {"content-type": "application/x-www-form-urlencoded"}
    assert read_json(b'{"n": 1}', curl) == {"n": 1}
    for name, value in (("origin", "null"), ("origin", "http://localhost"), ("sec-fetch-site", "cross-site")):
        assert refused(b'{"n": 1}', {**curl, name: value}).status == 415
    assert refused(b"n=1&prompt=a", curl).status == 400
    assert refused(b"{}", {"content-type": "application/x-www-form-urlencoded; charset=latin-1"}).status == 415


FIELDS = {
    "n": Field({"type": "integer"}),
    "options": Field({"type": "object"}),
    "suffix": Field({}, only=("", 0), advice="put it into the prompt"),
    "guess": Field({}, only=("",), advice="it is an option of the server", optional=True),
}


def test_unknown_fields_are_ignored_by_name_or_refused():
    body = Body({"n": 1, "topp": 1, "x": None}, FIELDS)
    assert body.ignored == ["topp"]  # a field that is null counts as missing
    assert body.take("n") == 1
    assert body.take("n") is None
    with pytest.raises(ApiError, match="no field 'm'") as caught:
        Body({"m": 1}, FIELDS, Rules(strict=True))
    assert (caught.value.status, caught.value.param) == (400, "m")
    assert body.nested("options", ()) == {}
    body = Body({"options": {"a": 1, "b": 2}}, FIELDS)
    assert body.nested("options", ("a",)) == {"a": 1}
    assert body.ignored == ["options.b"]
    with pytest.raises(ApiError, match=r"no field 'options\.b'") as caught:
        Body({"options": {"b": 2}}, FIELDS, Rules(strict=True)).nested("options", ("a",))
    assert caught.value.param == "options"


def test_a_field_that_cannot_be_honoured_is_refused_with_a_cure():
    for value in (1, "x", False, 0.0, []):
        with pytest.raises(ApiError, match="put it into the prompt") as caught:
            Body({"suffix": value}, FIELDS)
        assert (caught.value.status, caught.value.param) == (400, "suffix")
    for value in ("", 0, None):
        assert Body({"suffix": value}, FIELDS).ignored == []


def test_a_field_that_only_allows_something_is_ignored_by_name_or_refused():
    assert Body({"guess": "x"}, FIELDS).ignored == ["guess"]
    assert Body({"guess": ""}, FIELDS, Rules(strict=True)).ignored == []
    with pytest.raises(ApiError, match="guess is 'x', which is not supported; it is an option of the server"):
        Body({"guess": "x"}, FIELDS, Rules(strict=True))


def test_the_header_of_ignored_names_is_short_and_safe():
    assert ignored_headers([]) == {}
    assert ignored_headers(["b.c", "a[1]:d", "b.c"]) == {"X-Llamabatch-Ignored": "a[1]:d, b.c"}
    assert ignored_headers(["a\r\nSet-Cookie: x=1", "ä", ""]) == {"X-Llamabatch-Ignored": "?, a??Set-Cookie:?x?1"}
    value = ignored_headers(f"name{i}" * 20 for i in range(1000))["X-Llamabatch-Ignored"]
    assert len(value) <= 1024
    assert value.endswith(", ...")
    assert len(ignored_headers(["x" * 10_000])["X-Llamabatch-Ignored"]) == 64


def test_few_and_short_names_are_kept_of_what_is_ignored():
    """The names are written on the event loop, and the log stores them."""
    assert len(Body({f"f{i}": 0 for i in range(5000)}, FIELDS).ignored) == 1024
    assert Body({"x" * 1_000_000: 0}, FIELDS).ignored == ["x" * 64]
    body = Body({}, FIELDS)
    for i in range(5000):
        body.ignore_kind(f"tools[{i}]", "y" * 1000, "", "")
    assert len(body.ignored) == 1024
    assert max(map(len, body.ignored)) == 64


def test_an_ignored_name_is_logged_once_and_never_its_value(caplog, monkeypatch):
    monkeypatch.setattr(bodies, "_logged", set())
    with caplog.at_level(logging.DEBUG):
        log_ignored(["topp"])
        log_ignored(["topp", "other[3]", "other[4]"])
    assert [record.getMessage() for record in caplog.records] == [
        f"a request has '{name}', which is ignored (strict refuses it)" for name in ("topp", "other")
    ]


def test_a_timeout_is_in_seconds():
    assert timeout_of({}) is None
    assert timeout_of({"x-request-timeout": "30"}) == 30.0
    assert timeout_of({"x-request-timeout": " 0.5s"}) == 0.5
    for given in ("", "0", "-1", "nan", "inf", "1e10", "1m", "٣"[:0] + "x"):
        with pytest.raises(ApiError, match="X-Request-Timeout"):
            timeout_of({"x-request-timeout": given})


def test_the_field_of_a_message():
    assert param_of("temperature is -1.0; it must", {"temperature": -1}) == "temperature"
    assert param_of("max_tokens is 0; give", {"n_predict": 0}) == "n_predict"
    assert param_of("the parameters of 'f' are 1", {"tools": []}) is None
    assert param_of("json of structured_outputs is no JSON: x", {"json_schema": "x"}) == "json_schema"


@pytest.mark.parametrize("unit", [b"0,", b"[],", b'{"a":0},', b'"x",', b'"[",', b'"\\"[",'])
def test_a_body_has_a_bound_on_its_values(unit):
    n = MAX_SIZE // (12 if b":" in unit else 5 if unit == b"[]," else 1)
    assert len(read_json(b'{"a":[' + unit * (n // 64) + b"0]}")["a"]) == n // 64 + 1
    assert refused(b'{"a":[' + unit * (2 * n) + b"0]}").status == 413


def test_what_stands_in_a_text_is_no_value():
    text = '[{,\\"' * (MAX_SIZE // 8)
    assert read_json(json.dumps({"a": [text, text]}).encode()) == {"a": [text, text]}
    assert refused(b'{"a":"' + b"," * 2 * MAX_SIZE).status == 400  # an unterminated string
    assert read_json(b'{"a":["' + b"\\\\" * MAX_SIZE + b'", ",,"]}') == {"a": ["\\" * MAX_SIZE, ",,"]}


def test_a_byte_order_mark_before_a_body_is_passed_over():
    assert read_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
