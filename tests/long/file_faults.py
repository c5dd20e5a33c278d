"""Every file operation of a job fails once, in every way. The job says so, and the same command then finishes."""

from __future__ import annotations

import errno
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from llamabatch.errors import OutputError
from llamabatch.jobs.output import journal
from llamabatch.jobs.output.output import OutputOptions
from llamabatch.jobs.output.records import RecordOptions
from tests.long.fake_job import FaultyFiles, Killed, check, check_beside, in_shard, is_bad, run

HOLDS = (
    "the k-th open, write, fsync, rename, link, truncate or remove of a job fails, for every k: an error or a full "
    "disk stops it with a message, a full disk that gets room lets it go on, an interrupted call or a short write is "
    "not noticed, and after it, as after a kill there, the same command finishes with each row once, at most one of "
    "them computed twice"
)
TOTAL = 4802
QUICK = 120

_ROWS = 13
_FULL = (errno.ENOSPC, errno.EDQUOT)
_WAITS = ("open", "write", "rename", "link", "truncate")  # the job waits if one of these finds the disk full


class Scenario(NamedTuple):
    """A job, and the part of it that was done before the run that fails."""

    options: OutputOptions
    before: str = ""  # "half": a run that ended in the middle of a line; "whole": one with rows that failed
    name: str = "out.jsonl"
    small: bool = False  # the side file is rewritten all the time


class Case(NamedTuple):
    scenario: int
    what: str
    k: int
    fault: int | str
    lasting: bool = False
    patience_s: float = 0.0


SCENARIOS = (
    Scenario(OutputOptions(sync_s=0.0)),
    Scenario(OutputOptions(sync_s=0.0), small=True),
    Scenario(OutputOptions(order="finished", sync_s=0.0)),
    Scenario(OutputOptions(shard=(2, 3), sync_s=0.0, records=RecordOptions(shape="openai"))),
    Scenario(OutputOptions(sync_s=0.0), before="half"),
    Scenario(OutputOptions(order="finished", sync_s=0.0), before="half"),
    Scenario(OutputOptions(retry_errors=True, sync_s=0.0), before="whole"),
    Scenario(OutputOptions(order="finished", retry_errors=True, sync_s=0.0), before="whole"),
    Scenario(OutputOptions(sync_s=0.0, records=RecordOptions(shape="flat")), name="out.parquet"),
    Scenario(OutputOptions(retry_errors=True, sync_s=0.0), before="whole", name="out.parquet"),
)


def case(number: int, folder: Path) -> None:
    """Lets one call of one scenario fail in one way."""
    each = cases()[number]
    assert len(cases()) == TOTAL, f"there are {len(cases())} cases now"
    scenario = SCENARIOS[each.scenario]
    out = folder / scenario.name
    _prepare(scenario, out)
    files = FaultyFiles(each.what, each.k, each.fault, lasting=each.lasting, patience_s=each.patience_s)
    computed: list[int] = []
    stopped = _fails(scenario, out, files, computed)
    assert stopped == _must_stop(each), f"{each}: stopped is {stopped}, messages {files.messages}"
    if each.patience_s and not stopped:
        assert [re.sub(".*(no room|room again).*", r"\1", each, flags=re.S) for each in files.messages] == [
            "no room",
            "room again",
        ], files.messages
    else:
        assert not files.messages
    if stopped:
        _run(scenario, out, FaultyFiles(), computed)
    if scenario.before == "whole":
        assert all(_failed(number) or is_bad(number) for number in computed), f"{each}: good rows are done again"
    else:
        again = len(computed) - len(set(computed))
        assert again <= 1, f"{each}: computed twice: {again}"
    _check(scenario, out)


@cache
def cases() -> list[Case]:
    """Returns every way in which every call of each scenario can fail. The order is random, so that the first cases are
    a sample."""
    found = []
    for i, scenario in enumerate(SCENARIOS):
        with TemporaryDirectory() as folder:
            out = Path(folder) / scenario.name
            _prepare(scenario, out)
            files = FaultyFiles()
            _run(scenario, out, files, [])
        for what in sorted(set(files.calls)):
            for k in range(1, files.calls.count(what) + 1):
                found += [Case(i, what, k, *ways) for ways in _ways(what)]
    random.Random(1).shuffle(found)
    return found


def _ways(what: str) -> Iterator[tuple[int | str, bool, float]]:
    if what == "unlock":  # whether the lock's file is removed does not matter
        yield from (("killed before", False, 0.0), ("killed after", False, 0.0))
        return
    yield errno.EIO, False, 0.0
    yield errno.EINTR, False, 0.0
    yield from (("killed before", False, 0.0), ("killed after", False, 0.0))
    for full in _FULL:
        yield full, True, 0.0
        if what in _WAITS:
            yield full, False, 60.0
    if what == "write":
        yield from (("short", False, 0.0), ("killed amid", False, 0.0))


def _must_stop(each: Case) -> bool:
    return each.fault not in (errno.EINTR, "short") and not (each.patience_s and each.what in _WAITS)


def _prepare(scenario: Scenario, out: Path) -> None:
    plain = scenario.options.__class__(scenario.options.order, scenario.options.shard, scenario.options.records)
    if scenario.before == "half":
        run(out, _ROWS, plain, until=7, seed=3)
        with out.open("ab") as file:
            file.write('{"row": 5, "id": "é'.encode()[:-1])
    elif scenario.before == "whole":
        run(out, _ROWS, plain, failing=_failed)


def _failed(number: int) -> bool:
    return number % 4 == 1


def _run(scenario: Scenario, out: Path, files: FaultyFiles, computed: list[int]) -> None:
    least, journal._LEAST_GARBAGE = journal._LEAST_GARBAGE, 0 if scenario.small else 2**20
    try:
        run(out, _ROWS, scenario.options, files, computed=computed)
    finally:
        journal._LEAST_GARBAGE = least


def _fails(scenario: Scenario, out: Path, files: FaultyFiles, computed: list[int]) -> bool:
    """Runs the scenario, and returns True if it ended early. A message must name the error, the file and the cure."""
    message = None
    try:
        _run(scenario, out, files, computed)
    except Killed:
        return True
    except OutputError as error:
        message = str(error)
    assert message is None or re.search(rf"{out.parent}.*: \w+ failed: .*run the same command again", message), message
    return message is not None


def _check(scenario: Scenario, out: Path) -> None:
    if out.suffix != ".parquet":
        check(out, _ROWS, scenario.options)
        return
    import pyarrow.parquet as pq

    found = pq.read_table(out).to_pylist()
    assert [row["row"] for row in found] == in_shard(scenario.options, _ROWS)
    check_beside(out)
