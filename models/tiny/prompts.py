"""Chooses the 64 bundled prompts of `llamabatch compare`: mixed kinds and lengths, all answered right by the model.

    python models/tiny/prompts.py            # through llamabatch; --peer as in evaluate.py

Worded like the held-out questions, but drawn with another seed. Answers run from one word to a paragraph; every other
question without worked examples asks for a story, since what people wait for is mostly generated text.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from corpus import KINDS, Generator, Message, Question, check, with_shots
from corpus_turns import SHOTS_HELD_OUT, SYSTEM_HELD_OUT
from evaluate import DEFAULT_MODEL, ask_llama_cpp, ask_llamabatch

OUT = DEFAULT_MODEL.with_name("tiny_prompts.jsonl")
SEED = 640
# shape -> how many of the 64; a shape is (worked examples, turns before, system message)
SHAPES: list[tuple[int, tuple[range, range, bool]]] = [
    (30, (range(1), range(1), False)),
    (14, (range(1), range(1), True)),
    (6, (range(2, 5), range(1), False)),
    (4, (range(5, 10), range(1), False)),
    (10, (range(1), range(1, 5), True)),
]
CANDIDATES = 3  # times as many as are needed are asked


def draw(rng: random.Random, shape: tuple[range, range, bool], kind: str) -> tuple[Question, list[Message]]:
    """A question of this kind with its surroundings, and the whole chat."""
    examples, earlier, system = shape
    generator = Generator(rng, held_out=True)
    question = generator.question(kind)
    prompt = question.prompt
    shots = rng.choice(examples)
    if shots:
        prompt = with_shots(rng.choice(SHOTS_HELD_OUT), [generator.question(kind) for _ in range(shots)], question)
    messages = [{"role": "system", "content": rng.choice(SYSTEM_HELD_OUT)}] if system else []
    for _ in range(rng.choice(earlier)):
        before = generator.question(rng.choice(KINDS))
        messages += [{"role": "user", "content": before.prompt}, {"role": "assistant", "content": before.answer}]
    return question, [*messages, {"role": "user", "content": prompt}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--peer", action="store_true", help="ask llama_cpp.Llama instead of llamabatch")
    args = parser.parse_args()
    rng = random.Random(SEED)
    ask = ask_llama_cpp if args.peer else ask_llamabatch
    chosen: list[list[Message]] = []
    for count, shape in SHAPES:
        kinds = [kind for kind in KINDS if kind != "stories"]
        if shape[0] == range(1):  # worked examples for a story would be longer than all else together
            kinds = [kind for other in kinds for kind in ("stories", other)]
        drawn = [draw(rng, shape, kinds[i % len(kinds)]) for i in range(count * CANDIDATES)]
        answers = ask(args.model, [messages for _, messages in drawn])
        right = [
            messages
            for (question, messages), (text, reason) in zip(drawn, answers, strict=True)
            if check(question.kind, question, text) and "stop" in reason.lower()
        ]
        print(f"{len(right)} of {len(drawn)} right, {count} needed")
        if len(right) < count:
            raise SystemExit("too few right answers")
        chosen += right[:count]
    rng.shuffle(chosen)
    lines = [json.dumps({"messages": messages}) for messages in chosen]
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{args.out.name}: {len(lines)} prompts")


if __name__ == "__main__":
    main()
