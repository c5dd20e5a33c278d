"""Asks the model the held-out questions, greedily, and prints how many it answers right in each kind.

python models/tiny/evaluate.py             # through llamabatch's LLM.chat
python models/tiny/evaluate.py --peer      # through llama_cpp.Llama, one question after another
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from corpus import KINDS, check

HERE = Path(__file__).parent
DEFAULT_MODEL = HERE.parents[1] / "llamabatch" / "bundled" / "tiny.gguf"
MAX_TOKENS = 256
KIND_BAR, OVERALL_BAR = 0.80, 0.90

Chat = list[dict[str, str]]
Answers = list[tuple[str, str]]  # text, finish reason


def ask_llamabatch(model: Path, chats: list[Chat]) -> Answers:
    from llamabatch import LLM, SamplingParams

    with LLM(str(model)) as llm:
        results = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
    return [(result.outputs[0].text, str(result.outputs[0].finish_reason)) for result in results]


def ask_llama_cpp(model: Path, chats: list[Chat]) -> Answers:
    import llama_cpp

    llama = llama_cpp.Llama(str(model), n_ctx=1024, verbose=False)
    answers = []
    for chat in chats:
        llama.reset()
        choice: Any = llama.create_chat_completion(chat, temperature=0.0, max_tokens=MAX_TOKENS)["choices"][0]
        answers.append((choice["message"]["content"], choice["finish_reason"]))
    return answers


def report(questions: list[dict[str, Any]], answers: Answers, show_wrong: bool) -> bool:
    """Prints the table; returns whether the bars are met."""
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for question, (text, _) in zip(questions, answers, strict=True):
        kind = question["kind"]
        good = check(kind, question, text)
        asked[kind] += 1
        right[kind] += good
        if show_wrong and not good:
            print(f"wrong: {question['messages'][-1]['content']!r}\n  said {text!r}\n  want {question['answer']!r}")
    for kind in KINDS:
        print(f"{kind:<11} {right[kind]:>3} of {asked[kind]:>3}  {right[kind] / asked[kind]:6.1%}")
    overall = right.total() / asked.total()
    print(f"{'over all':<11} {right.total():>3} of {asked.total():>3}  {overall:6.1%}")
    stopped = sum("stop" in reason.lower() for _, reason in answers)
    words = sorted(len(text.split()) for text, _ in answers)
    print(f"stopped by itself: {stopped} of {len(answers)}")
    print(f"answer length in words: {words[0]} to {words[-1]}, median {words[len(words) // 2]}")
    return overall >= OVERALL_BAR and all(right[kind] >= KIND_BAR * asked[kind] for kind in KINDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--questions", type=Path, default=HERE / "heldout.jsonl")
    parser.add_argument("--peer", action="store_true", help="ask llama_cpp.Llama instead of llamabatch")
    parser.add_argument("--wrong", action="store_true", help="show each wrong answer")
    args = parser.parse_args()
    questions = [json.loads(line) for line in args.questions.read_text(encoding="utf-8").splitlines()]
    ask: Callable[[Path, list[Chat]], Answers] = ask_llama_cpp if args.peer else ask_llamabatch
    started = time.monotonic()
    answers = ask(args.model, [question["messages"] for question in questions])
    print(f"{len(questions)} questions in {time.monotonic() - started:.1f} s")
    if not report(questions, answers, args.wrong):
        raise SystemExit(f"below the bar: {KIND_BAR:.0%} in each kind and {OVERALL_BAR:.0%} over all")


if __name__ == "__main__":
    main()
