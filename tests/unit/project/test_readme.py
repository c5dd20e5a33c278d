"""README.md is short, begins with a picture, and its figures are those of the committed JSON."""

import json
from functools import partial
from pathlib import Path

import click
import pytest

pytest.importorskip("psutil")

from benchmarks import report, tables

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short_and_begins_with_a_picture():
    lines = README.splitlines()
    assert len(lines) <= 150
    assert any(line.startswith("![") for line in lines[:12])


def test_the_tables_are_those_of_the_json():
    """`python -m benchmarks.tables` writes the figures into the tables."""
    for path, text in tables.pages().items():
        assert path.read_text(encoding="utf-8") == text, path


def write(folder, name, series, machine=("A CPU", 2), **options):
    said = {"quick": False, "cut": False, "rounds": 3, **options}
    rows = [
        {
            "workload": workload, "peer": peer, "median": {"tokens_per_s": speed, "p95_gap_s": gap},
            "facts": {"options": {"prefill_share": 0.5}}, "rounds": [{}] * said["rounds"],
        }
        for workload, peer, speed, gap in series
    ]  # fmt: skip
    document = {"options": said, "machine": dict(zip(("cpu", "cores"), machine, strict=True)), "series": rows}
    (folder / f"{name}.json").write_text(json.dumps(document))


MEASURED = (
    ("burst", report.OURS, 300.0, None),
    ("burst", report.STOCK, 100.0, None),
    ("burst", report.STOCK_BEST, 120.0, None),
    ("burst", report.PATCHED, 280.0, None),
    ("burst", report.LIMIT, 310.0, None),
    ("long prompt among talkers", report.OURS, 90.0, 0.07),
    ("long prompt among talkers", report.STOCK, None, None),
)


def test_a_run_fills_the_table_of_readme_with_the_stock_server(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "read", partial(tables.read, folder=tmp_path))
    write(tmp_path, "bench", MEASURED)
    peers = tables.PAGES["README.md"]
    page = "Before\n<!-- measured:begin older -->\nolder\n<!-- measured:end -->\nAfter\n"
    filled = tables.fill(page, peers, "results", ["bench"])
    lines = filled.splitlines()
    assert lines[:2] == ["Before", "<!-- measured:begin bench -->"]
    assert lines[-2:] == ["<!-- measured:end -->", "After"]
    assert [line for line in lines if line.startswith("|")] == [
        "| workload | llamabatch | llama-server, stock | llama-server, stock, best flags | limit |",
        "|---|---|---|---|---|",
        "| burst: 32 x (64 + 64) | 300 | 100 (3.0 x) | 120 (2.50 x) | 310 (0.97) |",
        "| 4 prompts of 2,000 tokens among 16 talkers | 90.0 | | | |",
        "| the same, p95 between a talker's tokens | 70 ms | | | |",
    ]
    text = " ".join(lines)
    assert "Medians of 3 rounds on 2 cores of A CPU" in text
    assert "[1](results/bench.json)" in text
    assert "without our patches" in text
    assert "not measured" not in text
    assert "before long prompts" not in text
    assert tables.fill(filled, peers, "results") == filled
    write(tmp_path, "bench", [row for row in MEASURED if row[1] not in (report.STOCK, report.STOCK_BEST)])
    without = tables.fill(filled, peers, "results")
    assert "| workload | llamabatch | llama-server, patched | limit |" in without
    assert "stock llama-server was not measured" in " ".join(without.split())


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (["none"], "none.json does not exist"),
        (["cut"], "of a run with --cut"),
        (["whole", "other"], "more than one machine: 2 cores of A CPU; 4 cores of A CPU"),
        (["unknown"], "workload 'chess'"),
        (["kernels"], "no file of python -m benchmarks.bench"),
    ],
)
def test_files_that_are_no_whole_run_of_one_machine_are_refused(names, complaint, tmp_path):
    write(tmp_path, "whole", MEASURED)
    write(tmp_path, "cut", MEASURED, cut=True)
    write(tmp_path, "other", MEASURED, machine=("A CPU", 4))
    write(tmp_path, "unknown", [("chess", report.OURS, 1.0, None)])
    (tmp_path / "kernels.json").write_text("{}")
    with pytest.raises(click.ClickException, match=complaint):
        tables.read(names, tmp_path)


def test_a_page_without_the_lines_is_refused():
    with pytest.raises(click.ClickException, match="no pair of lines"):
        tables.fill("# A page", tables.PAGES["README.md"], "results", ["bench-stock"])


def test_each_table_has_its_own_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "read", partial(tables.read, folder=tmp_path))
    write(tmp_path, "bench", MEASURED)
    write(tmp_path, "peers", [("burst", report.OURS, 400.0, None)])
    page = "".join(f"<!-- measured:begin {name} -->\n<!-- measured:end -->\n" for name in ("bench", "peers"))
    peers = tables.PAGES["README.md"]
    filled = tables.fill(page, peers, "results", ["peers"])
    assert "| burst: 32 x (64 + 64) | 300 |" in filled
    assert "| burst: 32 x (64 + 64) | 400 |" in filled
    with pytest.raises(click.ClickException, match="not exactly one table"):
        tables.fill(page, peers, "results", ["third"])


@pytest.mark.parametrize(("defaults", "best"), [(200.0, 160.0), (160.0, 200.0)])
def test_best_settings_are_never_below_the_defaults(defaults, best, tmp_path):
    rows = (report.OURS, 400.0), (report.OPENVINO, defaults), (report.OPENVINO_BEST, best)
    write(tmp_path, "peers", [("burst", peer, speed, None) for peer, speed in rows])
    text = tables.block(tables.read(["peers"], tmp_path), tables.PAGES["README.md"], "results")
    assert "| burst: 32 x (64 + 64) | 400 | 200 (2.00 x) |" in text


def test_a_workload_whose_run_was_stopped_is_left_out(tmp_path):
    write(tmp_path, "bench", MEASURED)
    document = json.loads((tmp_path / "bench.json").read_text())
    del document["series"][-1]["rounds"][0]
    (tmp_path / "bench.json").write_text(json.dumps(document))
    assert {workload for workload, _ in tables.read(["bench"], tmp_path).medians} == {"burst"}
    last = document["series"][-1]
    last["failure"] = "it crashed in its second round"
    (tmp_path / "bench.json").write_text(json.dumps(document))
    found = tables.read(["bench"], tmp_path).medians.keys()
    assert (last["workload"], last["peer"]) not in found
    assert last["workload"] in {workload for workload, _ in found}


def test_the_picture_is_that_of_the_json():
    from benchmarks.compare_plot import RESULT, report

    drawn = report(json.loads(RESULT.read_text(encoding="utf-8")))
    assert [row.name for row in drawn.rows][:2] == ["baseline", "sequential"]
    for row in drawn.rows:
        assert f"{row.tokens_per_s:,.0f}" in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def test_medians_that_other_processes_disturbed_are_named(tmp_path):
    write(tmp_path, "peers", [("burst", report.OURS, 300.0, None), ("burst", report.STOCK_BEST, 120.0, None)])
    path = tmp_path / "peers.json"
    document = json.loads(path.read_text())
    for row, shares in zip(document["series"], ([0.5, 34.0, 0.3], [0.5, 34.0, 3.0]), strict=True):
        row["rounds"] = [{"others_cpu_percent": share} for share in shares]
    path.write_text(json.dumps(document))
    assert tables.read(["peers"], tmp_path).notes == (f"Other processes disturbed {report.STOCK_BEST} on burst.",)
