"""The expected time and cost of a job: ranges that are right, and no estimate where nothing was measured."""

import math
from types import SimpleNamespace

import pytest

from llamabatch.jobs import estimate
from llamabatch.jobs.estimate import Sample, from_profile, from_sample, measure
from llamabatch.planning.profile import Profile, Stair
from tests.unit.jobs_fakes import FakeClient, rows


def sample(**given):
    values = {"prompt_tokens": (10,) * 4, "output_tokens": (10, 20, 30, 40), "slot_use": 0.5, "energy_j": 200.0}
    return Sample(4, 0, 2.0, 1.0, **{**values, **given})


def test_a_sample_gives_a_range_of_seconds_energy_and_cost():
    found = from_sample(sample(), 100, 1000, None, 36.0)
    half = 1.96 * math.sqrt(500 / 3) / 2
    assert found.output_tokens == pytest.approx((100 * (25 - half), 100 * (25 + half)))
    per_s = 140 / 2.0
    low, high = (1000 + 100 * (25 - half)) / (per_s / 0.5), (1000 + 100 * (25 + half)) / per_s
    assert found.seconds == pytest.approx((low, high))
    assert found.energy_j == pytest.approx((100 * low, 100 * high))
    assert found.cost == pytest.approx((low / 100, high / 100))
    assert [line.split(":")[0] for line in found.describe()] == ["time", "output", "energy", "cost"]
    assert found.document()["seconds"] == list(found.seconds)


def test_outputs_are_never_expected_beyond_their_limit():
    assert from_sample(sample(), 100, 1000, 2600, None).output_tokens[1] == 2600
    assert from_sample(sample(energy_j=None), 100, 1000, 2600, None).energy_j is None


def test_what_was_not_measured_is_unknown():
    failed = from_sample(sample(prompt_tokens=(), output_tokens=()), 100, 1000, None, None)
    assert failed.describe() == ["time: unknown: all 4 rows of the sample failed"]
    single = sample(prompt_tokens=(1,), output_tokens=(5,))
    assert "give --sample 2 or more" in from_sample(single, 9, 9, None, None).describe()[0]
    assert from_sample(single, 9, 9, 90, None).output_tokens == (0, 90)
    assert from_profile(None, 8, 1, 100, None).describe() == ["time: unknown: no profile; add --sample 20"]
    profile = Profile(SimpleNamespace(type_k="f16", type_v="f16"), "2026-01-01", "m", stairs=(Stair(8, 10.0),))
    assert "of one engine" in from_profile(profile, 8, 2, 100, None).describe()[0]
    assert "no limit" in from_profile(profile, 8, 1, None, None).describe()[0]
    found = from_profile(profile, 8, 1, 1600, 3600.0)
    assert (found.seconds, found.cost) == ((0.0, 2.0), (0.0, 2.0))
    assert found.describe()[0].startswith("time: up to 2.0 s, to generate 1,600 tokens at most, by the profile of 2026")


def test_rows_are_run_and_measured(monkeypatch):
    engine = FakeClient(failing={"prompt 3"})
    monkeypatch.setattr(estimate, "connect", lambda config: engine)
    found = measure("config", list(rows(10)), 7, None)
    assert (found.n_rows, found.n_failed, len(found.output_tokens)) == (10, 1, 9)
    assert set(found.output_tokens) == {3}
    assert found.run_s > 0
    assert 0 < found.slot_use <= 1
    assert engine.closed
