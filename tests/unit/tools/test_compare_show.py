"""The display of a comparison: tables, progress, pictures."""

import io
import itertools
import sys

import pytest
from rich.console import Console

from llamabatch.cli.progress import CompareProgress
from llamabatch.errors import InputError, SetupError
from llamabatch.scheduler.policies import STRATEGIES
from llamabatch.tools.compare.plot import lanes_of
from llamabatch.tools.compare.report import Report, Row
from llamabatch.tools.compare.table import show
from llamabatch.tools.processes import OthersUse
from llamabatch.utils import console as output
from llamabatch.utils.format import seconds, significant, times
from tests.unit.compare_fakes import figures, report


def text(shown: Report, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(shown, console)
    return console.file.getvalue()


def test_the_table_has_every_figure():
    shown = text(report())
    assert all(name in shown for name in STRATEGIES)
    heads = ("requests", "tokens", "speed-", "first token", "between tokens", "latency", "memory", "rows/", "passes/")
    assert all(head in shown for head in heads)
    assert "auto (batched)" in shown
    assert shown.rstrip().splitlines()[-1].startswith("For work like this use ")


def test_a_pipe_gets_tables_of_80_columns_or_as_wide_as_asked(monkeypatch):
    def lines():
        console = output.console()
        console.file = io.StringIO()
        show(report(), console)
        return console.file.getvalue().splitlines()[2:-1]  # the first line and the last are sentences

    monkeypatch.delenv("COLUMNS", raising=False)
    parts = lines()
    assert 60 < max(map(len, parts)) <= 80
    assert sum("strategy" in line for line in parts) == 2
    assert sum(line.lstrip().startswith("batched") for line in parts) == 2, "each part has the rows, unbroken"
    monkeypatch.setenv("COLUMNS", "150")
    assert sum("strategy" in line for line in lines()) == 1


@pytest.mark.parametrize("width", [80, 40])
def test_no_word_breaks_and_no_figure_is_lost_on_a_terminal(width):
    words = set(text(report(sizes=(1, 2, 4))).split())
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    show(report(sizes=(1, 2, 4)), console)
    shown = console.file.getvalue()
    assert all(len(line) <= width for line in shown.splitlines())
    assert {word for word in words if "─" not in word} <= set(shown.split())
    assert "…" not in shown


def test_batch_sizes_and_their_knee():
    shown = text(report(sizes=(1, 2, 4)))
    assert "by number of slots" in shown
    assert shown.count("◀ knee") == 1


def test_other_processes_that_computed_are_told():
    fake = vars(report())
    assert "other processes" not in text(Report(**{**fake, "others": OthersUse(8, cores=4)}))
    assert "used 9 % of the CPU" in text(Report(**{**fake, "others": OthersUse(9, cores=4)}))
    assert not OthersUse(1.9, cores=64).is_much
    assert OthersUse(2.1, cores=64).is_much


def test_failures_are_told_and_brackets_are_not_markup():
    fake = report(strategies=("sequential",))
    broken = Row("batched", error="died of [bold]SIGSEGV[/]")
    shown = text(Report(**{**vars(fake), "rows": (*fake.rows, broken)}))
    assert "batched, n_slots = 1: died of [bold]SIGSEGV[/]" in shown


def test_texts_that_differ_are_explained():
    fake = report(strategies=("sequential",))

    def said(*equal):
        rows = tuple(figures(name, 1, equal=share) for name, share in equal)
        return " ".join(text(Report(**{**vars(fake), "rows": rows})).split())

    assert "Some texts of baseline, batched differ from those of sequential: other kernels" in said(
        ("baseline", 0.92), ("sequential", 1.0), ("batched", 0.99), ("static", None)
    )
    assert "Not all texts" not in said(("baseline", 1.0), ("sequential", 1.0), ("batched", None))


def test_equality_is_not_rounded_up_and_may_be_unknown():
    fake = report(strategies=("sequential",))
    rows = (figures("sequential", 1, equal=0.9996), figures("batched", 1, equal=None), figures("static", 1, equal=1.0))
    shown = text(Report(**{**vars(fake), "rows": rows}))
    assert "99.9 %" in shown
    assert "n/a" in shown
    assert "100 %" in shown


def test_figures_for_people():
    values = (0, 0.01234, 0.5, 1.234, 12.34, 123.4, 1234.5)
    assert [significant(v) for v in values] == ["0", "0.0123", "0.500", "1.23", "12.3", "123", "1,234"]
    assert [seconds(v) for v in (0.0123, 0.5, 1.5, 75)] == ["12.3 ms", "500 ms", "1.50 s", "75.0 s"]
    assert [times(v) for v in (0.5, 4.14, 12.6)] == ["0.5", "4.1", "13"]


def test_progress_is_one_line_a_run_without_a_terminal(capsys):
    with CompareProgress() as progress:
        for error in (None, "it [died]"):
            progress.start("batched", 2)
            progress.advance()
            progress.end(0.5 if error is None else None, error)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == ["batched: 2 requests in 500 ms", "batched: failed: it [died]"]


def test_lanes_are_reused_lowest_first():
    assert lanes_of([]) == []
    assert lanes_of([(0, 4), (0, 2), (2, 3), (3, 5), (3, 6)]) == [1, 0, 0, 0, 2]
    assert lanes_of([(0, 1), (1, 2), (2, 3)]) == [0, 0, 0]
    spans = [(0.1 * i, 0.1 * i + 1.0) for i in range(40)]
    for lane in set(lanes_of(spans)):
        mine = sorted(span for span, at in zip(spans, lanes_of(spans), strict=True) if at == lane)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(mine)), "bars of a lane overlap"
    assert len(set(lanes_of(spans))) in (10, 11)


def test_labels_are_moved_apart_and_stay_inside():
    pytest.importorskip("matplotlib")
    from llamabatch.tools.compare.plot import spread_out

    assert spread_out([0.2, 0.5], 0.1) == [0.2, 0.5]
    assert spread_out([0.5, 0.5, 0.5], 0.1) == pytest.approx([0.4, 0.5, 0.6])
    assert spread_out([0.95, 1.0, 1.0], 0.1) == pytest.approx([0.8, 0.9, 1.0])
    assert spread_out([], 0.1) == []


def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "compare.svg"
    output.write_plot("llamabatch.tools.compare.plot", report(sizes=(1, 2, 4)), path)
    assert path.stat().st_size > 20_000
    drawn = path.read_text()
    assert all(name in drawn for name in STRATEGIES)


@pytest.mark.parametrize("strategies", [("sequential",), ("auto",), ("baseline", "batched")])
def test_pictures_of_few_strategies(tmp_path, strategies):
    pytest.importorskip("matplotlib")
    from llamabatch.tools.compare.plot import figure

    figure(report(strategies=strategies)).savefig(tmp_path / "few.png")


def test_a_picture_of_nothing_is_no_crash(tmp_path):
    pytest.importorskip("matplotlib")
    from llamabatch.tools.compare.plot import figure

    fake = report(strategies=("sequential",))
    rows = (Row("batched", error="it died"),)
    figure(Report(**{**vars(fake), "rows": rows, "advice": None})).savefig(tmp_path / "nothing.png")


def test_targets_are_checked_first(tmp_path, monkeypatch):
    output.check_targets(None, None)
    output.check_targets(tmp_path / "a.json", None)
    with pytest.raises(InputError, match="there is no directory"):
        output.check_targets(tmp_path / "no" / "a.json", None)
    with pytest.raises(InputError, match="is a directory"):
        output.check_targets(tmp_path, None)
    with pytest.raises(InputError, match=r"no ending of a picture; allowed are \.png, \.svg, \.pdf"):
        output.check_targets(None, tmp_path / "a.gif")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SetupError, match=r"pip install 'llamabatch\[tools\]'"):
        output.check_targets(None, tmp_path / "a.png")
