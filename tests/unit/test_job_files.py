"""The files of a job among files that are none of it: nothing of anybody else's is touched, and what happens to its own
is noticed."""

import json
import shutil
from pathlib import Path

import pytest
from jobs_fakes import FakeClient

from llamabatch.jobs import OutputOptions, Settings, job, run
from llamabatch.jobs.records import RecordOptions
from tests.long import fake_job

# what the versions before have left half done; a folder for each format of OUT.job.json, never changed
SAMPLES = Path(__file__).parents[1] / "data"


def sample(tmp_path, name, version=1):
    return Path(shutil.copytree(SAMPLES / f"jobs_format_{version}" / name, tmp_path / name))


HALF_DONE = {
    "input": ("out.jsonl", OutputOptions()),
    "killed": ("out.jsonl", OutputOptions()),
    "finished": ("out.jsonl", OutputOptions(order="finished")),
    "shard": ("out.jsonl", OutputOptions(shard=(2, 3), records=RecordOptions(shape="openai"))),
    "parquet": ("out.parquet", OutputOptions(records=RecordOptions(token_ids=True))),
}


@pytest.mark.parametrize("name", HALF_DONE)
def test_what_the_version_before_left_half_done_is_gone_on_with(name, tmp_path):
    out, options = HALF_DONE[name]
    folder = sample(tmp_path, name)
    computed = fake_job.run(folder / out, 40, options, seed=8)
    due = fake_job.in_shard(options, 40)
    assert len(due) - len(computed) == (9 if name == "shard" else 25)
    if out.endswith(".parquet"):
        table = pytest.importorskip("pyarrow.parquet").read_table(folder / out)
        assert table.column("row").to_pylist() == due
        assert sorted(path.name for path in folder.iterdir()) == [out, f"{out}.job.json"]
    else:
        fake_job.check(folder / out, 40, options)


@pytest.mark.parametrize(("name", "out"), [("ended", "out.jsonl"), ("ended-parquet", "out.parquet")])
def test_what_the_version_before_has_ended_is_known_and_its_errors_are_done_again(name, out, tmp_path):
    folder = sample(tmp_path, name)
    before = (folder / out).read_bytes()
    assert fake_job.run(folder / out, 40, OutputOptions()) == []
    assert (folder / out).read_bytes() == before
    again = fake_job.run(folder / out, 40, OutputOptions(retry_errors=True))
    assert sorted(again) == [n for n in range(40) if n % 7 == 3 or fake_job.is_bad(n)]
    if out.endswith(".jsonl"):
        fake_job.check(folder / out, 40, OutputOptions())


def test_a_command_of_the_version_before_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "connect", lambda config: FakeClient())
    folder = sample(tmp_path, "command")
    monkeypatch.chdir(folder)
    summary = run(Settings("in.jsonl", "out.jsonl", model="model.bin"))
    assert (summary.counts.done_before, summary.counts.ok) == (25, 35)
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [(row["row"], row["id"], row["text"]) for row in rows] == [
        (n, f"row {n}", f"of prompt {n}") for n in range(60)
    ]
