"""The files of a job among other files: only its own are touched, and changes to them are noticed."""

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from llamabatch.cli import cli
from llamabatch.errors import ConfigError, OutputError
from llamabatch.jobs import OutputOptions, Settings, job, run
from llamabatch.jobs.output import manifest as manifests
from llamabatch.jobs.output.output import ORDERS, Output
from llamabatch.jobs.output.own_files import manifest_of
from llamabatch.jobs.output.records import RecordOptions
from tests.long import fake_job
from tests.long.fake_job import FaultyFiles
from tests.unit.jobs_fakes import FakeClient

# one folder for each format of OUT.job.json, left by a run; no folder changes once its format is released
SAMPLES = Path(__file__).parents[3] / "data"
FORMATS = [1]


def sample(tmp_path, name, version):
    return Path(shutil.copytree(SAMPLES / f"jobs_format_{version}" / name, tmp_path / name))


HALF_DONE = {
    "input": ("out.jsonl", OutputOptions()),
    "killed": ("out.jsonl", OutputOptions()),
    "finished": ("out.jsonl", OutputOptions(order="finished")),
    "shard": ("out.jsonl", OutputOptions(shard=(2, 3), records=RecordOptions(shape="openai"))),
    "parquet": ("out.parquet", OutputOptions(records=RecordOptions(token_ids=True))),
}


@pytest.mark.parametrize("version", FORMATS)
@pytest.mark.parametrize("name", HALF_DONE)
def test_what_the_version_before_left_half_done_is_gone_on_with(name, version, tmp_path):
    out, options = HALF_DONE[name]
    folder = sample(tmp_path, name, version)
    computed = fake_job.run(folder / out, 40, options, seed=8)
    due = fake_job.in_shard(options, 40)
    assert len(due) - len(computed) == (9 if name == "shard" else 25)
    if out.endswith(".parquet"):
        table = pytest.importorskip("pyarrow.parquet").read_table(folder / out)
        assert table.column("row").to_pylist() == due
        assert sorted(path.name for path in folder.iterdir()) == [out, f"{out}.job.json"]
    else:
        fake_job.check(folder / out, 40, options)


@pytest.mark.parametrize("version", FORMATS)
@pytest.mark.parametrize(("name", "out"), [("ended", "out.jsonl"), ("ended-parquet", "out.parquet")])
def test_what_the_version_before_has_ended_is_known_and_its_errors_are_done_again(name, out, version, tmp_path):
    folder = sample(tmp_path, name, version)
    before = (folder / out).read_bytes()
    assert fake_job.run(folder / out, 40, OutputOptions()) == []
    assert (folder / out).read_bytes() == before
    again = fake_job.run(folder / out, 40, OutputOptions(retry_errors=True))
    assert sorted(again) == [n for n in range(40) if n % 7 == 3 or fake_job.is_bad(n)]
    if out.endswith(".jsonl"):
        fake_job.check(folder / out, 40, OutputOptions())


@pytest.mark.parametrize("version", FORMATS)
def test_a_command_of_the_version_before_goes_on(version, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "connect", lambda config: FakeClient())
    folder = sample(tmp_path, "command", version)
    monkeypatch.chdir(folder)
    summary = run(Settings("in.jsonl", "out.jsonl", model="model.bin"))
    assert (summary.counts.done_before, summary.counts.ok) == (25, 35)
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [(row["row"], row["id"], row["text"]) for row in rows] == [
        (n, f"row {n}", f"of prompt {n}") for n in range(60)
    ]


# ---- files of others under the names that a job needs

MINE = b"precious\n"
ENDINGS = (".ahead", ".lock", ".job.json", ".sums")


def put_file(path):
    path.write_bytes(MINE)


def put_link(path):
    (path.parent / "elsewhere").write_bytes(MINE)
    path.symlink_to(path.parent / "elsewhere")


def put_rows(path):
    """Writes the finished output of another job."""
    fake_job.run(path, 3, OutputOptions())


def put_empty(path):
    path.write_bytes(b"")


def put_at(endings, puts):
    """Pairs each ending with each kind of file. A job's output never has the name of a manifest."""
    pairs = [(ending, put) for ending in endings for put in puts if (ending, put) != (".job.json", put_rows)]
    return pytest.mark.parametrize(("ending", "put"), pairs)


def contents(folder):
    return {
        path.name: "a pipe" if path.is_fifo() else "a folder" if path.is_dir() else path.read_bytes()
        for path in sorted(folder.iterdir())
    }


PUTS = [put_file, put_link, put_rows, os.mkfifo, os.mkdir]


@put_at([*ENDINGS, ".part", ".part.ahead", ".part.sums"], PUTS)
def test_a_file_of_anybody_else_is_refused_by_name_and_stays(ending, put, tmp_path):
    force = (len(ending) + PUTS.index(put)) % 2 == 0  # each ending and each kind of file with and without force
    out = tmp_path / ("out.parquet" if ending.startswith(".part") else "out.jsonl")
    put(Path(f"{out}{ending}"))
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(out.name + ending)):
        fake_job.run(out, 5, OutputOptions(force=force))
    assert contents(tmp_path) == before


@put_at([*ENDINGS, ".part", ".part.ahead"], [put_file, put_rows, put_empty])
def test_a_file_that_comes_between_two_runs_is_refused_and_stays(ending, put, tmp_path):
    out, options = tmp_path / ("out.parquet" if ending.startswith(".part") else "out.jsonl"), OutputOptions()
    fake_job.run(out, 20, options, until=12)
    path = Path(f"{out}{ending}")
    path.unlink(missing_ok=True)
    if put is put_rows:  # as if the other job's files had been there before
        (tmp_path / "other").mkdir()
        put(tmp_path / "other" / path.name)
        for file in (tmp_path / "other").iterdir():
            file.rename(tmp_path / file.name)
        (tmp_path / "other").rmdir()
    else:
        put(path)
    before = contents(tmp_path)
    if put is put_empty and ending == ".lock":  # an empty lock says nothing, and stays as it is
        fake_job.run(out, 20, options)
        assert path.read_bytes() == b""
        return
    with pytest.raises(ConfigError, match=re.escape(path.name)):
        fake_job.run(out, 20, options)
    assert contents(tmp_path) == before


def test_a_temporary_file_is_cleaned_away_only_where_it_is_the_jobs(tmp_path):
    out = tmp_path / "out.jsonl"
    fake_job.run(out, 20, OutputOptions(), until=12)
    seed = json.loads((tmp_path / "out.jsonl.job.json").read_text())["seed"]
    mine = [tmp_path / "out.jsonl.tmp", tmp_path / "out.jsonl.ahead.tmp", tmp_path / "out.jsonl.0badcafe.tmp"]
    for path in mine:
        path.write_bytes(MINE)
    own = tmp_path / f"out.jsonl.{f'{seed:016x}'[:8]}.tmp"
    own.write_bytes(MINE)
    with pytest.raises(ConfigError, match=own.name):
        fake_job.run(out, 20, OutputOptions())
    own.write_text(f'{{"llamabatch": "ahead", "job": "{seed:016x}"}}\nhalf a li')
    fake_job.run(out, 20, OutputOptions())
    assert not own.exists()
    assert [path.read_bytes() for path in mine] == [MINE] * 3


@pytest.mark.parametrize("ending", [".tmp", ".ahead", ".sums", ".part", ".rescued"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_finished_outputs_of_other_jobs_stay(name, ending, tmp_path):
    """A user runs `run in a.jsonl.tmp`, and later `run in a.jsonl`."""
    other = tmp_path / f"{name}{ending}"
    fake_job.run(other, 7, OutputOptions())
    before = contents(tmp_path)
    with contextlib.suppress(ConfigError):
        fake_job.run(tmp_path / name, 9, OutputOptions())
    assert before.items() <= contents(tmp_path).items()


def test_a_file_system_without_links_will_do(tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("llamabatch.jobs.output.files.os.link", refuse)
    out = tmp_path / "out.jsonl"
    fake_job.run(out, 20, OutputOptions(), until=12)
    fake_job.run(out, 20, OutputOptions())
    fake_job.check(out, 20, OutputOptions())


def test_two_jobs_on_two_names_of_one_file_do_not_run_both(tmp_path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.touch()
    os.link(one, two)
    with Output(one, fake_job.SETTINGS) as output:
        with pytest.raises(ConfigError, match=r"writing .*two\.jsonl under another name of the same file"):
            Output(two, fake_job.SETTINGS)
        for number in range(5):
            output.done(*fake_job.result(number))
        output.finish()
    assert [number for number, _ in fake_job.rows(two)] == list(range(5))
    assert not (tmp_path / "two.jsonl.lock").exists()
    with pytest.raises(ConfigError, match=r"two\.jsonl exists without two\.jsonl\.job\.json"):
        Output(two, fake_job.SETTINGS)


@pytest.mark.parametrize("order", ["input", "finished"])
def test_an_output_whose_errors_are_done_again_stays_the_file_that_it_is_and_locked(order, tmp_path):
    out, other = tmp_path / "out.jsonl", tmp_path / "other.jsonl"
    options = OutputOptions(order=order)
    fake_job.run(out, 20, options, failing=lambda n: n == 3)
    os.link(out, other)
    with Output(out, fake_job.SETTINGS, replace(options, retry_errors=True)), pytest.raises(ConfigError):
        Output(other, fake_job.SETTINGS, OutputOptions(force=True))
    assert out.samefile(other)


# ---- what happens to the output while the job runs


def remove(out):
    out.unlink()


def put_another(out):
    other = out.with_name("other")
    other.write_bytes(MINE)
    os.replace(other, out)


def move(out):
    out.rename(out.with_name("moved"))


def cut(out):
    os.truncate(out, out.stat().st_size // 2)


def empty(out):
    out.write_bytes(b"")


def grow(out):
    with out.open("ab") as file:
        file.write(MINE)


HAPPENS = {remove: "was removed", put_another: "was replaced", move: "was moved", cut: "was cut", grow: "has 9 bytes"}


MOMENTS = ["sync", "finish", "close"]


@pytest.mark.parametrize("at", MOMENTS)
@pytest.mark.parametrize("happens", [*HAPPENS, empty])
def test_a_change_of_the_output_is_reported_and_its_rows_are_there(happens, at, tmp_path):
    one, other = [*HAPPENS, empty].index(happens), MOMENTS.index(at)
    order, name = ORDERS[(one + other) % 2], ("out.jsonl", "out.parquet")[(one // 2 + other) % 2]  # all pairs occur
    out = tmp_path / name
    kept = Path(f"{out}.part") if name.endswith(".parquet") else out
    options = OutputOptions(order=order, sync_s=0.0 if at == "sync" else 60.0)
    output = Output(out, fake_job.SETTINGS, options, FaultyFiles())
    for number in range(6):
        output.done(*fake_job.result(number))
    whole = kept.read_bytes()
    happens(kept)
    with pytest.raises(
        OutputError, match=rf"{kept.name} {HAPPENS.get(happens, 'was cut')}.* while the job ran"
    ) as raised:
        output.done(*fake_job.result(6)) if at == "sync" else getattr(output, at)()
    output.close()
    assert not out.with_name(out.name + ".lock").exists()
    if happens in (remove, put_another):
        rescued = Path(f"{kept}.rescued")
        assert f"rows (7) are saved in {rescued}" in str(raised.value) or at != "sync"
        assert rescued.read_bytes().startswith(whole)
        assert kept.exists() == (happens is put_another)
        if happens is put_another:
            assert kept.read_bytes() == MINE
        os.replace(rescued, kept)
    elif happens is move:
        where = "that file, wherever it is now" if name.endswith(".parquet") else tmp_path / "moved"
        assert f"are in {where}: move that back" in str(raised.value)
        (tmp_path / "moved").rename(kept)
    elif happens is grow:
        with pytest.raises(ConfigError, match=r"line 7"):
            Output(out, fake_job.SETTINGS, options, FaultyFiles())
    if kept != out and happens is empty:  # the file's first line is gone
        with pytest.raises(ConfigError, match=r"out\.parquet\.part is not of this job|\.sums, with"):
            fake_job.run(out, 9, replace(options, force=True))
        return
    fake_job.run(out, 9, replace(options, force=happens in (cut, empty, grow)))
    if name.endswith(".jsonl"):
        fake_job.check(out, 9, options)


@pytest.mark.parametrize("ending", [".ahead", ".sums"])
@pytest.mark.parametrize("happens", [remove, put_another, cut, grow])
def test_a_change_of_the_side_files_is_reported(happens, ending, tmp_path):
    out = tmp_path / "out.jsonl"
    output = Output(out, fake_job.SETTINGS, OutputOptions(sync_s=60.0), FaultyFiles())
    for number in (0, 1, 3):
        output.done(*fake_job.result(number))
    happens(Path(f"{out}{ending}"))
    with pytest.raises(OutputError, match=rf"out\.jsonl\{ending} .* while the job ran"):
        output.sync()
    output.close()
    if happens is remove or (happens is cut and ending == ".ahead"):
        fake_job.run(out, 9, OutputOptions())
        fake_job.check(out, 9, OutputOptions())
    elif happens is put_another:
        with pytest.raises(ConfigError, match=f"out.jsonl{ending} is not of this job"):
            fake_job.run(out, 9, OutputOptions())


def test_lines_that_wait_and_are_lost_are_reported(tmp_path):
    out = tmp_path / "out.jsonl"
    output = Output(out, fake_job.SETTINGS, OutputOptions(sync_s=60.0), FaultyFiles())
    output.done(*fake_job.result(1))
    Path(f"{out}.ahead").write_bytes(b"")
    with pytest.raises(OutputError, match=r"out\.jsonl\.ahead: something else has written to it while the job ran"):
        output.done(*fake_job.result(0))
    output.close()


def test_a_table_that_comes_to_be_while_the_job_runs_stays(tmp_path):
    pytest.importorskip("pyarrow")
    out = tmp_path / "out.parquet"
    output = Output(out, fake_job.SETTINGS, OutputOptions(), FaultyFiles())
    output.done(*fake_job.result(0))
    out.write_bytes(MINE)
    with pytest.raises(OutputError, match=r"has been made.* rows are in .*out\.parquet\.part"):
        output.finish()
    output.close()
    assert out.read_bytes() == MINE


def test_a_manifest_that_is_replaced_while_the_job_runs_stays(tmp_path):
    out = tmp_path / "out.jsonl"
    output = Output(out, fake_job.SETTINGS, OutputOptions(), FaultyFiles())
    output.done(*fake_job.result(0))
    Path(f"{out}.job.json").write_bytes(MINE)
    with pytest.raises(OutputError, match=r"job\.json was replaced by something else"):
        output.finish()
    output.close()
    assert Path(f"{out}.job.json").read_bytes() == MINE


@pytest.mark.parametrize("happens", [remove, put_another, move])
def test_the_command_ends_with_3_when_its_output_is_gone(happens, tmp_path, monkeypatch):
    class Client(FakeClient):
        def submit(self, requests, sink, **options):
            super().submit(requests, sink, **options)
            if out.exists() and out.stat().st_size:
                happens(out)

    monkeypatch.setattr(job, "connect", lambda config: Client())
    monkeypatch.chdir(tmp_path)
    out = Path("out.jsonl")
    Path("in.jsonl").write_text("".join(json.dumps({"prompt": f"prompt {i}"}) + "\n" for i in range(600)))
    result = CliRunner().invoke(cli, ["run", "in.jsonl", "out.jsonl"])
    assert result.exit_code == 3, result.output
    assert re.search(rf"Error: \S*out\.jsonl {HAPPENS[happens]}.* while the job ran\. Its rows .* are", result.output)


# ---- edited outputs


def edited(line):
    """Returns the line with another text in the same frame."""
    record = json.loads(line)
    record["error" if record.get("error") else "text" if "text" in record else "response"] = "another"
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


@pytest.mark.parametrize("order", ["input", "finished"])
@pytest.mark.parametrize("which", [0, 2, -1])
def test_an_output_that_was_edited_within_its_frame_is_refused_and_by_force_kept(which, order, tmp_path):
    until = 15 if (which == 0) == (order == "input") else None  # each pair of values of the three variables occurs
    out, options = tmp_path / "out.jsonl", OutputOptions(order=order)
    fake_job.run(out, 23, options, until=until, seed=5)
    lines = out.read_bytes().splitlines(keepends=True)
    lines[which] = edited(lines[which])
    out.write_bytes(b"".join(lines))
    with pytest.raises(ConfigError, match=r"has changed since the job wrote it.*--force"):
        fake_job.run(out, 23, options)
    assert out.read_bytes() == b"".join(lines)
    fake_job.run(out, 23, replace(options, force=True))
    assert lines[which] in out.read_bytes()
    assert sorted(number for number, _ in fake_job.rows(out)) == list(range(23))
    assert fake_job.run(out, 23, options) == []


def test_an_edit_of_the_same_size_after_the_end_is_noticed(tmp_path):
    out = tmp_path / "out.jsonl"
    fake_job.run(out, 3000, OutputOptions())
    content = out.read_bytes()
    out.write_bytes(content.replace(b'"id": "id-1500"', b'"id": "ID-1500"'))
    with pytest.raises(ConfigError, match="line 2048 or a line before it has changed since the job wrote it"):
        fake_job.run(out, 3000, OutputOptions())
    out.write_bytes(content[:-9])  # only the last line is cut
    assert fake_job.run(out, 3000, OutputOptions()) == [2999]
    assert out.read_bytes() == content


def test_a_table_that_was_edited_after_the_end_is_refused(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "out.parquet"
    fake_job.run(out, 9, OutputOptions())
    table = pq.read_table(out)
    pq.write_table(table.slice(0, 8), out)
    with pytest.raises(ConfigError, match="has changed since the job wrote it"):
        fake_job.run(out, 9, OutputOptions())
    assert fake_job.run(out, 9, OutputOptions(force=True)) == [8]


def test_lines_that_were_edited_while_they_wait_are_done_again(tmp_path):
    out, ahead = tmp_path / "out.jsonl", tmp_path / "out.jsonl.ahead"
    with Output(out, fake_job.SETTINGS) as output:
        for number in (2, 3):
            output.done(*fake_job.result(number))
    ahead.write_bytes(ahead.read_bytes().replace(b"id-3", b"ID-3"))
    assert sorted(fake_job.run(out, 4, OutputOptions())) == [0, 1, 3]
    fake_job.check(out, 4, OutputOptions())


def test_lines_without_a_checksum_are_done_again_and_foreign_ones_refused(tmp_path):
    out, sums = tmp_path / "out.jsonl", tmp_path / "out.jsonl.sums"
    fake_job.run(out, 9, OutputOptions(order="finished"), until=6)
    whole = sums.read_bytes()
    sums.write_bytes(whole[:-8])
    files = FaultyFiles()
    assert len(fake_job.run(out, 9, OutputOptions(order="finished"), files, until=1)) == 1
    assert "2 lines without a checksum, as after a crash of the system, are done again" in files.messages[0]
    with out.open("ab") as file:
        file.write(b"note to self\n")
    with pytest.raises(ConfigError, match="line 6 is not one that this job has written"):
        fake_job.run(out, 9, OutputOptions(order="finished"))
    sums.unlink()
    with pytest.raises(ConfigError, match=r"out\.jsonl\.sums, with the checksums of its lines, is gone.*--force"):
        fake_job.run(out, 9, OutputOptions(order="finished"))
    fake_job.run(out, 9, OutputOptions(order="finished", force=True))
    fake_job.check(out, 9, OutputOptions(order="finished"))


# ---- names that no output can have


@pytest.mark.parametrize("name", ["a" * 251, "é" * 125, "b" * 243 + ".jsonl", "c" * 300, "link", "loop/x", "a\0b"])
def test_a_name_that_cannot_be_an_output_ends_with_2(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"prompt": "a"}\n')
    Path("link").symlink_to("link")
    Path("loop").symlink_to("loop")
    before = sorted(os.listdir())
    result = CliRunner().invoke(cli, ["run", "in.jsonl", name])
    assert result.exit_code == 2, result.output
    assert "the output is" in result.output or "output is" in result.output
    assert "run the same command" not in result.output
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_the_longest_name_will_do(ending, tmp_path):
    out = tmp_path / ("a" * (239 - len(ending)) + ending)
    fake_job.run(out, 20, OutputOptions(), until=9)
    fake_job.run(out, 20, OutputOptions(retry_errors=True))
    fake_job.check_beside(out)


# ---- manifests that no job has written


def manifest(**fields):
    settings = {"output": {"order": "input", "shard": [1, 1]}}
    return {"format": manifests.FORMAT, "seed": 3, "settings": settings, "earlier": [], "ending": None} | fields


CRAFTED = {
    "infinite seed": json.dumps(manifest(seed=float("inf"))),
    "seed that is too large": json.dumps(manifest()).replace('"seed": 3', '"seed": 1e999'),
    "long seed": json.dumps(manifest()).replace('"seed": 3', '"seed": ' + "9" * 4000),
    "longer seed": json.dumps(manifest()).replace('"seed": 3', '"seed": ' + "9" * 10**5),
    "seed of text": json.dumps(manifest(seed="3")),
    "true seed": json.dumps(manifest(seed=True)),
    "no seed": json.dumps({"format": 1, "settings": {}}),
    "output 5": json.dumps(manifest(settings={"output": 5})),
    "no output": json.dumps(manifest(settings={})),
    "shard of text": json.dumps(manifest(settings={"output": {"shard": "ab"}})),
    "shard of three": json.dumps(manifest(settings={"output": {"shard": [1, 2, 3]}})),
    "shard of nothing": json.dumps(manifest(settings={"output": {"shard": [1, 0]}})),
    "settings with infinity": json.dumps(manifest(settings={"output": {"shard": [1, 1]}, "a": float("inf")})),
    "settings of a list": json.dumps(manifest(settings=[])),
    "deep settings": json.dumps(manifest()).replace(
        '"earlier": []', '"earlier": [' + '{"a":' * 300 + "1" + "}" * 300 + "]"
    ),
    "deeper settings": '{"format": 1, "seed": 1, "settings": ' + '{"a":' * 10**5,
    "deepest": '{"format": ' + "[" * 10**6,
    "earlier of a number": json.dumps(manifest(earlier=7)),
    "earlier of texts": json.dumps(manifest(earlier=["a"])),
    "ending of a list": json.dumps(manifest(ending=[])),
    "ending without rows": json.dumps(manifest(ending={"errors": 0, "bytes": 0})),
    "ending below 0": json.dumps(manifest(ending={"rows": -1, "errors": 0, "bytes": 0})),
    "ending of infinity": json.dumps(manifest(ending={"rows": float("inf"), "errors": 0, "bytes": 0})),
    "sums of nonsense": json.dumps(manifest(ending={"rows": 1, "errors": 0, "bytes": 0, "sums": "xyz"})),
    "true format": json.dumps(manifest(format=True)),
    "format to come": json.dumps(manifest(format=manifests.FORMAT + 1)),
    "endless format": json.dumps(manifest(format=float("nan"))),
    "half of it": json.dumps(manifest())[:40],
    "bytes": b'{"format": 1, "seed": \xff\xfe',
}


@pytest.mark.parametrize(("beside", "force"), [("in.jsonl", False), ("out.jsonl", False), ("out.jsonl", True)])
@pytest.mark.parametrize("content", CRAFTED.values(), ids=list(CRAFTED))
def test_a_crafted_manifest_ends_with_2_and_a_sentence(content, beside, force, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job, "connect", lambda config: FakeClient())
    Path("in.jsonl").write_text('{"prompt": "a"}\n')
    path = Path(f"{beside}.job.json")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = path.read_bytes()
    result = CliRunner().invoke(cli, ["run", "in.jsonl", "out.jsonl", *["--force"] * force])
    if force:
        assert result.exit_code == 0, result.output
        return
    assert result.exit_code == 2, (result.output, result.exception)
    assert str(path) in result.output
    assert len(result.output) < 1000
    assert path.read_bytes() == before


def test_a_setting_of_any_name_is_shown_in_a_few_characters(tmp_path):
    out = tmp_path / "out.jsonl"
    fake_job.run(out, 9, OutputOptions(), until=5)
    path = Path(f"{out}.job.json")
    document = json.loads(path.read_text())
    document["settings"] |= {"\x1b[2J\ud800" + "x" * 5000: "y" * 5000, "model": 5}
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="begun with other settings") as raised:
        fake_job.run(out, 9, OutputOptions())
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 1000


FIELDS = ("format", "seed", "settings", "earlier", "ending", "output", "shard", "rows", "errors", "bytes", "sums")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=3), inner),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_manifest_is_read_or_refused(data):
    """A manifest with any fields and bytes is read, or its problem is reported. A manifest that is read can be used."""
    document = manifest()
    for name in data.draw(st.lists(st.sampled_from(FIELDS), max_size=2)):
        document[name] = data.draw(JSON)
    if data.draw(st.booleans()):
        document["settings"] = {"output": {"shard": [1, 1]}, "more": data.draw(JSON)}
    content = bytearray(json.dumps(document).encode())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        Path(f"{out}.job.json").write_bytes(content)
        found = manifests.read(manifest_of(out))
        assert found is not None
        assert (found.manifest is None) == bool(found.problem)
        for options in (OutputOptions(), OutputOptions(force=True)):
            with contextlib.suppress(ConfigError):
                Output(out, fake_job.SETTINGS, options).close()
        with contextlib.suppress(ConfigError):
            manifests.output_of(out)
