"""benchmarks/talkers.py without running it: figures of a round, curves, verdict and picture, from invented figures."""

import json
import math

import pytest

pytest.importorskip("psutil")

from benchmarks import report, rounds, talkers, talkers_curve
from benchmarks.peers.base import Result
from benchmarks.talkers_curve import FIGURES, Point
from benchmarks.workloads import Shape, Workload

SMALL = Workload(
    "small", "tiny", (*[Shape(4, 100, endless=True)] * 2, *[Shape(40, 2, 1.0, talker=False)] * 2), 256, streamed=True
)


def result(*talking, first=(3.0, 4.0)):
    times = [*talking, *([each, each + 0.5] for each in first)]
    return Result(5.0, [], times_s=times, began_s=[0.0, 0.0, 1.0, 1.0])


def point(server, value, first_s, gap_s):
    return Point(server, value, first_s, first_s, dict.fromkeys(FIGURES, gap_s))


def test_the_workload_is_that_of_the_documentation():
    shapes = talkers.WORKLOAD.shapes
    assert len({s.arrival_s for s in shapes if not s.endless}) == 1
    for workload in (talkers.WORKLOAD, talkers.QUICK):
        assert workload.streamed
        assert all(s.prompt + s.generated <= workload.n_ctx for s in workload.shapes)


def test_gaps_count_from_the_arrival_of_the_prompts_to_the_last_of_their_first_tokens():
    before, across, within, after = [0.1, 0.4], [0.4, 1.3], [1.3, 2.0], [3.9, 4.4, 4.9]
    one = [*before, across[1], *within[1:], *after]
    found = talkers.figures(result(one, [0.5, 4.5]), SMALL)
    assert found["first_tokens_s"] == [2.0, 3.0]
    assert (found["first_s"], found["last_s"]) == (2.5, 3.0)
    assert sorted(talkers.gaps_meanwhile(result(one, [0.5, 4.5]), SMALL)) == pytest.approx([0.5, 0.7, 0.9, 1.9, 4.0])
    assert found["gaps"] == 5
    assert [found[name] for name in FIGURES] == pytest.approx([0.9, 4.0, 4.0, 4.0])


def test_a_round_in_which_a_talker_was_silent_is_a_failure():
    ended = [0.01 * i for i in range(100)]
    assert "1 talkers" in talkers.figures(result([0.5, 4.5], ended), SMALL)["failure"]


def test_a_curve_has_medians_and_leaves_failures_out():
    chosen = talkers.settings((0.5, 1.0), (64,))
    good = {"first_s": 2.0, "last_s": 3.0, **dict.fromkeys(FIGURES, 0.1)}
    names = [each.peer.name for each in chosen]
    assert names == ["ours, prefill_share=0.5", "ours, prefill_share=1", "llama-server, stock, -b 64 -ub 64"]
    assert chosen[2].peer.stock
    assert chosen[2].peer.flags == ("-b", "64", "-ub", "64")
    assert chosen[0].peer.options == {"prefill_share": 0.5}
    found = {names[0]: [good, {**good, "first_s": 9.0}, {**good, "first_s": 4.0}], names[1]: [good, {"failure": "x"}]}
    assert [(p.value, p.first_s) for p in talkers.points(found, chosen)] == [(0.5, 4.0)]


def test_between_settings_a_curve_is_interpolated_by_logarithms():
    curve = [point("ours", 1.0, 1.0, 1.6), point("ours", 0.5, 4.0, 0.1)]
    assert talkers_curve.gap_within(0.9, curve, "p99_gap_s") == math.inf
    assert talkers_curve.gap_within(1.0, curve, "p99_gap_s") == 1.6
    assert talkers_curve.gap_within(2.0, curve, "p99_gap_s") == pytest.approx(0.4)
    assert talkers_curve.gap_within(9.0, curve, "p99_gap_s") == 0.1


def test_the_verdict_names_the_settings_of_which_it_does_not_hold():
    ours = [point(report.OURS, 1.0, 1.0, 1.6), point(report.OURS, 0.5, 4.0, 0.1)]
    beaten, early, smooth = (
        point(report.STOCK, 512, 2.0, 0.5), point(report.STOCK, 2048, 0.5, 9.0), point(report.STOCK, 64, 3.9, 0.05),
    )  # fmt: skip
    for rows, not_beaten, ours_beaten, gap in (
        ([beaten], [], [], "p99_gap_s"),
        ([beaten, early], [2048], [], "max_gap_s"),
        ([smooth], [64], [0.5], "p99_gap_s"),
    ):
        found = talkers_curve.verdict([*ours, *rows])[gap]
        met = not not_beaten and not ours_beaten
        assert found == {"stock_not_beaten": not_beaten, "ours_beaten": ours_beaten, "met": met}
    assert not talkers_curve.verdict(ours)["p99_gap_s"]["met"]  # no other program was measured


def test_the_document_the_lines_and_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import talkers_plot

    chosen = talkers.settings((0.5,), (64, 512))
    measured = result([0.5, 2.0, 4.5], [0.5, 2.5, 4.5])
    slower = result([0.5, 2.0, 9.0], [0.5, 2.5, 9.0], first=(6.0, 8.0))
    series = [
        rounds.Series(chosen[0].peer.name, SMALL.name, [measured]),
        rounds.Series(chosen[1].peer.name, SMALL.name, [slower]),
        rounds.Series(chosen[2].peer.name, SMALL.name, failure="it ended with SIGILL"),
    ]
    about = {"machine": {"cpu": "A CPU", "cores": 2}}
    made = talkers.document(about, {"rounds": 1}, series, chosen, SMALL)
    path = tmp_path / "talkers.json"
    path.write_text(json.dumps(made, allow_nan=False))
    points, machine = talkers_curve.read(path)
    assert [(p.server, p.value, p.first_s) for p in points] == [("ours", 0.5, 2.5), (report.STOCK, 64, 6.0)]
    assert machine == "A CPU, 2 cores"
    text = "\n".join(talkers.lines(made))
    assert "failed: it ended with SIGILL" in text
    assert "p99 gap: met" in text
    assert len(talkers_plot.figure(points, machine).axes) == 2
    talkers_plot.draw(points, machine, tmp_path / "talkers.svg")
    assert "llama-server, stock" in (tmp_path / "talkers.svg").read_text()
