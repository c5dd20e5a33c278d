"""Jobs with table and compressed outputs are killed at random file operations until they are done."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

from llamabatch.jobs.output.output import Output, OutputOptions
from llamabatch.jobs.output.records import RecordOptions, record, refusal
from llamabatch.jobs.rows import BadRow, Row
from tests.long import fake_job
from tests.long.fake_job import SETTINGS, FaultyFiles, Killed

HOLDS = (
    "an output of each kind (.jsonl, .csv and .tsv, plain, .gz and .zst, .parquet), killed at random calls until it is "
    "done, and killed again while its failed rows are retried, has the bytes of a run without a kill"
)
TOTAL = 100
QUICK = 16

NAMES = ("out.csv", "out.jsonl.gz", "out.csv.zst", "out.parquet", "out.jsonl.zst", "out.tsv", "out.csv.gz", "out.jsonl")
N_ROWS = 40
_MOST_RUNS = 400
_FAULTS = ("killed before", "killed amid", "killed after")


def case(number: int, folder: Path) -> None:
    """Writes one kind of output. Half of the cases have flat rows with kept columns and fields of answers; the others
    have OpenAI's format."""
    rng = random.Random(number)
    name = NAMES[number % len(NAMES)]
    shape = "flat" if number // len(NAMES) % 2 == 0 else "openai"
    records = RecordOptions(shape=shape, **({"answer": "said", "parse": ("label",)} if shape == "flat" else {}))
    (folder / "whole").mkdir()
    (folder / "killed").mkdir()
    whole, out = folder / "whole" / name, folder / "killed" / name
    _run(whole, OutputOptions(records=records), FaultyFiles(), failing=False)
    for failing, retry in ((True, False), (False, True)):
        options = OutputOptions(records=records, sync_s=0.0, retry_errors=retry)
        for _ in range(_MOST_RUNS):
            fault = rng.choice(_FAULTS)
            files = FaultyFiles("write" if fault == "killed amid" else None, rng.randint(1, 150), fault)
            with contextlib.suppress(Killed):
                _run(out, options, files, failing)
                break
        else:
            raise AssertionError(f"not done after {_MOST_RUNS} kills")
        _run(out, options, FaultyFiles(), failing)
    assert out.read_bytes() == whole.read_bytes(), name
    fake_job.check_beside(out)
    before = out.stat()
    assert _run(out, OutputOptions(records=records), FaultyFiles(), failing=False) == 0
    assert out.stat() == before


def _run(out: Path, options: OutputOptions, files: FaultyFiles, failing: bool) -> int:
    """Runs the job once, and returns the number of computed rows. Every fifth row fails if `failing`."""
    n = 0
    with Output(out, SETTINGS, options, files) as output:
        due = [i for i in range(N_ROWS) if not output.is_done(i)]
        random.Random(len(due)).shuffle(due)
        for i in due:
            output.write(i, _record(i, options.records, failing and i % 5 == 3))
            n += 1
        if not output.finished:
            output.finish()
    return n


def _record(number: int, options: RecordOptions, failing: bool) -> dict[str, Any]:
    """Returns a record with cells of every kind: separators, quotes, line ends, numbers, lists, null, both types of
    ids."""
    row, output = fake_job.result(number, failing)
    kept = {"n": number, "share": number / 7, "tags": ["a,b", {"c": None}], "mixed": number if number % 2 else "x\r\ny"}
    kept["sometimes"] = None if number % 3 else f'"{number}", yes'
    identity = number if number % 2 else row.id
    if fake_job.is_bad(number) and failing:
        return refusal(BadRow(number, identity, "it is no row", kept=kept), "it is no row", options)
    made = Row(number, identity, "completion", "say", openai=options.shape == "openai", kept=kept)
    found = record(made, output, options)
    if options.shape == "flat" and not failing:
        found["label"] = ("good", "bad", None)[number % 3]
    return found
