"""The output of a job has every row once, whatever happens, in order, and belongs to one job alone."""

import contextlib
import errno
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamabatch.errors import ConfigError, OutputError
from llamabatch.jobs.output import journal
from llamabatch.jobs.output.files import Files
from llamabatch.jobs.output.lock import is_held
from llamabatch.jobs.output.output import ORDERS, Output, OutputOptions
from llamabatch.jobs.output.own_files import OwnFiles
from llamabatch.jobs.output.survey import Bits
from tests.long import fake_job
from tests.long.fake_job import FaultyFiles, Killed

SETTINGS = {"model": {"name": "tiny.gguf", "sha256": "ab"}, "sampling": {"temperature": 0.0}, "inputs": [{"name": "a"}]}


def rec(number, error=None, text="some text"):
    reason = "stop" if error is None else "error"
    return {"row": number, "id": f"id-{number}", "text": text, "finish_reason": reason, "error": error}


def shuffled(n, seed=1):
    numbers = list(range(n))
    random.Random(seed).shuffle(numbers)
    return numbers


def run(out, numbers, options=None, job=SETTINGS, error=lambda n: None):
    """Runs a job to its end. Returns the numbers that were left to do."""
    with Output(out, job, options) as output:
        left = [n for n in numbers if not output.is_done(n)]
        for n in left:
            output.write(n, rec(n, error(n)))
        output.finish()
    return left


def rows(out):
    return [json.loads(line)["row"] for line in out.read_bytes().splitlines()]


@pytest.mark.parametrize("order", ORDERS)
def test_each_row_once_and_nothing_is_left_beside(tmp_path, order):
    out = tmp_path / "out.jsonl"
    numbers = shuffled(300)
    assert run(out, numbers, OutputOptions(order=order)) == numbers
    assert rows(out) == (list(range(300)) if order == "input" else numbers)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.job.json"]
    with Output(out, SETTINGS, OutputOptions(order=order)) as again:
        assert again.finished
        assert again.is_done(299)


def test_more_lines_than_one_write_takes_wait_for_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "_MOST_AT_ONCE", 1000)
    run(tmp_path / "out.jsonl", [*range(1, 60), 0], OutputOptions(order="input"))
    assert rows(tmp_path / "out.jsonl") == list(range(60))


@pytest.mark.parametrize("order", ORDERS)
def test_a_run_that_ends_early_is_gone_on_with(tmp_path, order):
    out = tmp_path / "out.jsonl"
    numbers, options = shuffled(300), OutputOptions(order=order)
    with Output(out, SETTINGS, options) as output:
        seed = output.seed
        for n in numbers[:200]:
            output.write(n, rec(n))
    with Output(out, SETTINGS, options) as output:
        assert (output.resumed, output.n_before, output.seed) == (True, 200, seed)
    assert run(out, numbers, options) == numbers[200:]
    assert sorted(rows(out)) == list(range(300))


def test_another_setting_is_refused_by_name_and_forced(tmp_path):
    out = tmp_path / "out.jsonl"
    with Output(out, SETTINGS) as output:
        output.write(0, rec(0))
    changed = {**SETTINGS, "sampling": {"temperature": 0.7}}
    with pytest.raises(ConfigError, match=r"sampling\.temperature: 0\.0, now 0\.7"):
        Output(out, changed)
    assert run(out, range(3), OutputOptions(force=True), changed) == [1, 2]
    with pytest.raises(ConfigError, match=r"temperature: 0\.7, now 0\.0"):
        Output(out, SETTINGS)


@pytest.mark.parametrize("order", ORDERS)
def test_rows_that_failed_are_done_again_in_their_places(tmp_path, order):
    out = tmp_path / "out.jsonl"
    run(out, shuffled(100), OutputOptions(order=order), error=lambda n: "no" if n % 7 == 3 else None)
    again = OutputOptions(order=order, retry_errors=True)
    assert sorted(run(out, range(100), again)) == [n for n in range(100) if n % 7 == 3]
    assert rows(out) == list(range(100)) if order == "input" else sorted(rows(out)) == list(range(100))
    assert all(json.loads(line)["error"] is None for line in out.read_bytes().splitlines())


@contextlib.contextmanager
def process_of(code, path):
    """Yields a process that has run this code with the path, and waits until it is killed."""
    code = f"import sys, time; from pathlib import Path\n{code}\nprint('', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"\n"
            yield holder
        finally:
            holder.kill()


def test_another_process_is_kept_out_while_it_lives(tmp_path):
    out = tmp_path / "out.jsonl"
    code = "from llamabatch.jobs.output.output import Output; output = Output(Path(sys.argv[1]), {})"
    with (
        process_of(code, out) as holder,
        pytest.raises(ConfigError, match=rf"another process \(pid {holder.pid}\) is writing .*out\.jsonl"),
    ):
        Output(out, {})
    assert (tmp_path / "out.jsonl.lock").exists()  # a killed job leaves it
    run(out, range(3), job={})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.job.json"]


def test_a_file_that_no_job_has_written_is_refused(tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text('{"precious": true}\n')
    with pytest.raises(ConfigError, match=r"out\.jsonl exists without out\.jsonl\.job\.json.*--force"):
        Output(out, SETTINGS)
    with pytest.raises(ConfigError, match="line 1 is not one that this job has written"):
        Output(out, SETTINGS, OutputOptions(force=True))
    assert out.read_text() == '{"precious": true}\n'
    out.write_text("")  # as mktemp leaves it
    assert run(out, range(3)) == [0, 1, 2]


def test_an_output_without_its_manifest_is_gone_on_with_by_force(tmp_path):
    out = tmp_path / "out.jsonl"
    with Output(out, SETTINGS) as output:
        output.write(0, rec(0))
    (tmp_path / "out.jsonl.job.json").unlink()
    assert run(out, range(3), OutputOptions(force=True)) == [1, 2]


def test_an_output_that_is_removed_begins_anew(tmp_path):
    out = tmp_path / "out.jsonl"
    with Output(out, SETTINGS) as output:
        output.write(1, rec(1))
    out.unlink()
    assert run(out, range(2), job={"other": 1}) == [0, 1]


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda lines: [*lines[:3], *lines[4:]], "line 4 is of row 4, but row 3 must come next"),
        (lambda lines: lines[::-1], "line 1 is of row 9, but row 0 must come next"),
        (lambda lines: [*lines[:3], b"note to self\n", *lines[3:]], "line 4 is not one that this job has written"),
        (lambda lines: [*lines[:3], b"\0" * 40 + b"\n", *lines[3:]], "line 5 follows one that is torn"),
        (lambda lines: [*lines, lines[3]], "line 11 is of row 3, but row 10 must come next"),
    ],
)
def test_an_output_that_was_edited_is_refused_and_by_force_mended(tmp_path, edit, what):
    out = tmp_path / "out.jsonl"
    with Output(out, SETTINGS) as output:
        for n in range(10):
            output.write(n, rec(n))
    whole = out.read_bytes()
    out.write_bytes(b"".join(edit(whole.splitlines(keepends=True))))
    with pytest.raises(ConfigError, match=what):
        Output(out, SETTINGS)
    with Output(out, SETTINGS, OutputOptions(force=True)) as output:
        if not output.is_done(3):
            output.write(3, rec(3))
        output.finish()
    assert out.read_bytes() == whole


def test_zeros_behind_a_crash_of_the_system_are_torn(tmp_path):
    out = tmp_path / "out.jsonl"
    with Output(out, SETTINGS) as output:
        for n in range(3):
            output.write(n, rec(n))
    with out.open("ab") as file:
        file.write(b'{"row": 3, ' + bytes(5000) + b'}\n{"row": 4, ' + bytes(100))
    assert run(out, range(5)) == [3, 4]
    assert rows(out) == list(range(5))


def test_the_order_can_be_changed_by_force_both_ways(tmp_path):
    out = tmp_path / "out.jsonl"
    numbers = shuffled(60)
    with Output(out, SETTINGS, OutputOptions(order="finished")) as output:
        for n in numbers[:20]:
            output.write(n, rec(n))
    with Output(out, SETTINGS, OutputOptions(force=True)) as output:
        for n in numbers[20:40]:
            output.write(n, rec(n))
    with pytest.raises(ConfigError, match=r"output\.order: 'input', now 'finished'"):
        Output(out, SETTINGS, OutputOptions(order="finished"))
    files = FaultyFiles()
    options = OutputOptions(order="finished", force=True)
    Output(out, SETTINGS, options, files).close()
    assert files.calls[-3:] == ["fsync", "remove", "unlock"]  # waiting rows are on disk before their file is removed
    assert run(out, numbers, options) == numbers[40:]
    assert sorted(rows(out)) == list(range(60))


def test_a_shard_is_not_mixed_with_another(tmp_path):
    out = tmp_path / "out.jsonl"
    with Output(out, SETTINGS, OutputOptions(shard=(2, 3))) as output:
        assert [n for n in range(9) if not output.is_done(n)] == list(range(9))
        for n in (4, 1):
            output.write(n, rec(n))
        with pytest.raises(ValueError, match="row 2 is not due"):
            output.write(2, rec(2))
    with pytest.raises(ConfigError, match=r"rows of shard 2/3, and this is shard 1/3; .* --shard 2/3$") as refused:
        Output(out, SETTINGS, OutputOptions(shard=(1, 3)))
    assert "--force" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"row 1, which is not of shard \(1, 3\)"):
        Output(out, SETTINGS, OutputOptions(shard=(1, 3), force=True))
    assert rows(out) == [1, 4]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("out.parquet.gz", "Parquet is compressed in itself: leave .gz away"),
        (
            "out.xlsx.zst",
            r"\.xlsx is a spreadsheet, which is not written; what is written: lines of JSON .* 'out\.jsonl'",
        ),
        ("out.json", r"\.json is one JSON document, which is not written"),
        ("out.xlsx", r"\.xlsx is a spreadsheet, which is not written"),
        ("out.jsonl.xz", r"\.xz is compressed by another program"),
        ("out.arrow", "a file of columns other than Parquet"),
        ("", "a directory"),
        ("missing/out.jsonl", "there is no directory"),
    ],
)
def test_names_that_cannot_be_written(tmp_path, name, what):
    with pytest.raises(ConfigError, match=what):
        Output(tmp_path / name, SETTINGS)
    assert list(tmp_path.iterdir()) == []


def test_what_force_has_overridden_is_kept_in_the_manifest(tmp_path):
    out = tmp_path / "out.jsonl"
    run(out, range(2))
    run(out, range(2), OutputOptions(force=True), {"model": "b"})
    kept = json.loads((tmp_path / "out.jsonl.job.json").read_text())
    assert kept["settings"]["model"] == "b"
    assert [each["model"] for each in kept["earlier"]] == [SETTINGS["model"]]
    assert kept["ending"]["rows"] == 2


def test_nothing_is_written_behind_half_a_line(tmp_path):
    out = tmp_path / "out.jsonl"
    files = FaultyFiles()
    with Output(out, SETTINGS, OutputOptions(sync_s=60.0), files) as output:
        output.write(0, rec(0))
        # fails from the second write on: the line, after its checksum
        files._what, files._k, files._fault, files._n, files._lasting = "write", 2, errno.ENOSPC, 0, True
        with pytest.raises(OutputError, match="No space left"):
            output.write(1, rec(1))
        written = out.read_bytes()
        assert not written.endswith(b"\n")
        with pytest.raises(OutputError, match="No space left"):
            output.write(2, rec(2))
        assert out.read_bytes() == written
    assert run(out, range(3)) == [1, 2]


def test_a_wait_for_a_full_disk_ends_when_the_job_is_stopped(tmp_path):
    messages = []
    files = Files(messages.append, patience_s=60.0, stopped=lambda: True)
    full = OSError(errno.ENOSPC, "No space left on device")
    files._system = lambda what, function, *args: (_ for _ in ()).throw(full)
    with pytest.raises(OutputError, match="No space left"):
        files.open(tmp_path / "x", 0)
    assert len(messages) == 1
    assert "no room for" in messages[0]


def test_a_wait_for_a_full_disk_ends_with_patience(tmp_path):
    files = FaultyFiles("write", 1, errno.ENOSPC, lasting=True, patience_s=0.01)
    with pytest.raises(OutputError, match="make room, and run the same command again"):
        OwnFiles(files, tmp_path / "x", "0" * 16).create("ahead")
    assert len(files.messages) == 1


def test_what_was_written_is_synced_every_few_seconds(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("llamabatch.jobs.output.output.time", SimpleNamespace(monotonic=lambda: now[0]))
    files = FaultyFiles()
    with Output(tmp_path / "out.jsonl", SETTINGS, OutputOptions(sync_s=5.0), files) as output:
        files.calls.clear()
        for n in range(10):
            output.write(n, rec(n))
        assert files.calls == ["write", "write"] * 10  # a checksum and its line
        now[0] += 6
        output.sync_if_due()
        assert files.calls[20:] == ["fsync", "fsync"]
        now[0] += 6
        output.sync_if_due()  # nothing was written since
        assert files.calls[22:] == []


def test_the_side_file_stays_small(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "_LEAST_GARBAGE", 2000)
    monkeypatch.setattr(journal, "_TRIM", 16)
    out, ahead = tmp_path / "out.jsonl", tmp_path / "out.jsonl.ahead"
    largest, files = 0, FaultyFiles()
    with Output(out, SETTINGS, files=files) as output:
        files.calls.clear()
        for n in range(1000):
            output.write(n ^ 3, rec(n ^ 3))  # four at a time, the last one first
            largest = max(largest, ahead.stat().st_size)
        output.finish()
    assert 2000 < largest < 3000
    calls = [call for call in files.calls if call != "write"]
    assert calls[:5] == ["fsync", "fsync", "open", "fsync", "rename"]  # the output is synced first
    assert rows(out) == list(range(1000))


def test_a_million_places_are_known_in_little_memory(tmp_path):
    bits, offsets = Bits(), journal.Offsets(0)
    for place in range(0, 1_000_000, 1000):
        bits.add(place)
        offsets.put(place, 1)
    bits.add(999_999)
    assert len(bits._bytes) == 125_000
    assert 999_999 in bits
    assert 999_998 not in bits
    assert [n for n in range(3000) if n in bits] == [0, 1000, 2000]
    assert offsets._offsets.itemsize * len(offsets._offsets) < 8_000_000
    assert offsets.n == 1000


def test_a_torn_line_that_waits_is_mended(tmp_path):
    out, ahead = tmp_path / "out.jsonl", tmp_path / "out.jsonl.ahead"
    with Output(out, SETTINGS) as output:
        for n in (2, 3):
            output.write(n, rec(n))
    os.truncate(ahead, ahead.stat().st_size - 9)
    for n in (4, 5):
        with Output(out, SETTINGS) as output:
            output.write(n, rec(n))
    assert run(out, range(6)) == [0, 1, 3]
    assert rows(out) == list(range(6))


@settings(max_examples=40)
@given(st.data())
def test_whatever_is_interrupted_each_row_is_there_once(data):
    """Any sequence of writes in any order, kills at any call, torn tails, normal ends and retries."""
    order = data.draw(st.sampled_from(ORDERS))
    n_rows = data.draw(st.integers(1, 25))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        for _ in range(data.draw(st.integers(0, 6))):
            retry = data.draw(st.booleans())
            options = OutputOptions(order=order, sync_s=0.0, retry_errors=retry)
            files = FaultyFiles(
                None, data.draw(st.integers(1, 60)), data.draw(st.sampled_from(["killed before", "killed after"]))
            )
            until = data.draw(st.none() | st.integers(1, 10))
            with contextlib.suppress(Killed):
                fake_job.run(out, n_rows, options, files, seed=data.draw(st.integers(0, 9)), until=until)
            for path in (out, Path(f"{out}.ahead")):
                if path.exists() and data.draw(st.booleans()):
                    least = 0 if path == out else 20
                    os.truncate(path, max(least, path.stat().st_size - data.draw(st.integers(0, 30))))
        fake_job.run(out, n_rows, OutputOptions(order=order))
        fake_job.check(out, n_rows, OutputOptions(order=order))


def test_an_output_that_is_a_link_stays_one(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, out = tmp_path / "elsewhere" / "real.jsonl", tmp_path / "out.jsonl"
    out.symlink_to(target)
    run(out, range(4), error=lambda n: "no" if n == 1 else None)
    assert run(out, range(4), OutputOptions(retry_errors=True)) == [1]
    assert out.is_symlink()
    assert rows(target) == [0, 1, 2, 3]


def test_how_it_ended_is_known_to_the_next_run(tmp_path):
    out = tmp_path / "out.jsonl"
    with Output(out, SETTINGS) as output:
        output.write(1, rec(1, "no"))
    run(out, range(5), error=lambda n: "no" if n == 3 else None)
    with Output(out, SETTINGS) as output:
        assert (output.finished, output.n_before, output.n_errors_before) == (True, 5, 2)


def test_a_disk_that_fails_when_all_is_closed_is_reported_once(tmp_path):
    files = FaultyFiles()
    output = Output(tmp_path / "out.jsonl", SETTINGS, OutputOptions(sync_s=60.0), files)
    output.write(0, rec(0))
    files._what, files._k, files._fault, files._n = "fsync", 1, errno.EIO, 0
    with pytest.raises(OutputError, match="fsync failed"):
        output.close()
    output.close()
    assert not (tmp_path / "out.jsonl.lock").exists()


def test_a_lock_is_seen_as_held_by_another_process_with_its_id(tmp_path):
    path = tmp_path / "out.jsonl.lock"
    code = (
        "from llamabatch.jobs.output.files import Files; from llamabatch.jobs.output.lock import Lock\n"
        "lock = Lock(Files(), Path(sys.argv[1]), Path('out')); lock.write_id('0' * 15 + '7')"
    )
    with process_of(code, path):
        assert is_held(path, "0" * 15 + "7")
        with pytest.raises(ConfigError, match="is not the lock of job 0000000000000008"):
            is_held(path, "0" * 15 + "8")
    assert not is_held(path, "0" * 15 + "7")
    path.unlink()
    with pytest.raises(FileNotFoundError):
        is_held(path, "0" * 15 + "7")


def test_lines_are_copied_from_another_output_of_the_job(tmp_path):
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    run(one, range(20), error=lambda n: "no" if n == 3 else None)
    lines = one.read_bytes().splitlines(keepends=True)
    with Output(other, {}) as output:
        for n in shuffled(20):
            output.copy(n, lines[n])
        with pytest.raises(ValueError, match="row 3 is not due"):
            output.copy(3, lines[3])
    with Output(other, {}) as output:
        assert (output.n_before, output.n_errors_before) == (20, 1)
        with pytest.raises(ValueError, match="row 20 is not due"):
            output.copy(20, lines[3])
    with Output(other, {}) as output:
        output.finish()
    assert other.read_bytes() == one.read_bytes()
