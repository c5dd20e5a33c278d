"""The gate: what fails it, which tests wait for `make test-all`, and one core for each worker."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.all import __main__ as test_all
from tests.all import inputs, parts
from tests.defects import Defect
from tests.defects import __main__ as test_defects
from tests.defects.copies import Copy
from tests.gate import marks, unsteady
from tests.gate.run import TESTS

CHECKOUT = Path(__file__).parents[3]
BODY = """
import os, pytest
calls = {}

@pytest.mark.parametrize("number", range(%d))
def test_unsteady(number):
    calls[number] = calls.get(number, 0) + 1
    assert calls[number] > 1

def test_other():
    calls["other"] = calls.get("other", 0) + 1
    assert %s, calls["other"]
"""


def pytest_of(folder, *arguments):
    """Runs pytest with the gate's plugins over a folder. Returns the finished process."""
    plugins = ["-p", "tests.gate.workers", "-p", "tests.gate.unsteady", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-q", *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, text=True, capture_output=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("n_unsteady", "other", "file", "code", "says"),
    [
        (unsteady.MOST_UNSTEADY, "True", "test_any.py", 0, "UNSTEADY test_any.py::test_unsteady[0]"),
        (unsteady.MOST_UNSTEADY + 1, "True", "test_any.py", 1, "4 tests are unsteady, more than 3"),
        (0, "False", "test_any.py", 1, "AssertionError: 3"),
        (1, "True", "test_equal_bits.py", 1, "1 failed"),
        (0, "pytest.fail('Timeout (>1.0s)')", "test_any.py", 1, "1 failed, 1 skipped in"),
    ],
)
def test_what_runs_again_and_what_fails_a_run(tmp_path, n_unsteady, other, file, code, says):
    (tmp_path / file).write_text(BODY % (n_unsteady, other))
    done = pytest_of(tmp_path)
    assert done.returncode == code, done.stdout
    assert says in done.stdout
    assert ("UNSTEADY" in done.stdout) == (n_unsteady > 0 and file == "test_any.py")


def test_unsteady_tests_of_workers_are_named_and_a_worker_that_dies_fails_the_run(tmp_path):
    (tmp_path / "test_a.py").write_text(BODY % (1, "True"))
    (tmp_path / "test_b.py").write_text(
        BODY % (0, "len(getattr(os, 'sched_getaffinity', lambda process: [0])(0)) == 1")
    )
    done = pytest_of(tmp_path, "-n", "auto", "--dist", "loadfile")
    assert done.returncode == 0, done.stdout
    assert "UNSTEADY test_a.py::test_unsteady[0]" in done.stdout
    (tmp_path / "test_c.py").write_text(BODY % (0, "os._exit(1)"))
    done = pytest_of(tmp_path, "-n", "auto", "--dist", "loadfile")
    assert done.returncode != 0
    assert "crashed while running 'test_c.py::test_other'" in done.stdout
    assert "UNSTEADY test_c" not in done.stdout


def test_a_test_has_the_same_name_in_every_process(tmp_path):
    """Workers that collect different tests stop. Their hash seeds differ, and the clock may reach another second."""
    (tmp_path / "later.py").write_text("import time\nreal = time.time\ntime.time = lambda: real() + 1000\n")
    names = []
    for plugins in ([], ["-p", "later"]):
        environment = os.environ | {
            "PYTHONHASHSEED": str(len(plugins)),
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{CHECKOUT}",
        }
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *plugins]
        command += ["--rootdir", str(CHECKOUT), *(str(CHECKOUT / folder) for folder in TESTS)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout[-2000:]
        names.append([line for line in done.stdout.splitlines() if "::" in line])
    assert names[0] == names[1]


def test_marks(monkeypatch):
    monkeypatch.setattr(marks, "slow", lambda: {"a.py::test_a", "a.py::test_b[x]", "a.py::test_c"})

    class Item:
        def __init__(self, nodeid, *given):
            self.nodeid, self.given = nodeid, list(given)

        def get_closest_marker(self, name):
            return name if name in self.given else None

        def add_marker(self, name):
            self.given.append(name)

    items = [Item("a.py::test_a[1]"), Item("a.py::test_b[x]"), Item("a.py::test_b[y]"), Item("a.py::test_c", "guard")]
    marks.mark(items)
    assert [item.given for item in items] == [["slow"], ["slow"], [], ["guard"]]


@pytest.mark.skipif(not (CHECKOUT / ".git").exists(), reason="parts are made of the files that git knows")
def test_parts_have_all_tests_and_are_due_after_a_change_that_they_see():
    tests = {
        name for room in ("unit", "model", "installed") for name in inputs.files() if name.startswith(f"tests/{room}/")
    }
    tests = {name for name in tests if Path(name).name.startswith("test_")}
    assert {name for part in parts.ALL for name in part.tests()} == tests
    assert all(part.tests() for part in parts.ALL)
    seen = {part.name: inputs.seen_by(part.tests(), part.also) for part in parts.ALL}
    assert "llamabatch/server/application.py" in seen["server"]
    assert "llamabatch/scheduler/scheduler.py" in seen["engines"]
    assert "README.md" in seen["docs"]
    kernels = inputs.seen_by(["tests/model/test_kernels.py"])
    assert {"native_patches/kernels/fattn-block.cpp", "tests/model/conftest.py"} <= kernels
    assert "llamabatch/server/application.py" not in kernels
    assert "docs/compare.md" not in kernels
    assert "docs/compare.md" in inputs.seen_by(["tests/unit/tools/test_compare_report.py"])  # that test names the page
    assert inputs.digest(kernels) != inputs.digest(kernels - {"tests/model/conftest.py"})


def test_a_part_that_has_passed_is_due_once_a_file_that_it_sees_has_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(test_all, "MEMORY", tmp_path / "build" / "memory.json")
    monkeypatch.setattr(parts.Part, "inputs", lambda part: part.name)
    one, other = parts.ALL[:2]
    assert test_all._is_due(one)
    test_all._remember(one, one.inputs(), 12.3)
    assert not test_all._is_due(one)
    assert test_all._is_due(other)
    monkeypatch.setattr(parts.Part, "inputs", lambda part: "changed")
    assert test_all._is_due(one)


def test_no_slow_test_is_unknown():
    """A line of slow.txt that names no test belongs to a test that was renamed."""
    for line in marks.FILE.read_text().splitlines():
        if not line.startswith("#"):
            file, _, name = line.split(" ", 1)[1].partition("::")
            assert f"def {marks.function_of(name)}(" in (CHECKOUT / file).read_text(), line


def test_files_come_in_another_order_and_each_as_a_whole(tmp_path):
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text("def test_1(): pass\ndef test_2(): pass\n")
    orders = []
    for seed in ("1", "2", "1"):
        done = pytest_of(tmp_path, "-p", "tests.steady.order", "--order", seed, "--collect-only")
        names = [line for line in done.stdout.splitlines() if "::" in line]
        assert [name.partition("::")[2] for name in names] == ["test_1", "test_2"] * 4
        orders.append([name.partition("::")[0] for name in names])
        assert orders[-1][::2] == orders[-1][1::2]
    assert orders[0] == orders[2] != orders[1]


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("half", "len(os.sched_getaffinity(0)) == 1 and n_busy() == 1"),
        ("busy", "n_busy() == len(os.sched_getaffinity(os.getppid()))"),
        ("slow", "os.environ['SPEED_OF_TESTED_STEPS'] == 'slow' and n_busy() == 0"),
    ],
    ids=["half", "busy", "slow"],
)
@pytest.mark.skipif(sys.platform != "linux", reason="cores are chosen on Linux alone")
def test_the_conditions_of_test_steady(condition, holds, tmp_path):
    (tmp_path / "test_a.py").write_text(
        "import os, psutil\n"
        "def n_busy():\n"
        "    above = psutil.Process().parents()\n"
        "    runner = next(each for each in above if 'tests.steady' in each.cmdline())\n"
        "    return sum('while os.getppid()' in ' '.join(each.cmdline()) for each in runner.children())\n"
        f"def test_one(): assert {holds}\n"
    )
    command = [sys.executable, "-m", "tests.steady", condition, str(tmp_path / "test_a.py")]
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout
    assert f"--- {condition}: passed in" in done.stdout


def test_each_defect_is_of_one_place_of_the_code():
    for room in test_defects.ROOMS.values():
        for defect in room:
            text = (CHECKOUT / defect.file).read_text(encoding="utf-8")
            assert text.count(defect.old) == 1, f"write the defect anew: {defect.what}"


def test_the_cpus_that_run_a_defect():
    defect = Defect("", "", "", "", (), cpu="avx2 -avx512f")
    assert [defect.runs_on(flags) for flags in ({"avx2"}, {"avx2", "avx512f"}, set())] == [True, False, False]
    assert Defect("", "", "", "", ()).runs_on(set())


def test_a_defect_is_planted_and_taken_out(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "files", lambda: ("llamabatch/errors.py",))
    copy = Copy(tmp_path / "copy", None)
    file = tmp_path / "copy" / "llamabatch" / "errors.py"
    before = file.read_text()
    with copy.planted(Defect("", "llamabatch/errors.py", "class LlamaBatchError(Exception):", "class Other:", ())):
        assert "class Other:" in file.read_text()
    assert file.read_text() == before
    with (
        pytest.raises(AssertionError, match="write the defect anew"),
        copy.planted(Defect("", "llamabatch/errors.py", "class ", "", ())),
    ):
        pass


@pytest.mark.parametrize(("fails", "by"), [("not slow", "gate"), ("slow", "test-all"), ("", "nobody")])
def test_who_catches_a_defect(fails, by):
    class Planted:
        """A copy in which the tests with one mark fail."""

        planted = staticmethod(lambda defect: contextlib.nullcontext({}))

        def pytest(self, arguments, more):
            return (1, "1 failed") if arguments[2] == fails else (0, "1 passed")

    assert test_defects._caught_by(Planted(), Defect("", "", "", "", ("a",))) == by
