"""Runs the second turn of a chat after many other chats have used the slots."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamabatch import LLM, SamplingParams
from tests.model.near_ties import N_LOGPROBS, gap_of
from tests.model.small_shapes import HYBRIDS, WINDOWS

# name -> a shape, and options of its engine
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in (*HYBRIDS, *WINDOWS)},
    **{f"{name}, window cells alone": (name, {"swa_full": False}) for name in WINDOWS},
}
N_SLOTS = 2
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=N_LOGPROBS)
SIZES: dict[str, Any] = {
    "n_threads": 1, "n_threads_batch": 1, "n_batch": 512, "n_ubatch": 512, "profile": False, "trial": "off",
}  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """The result of a second turn: number of tokens of its prompt, number of computed ones, and its text; then the text
    without a cache (`wanted`), and the gap between the two (near_ties)."""

    tokens: int
    computed: int
    text: tuple[int, ...]
    wanted: tuple[int, ...]
    gap: float


def second_turn(
    path: Path, n_tokens: int, n_more: int, n_others: int, *, keeps_answer: bool = True, seed: int = 0, **options: Any
) -> Turn:
    """Runs a chat of `n_tokens`, then `n_others` chats of up to a fifth of this length in two slots, then the second
    turn.

    Args:
        n_more: number of tokens of the second question.
        keeps_answer: True: the second prompt has the model's first answer; False: as many other tokens.
    """
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(300, 1700) for _ in range(count)]

    chat, sizes = ids(n_tokens), {**SIZES, "n_ctx": -(-(n_tokens + n_more + 12) // 256) * 256, **options}
    with LLM(str(path), n_slots=N_SLOTS, strategy="batched", **sizes) as llm:
        answer = llm.generate([chat], GREEDY)[0].outputs[0].token_ids
        llm.generate([ids(rng.randint(n_tokens // 10, n_tokens // 5)) for _ in range(n_others)], GREEDY)
        prompt = [*chat, *(answer if keeps_answer else ids(len(answer))), *ids(n_more)]
        before = llm.stats().prefill_tokens
        ours = llm.generate([prompt], GREEDY)[0].outputs[0]
        computed = llm.stats().prefill_tokens - before
    with LLM(str(path), n_slots=1, strategy="sequential", cache_prefix=False, **sizes) as llm:
        wanted = llm.generate([prompt], GREEDY)[0].outputs[0]
    return Turn(len(prompt), computed, ours.token_ids, wanted.token_ids, gap_of(ours, wanted))
