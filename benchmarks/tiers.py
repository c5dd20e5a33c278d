"""Measures how a background load lengthens the gaps between tokens of interactive requests.

    python -m benchmarks.tiers --model tiny

Rounds without and with the load take turns. The program prints the 95th percentile of the time between tokens of both,
and their ratio. The ratio should be at most 1.2. It also prints the speed of the load, and the same figures for a load
that is not marked as background.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
from dataclasses import dataclass

from llamabatch import LLM, SamplingParams
from llamabatch.engine.stats import percentile

LIMIT = 1.2


@dataclass(frozen=True)
class Round:
    """The 95th percentile of the time between tokens, and the tokens a second of the load."""

    p95_s: float
    load_tps: float


def prompts(rng: random.Random, count: int, length: int) -> list[list[int]]:
    """Returns prompts of random ids that every vocabulary has; random, so that hardly two of them begin alike."""
    return [[rng.randrange(3, 256) for _ in range(length)] for _ in range(count)]


def interactive(llm: LLM, rng: random.Random, people: int, turns: int) -> list[float]:
    """Returns the gaps between tokens of callers that ask again as soon as they have their answer."""
    gaps: list[float] = []
    params = SamplingParams(max_tokens=96, ignore_eos=True)

    def one(asked: list[list[int]]) -> None:
        for prompt in asked:
            [output] = llm.generate(prompt, params)
            gaps.extend(output.timings.inter_token_s)

    threads = [threading.Thread(target=one, args=(prompts(rng, turns, 48),)) for _ in range(people)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return gaps


class Load:
    """Lists of requests that run one after another in another thread, until the `with` block ends."""

    def __init__(self, llm: LLM, rng: random.Random, background: bool) -> None:
        self._llm = llm
        self._params = SamplingParams(max_tokens=200, ignore_eos=True, background=background)
        self._stop = threading.Event()
        self._work = [prompts(rng, 40, 150) for _ in range(50)]
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        for work in self._work:
            for _ in self._llm.stream(work, self._params):
                if self._stop.is_set():
                    return


def measure(llm: LLM, people: int, turns: int, seed: int, background: bool | None) -> Round:
    """Runs one round. With `background` None there is no load."""
    rng = random.Random(seed)
    if background is None:
        return Round(percentile(interactive(llm, rng, people, turns), 95) or 0.0, 0.0)
    with Load(llm, rng, background):
        interactive(llm, rng, people, 1)  # until the load has settled
        before = llm.stats()
        gaps = interactive(llm, rng, people, turns)
        after = llm.stats()
    own = len(gaps) + people * turns
    rows = after.decode_rows - before.decode_rows - own
    return Round(percentile(gaps, 95) or 0.0, max(0, rows) / max(sum(gaps) / people, 1e-9))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--people", type=int, default=2)
    parser.add_argument("--turns", type=int, default=4, help="requests of each in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--ctx", type=int, default=512)
    args = parser.parse_args()
    found: dict[str, list[Round]] = {"alone": [], "background": [], "same tier": []}
    with LLM(args.model, n_slots=args.slots, n_ctx=args.ctx, instances=1) as llm:
        measure(llm, args.people, 1, 0, True)  # warm-up: the context grows, threads start
        for number in range(args.rounds):
            for name, background in (("alone", None), ("background", True), ("same tier", False)):
                found[name].append(measure(llm, args.people, args.turns, number, background))
    p95 = {name: statistics.median(r.p95_s for r in rounds) for name, rounds in found.items()}
    ratios = [b.p95_s / a.p95_s for a, b in zip(found["alone"], found["background"], strict=True)]
    print(
        json.dumps(
            {
                "p95_ms": {name: round(1000 * value, 2) for name, value in p95.items()},
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios],
                "ratio_of_same_tier": round(p95["same tier"] / p95["alone"], 3),
                "load_tokens_per_s": {
                    name: round(statistics.median(r.load_tps for r in found[name]))
                    for name in ("background", "same tier")
                },
                "kept": statistics.median(ratios) <= LIMIT,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
