"""A signal at any moment of a command gives the exit code of this signal, and one line on stderr, no traceback."""

import json
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import psutil
import pytest

from llamabatch.llama.log import LogForwarder
from llamabatch.utils import interrupts
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells when the handlers are there")

COMMAND = [sys.executable, "-m", "llamabatch"]
GENERATE = ["generate", "-m", "tiny", "--max-tokens", "8", "Once"]
RUN = ["run", "-m", "tiny", "in.jsonl", "out.jsonl"]


def has_handlers(process):
    """Returns True if the process has set a handler of SIGTERM. Our code does so first, after Python's own start."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")), 0)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def started(arguments, folder, command=COMMAND):
    process = subprocess.Popen(
        [*command, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "LLAMABATCH_CACHE": str(folder / "cache")},
    )  # fmt: skip
    until(lambda: process.poll() is not None or has_handlers(process))
    return process


@pytest.mark.parametrize(("arguments", "n"), [(GENERATE, 30), (RUN, 12)], ids=["generate", "run"])
def test_a_signal_ends_it_at_any_moment_with_its_code_and_a_line(arguments, n, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": f"Once {i}"}) + "\n" for i in range(20)))
    start = time.monotonic()
    whole = started(arguments, tmp_path)
    assert whole.communicate(timeout=120)[1].count("Traceback") == 0
    assert whole.returncode == 0
    span, n_interrupted = time.monotonic() - start, 0
    for number in range(n):
        (tmp_path / "out.jsonl").unlink(missing_ok=True)
        start, process = time.monotonic(), started(arguments, tmp_path)
        signum = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)[number % 3]
        try:
            process.wait(span * number / n)
            span = min(span, time.monotonic() - start)  # the command can be faster than in the first run
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signum)  # a terminal also signals the whole group
        out, err = process.communicate(timeout=60)
        if process.returncode == 0:  # the command was done before the signal
            assert out or (tmp_path / "out.jsonl").exists()
        else:
            n_interrupted += 1
            assert (process.returncode, err.count("Interrupted")) == (128 + signum, 1), err
        for bad in ("Traceback", "Exception ignored", "numpy", "Error"):
            assert bad not in err
    assert n_interrupted > n / 3


def test_the_installed_command_takes_over_signals_as_python_m_does(tmp_path):
    """The test runs the script that pip writes for the command, without its first line."""
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    scripts = project.split("[project.scripts]\n")[1].splitlines()
    [script] = [line for line in scripts[:2] if line.startswith("llamabatch = ")]
    module, function = script.split('"')[1].split(":")
    program = f"import sys; from {module} import {function} as main; sys.exit(main())"
    process = started(GENERATE, tmp_path, [sys.executable, "-c", program])
    os.kill(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=60) == ("", "Interrupted.\n")
    assert process.returncode == 143


UNTIL_SENT = "import os, time\nwhile not os.path.exists('sent'):\n    time.sleep(0.001)\n"


def run_code(code, folder, signum):
    """Starts a program, and sends the signal when it has printed "ready" and sleeps. Then makes the file `sent`."""
    process = started([code], folder, [sys.executable, "-c"])
    assert process.stdout.readline() == "ready\n"
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING)
    process.send_signal(signum)
    (folder / "sent").touch()
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def test_native_code_does_not_hold_it_up(tmp_path):
    code = (
        "from llamabatch.utils import interrupts; interrupts.guard()\n"
        "import ctypes; lock = ctypes.create_string_buffer(64); take = ctypes.CDLL(None).pthread_mutex_lock\n"
        "take(lock); print('ready', flush=True); take(lock)"  # waits for ever: a signal does not interrupt it
    )
    assert run_code(code, tmp_path, signal.SIGTERM) == (143, "", "Interrupted.\n")


SLOW_MODULE = f"print('ready', flush=True)\n{UNTIL_SENT}whole = True\n"
IMPORTING = """
from llamabatch.utils import interrupts
interrupts.guard()
from llamabatch.jobs.loop import Stop
stop = Stop()
try:
    {start}
    import slow_module
    while True:
        slow_module.time.sleep(0.01)
except KeyboardInterrupt:
    print("raised", slow_module.whole, interrupts.came(), stop.signum, flush=True)
"""


@pytest.mark.parametrize(
    ("start", "came"), [("interrupts.careful()", "15 None"), ("held = stop.listening(); held.__enter__()", "None 15")]
)
def test_no_exception_is_raised_inside_an_import(start, came, tmp_path):
    (tmp_path / "slow_module.py").write_text(SLOW_MODULE)
    ended = run_code(IMPORTING.format(start=start), tmp_path, signal.SIGTERM)
    assert ended == (0, f"raised True {came}\n", "")


def test_a_signal_that_is_ignored_stays_ignored(tmp_path):
    code = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from llamabatch.utils import interrupts; interrupts.guard()\n"
        f"print('ready', flush=True)\n{UNTIL_SENT}print('lived')"
    )
    assert run_code(code, tmp_path, signal.SIGHUP) == (0, "lived\n", "")


def test_the_command_line_may_be_called_from_a_program_that_has_signals_of_its_own(tmp_path):
    code = (
        "import signal; signal.signal(signal.SIGTERM, lambda *a: print('mine', flush=True))\n"
        "from llamabatch.cli import main; import sys; sys.argv[1:] = []\n"
        f"try:\n    main()\nexcept SystemExit:\n    print('ready', flush=True)\n{UNTIL_SENT}"
    )
    assert run_code(code, tmp_path, signal.SIGTERM)[1] == "mine\n"


def test_the_module_that_llama_cpp_logs_through_is_delicate():
    """ctypes would drop an exception that a signal raises inside its callback."""
    assert LogForwarder.__module__ in interrupts._DELICATE


def test_a_signal_that_comes_again_prints_no_second_line(tmp_path):
    code = (
        "from llamabatch.utils import interrupts; interrupts.guard()\n"
        "import time; assert interrupts.acknowledge() and not interrupts.acknowledge()\n"
        "print('ready', flush=True)\nwhile True:\n    time.sleep(0.01)"
    )
    assert run_code(code, tmp_path, signal.SIGTERM) == (143, "", "")


CLEANING = """
from llamabatch.utils import interrupts
import os, time, types
now = 0
interrupts.time = types.SimpleNamespace(monotonic=lambda: now)
interrupts.guard()
interrupts.careful()
try:
    print("ready", flush=True)
    while True:
        time.sleep(0.01)  # Python sees a signal that comes just before a sleep when that is over
except KeyboardInterrupt:
    os.kill(os.getpid(), interrupts.came())
    now += {pause}
    os.kill(os.getpid(), interrupts.came())
    print("cleaned", flush=True)
"""


def test_a_signal_that_is_sent_twice_does_not_end_the_cleaning_up(tmp_path):
    """`timeout` signals the process and then its group."""
    assert run_code(CLEANING.format(pause=0.9), tmp_path, signal.SIGTERM) == (0, "cleaned\n", "")
    _, out, err = run_code(CLEANING.format(pause=1.1), tmp_path, signal.SIGTERM)  # a second signal, not a copy, ends it
    assert out == ""
    assert "KeyboardInterrupt" in err


@pytest.mark.parametrize(
    "keep",
    [
        lambda kept: weakref.WeakSet([kept]),
        lambda kept: weakref.WeakKeyDictionary({kept: 1}),
        lambda kept: weakref.WeakValueDictionary({1: kept}),
        lambda kept: weakref.finalize(kept, len, ""),
    ],
    ids=["set", "keys", "values", "finalize"],
)
def test_the_end_of_an_object_is_delicate(keep):
    """Python only prints an exception in a callback that runs at the end of an object, and goes on."""

    class Kept:
        pass

    kept, seen = Kept(), []
    table = keep(kept)
    sys.setprofile(lambda frame, event, _: seen.append(interrupts.is_delicate(frame, __name__)))
    try:
        del kept
    finally:
        sys.setprofile(None)
    assert seen[0]
    del table
