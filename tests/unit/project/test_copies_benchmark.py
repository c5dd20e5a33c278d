"""benchmarks/copies.py without running it: the figures of its rounds, and the two sides. Figures are invented."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("psutil")

from benchmarks import ab, copies
from benchmarks.process import PeerFailure


def rounds(*ms, mib=100):
    return [{"ms": each, "resident_mib": mib} for each in ms]


def test_first_rounds_are_apart_and_later_ones_are_compared_one_by_one():
    found = {
        "this": [rounds(100, 50, 40, mib=10), rounds(300, 50, 50, mib=30)],
        "other": [rounds(200, 100, 60, mib=20), rounds(1200, 50, 100, mib=40)],
    }
    short = copies.summary(found)
    assert short["first"] == {"ms": 200, "resident_mib": 20}
    assert short["first of the other"] == {"ms": 700, "resident_mib": 30}
    assert short["first_ratio"] == 3
    assert short["later_ratio"] == pytest.approx(1.75)  # the median of 2, 1.5, 1 and 2
    low, high = short["later_interval"]
    assert 1 <= low <= 1.75 <= high <= 2


def test_prompts_fit_their_slots():
    for workload in copies.WORKLOADS:
        assert all(s.prompt + s.generated <= workload.n_ctx for s in workload.shapes)
        assert 0 < workload.shared < workload.shapes[0].prompt


def test_a_revision_with_the_same_build_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(ab, "unpack", lambda reference: ("0123456789ab", tmp_path))
    monkeypatch.setattr(ab, "interpreter", lambda folder, log: Path(sys.executable))
    with pytest.raises(PeerFailure, match="HEAD wants the build of llama"):
        copies.sides("HEAD")
