"""The counts, the summary, the display and the picture of a job."""

import io
import json
import math
import random
import sys
from dataclasses import replace

import pytest

from llamabatch.jobs.progress import JobSnapshot, StderrProgress, _fitting
from llamabatch.jobs.stats import Counts, Timeline
from llamabatch.jobs.summary import Summary
from llamabatch.request.request import Request
from llamabatch.utils.console import write_plot
from llamabatch.utils.format import duration
from llamabatch.utils.histogram import Quantiles
from tests.unit.jobs_fakes import finished


def counted(ok=3, failed=2, done_before=0, failed_before=0):
    counts = Counts(done_before=done_before, failed_before=failed_before)
    for n in range(ok):
        output = finished(Request(str(n), (1, 2, 3, 4)), tokens=5).finished
        counts.add("completion", f"line {n}", output)
    for n in range(failed):
        counts.add("chat", f"line {n}", finished(Request(str(n), (1,)), error="too long").finished)
    return counts


def summary(counts=None, **given):
    clock = iter([0.0, 1.0, 2.0, 4.0])
    timeline = Timeline(8, clock=lambda: next(clock))
    timeline.add(1, 5, 8)
    timeline.add(2, 10, 8)
    timeline.add(3, 15, 2)
    options = {"price_per_hour": 0.9} | given
    return Summary("out.jsonl", counts or counted(), timeline, 1.5, 4.0, "tiny", "batched", 8, 2, **options)


@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e4])
def test_percentiles_are_within_a_percent(scale):
    rng = random.Random(1)
    values = [scale * rng.lognormvariate(0, 1.5) for _ in range(5000)]
    figures = Quantiles()
    figures.add_all(values)
    for percent in (1, 50, 95, 99, 100):
        true = sorted(values)[max(1, math.ceil(percent / 100 * 5000)) - 1]
        assert figures.at(percent) == pytest.approx(true, rel=0.0101)
    assert (figures.n, figures.mean) == (5000, pytest.approx(sum(values) / 5000))
    assert sum(n for _, n in figures.classes()) == 5000


def test_percentiles_of_nothing_of_zero_and_of_ever_more_take_no_memory():
    figures = Quantiles()
    assert figures.at(50) is None
    assert figures.mean is None
    figures.add(0.0)
    figures.add(-1.0)
    assert figures.at(99) == 0.0
    for i in range(100_000):
        figures.add(i * 0.001)
    assert len(figures.classes()) < 1000


def test_percentiles_of_few_figures_are_figures():
    times, lengths = Quantiles(), Quantiles()
    times.add_all((0.616, 5.2))
    assert [times.at(p) for p in (50, 95, 99)] == pytest.approx([0.616, 5.2, 5.2], rel=0.0101)
    lengths.add_all((1, 8, 37, 1000))
    assert [lengths.at(p) for p in (0, 25, 50, 75)] == [1, 1, 8, 37]
    lengths.include(times)
    assert lengths.at(1) == pytest.approx(0.616, rel=0.0101)


def test_counts_of_rows_and_tokens():
    counts = counted()
    assert (counts.ok, counts.failed, counts.rows) == (3, 2, 5)
    assert (counts.prompt_tokens, counts.generated_tokens) == (12, 15)
    assert dict(counts.reasons) == {"stop": 3}
    assert counts.errors == ["line 0: too long", "line 1: too long"]
    assert counts.inter_token_s.n == 3 * 4


@pytest.mark.parametrize(
    ("counts", "signum", "code"),
    [
        (counted(failed=0), None, 0),
        (counted(), None, 1),
        (counted(ok=0, failed=0, done_before=5, failed_before=1), None, 1),
        (counted(), 2, 130),
        (counted(), 15, 143),
    ],
)
def test_exit_codes(counts, signum, code):
    assert summary(counts, signum=signum).exit_code == code


def test_a_summary_has_the_cost():
    report = summary(energy_j=50.0, restarts=2)
    assert report.cost.total == pytest.approx(0.9 * 4 / 3600)
    assert report.cost.per_million_generated == pytest.approx(0.001 / 15 * 1e6)
    assert report.cost.per_million == pytest.approx(0.001 / 27 * 1e6)
    assert report.tokens_per_joule == pytest.approx(15 / 50)
    text = report.describe()
    for part in (
        "3 ok, 2 failed; 4.0 s, and 1.5 s to load",
        "3.75 generated tokens/s, 3.00 prompt tokens/s, 1.25 rows/s",
        "15 generated, 12 of prompts; ended by 3 stop",
        "batched, 8 slots, 62% of them in use, 2 engines, 2 restarts",
        "50.0 J, 0.300 tokens/J",
        "66.7 a million generated tokens",
        "error:       line 0: too long",
    ):
        assert part in text, text
    assert summary(price_per_hour=None).cost is None


def test_a_summary_of_nothing():
    report = summary(Counts())
    assert "0 ok, 0 failed" in report.describe()
    assert report.cost.per_million is None
    assert json.loads(json.dumps(report.document(), allow_nan=False))["rows"]["ok"] == 0


def test_a_summary_shows_few_of_many_errors():
    text = summary(counted(failed=100)).describe()
    assert text.count("\nerror:") == 6
    assert "and 95 more" in text


def test_json_is_plain():
    document = json.loads(json.dumps(summary().document(), allow_nan=False))
    assert document["rows"] == {
        "ok": 3, "failed": 2, "done_before": 0, "failed_before": 0, "by_task": {"completion": 3, "chat": 2},
    }  # fmt: skip
    assert document["slot_use"] == pytest.approx((8 + 8 + 2 * 2) / (4 * 8))
    assert document["cost"]["per_million_generated_tokens"] == pytest.approx(66.67, rel=1e-3)


def test_a_timeline_stays_small_and_keeps_its_span():
    now = [0.0]
    line = Timeline(4, every_s=1.0, clock=lambda: now[0])
    for i in range(50_000):
        now[0] += 1.0
        line.add(i, 10 * i, 4)
    assert 400 < len(line.points) <= 1025
    assert line.points[0].at_s < 100
    assert line.points[-1].at_s > 49_900
    gaps = {b.at_s - a.at_s for a, b in zip(line.points, line.points[1:], strict=False)}
    assert max(gaps) <= 4 * min(gaps)
    assert line.tokens_per_s == pytest.approx(10)
    assert line.slot_use == pytest.approx(1.0)
    assert line.seconds_for(100) == pytest.approx(100, rel=0.01)


def test_a_jump_of_the_clock_is_only_a_long_gap():
    now = [0.0]
    line = Timeline(4, clock=lambda: now[0])
    line.add(1, 10, 4)
    now[0] = 8 * 3600.0
    line.add(2, 20, 4)
    assert line.tokens_per_s < 1
    assert line.seconds_for(1) > 0


SNAPSHOT = JobSnapshot(1234, 10_000, 3, 1830.4, 28, 32, 250.0)


def test_lines_come_first_after_a_few_seconds_and_then_every_half_minute(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    now, asked = [0.0], []
    with StderrProgress(lambda: now[0]) as progress:
        for second in range(70):
            now[0] = second
            progress.show(lambda: asked.append(1) or SNAPSHOT)
    lines = sys.stderr.getvalue().splitlines()
    assert len(lines) == len(asked) == 3  # at 5, 35 and 65 s
    assert lines[0] == "1,234 of 10,000 rows (12%), 1,830 tokens/s, 3 errors, 28 of 32 slots, 4 min 10 s left"


@pytest.mark.parametrize(
    ("room", "text", "bar"),
    [
        (100, "28/32 slots · 1,830 tokens/s · 3 errors · 4 min 10 s left", 24),
        (62, "28/32 slots · 1,830 tokens/s · 3 errors · 4 min 10 s left", 3),
        (40, "3 errors · 4 min 10 s left", 12),
        (5, "4 min 10 s left", 1),
    ],
)
def test_the_bar_shrinks_before_the_text(room, text, bar):
    assert _fitting(SNAPSHOT, room) == (text, bar)


def test_an_estimated_total_is_marked():
    assert "1,234 of ~10,000 rows (12%)" in str(replace(SNAPSHOT, estimated=True))


def test_a_line_where_the_total_is_not_known():
    assert str(JobSnapshot(7, None, 1, 0.0, 1, 8, None)) == "7 rows, 0 tokens/s, 1 error, 1 of 8 slots"
    assert str(JobSnapshot(1, None, 0, 0.0, 1, 1, None)) == "1 row, 0 tokens/s, 0 errors, 1 of 1 slot"
    assert JobSnapshot(1, 1, 0, 0.0, 1, 1, None).rows_text("/") == "1/1 row"


def test_a_terminal_that_is_gone_does_not_end_the_job(monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Gone())
    with StderrProgress(lambda: 0.0) as progress:
        progress.say("anything")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.21, "3.2 s"),
        (59.96, "60.0 s"),
        (60, "1 min 0 s"),
        (250.4, "4 min 10 s"),
        (7500, "2 h 5 min"),
        (273_600, "3 d 4 h"),
    ],
)
def test_durations(value, text):
    assert duration(value) == text


@pytest.mark.parametrize("counts", [counted(), counted(ok=0, failed=3), Counts()])
def test_a_report_is_drawn_of_any_summary(counts, tmp_path):
    pytest.importorskip("matplotlib")
    from llamabatch.jobs.plot import figure

    report = summary(counts)
    write_plot("llamabatch.jobs.plot", report, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    titles = {ax.get_title() for ax in figure(report).axes}
    assert {"How rows ended", "Length in tokens", "8 slots, 62% of them in use"} <= titles


def test_the_picture_shows_tokens_a_second_of_each_span():
    pytest.importorskip("matplotlib")
    from llamabatch.jobs.plot import rates

    at, speeds = rates(summary().timeline.points)
    assert at == [1.0, 2.0, 4.0]
    assert speeds == [5.0, 5.0, 2.5]


def test_counts_of_two_runs_add_up():
    def counted_of(numbers):
        counts = Counts()
        for n in numbers:
            counts.ok += 1
            counts.prompt_tokens += n
            counts.reasons["stop" if n % 2 else "length"] += 1
            counts.total_s.add(n / 10)
        for n in numbers[:4]:
            counts.add_error(f"row {n}: no")
        return counts

    whole, one, other = counted_of(range(1, 101)), counted_of(range(1, 41)), counted_of(range(41, 101))
    one.include(other)
    assert (one.ok, one.failed, one.prompt_tokens, one.reasons) == (100, 8, whole.prompt_tokens, whole.reasons)
    assert one.total_s.classes() == whole.total_s.classes()
    assert (one.total_s.n, one.total_s.mean) == (100, pytest.approx(whole.total_s.mean))
    assert one.errors == [f"row {n}: no" for n in (1, 2, 3, 4, 41)]
    assert other.ok == 60
