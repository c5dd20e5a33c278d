"""Compares our parse of texts with tool calls with that of llama-server, which tests/chat_peer recorded."""

import json
from pathlib import Path

import pytest

from llamabatch.chat.tool_formats import FORMATS
from llamabatch.chat.tool_parsers import ToolParser
from tests.chat_peer import texts
from tests.unit.chat.tool_texts import TOOLS

PARSES = json.loads((Path(__file__).parents[2] / "chat_peer" / "parses.json").read_text(encoding="utf-8"))
READERS = {each.name: each.reader for each in FORMATS}

# Kinds of difference -> why our parse differs.
WHY = {
    "error": "llama.cpp refuses the whole output, and llama-server answers with an error; here calls that can be read "
    "are, in any variant of the notation, and everything else is text, as the model wrote it",
    "lost": "llama.cpp drops a call that it cannot read, or whitespace; here nothing of an output is lost",
    "text": "llama.cpp has the whole output as text, also where it has calls in a variant of the notation, or one that "
    "has begun and is cut, which a stream has shown already",
    "mark": "llama.cpp leaves a mark of the notation in the text",
    "space": "the same arguments, with a space behind each colon of JSON as models write it",
}


COUNTED = {None: 15, "error": 22, "lost": 5, "text": 7, "mark": 1, "space": 2}


def ours(parse):
    delta = ToolParser(READERS[parse["family"]], TOOLS, lambda index, name: "id").finish(parse["text"])
    return delta.text, [(call.name, plain(call.arguments)) for call in delta.tool_calls]


def plain(arguments):
    """Returns arguments as parsed JSON, or as their text if they are no JSON."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def theirs(parse):
    return parse["content"], [(call["name"], plain(call["arguments"])) for call in parse["tool_calls"]]


def difference(parse):
    """Returns the kind of difference, a key of WHY, or None if the parses are the same."""
    text, calls = ours(parse)
    if "error" in parse:
        return "error"
    their_text, their_calls = theirs(parse)
    if (their_text, their_calls) == (text, calls):
        return None
    if not their_text and not their_calls:
        return "lost"
    if not their_calls and their_text == parse["text"]:
        return "text"
    if their_calls == calls and their_text == "<|python_tag|>":
        return "mark"
    if their_text == text and [(name, str(given).replace(": ", ":")) for name, given in calls] == their_calls:
        return "space"
    return f"another: {parse}"


def test_the_record_is_that_of_the_texts():
    recorded = [[(parse["family"], parse["text"]) for parse in PARSES[part]] for part in ("well_formed", "others")]
    assert recorded == [texts.well_formed(), texts.others()], "record anew: python -m tests.chat_peer"


@pytest.mark.parametrize("parse", PARSES["well_formed"], ids=lambda each: f"{each['family']}: {each['text'][:30]!r}")
def test_well_formed_calls_are_read_as_llama_cpp_reads_them(parse):
    assert ours(parse) == theirs(parse)


def test_other_texts_differ_for_a_reason():
    kinds = [difference(parse) for parse in PARSES["others"]]
    assert set(kinds) - {None} == set(WHY)
    counted = {kind: kinds.count(kind) for kind in (None, *WHY)}
    assert counted == COUNTED
