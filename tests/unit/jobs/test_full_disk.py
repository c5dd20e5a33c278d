"""The command on a disk that fills up under it, in a process of its own: what is written stays, and it goes on."""

import csv
import json
import re
import subprocess
import sys

import pytest

N_ROWS = 200
ROW = re.compile(rb'\{"row": .*\}$')

# The command with an engine without a model. Its disk has room for so many bytes, or each file has (RLIMIT_FSIZE):
# what fits of a write is written, as a real disk does it.
CHILD = """
import errno, functools, json, os, signal, sys
from llamabatch.cli import cli
from llamabatch.jobs import job
from llamabatch.jobs.output.files import Files
from tests.unit.jobs_fakes import FakeClient

limit, room, *command = sys.argv[1:]
room, write = int(room), os.write
client = FakeClient(held=7)
job.connect = lambda config: client
job.Files = functools.partial(Files, patience_s=0)  # no wait for room

def full(fd, data):
    global room
    if fd < 3:
        return write(fd, data)
    if room <= 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    n = write(fd, bytes(data)[:room])
    room -= n
    return n

if limit == "disk":
    os.write = full
elif limit == "file":
    import resource
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
try:
    cli(command)
finally:
    print("computed:", *(request.prompt.split()[1] for request in client.requests))
"""


def run(folder, name, order, limit="none", room=0):
    """(exit code, message, rows that the engine got)."""
    command = ["run", str(folder / "in.jsonl"), str(folder / "work" / name), "--order", order, "-m", "tiny"]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, limit, str(room), *command],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    [computed] = [line for line in done.stdout.splitlines() if line.startswith("computed:")]
    return done.returncode, done.stderr, {int(number) for number in computed.split()[1:]}


def stored(folder):
    """The whole lines of rows that the job has on the disk, those in OUT.ahead included."""
    lines = [line for path in (folder / "work").iterdir() for line in path.read_bytes().split(b"\n")[:-1]]
    whole = [match[0] for match in map(ROW.search, lines) if match]
    return {json.loads(line)["row"]: line for line in whole}


def rows_of(path):
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return [(int(row["row"]), row["id"], row["text"], row["error"] or None) for row in csv.DictReader(file)]
    if path.suffix == ".parquet":
        rows = pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["row"], row["id"], row["text"], row["error"]) for row in rows]


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are POSIX's")
@pytest.mark.parametrize(
    ("limit", "name", "order", "rooms"),
    [
        ("disk", "out.jsonl", "input", (12_000, 0, 9_000)),
        ("disk", "out.csv", "finished", (15_000, 28_000)),  # the second while OUT is made of the rows
        ("file", "out.parquet", "input", (12_000,)),
    ],
)
def test_a_job_resumed_after_a_full_disk_has_each_row_once(limit, name, order, rooms, tmp_path):
    lines = [{"id": f"row {i}", "prompt": f"prompt {i} {'x' * 60}"} for i in range(N_ROWS)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "work").mkdir()
    before = {}
    for room in (*rooms, None):
        code, message, computed = run(tmp_path, name, order, "none" if room is None else limit, room or 0)
        assert not computed & before.keys(), "a row that is on the disk is computed again"
        if room is None:
            break
        assert code == 3, message
        assert {"disk": "No space left on device", "file": "File too large"}[limit] in message
        after = stored(tmp_path)
        assert before.items() <= after.items(), "a finished row is lost"
        before = after
    assert code == 0, message
    assert computed | before.keys() == set(range(N_ROWS))
    found = rows_of(tmp_path / "work" / name)
    assert (found if order == "input" else sorted(found)) == [
        (i, f"row {i}", f"of prompt {i} {'x' * 60}", None) for i in range(N_ROWS)
    ]
    assert {path.name for path in (tmp_path / "work").iterdir()} == {name, f"{name}.job.json"}
