"""Second turns of chats on hybrid models and models with sliding windows, after 64 other chats."""

from __future__ import annotations

from pathlib import Path

from llamabatch.tools.synth import write_model
from tests.model.near_ties import NEAR
from tests.model.second_turns import KINDS, second_turn
from tests.model.small_shapes import HYBRIDS, WINDOWS

NEEDS = "gguf"
HOLDS = (
    "the second turn of a chat of 2,000 tokens computes less than a tenth of them, and has the text of an engine "
    "without a cache, after 64 other chats in two slots, on small forms of hybrids and sliding windows"
)
TOTAL = 10 * len(KINDS)
QUICK = 1


def case(number: int, folder: Path) -> None:
    """Runs one chat of one kind. In half of the cases, the second prompt contains another answer than the model's."""
    name, options = list(KINDS.values())[number % len(KINDS)]
    path = folder / f"{name}.gguf"
    write_model({**HYBRIDS, **WINDOWS}[name], path)
    turn = second_turn(path, 2000, 100, 64, keeps_answer=number // len(KINDS) % 2 == 0, seed=number, **options)
    assert turn.computed < 0.1 * turn.tokens, f"{turn.computed} of {turn.tokens} tokens were computed"
    assert turn.gap <= (NEAR if name in WINDOWS else 0), f"{turn.text} in place of {turn.wanted}"
