"""`make test-long` runs missing cases, stores each outcome, and goes on when a case dies."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from click.testing import CliRunner

from llamabatch.utils import subprogram
from tests.long import __main__ as program
from tests.long import figures, workers
from tests.long.state import Outcome, State, publish
from tests.waiting import until

PLAIN = """
HOLDS = "each case writes
its number"
TOTAL, QUICK = 6, 2
TIMEOUT_S = 60
def case(number, folder):
    assert folder.is_dir() and not list(folder.iterdir())
    (folder / "own").write_text("x")
    print("not an answer")
    open(LOG, "a").write(f"{number} ")
    OTHER
"""


def figure_of(folder, name="fake", other="pass", text=PLAIN):
    text = (
        text.replace("writes\nits", "writes its").replace("LOG", repr(str(folder / "log.txt"))).replace("OTHER", other)
    )
    (folder / f"{name}.py").write_text(text)
    return next(figure for figure in figures.find(folder) if figure.name == name)


def ran(folder):
    log = folder / "log.txt"
    return [int(number) for number in log.read_text().split()] if log.exists() else []


@pytest.fixture
def state(tmp_path):
    return State(tmp_path / "state" / "state.json")


def test_all_cases_are_run_once_and_not_again(tmp_path, state):
    figure = figure_of(tmp_path)
    assert (figure.total, figure.quick, figure.holds) == (6, 2, "each case writes its number")
    program.run([figure], state, folder=tmp_path, revision="abc")
    assert ran(tmp_path) == list(range(6))
    kept = State(tmp_path / "state" / "state.json")
    assert kept.missing(figure) == []
    assert {outcome.revision for outcome in kept.outcomes(figure).values()} == {"abc"}
    program.run([figure], kept, folder=tmp_path)
    assert len(ran(tmp_path)) == 6


def test_a_case_that_fails_is_recorded_and_tried_again_after_the_others(tmp_path, state):
    figure = figure_of(tmp_path, other="assert number != 2, f'two in {folder}'")
    told = []
    program.run([figure], state, folder=tmp_path, tell=lambda *outcome: told.append(outcome))
    errors = {number: outcome.error for number, outcome in state.outcomes(figure).items()}
    assert errors == {0: None, 1: None, 2: "AssertionError: two in FOLDER", 3: None, 4: None, 5: None}
    assert [number for _, number, _ in told] == list(range(6))
    assert state.missing(figure) == [2]


@pytest.mark.parametrize(
    ("other", "error"),
    [
        ("number == 2 and __import__('os').kill(__import__('os').getpid(), 9)", "its process ended with code -9"),
        ("number == 2 and __import__('time').sleep(600)", "it did not end within 60 s"),
        ("if number == 2: raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_case_that_dies_or_hangs_costs_itself_alone(tmp_path, state, other, error, monkeypatch):
    over = []

    class Timer(threading.Timer):
        """A timer that expires when case 2 hangs."""

        def run(self):
            until(lambda: self.finished.is_set() or (not over and ran(tmp_path) == [0, 1, 2]))
            if not self.finished.is_set():
                over.append(True)
                self.function()

    if "sleep" in other:
        monkeypatch.setattr(threading, "Timer", Timer)
    figure = figure_of(tmp_path, other=other)
    program.run([figure], state, folder=tmp_path)
    errors = {number: outcome.error for number, outcome in state.outcomes(figure).items()}
    assert errors == {number: error if number == 2 else None for number in range(6)}


def test_a_changed_figure_is_run_anew_and_so_is_one_whose_neighbour_changed(tmp_path, state):
    (tmp_path / "helper.py").write_text("X = 1\n")
    text = PLAIN + "\n# from tests.long.helper import X\n"
    before = figure_of(tmp_path, text=text)
    program.run([before], state, folder=tmp_path)
    (tmp_path / "helper.py").write_text("X = 2\n")
    assert figure_of(tmp_path, text=text).digest == before.digest  # a comment imports nothing
    after = figure_of(tmp_path, other="1")
    assert state.missing(after) == list(range(6))
    (tmp_path / "one.py").write_text("from tests.long.helper import X\nfrom tests.long import log\n")
    first = figures.digest(tmp_path, "one")
    (tmp_path / "helper.py").write_text("X = 3\n")
    assert figures.digest(tmp_path, "one") != first


def test_stopped_in_the_middle_it_goes_on_where_it_was(tmp_path, state):
    figure = figure_of(tmp_path, other="__import__('time').sleep(0.1)")

    def interrupt(figure, number, outcome):
        if number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        program.run([figure], state, folder=tmp_path, tell=interrupt)
    kept = State(tmp_path / "state" / "state.json")
    assert kept.missing(figure) == [2, 3, 4, 5]
    started = len(ran(tmp_path))
    time.sleep(0.3)
    assert len(ran(tmp_path)) == started  # no worker still runs cases
    program.run([figure], kept, folder=tmp_path)
    assert ran(tmp_path)[started:] == [2, 3, 4, 5]


def test_a_worker_that_was_stopped_starts_no_process(tmp_path):
    """The thread that runs cases may reach the next case while another thread stops the worker."""
    with workers.Worker(figure_of(tmp_path), tmp_path, "") as worker:
        assert worker.run(0).error is None
    assert worker.run(1) is None
    assert ran(tmp_path) == [0]


def with_tests():
    """Returns the environment for a program that imports from the checkout, whatever its working directory is."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(subprogram.import_path())}


def test_killed_in_the_middle_it_goes_on_where_it_was(tmp_path, begun):
    sleeps = "number < 2 or __import__('os').path.exists(LOG + '.go') or __import__('time').sleep(60)"
    figure = figure_of(tmp_path, other=sleeps.replace("LOG", repr(str(tmp_path / "log.txt"))))
    code = (
        "import sys; from pathlib import Path; from tests.long import __main__ as p, figures\n"
        "from tests.long.state import State\n"
        "folder = Path(sys.argv[1]); p.run(figures.find(folder), State(folder / 'state.json'), folder=folder)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=with_tests())
    until(lambda: len(ran(tmp_path)) == 3 and len(State(tmp_path / "state.json").outcomes(figure)) == 2)
    workers = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    state = State(tmp_path / "state.json")
    assert set(state.outcomes(figure)) == {0, 1}
    assert len(workers) == 1
    assert not psutil.wait_procs(workers, timeout=60)[1]  # the worker ends while its case runs
    (tmp_path / "log.txt.go").touch()
    program.run([figure], state, folder=tmp_path)
    assert state.missing(figure) == []
    assert ran(tmp_path) == [0, 1, 2, 2, 3, 4, 5]
    assert not [thread for thread in begun.threads() if isinstance(thread, threading.Timer)]


def test_the_summary_names_no_path_and_keeps_other_figures(tmp_path, state):
    figure = figure_of(tmp_path, other="assert number != 2, f'{folder} {__file__}'")
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"figures": {"another": {"cases": 1}}}))
    program.run([figure], state, folder=tmp_path, revision="abc")
    document = publish(results, [figure], state, {"cpu": "fast"})
    assert json.loads(results.read_text()) == document
    assert document["figures"]["another"] == {"cases": 1}
    fake = document["figures"]["fake"]
    assert (fake["cases"], fake["run"], fake["failed"], fake["revisions"]) == (6, 6, 1, ["abc"])
    assert fake["machine"] == {"cpu": "fast"}
    assert list(fake["failures"]) == ["2"]
    assert "FOLDER" in fake["failures"]["2"]
    assert str(tmp_path) not in results.read_text().replace("/private", "")


def test_what_was_never_run_is_not_published(tmp_path, state):
    figure = figure_of(tmp_path)
    assert publish(tmp_path / "results.json", [figure], state, {}) == {"figures": {}}
    state.record(figure, 0, Outcome(None, 1.0, "2026-01-01T00:00:00+00:00", "abc"))
    assert publish(tmp_path / "results.json", [figure], state, {})["figures"]["fake"]["run"] == 1
    state.forget([figure])
    assert state.missing(figure) == list(range(6))


def test_the_command(tmp_path, monkeypatch):
    figure_of(tmp_path)
    figure_of(tmp_path, "worse", other="assert number != 2, 'two'")
    monkeypatch.setattr(program, "HERE", tmp_path)
    found = figures.find(tmp_path)
    monkeypatch.setattr(figures, "find", lambda: found)
    monkeypatch.setattr(program, "_publish", lambda results, chosen, state: publish(results, chosen, state, {}))
    monkeypatch.setattr(program.run, "__kwdefaults__", {**program.run.__kwdefaults__, "folder": tmp_path})
    files = ["--state", str(tmp_path / "s.json"), "--results", str(tmp_path / "r.json")]

    def command(*arguments):
        return CliRunner().invoke(program.main, [*arguments, *files])

    assert command("--only", "none").exit_code == 2
    assert command("--only", "fake").exit_code == 0
    failed = command()
    assert (failed.exit_code, "worse, case 2: AssertionError: two" in failed.output) == (1, True)
    assert "fake: 6 of 6 run, 0 failed. each case writes its number" in command("--list").output
    before = len(ran(tmp_path))
    assert command("--only", "worse").exit_code == 1  # only the failed case is run again
    assert len(ran(tmp_path)) == before + 1
    assert command("--only", "fake", "--again").exit_code == 0
    assert len(ran(tmp_path)) == before + 7
    assert set(json.loads((tmp_path / "r.json").read_text())["figures"]) == {"fake", "worse"}


def test_every_figure_of_the_project_says_what_holds():
    found = {figure.name: figure for figure in figures.find()}
    assert {"bad_lines", "many_rows", "soak"} <= set(found)
    assert list(found)[-1] == "soak"
    assert all(len(figure.holds) > 30 and figure.quick >= 1 for figure in found.values())
