"""Rows, sweeps and the JSON document, from invented measurements."""

import json

import pytest

from llamabatch.engine.stats import EngineStats
from llamabatch.scheduler.policies import STRATEGIES
from llamabatch.tools.compare.document import SCHEMA_VERSION, document
from llamabatch.tools.compare.measure import BASELINE, Measurement
from llamabatch.tools.compare.report import Row, Spread, compared, efficiency, knee, row, sweep
from tests.unit.compare_fakes import figures, measurement, output, report


def with_outputs(*outputs, wall_s=2.0) -> Measurement:
    fake = measurement("sequential", work=[(1, 1)])
    return Measurement(outputs, wall_s, 1000, EngineStats(decode_calls=4, decode_rows=6, decode_passes=5), fake.plan)


def test_a_row_counts_what_came_out():
    first = output(0, (5, 6, 7), 0.1, (0.5, 0.6, 0.8))
    second = output(1, (5,), 0.2, (1.5,))
    made = row("sequential", [with_outputs(first, second)])
    assert (made.requests_per_s, made.tokens_per_s, made.wall_s) == (1.0, 2.0, 2.0)
    assert made.ttft == Spread(1.0, pytest.approx(1.45))
    assert made.inter_token == Spread(pytest.approx(0.15), pytest.approx(0.195))
    assert made.latency.p50 == pytest.approx(1.15)
    assert (made.rows_per_step, made.passes_per_step, made.peak_memory_bytes) == (1.5, 1.25, 1000)
    assert made.error is None


def test_failed_requests_are_named_and_do_not_count():
    made = row("sequential", [with_outputs(output(0, (5, 6), 0, (0.5, 1)), output(1, (), 0, (), error="no room"))])
    assert made.error == "1 of 2 requests failed: no room"
    assert (made.requests_per_s, made.tokens_per_s) == (0.5, 1.0)


def test_the_median_round_is_shown():
    rounds = [with_outputs(output(0, (5, 6), 0, (0.5, 1)), wall_s=wall_s) for wall_s in (1.0, 4.0, 2.0)]
    made = row("sequential", rounds)
    assert (made.wall_s, made.rounds) == (2.0, (2.0, 0.5, 1.0))
    assert row("sequential", rounds[:2]).wall_s == 4.0


def test_rows_are_compared_with_sequential_and_with_the_baseline():
    reference = row("sequential", [with_outputs(output(0, (5, 6), 0, (0.5, 1)), output(1, (5,), 0, (1,)))])
    other = row("batched", [with_outputs(output(0, (5, 6), 0, (0.5, 1)), output(1, (9,), 0, (1,)), wall_s=1.0)])
    loop = row(BASELINE, [with_outputs(output(0, (5, 6), 0, (0.5, 1)), output(1, (5,), 0, (1,)), wall_s=4.0)])
    rows = compared([loop, reference, other], [loop, reference, other])
    assert [r.equal for r in rows] == [1.0, 1.0, 0.5]
    assert [r.speed_up for r in rows] == [1.0, 2.0, 4.0]
    rows = compared([reference, other], [reference, other])
    assert [r.speed_up for r in rows] == [1.0, 2.0]
    [alone] = compared([other], [other])
    assert (alone.equal, alone.speed_up) == (None, None)
    failed = Row("sequential", error="it died")
    rows = compared([failed, other], [failed, other])
    assert [(r.equal, r.speed_up) for r in rows] == [(None, None), (None, None)]


def test_auto_tells_what_it_chose():
    assert row("auto", [measurement("auto")]).name == "auto (batched)"
    assert row("batched", [measurement("batched")]).name == "batched"


def test_differences_of_counts():
    before, after = EngineStats(decode_calls=3, prefill_tokens=10), EngineStats(decode_calls=7, prefill_tokens=30)
    assert after.since(before) == EngineStats(decode_calls=4, prefill_tokens=20)


@pytest.mark.parametrize(
    ("points", "size"),
    [
        ([], None),
        ([(4, 100.0)], 4),
        ([(1, 100.0), (2, 200.0), (4, 400.0)], 4),  # still rising at the end
        ([(1, 100.0), (2, 109.0), (4, 118.0)], 1),  # less than 10 % for each doubling
        ([(1, 100.0), (2, 180.0), (4, 300.0), (8, 310.0), (16, 305.0)], 4),
        ([(1, 100.0), (2, 100.0), (4, 101.0), (8, 300.0), (16, 310.0)], 8),  # the speed rises in stairs
        ([(1, 100.0), (8, 132.0)], 1),  # three doublings must bring 33 %
        ([(1, 100.0), (8, 134.0)], 8),
        ([(1, 100.0), (2, 300.0), (4, 100.0), (8, 250.0)], 2),  # recovery from a dip does not count
    ],
)
def test_the_knee(points, size):
    assert knee(points) == size


def test_efficiency_is_relative_to_the_smallest_size():
    rows = (figures("batched", 50, n_slots=2), Row("batched", n_slots=4, error="x"), figures("batched", 100, n_slots=8))
    assert efficiency(rows) == (1.0, None, 0.5)
    assert efficiency((Row("batched", error="x"),)) == (None,)
    swept = sweep(reversed(rows))
    assert [r.n_slots for r in swept.rows] == [2, 4, 8]
    assert swept.knee == 8


def test_the_document_is_plain_json_and_complete():
    text = json.dumps(document(report(sizes=(1, 2, 4))), allow_nan=False)
    read = json.loads(text)
    assert read["schema_version"] == SCHEMA_VERSION
    assert set(read) == {
        "schema_version", "created", "machine", "versions", "model", "workload", "others_cpu_percent", "rows", "slots",
        "advice",
    }  # fmt: skip
    assert [r["strategy"] for r in read["rows"]] == [BASELINE, *STRATEGIES]
    batched = next(r for r in read["rows"] if r["strategy"] == "batched")
    assert len(batched["requests"]) == read["workload"]["prompts"] == 64
    one = batched["requests"][3]
    assert len(one["token_times_s"]) == one["output_tokens"]
    assert one["queued_s"] <= one["ttft_s"] <= one["total_s"]
    assert batched["options"]["n_slots"] == batched["n_slots"] == 32
    assert batched["counts"]["decode_calls"] > 0
    assert "running" not in batched["counts"]
    assert [r["n_slots"] for r in read["slots"]["rows"]] == [1, 2, 4]
    assert read["slots"]["rows"][0]["efficiency"] == 1.0
    assert read["slots"]["knee"] in (1, 2, 4)
    assert read["advice"]["strategy"] in STRATEGIES


def test_a_failed_row_is_in_the_document():
    fake = report(strategies=("sequential",))
    broken = document(type(fake)(**{**vars(fake), "rows": (Row("batched", error="it died"),), "advice": None}))
    [only] = broken["rows"]
    assert (only["error"], only["tokens_per_s"], only["requests"], only["options"]) == ("it died", None, [], None)
    assert broken["advice"] is None


def test_docs_name_every_key_of_the_document():
    from pathlib import Path

    docs = (Path(__file__).parents[3] / "docs" / "compare.md").read_text(encoding="utf-8")

    def keys(value) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(keys, value[:1]))
        if not isinstance(value, dict):
            return set()
        return set(value) | set().union(*(keys(v) for k, v in value.items() if k not in ("options", "counts")))

    assert {key for key in keys(document(report(sizes=(1, 2)))) if f"`{key}`" not in docs} == set()
