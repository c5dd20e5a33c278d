"""Calls of tools in generated text: what each family's reader finds, however the text is cut."""

import json
import random
import time

import pytest

from llamabatch.chat import tool_parsers
from llamabatch.chat.tool_parsers import ToolParser, to_json
from llamabatch.chat.tool_schemas import types_of
from tests.unit.chat.tool_texts import BROKEN, CASES, MARKS, NO_CALLS, OSLO, TOOLS

N_CUTS = 1000


def read(reader, pieces, **options):
    """Yields the text and the calls (id, name, arguments) after each piece. The last piece goes to finish()."""
    parser = ToolParser(reader, options.pop("tools", TOOLS), lambda index, name: f"id {index}", **options)
    text, calls = "", []
    for delta in [*map(parser.feed, pieces[:-1]), parser.finish(pieces[-1])]:
        assert delta.reasoning == ""
        text += delta.text
        for call in delta.tool_calls:
            if call.id is not None:
                assert call.index == len(calls)
                calls.append([call.id, call.name, ""])
            calls[call.index][2] += call.arguments
        yield text, calls


def whole(reader, *pieces, **options):
    *_, last = read(reader, pieces, **options)
    return last


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.reader.__name__}: {case.given[:40]!r}")
def test_calls_are_found(case):
    text, calls = whole(case.reader, case.given)
    assert text == case.text
    assert [(name, json.loads(arguments)) for _, name, arguments in calls] == list(case.calls)
    assert [call_id for call_id, _, _ in calls] == list(case.ids or (f"id {i}" for i in range(len(calls))))


@pytest.mark.parametrize(("reader", "given"), NO_CALLS)
def test_what_is_no_call_is_text(reader, given):
    assert whole(reader, given) == (given, [])


@pytest.mark.parametrize(("reader", "given", "arguments", "rest"), BROKEN)
def test_a_call_that_has_begun_stays_one(reader, given, arguments, rest):
    text, [(_, name, written)] = whole(reader, given)
    assert (text, name, written) == (rest, "weather", arguments)


def all_texts():
    return [
        *((case.reader, case.given) for case in CASES),
        *NO_CALLS,
        *((reader, given) for reader, given, _, _ in BROKEN),
    ]


@pytest.mark.parametrize("reader", dict.fromkeys(reader for reader, _ in all_texts()), ids=lambda r: r.__name__)
def test_no_cut_changes_anything_and_no_prefix_shows_half_a_mark(reader):
    rng = random.Random(15)
    given = [text for each, text in all_texts() if each is reader]
    expected = {text: whole(reader, text) for text in given}
    for _ in range(N_CUTS):
        text = rng.choice(given)
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.choice((1, 2, 5, 20)))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        final, final_calls = expected[text]
        *prefixes, last = read(reader, pieces)
        assert last == (final, final_calls), pieces
        for shown, calls in prefixes:
            assert final.startswith(shown)
            assert all(after[2].startswith(before[2]) for before, after in zip(calls, final_calls, strict=False))
            for mark in MARKS:  # the beginning of a mark may be shown only where no mark can follow
                half = next((n for n in range(len(mark) - 1, 2, -1) if shown.endswith(mark[:n])), 0)
                assert not half or final[len(shown) - half :].startswith(mark[:half])


@pytest.mark.parametrize("reader", dict.fromkeys(case.reader for case in CASES), ids=lambda r: r.__name__)
def test_arguments_come_while_they_are_written(reader):
    given = next(case.given for case in CASES if case.reader is reader and OSLO in case.calls and "Oslo" in case.given)
    parser = ToolParser(reader, TOOLS, lambda index, name: "id")
    [call] = parser.feed(given[: given.index("Oslo") + 2]).tool_calls
    assert (call.name, call.arguments) == ("weather", '{"city": "Os')


def test_values_of_tags_have_the_types_of_the_schema():
    def types(*names):
        return frozenset(names)

    assert to_json("3", types("integer")) == "3"
    assert to_json("3", types("string", "null")) == '"3"'
    assert to_json("null", types("string", "null")) == "null"
    assert to_json("False", types("boolean")) == "false"
    assert to_json("False", types("string", "boolean")) == '"False"'
    assert to_json("NaN", types("number")) == '"NaN"'
    assert to_json("two", types("integer")) == '"two"'
    assert to_json(' {"a": 1}\n', None) == '{"a": 1}'
    assert to_json("two dollars", None) == '"two dollars"'


def test_types_of_schemas():
    root = {"$defs": {"unit": {"enum": ["C", 1]}, "loop": {"$ref": "#/$defs/loop"}}}
    assert types_of({"type": "string"}, root) == {"string"}
    assert types_of({"$ref": "#/$defs/unit"}, root) == {"string", "integer", "number"}
    assert types_of({"anyOf": [{"type": "string"}, {"const": None}]}, root) == {"string", "null"}
    assert types_of({"anyOf": [{"type": "string"}, {}]}, root) is None
    assert types_of({"$ref": "#/$defs/loop"}, root) == frozenset()
    assert types_of({"$ref": "#/$defs/none"}, root) is None
    assert types_of(True, root) is None


def test_a_recursive_schema_is_read_once():
    parts = {f"p{i}": {"anyOf": [{"$ref": f"#/$defs/p{k}"} for k in range(80)]} for i in range(80)}
    parts["p7"] = {"type": "integer"}
    start = time.process_time()
    assert types_of({"$ref": "#/$defs/p0"}, {"$defs": parts}) == {"integer"}
    assert time.process_time() - start < 1


DIGITS = "1" * 5000  # json.loads refuses numbers of so many digits


@pytest.mark.parametrize(
    "given",
    [
        f'{{"name": "weather", "arguments": {{"days": {DIGITS}}}}}',
        f'{{"arguments": {{"days": {DIGITS}}}, "name": "weather"}}',
        f'{{"name": "weather", "arguments": "{{\\"days\\": {DIGITS}}}"}}',
    ],
)
def test_numbers_may_have_any_number_of_digits(given):
    text, [(_, name, arguments)] = whole(tool_parsers.hermes, f"<tool_call>{given}</tool_call>")
    assert (text, name, arguments) == ("", "weather", f'{{"days": {DIGITS}}}')


def test_half_a_character_within_a_text_of_arguments_stays_an_escape():
    for half in (r"\ud83d", r"\\ud83d"):
        given = r'<tool_call>{"name": "weather", "arguments": "{\"city\": \"%s\"}"}</tool_call>'
        _, [(_, _, arguments)] = whole(tool_parsers.hermes, given % half)
        assert arguments == r'{"city": "\ud83d"}'


def test_many_markers_cost_no_more_than_their_length():
    """A text of nothing but beginnings of calls is read once, not once for each beginning."""
    text = '<tool_call>{"name": ' * 5000
    assert whole(tool_parsers.hermes, text) == (text, [])


def test_a_number_may_have_more_digits_than_python_reads():
    assert to_json("7" * 5000, frozenset(("integer", "number"))) == "7" * 5000
