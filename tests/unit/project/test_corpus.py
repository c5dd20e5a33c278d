"""The generator of questions for the bundled model, and the checkers that measure the model's accuracy."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import pytest

MODELS = Path(__file__).parents[3] / "models" / "tiny"
sys.path.insert(0, str(MODELS))

import corpus  # noqa: E402
import corpus_templates  # noqa: E402
import corpus_turns  # noqa: E402
from corpus_stories import write_story  # noqa: E402


def normal(template: str) -> str:
    return re.sub(r"[^a-z_+-]+", " ", re.sub(r"\{.\w*\}", "_", template.lower())).strip()


def question(kind: str, **expect: object) -> dict[str, object]:
    return {"kind": kind, "expect": expect}


def test_held_out_templates_are_not_trained_on() -> None:
    trained = {normal(line) for lines in corpus_templates.TRAIN.values() for line in lines}
    held_out = {normal(line) for lines in corpus_templates.HELD_OUT.values() for line in lines}
    assert corpus_templates.TRAIN.keys() == corpus_templates.HELD_OUT.keys()
    assert not trained & held_out
    assert not set(corpus_turns.SYSTEM_TRAIN) & set(corpus_turns.SYSTEM_HELD_OUT)
    openers = {normal(opener) for opener in corpus_turns.OPENERS}
    assert not {f"{opener} {line}" for opener in openers for line in trained} & held_out


def test_the_committed_questions_come_from_the_generator() -> None:
    lines = (MODELS / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [q.as_record() for q in corpus.held_out_questions()]
    assert len(lines) == 300


def test_the_same_seed_gives_the_same_corpus() -> None:
    one, two, other = corpus.TrainingStream(4), corpus.TrainingStream(4), corpus.TrainingStream(5)
    turns = [one.turn() for _ in range(300)]
    assert turns == [two.turn() for _ in range(300)]
    assert turns != [other.turn() for _ in range(300)]


def test_training_never_asks_a_held_out_question() -> None:
    held_out = {q.prompt for q in corpus.held_out_questions()}
    stream = corpus.TrainingStream(6)
    assert not held_out & {stream.turn()[0] for _ in range(20_000)}


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("kind", corpus.KINDS)
def test_every_reference_answer_passes_its_check(kind: str, held_out: bool) -> None:
    generator = corpus.Generator(random.Random(8), held_out)
    for _ in range(300):
        asked = generator.question(kind)
        assert corpus.check(kind, asked, asked.answer), asked


@pytest.mark.parametrize("kind", corpus.KINDS)
def test_another_questions_answer_fails(kind: str) -> None:
    generator = corpus.Generator(random.Random(9))
    for _ in range(100):
        asked, other = generator.question(kind), generator.question(kind)
        if other.expect != asked.expect and (kind != "stories" or other.expect["name"] != asked.expect["name"]):
            assert not corpus.check(kind, asked, other.answer)
        assert not corpus.check(kind, asked, "")
        assert not corpus.check(kind, asked, asked.answer + " and more")


@pytest.mark.parametrize(
    "answer",
    [
        '{"name": "Anna", "age": "34"}',
        '{"name": "Anna", "age": 34.0}',
        '{"name": "Anna", "age": 34, "city": "Rome"}',
        '{"name": "Anna"}',
        '{"name": "Ben", "name": "Anna", "age": 34}',
        '{"name": "Anna", "age": 34',
        'Here it is: {"name": "Anna", "age": 34}',
        '["name", "Anna", "age", 34]',
    ],
)
def test_a_record_must_be_exact(answer: str) -> None:
    asked = question("json", json={"name": "Anna", "age": 34})
    assert corpus.check("json", asked, '{"age": 34, "name": "Anna"}')
    assert not corpus.check("json", asked, answer)


def test_a_story_must_be_well_formed() -> None:
    asked = question("stories", name="Anna", thing="kite", place="river", sentences=4)
    story = write_story(random.Random(1), "Anna", "kite", "river", 4)
    assert corpus.check("stories", asked, story)
    first, rest = story.split(". ", 1)
    wrong = {
        "unfinished": story[:-1],
        "too short": rest,
        "said twice": story + " " + story.rsplit(". ", 1)[1],
        "no name": story.replace("Anna", "she"),
        "another name": story.replace("Anna", "Ben", 1),
        "no thing": story.replace("kite", "drum"),
        "garbled": story.replace("the ", "tehh ", 1),
        "small letter": first[0].lower() + story[1:],
    }
    for what, text in wrong.items():
        assert not corpus.check("stories", asked, text), what
