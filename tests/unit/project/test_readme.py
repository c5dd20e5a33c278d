"""README.md is short, begins with a picture, and its figures are those of the committed JSON."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"
# the row of the table -> file, workload, figure
ROWS = {
    "burst: 32 x (64 + 64)": ("bench-burst-tiny", "burst", "tokens_per_s"),
    "ragged: 96 x (16..256 + 8..256)": ("bench-ragged-shared-talkers", "ragged", "tokens_per_s"),
    "shared prefix: 32 x (512 + 32 + 64)": ("bench-ragged-shared-talkers", "shared prefix", "tokens_per_s"),
    "4 prompts of 2,000 tokens among 16 talkers": (
        "bench-ragged-shared-talkers",
        "long prompt among talkers",
        "tokens_per_s",
    ),
    "the same, p95 between a talker's tokens": (
        "bench-ragged-shared-talkers",
        "long prompt among talkers",
        "p95_gap_s",
    ),
    "tiny: 256 x (16..256 + 8..256)": ("bench-burst-tiny", "tiny", "tokens_per_s"),
}
PEERS = ("ours", "llama-server", "Llama loop", "limit")


def table() -> dict[str, list[str]]:
    body = README.split("<!-- measured:begin -->")[1].split("<!-- measured:end -->")[0]
    lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in body.strip().splitlines()[2:]]
    return {cells[0]: cells[1:] for cells in lines}


def test_it_is_short_and_begins_with_a_picture():
    lines = README.splitlines()
    assert len(lines) <= 150
    assert any(line.startswith("![") for line in lines[:12])


def test_the_table_has_the_rows_of_this_test():
    assert list(table()) == list(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_figures_are_those_of_the_json(row):
    file, workload, figure = ROWS[row]
    series = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["series"]
    medians = {found["peer"]: found["median"][figure] for found in series if found["workload"] == workload}
    scale = 1000 if figure == "p95_gap_s" else 1
    for peer, cell in zip(PEERS, table()[row], strict=True):
        if not cell:
            assert medians.get(peer) is None
            continue
        shown, ratio = re.fullmatch(r"([\d.,]+)(?: ms)?(?: \(([\d.]+)(?: x)?\))?", cell).groups()
        assert float(shown.replace(",", "")) == pytest.approx(medians[peer] * scale, rel=0.006)
        if ratio:
            assert float(ratio) == pytest.approx(medians["ours"] / medians[peer], rel=0.03)


def test_the_picture_is_that_of_the_json():
    from benchmarks.compare_plot import RESULT, report

    drawn = report(json.loads(RESULT.read_text(encoding="utf-8")))
    assert [row.name for row in drawn.rows][:2] == ["baseline", "sequential"]
    for row in drawn.rows:
        assert f"{row.tokens_per_s:,.0f}" in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
