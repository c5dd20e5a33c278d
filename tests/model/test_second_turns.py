"""The second turn of a chat computes only its own tokens, on hybrid models and models with sliding windows."""

import pytest

from llamabatch.tools.synth import write_model
from tests.model.near_ties import NEAR
from tests.model.second_turns import KINDS, second_turn
from tests.model.small_shapes import HYBRIDS, WINDOWS

pytest.importorskip("gguf")


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_turn_computes_less_than_a_tenth(kind, tmp_path):
    """Six other chats use the two slots between the turns. tests/long/second_turns.py has 2,000 tokens and 64 chats."""
    name, options = KINDS[kind]
    write_model({**HYBRIDS, **WINDOWS}[name], tmp_path / "model.gguf")
    turn = second_turn(tmp_path / "model.gguf", 500, 20, 6, **options)
    assert 20 <= turn.computed < 0.1 * turn.tokens
    assert turn.gap <= (NEAR if name in WINDOWS else 0), f"{turn.text} in place of {turn.wanted}"
