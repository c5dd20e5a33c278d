"""Questions with known answers, of five kinds, and the pure checker that judges an answer.

Everything is drawn from a seeded `random.Random`, so the same seed gives the same corpus on every machine.
Training and held-out questions differ twice: their templates are separate lists (corpus_templates.py), and where the
kind allows, the content is split too: a hash reserves some pairs of numbers, word lists, records and story triples
for held-out questions, and training never draws them.

    python models/tiny/corpus.py --held-out models/tiny/heldout.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import corpus_tables as tables
import corpus_templates as templates
import corpus_turns as turns
from corpus_stories import NUMBER_WORDS, story_is_well_formed, write_story

KINDS = ("facts", "arithmetic", "words", "json", "stories")

# The ranges that a model of this size can learn, for training and held-out questions alike.
MAX_NUMBER = 30  # each operand: a sum reaches 60, a difference is never negative
COPY_WORDS = (3, 6)
REVERSE_WORDS = (3, 5)
RESERVED_SHARE = 12  # one content key in so many is never trained on

HELD_OUT_SEED = 20260
HELD_OUT_PER_KIND = 60

Message = dict[str, str]


@dataclass(frozen=True)
class Question:
    """One user message, a right answer, and what the checker needs to know to judge any other answer."""

    kind: str
    task: str
    prompt: str
    answer: str
    expect: dict[str, Any] = field(default_factory=dict)
    system: str | None = None

    @property
    def messages(self) -> list[Message]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]

    def as_record(self) -> dict[str, Any]:
        """A line of heldout.jsonl."""
        fields = asdict(self)
        del fields["prompt"], fields["system"]
        return {**fields, "messages": self.messages}


def is_reserved(key: str) -> bool:
    """Whether this content belongs to held-out questions. A checksum, so that no list of it has to be kept."""
    return zlib.crc32(key.encode()) % RESERVED_SHARE == 0


class Generator:
    """Draws questions of one split: `train` or `held_out`."""

    def __init__(self, rng: random.Random, held_out: bool = False) -> None:
        self.rng = rng
        self.held_out = held_out
        self.templates = templates.HELD_OUT if held_out else templates.TRAIN

    def question(self, kind: str) -> Question:
        make = {
            "facts": self._facts, "arithmetic": self._arithmetic, "words": self._words, "json": self._json,
            "stories": self._stories,
        }  # fmt: skip
        return make[kind]()

    # -- the five kinds ------------------------------------------------------------------------------------------

    def _facts(self) -> Question:
        task = self.rng.choices(
            ["capital.word", "capital.sentence", "country.word", "continent.word", "opposite.word", "young.word"],
            [6, 3, 3, 2, 4, 2],
        )[0]
        if task.startswith("capital"):
            x = self.rng.choice(list(tables.COUNTRIES))
            answer = tables.COUNTRIES[x][0]
            if task == "capital.sentence":
                answer = f"The capital of {x} is {answer}."
        elif task == "country.word":
            answer = self.rng.choice(list(tables.COUNTRIES))
            x = tables.COUNTRIES[answer][0]
        elif task == "continent.word":
            x = self.rng.choice(list(tables.COUNTRIES))
            answer = tables.COUNTRIES[x][1]
        elif task == "opposite.word":
            pair = self.rng.choice(tables.OPPOSITES)
            x, answer = pair if self.rng.random() < 0.5 else pair[::-1]
        else:
            x, answer = self.rng.choice(list(tables.YOUNG.items()))
        return Question("facts", task, self._template(task).format(x=x), answer, {"text": answer})

    def _arithmetic(self) -> Question:
        plus = self.rng.random() < 0.5
        a, b = self._fresh(lambda: self._operands(plus))
        result = a + b if plus else a - b
        task = ("sum" if plus else "difference") + (".word" if self.rng.random() < 0.8 else ".sentence")
        prompt = self._template(task).format(a=a, b=b, p=self.rng.choice(tables.NAMES)[0])
        answer = str(result)
        if task.endswith("sentence"):
            answer = f"{a} {'plus' if plus else 'minus'} {b} is {result}."
        return Question("arithmetic", task, prompt, answer, {"text": answer})

    def _operands(self, plus: bool) -> tuple[int, int]:
        a, b = self.rng.randint(0, MAX_NUMBER), self.rng.randint(0, MAX_NUMBER)
        return (a, b) if plus else (max(a, b), min(a, b))

    def _words(self) -> Question:
        task = self.rng.choice(["copy", "reverse"])
        low, high = COPY_WORDS if task == "copy" else REVERSE_WORDS
        length = self.rng.randint(low, high)
        words = self._fresh(lambda: tuple(self.rng.sample(tables.WORDS, length)))
        if not self.held_out and self.rng.random() < 0.3:
            # Copying digits is learnt late, and sums and records wait for it: so some lists hold numbers.
            words = tuple(str(self.rng.randint(0, 99)) if self.rng.random() < 0.6 else word for word in words)
        separator = self.rng.choice([" ", " ", ", "])
        answer = separator.join(words if task == "copy" else words[::-1])
        prompt = self._template(task).format(w=separator.join(words))
        return Question("words", task, prompt, answer, {"text": answer})

    def _json(self) -> Question:
        schema = self.rng.choice(["person", "product", "booking", "pet"])
        values = dict(self._fresh(lambda: tuple(self._record(schema).items())))
        sentence = self._template(schema).format(**values)
        task = self.rng.choice(["json.keys", "json.plain"])
        wanted = list(values)
        if task == "json.keys" and self.rng.random() < 0.4:
            wanted.remove(self.rng.choice(wanted))
        prompt = self._template(task).format(s=sentence, k=self._key_list(wanted))
        record = {key: values[key] for key in wanted}
        return Question("json", task, prompt, json.dumps(record), {"json": record})

    def _record(self, schema: str) -> dict[str, str | int]:
        rng = self.rng
        name = rng.choice(tables.NAMES)[0]
        if schema == "person":
            city = rng.choice(list(tables.COUNTRIES.values()))[0]
            return {"name": name, "age": rng.randint(5, 90), "city": city}
        if schema == "product":
            item, colour = rng.choice(tables.PRODUCTS), rng.choice(tables.COLOURS)
            return {"item": item, "colour": colour, "price": rng.randint(2, 99)}
        if schema == "booking":
            return {"name": name, "day": rng.choice(tables.DAYS), "guests": rng.randint(2, 20)}
        return {"name": name, "animal": rng.choice(tables.PETS), "age": rng.randint(2, 20)}

    def _key_list(self, keys: list[str]) -> str:
        if self.rng.random() < 0.4:
            keys = [f'"{key}"' for key in keys]
        return " and ".join([", ".join(keys[:-1]), keys[-1]])

    def _stories(self) -> Question:
        def triple() -> tuple[str, str, str]:
            name = self.rng.choice(tables.NAMES)[0]
            return name, self.rng.choice(tables.STORY_THINGS), self.rng.choice(tables.STORY_PLACES)

        name, thing, place = self._fresh(triple)
        counted = self.rng.random() < 0.5
        sentences = self.rng.choice(list(NUMBER_WORDS) if counted else [4, 5])
        count = self.rng.choice([str(sentences), NUMBER_WORDS[sentences]])
        task = "story.count" if counted else "story"
        prompt = self._template(task).format(n=name, t=thing, p=place, c=count)
        expect = {"name": name, "thing": thing, "place": place, "sentences": sentences if counted else None}
        return Question("stories", task, prompt, write_story(self.rng, name, thing, place, sentences), expect)

    # -- helpers -------------------------------------------------------------------------------------------------

    def _template(self, task: str) -> str:
        return self.rng.choice(self.templates[task])

    def _fresh(self, draw: Any) -> Any:
        """Draw until the content belongs to this split."""
        while True:
            content = draw()
            if is_reserved(repr(content)) == self.held_out:
                return content


# Shares of training questions. Arithmetic and words are the hard ones.
TRAIN_SHARES = {"facts": 19, "arithmetic": 38, "words": 26, "json": 12, "stories": 7}


class TrainingStream:
    """An endless, seeded stream of training conversations: question and answer turns, some after a system message."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.generator = Generator(self.rng)

    def turn(self) -> tuple[str, str]:
        """One user message and its answer."""
        rng = self.rng
        if rng.random() < 0.015:
            asked, answer = rng.choice(turns.SMALL_TALK)
            return rng.choice(asked), answer
        kind = rng.choices(list(TRAIN_SHARES), list(TRAIN_SHARES.values()))[0]
        question = self.generator.question(kind)
        if kind != "stories" and rng.random() < 0.06:
            return self._with_shots(question), question.answer
        return self._vary(question.prompt), question.answer

    def system(self) -> str | None:
        """The system message to begin a conversation with, if any."""
        return self.rng.choice(turns.SYSTEM_TRAIN) if self.rng.random() < 0.25 else None

    def _vary(self, prompt: str) -> str:
        """An opener, a lower-case start or a missing last mark: people type all of these."""
        rng = self.rng
        if rng.random() < 0.1 and prompt[1:2].islower():
            prompt = prompt[0].lower() + prompt[1:]
        if rng.random() < 0.05 and prompt[-1] in "?.":
            prompt = prompt[:-1]
        return rng.choice(turns.OPENERS) + prompt if rng.random() < 0.15 else prompt

    def _with_shots(self, question: Question) -> str:
        shots = [self.generator.question(question.kind) for _ in range(self.rng.randint(1, 5))]
        return with_shots(self.rng.choice(turns.SHOTS_TRAIN), shots, question)


def with_shots(style: tuple[str, str, str], shots: list[Question], question: Question) -> str:
    """One message that shows worked examples and then asks."""
    lead, example, ask = style
    return lead + "".join(example.format(q=s.prompt, a=s.answer) for s in shots) + ask.format(q=question.prompt)


def held_out_questions(seed: int = HELD_OUT_SEED, per_kind: int = HELD_OUT_PER_KIND) -> list[Question]:
    """The questions that the model is judged on: unseen templates, reserved content, no prompt twice."""
    rng = random.Random(seed)
    generator = Generator(rng, held_out=True)
    found: dict[str, Question] = {}
    for kind in KINDS:
        goal = len(found) + per_kind
        while len(found) < goal:
            question = generator.question(kind)
            found.setdefault(question.prompt, question)
    return list(found.values())


def check(kind: str, question: Question | dict[str, Any], answer: str) -> bool:
    """Whether the answer is right: the very text, the very record, or a well-formed story about what was given."""
    expect = question.expect if isinstance(question, Question) else question["expect"]
    answer = answer.strip()
    if kind == "json":
        return _same_json(answer, expect["json"])
    if kind == "stories":
        return story_is_well_formed(answer, expect["name"], expect["thing"], expect["place"], expect["sentences"])
    return answer == expect["text"]


def _same_json(answer: str, record: dict[str, Any]) -> bool:
    """The whole answer parses, once, to the same keys, values and types."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a key twice")
        return dict(pairs)

    try:
        found = json.loads(answer, object_pairs_hook=unique)
    except ValueError:
        return False
    if not isinstance(found, dict) or found != record:
        return False
    return all(type(found[key]) is type(value) for key, value in record.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held-out", type=Path, help="write the held-out questions here, one JSON object a line")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N training turns")
    args = parser.parse_args()
    if args.held_out:
        lines = [json.dumps(question.as_record()) for question in held_out_questions()]
        args.held_out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    stream = TrainingStream(seed=1)
    for _ in range(args.show):
        prompt, answer = stream.turn()
        print(f"{prompt!r}\n    {answer!r}")


if __name__ == "__main__":
    main()
