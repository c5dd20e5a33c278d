"""Cuts a file of a job at each byte of its last three lines. The same command must then finish the job."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

from llamabatch.errors import ConfigError
from llamabatch.jobs.output.output import OutputOptions
from llamabatch.jobs.output.records import RecordOptions
from tests.long.fake_job import check, in_shard, run

HOLDS = (
    "an output, what waits beside it, its checksums, or the manifest, is cut at any byte of its last three lines, in "
    "the middle of a job or after its end: the same command finishes with each row once; a cut manifest is named, and "
    "--force goes on"
)
TOTAL = 6566
QUICK = 100

_ROWS = 23
_CUT = 3  # lines


class Scenario(NamedTuple):
    options: OutputOptions
    until: int | None  # rows of the run before the cut; None: the run was complete


class Case(NamedTuple):
    scenario: int
    suffix: str  # suffix of the file that is cut
    size: int  # bytes of the file that are left


SCENARIOS = (
    Scenario(OutputOptions(), 15),
    Scenario(OutputOptions(), None),
    Scenario(OutputOptions(order="finished", records=RecordOptions(token_ids=True)), 15),
    Scenario(OutputOptions(order="finished"), None),
    Scenario(OutputOptions(shard=(1, 2), records=RecordOptions(shape="openai")), 7),
)


def case(number: int, folder: Path) -> None:
    """Cuts one file of one scenario at one byte, and runs the job again."""
    each = cases()[number]
    assert len(cases()) == TOTAL, f"there are {len(cases())} cases now"
    scenario = SCENARIOS[each.scenario]
    out = folder / "out.jsonl"
    _prepare(scenario, out)
    path = folder / f"out.jsonl{each.suffix}"
    whole = path.read_bytes()
    path.write_bytes(whole[: each.size])
    options = scenario.options
    if each.suffix == ".job.json" and each.size < len(whole) - 1:  # a manifest is whole without its last newline
        with pytest.raises(ConfigError, match=r"out\.jsonl\.job\.json.* cannot be read.*--force"):
            run(out, _ROWS, options)
        options = replace(options, force=True)
    computed = run(out, _ROWS, options)
    lost = whole[each.size :].count(b"\n") if each.suffix != ".job.json" else 0
    if each.suffix == ".sums":  # 4 bytes for each line
        lost = -(-(len(whole) - each.size) // 4)
    before = scenario.until if scenario.until is not None else _ROWS
    left = len(in_shard(options, _ROWS)) - before
    assert left <= len(computed) <= left + lost, (len(computed), lost)  # a lost row may still be in the side file
    check(out, _ROWS, scenario.options)


@cache
def cases() -> list[Case]:
    """Returns all cases in a random order, so that the first ones are a sample."""
    found = []
    for i, scenario in enumerate(SCENARIOS):
        with TemporaryDirectory() as folder:
            out = Path(folder) / "out.jsonl"
            _prepare(scenario, out)
            for path in sorted(out.parent.iterdir()):
                found += [Case(i, path.name[len(out.name) :], size) for size in _sizes(path)]
    random.Random(1).shuffle(found)
    return found


def _sizes(path: Path) -> Iterator[int]:
    lines = path.read_bytes().splitlines(keepends=True)
    end = sum(map(len, lines))
    first = 0 if path.suffix == ".json" else end - sum(map(len, lines[-_CUT:]))
    if path.suffix == ".sums":
        first = max(len(lines[0]), end - 4 * _CUT)
    if path.suffix == ".ahead":
        first = max(first, 20)  # a shorter beginning of the first line could belong to any file
    yield from range(first, end)


def _prepare(scenario: Scenario, out: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secrets.randbits", lambda bits: 2**bits - 1)  # a manifest of the same length each time
        run(out, _ROWS, scenario.options, until=scenario.until, seed=2)
