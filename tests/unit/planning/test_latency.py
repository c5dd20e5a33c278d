"""Slots for a limit on the time between two tokens."""

import pytest

from llamabatch.config import EngineConfig
from llamabatch.errors import ConfigError
from llamabatch.gguf.shape import ModelShape
from llamabatch.planning.capacity import resolve
from llamabatch.planning.machine import Machine
from llamabatch.planning.model_facts import ModelFacts
from llamabatch.planning.profile import Profile, ProfileKey, Stair
from llamabatch.tools.tune.choose import choose_rows, gap_of

STAIRS = (
    Stair(1, 10.0, 11.0),
    Stair(4, 12.0, 13.0),
    Stair(8, 14.0, 18.0),
    Stair(16, 20.0, 26.0),
    Stair(32, 60.0, 70.0),
)
KEY = ProfileKey(ModelShape("q", "", "", "", "", "", 1, "", 1, 1), "A CPU", "", 2, "1", "f16", "f16")
FACTS = ModelFacts("small", 530_000_000, 24 * 2 * 64, 24 * 2 * 64, 896, 14, 151_936, 32_768)


@pytest.mark.parametrize(
    ("limit_ms", "rows"),
    [(11.0, 1), (13.0, 4), (17.9, 4), (18.0, 8), (32.3, 8), (32.4, 16), (1000.0, 16)],
)
def test_the_most_tokens_within_the_limit(limit_ms, rows):
    """From 13 rows on, p95 includes a short prompt of 64 tokens of 0.1 ms. 32 rows make fewer tokens/s than 16."""
    assert choose_rows(STAIRS, 0.1, limit_ms).rows == rows


def test_a_gap_is_a_step_and_a_short_prompt():
    assert gap_of(Stair(8, 14.0, 18.0), 0.1).p95_ms == 18.0  # 1 step in 32 has a prompt
    assert gap_of(Stair(16, 20.0, 26.0), 0.1).p95_ms == pytest.approx(26.0 + 6.4)  # 1 step in 16 has a prompt
    assert gap_of(Stair(4, 12.0), 0.1).p95_ms == 12.0


def test_an_impossible_limit_is_refused_with_the_least():
    with pytest.raises(ConfigError, match=r"p95_inter_token_ms is 5; .* 11, with 1 row$"):
        choose_rows(STAIRS, 0.1, 5.0)


def profile(**options):
    return Profile(KEY, "2026-01-02", "m", stairs=STAIRS, **options)


def test_engines_keep_the_limit():
    config = EngineConfig("m", n_ctx=512)
    machine = Machine(8, 16 * 2**30)
    free = resolve(config, FACTS, machine, profile())
    assert free.config.n_slots == 16  # more rows bring too few tokens/s
    limited = resolve(config, FACTS, machine, profile(p95_inter_token_ms=20.0, latency_rows=4))
    assert limited.config.n_slots == 4
    assert "20 ms between two tokens at p95" in limited.reasons["n_slots"]
    assert resolve(EngineConfig("m", n_ctx=512, n_slots=9), FACTS, machine, profile()).config.n_slots == 9
    little = Machine(8, int(3.5 * 2**30))
    long = EngineConfig("m", n_ctx=32_768, flash_attn="on")
    few = resolve(long, FACTS, little, profile(p95_inter_token_ms=20.0, latency_rows=4)).config
    assert (few.kv, few.n_slots) == ("unified", 4)


def test_rows_chosen_among_all_are_not_chosen_again_among_fewer():
    """24 rows are within 3 % of the best throughput, and 16 rows within 3 % of that of 24 rows."""
    stairs = (Stair(16, 10.0), Stair(24, 14.6), Stair(32, 19.0))
    rows = choose_rows(stairs, 0.0, 1000.0).rows
    assert rows == 24
    kept = Profile(KEY, "2026-01-02", "m", stairs=stairs, p95_inter_token_ms=1000.0, latency_rows=rows)
    plan = resolve(EngineConfig("m", n_ctx=512), FACTS, Machine(8, 16 * 2**30), kept)
    assert plan.config.n_slots == 24
    assert kept.best_rows(lambda rows: rows < 24) == 16


def test_a_profile_remembers_the_limit():
    kept = profile(p95_inter_token_ms=20.0, latency_rows=4)
    assert Profile.from_json(kept.to_json()) == kept
    before = kept.to_json()
    for name in ("p95_inter_token_ms", "latency_rows"):
        del before[name]
    before["stairs"] = [{"rows": stair.rows, "step_ms": stair.step_ms} for stair in STAIRS]
    assert Profile.from_json(before).latency_rows is None
    with pytest.raises(ConfigError, match="go together"):
        profile(latency_rows=4)
