"""`make test-all`: runs the parts of the tests that have not passed since a change that touches them.

Parts that have passed are remembered in build/test-all.json, so a stopped run can be continued by the next one.
Failed tests are not repeated. A test that takes more than a second fails its part, unless tests/gate/slow.txt has it.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from benchmarks import facts
from tests.all.inputs import ROOT
from tests.all.parts import ALL, Part
from tests.gate import marks
from tests.gate.run import WORKERS, measured, need_all_cores
from tests.memory import Memory

MEMORY = ROOT / "build" / "test-all.json"


def _remember(part: Part, inputs: str, seconds: float) -> None:
    passed = {"inputs": inputs, "commit": facts.revision(), "seconds": round(seconds)}
    Memory(MEMORY).remember(part.name, passed)


def _passed(part: Part) -> dict[str, Any]:
    """Returns the inputs, commit and seconds of the run in which the part passed; empty if it has not passed."""
    return Memory(MEMORY).get(part.name) or {}


def _is_due(part: Part) -> bool:
    return bool(_passed(part).get("inputs") != part.inputs())


def _run(part: Part) -> bool:
    """Runs the tests of a part. Tests that need all cores run last, one at a time. Returns True if all passed."""
    inputs, start, files = part.inputs(), time.monotonic(), part.tests()
    code, seconds = measured([*WORKERS, "-m", "not alone", *files])
    if code == 0 and (alone := need_all_cores(files)):
        code, of_alone = measured(["-m", "alone", *alone])
        seconds |= of_alone
    if code != 0:
        return False
    if too_long := _too_long(seconds):
        for nodeid, took in too_long.items():
            click.echo(
                f"{nodeid} took {took:.1f} s: make it shorter, or write it into {marks.FILE.name}: make test-seconds"
            )
        return False
    _remember(part, inputs, time.monotonic() - start)
    return True


def _too_long(seconds: dict[str, float]) -> dict[str, float]:
    """Returns the tests that take longer than a second and are not in slow.txt, with their seconds.

    Another program may have slowed a test down, so each of these tests is measured twice more, one at a time, and its
    shortest time counts. On a slower CPU than that of slow.txt, the limit is longer.
    """
    limit = marks.LIMIT_S * max(1.0, marks.yardstick_s() / marks.YARDSTICK_S)
    long = {nodeid: took for nodeid, took in seconds.items() if took > limit and not marks.is_slow(nodeid)}
    for _ in range(2):
        if long:
            again = measured(list(long))[1]
            long = {nodeid: min(took, again.get(nodeid, took)) for nodeid, took in long.items()}
            long = {nodeid: took for nodeid, took in long.items() if took > limit}
    return long


@click.command()
@click.argument("names", nargs=-1, metavar="[PART]...")
@click.option("--due", is_flag=True, help="List the parts that have not passed since a change that touches them.")
@click.option("--list", "listing", is_flag=True, help="List all parts, and the commits on which they passed.")
def main(names: tuple[str, ...], due: bool, listing: bool) -> None:
    """Runs the PARTs, or else those that are due. Exit codes: 0 all passed, 1 one failed, 2 usage."""
    known = {part.name: part for part in ALL}
    for name in names:
        if name not in known:
            raise click.UsageError(f"there is no part {name!r} (known: {', '.join(known)})")
    chosen = [known[name] for name in names or known]
    due_now = [part for part in chosen if _is_due(part)]
    if due or listing:
        for part in due_now if due else chosen:
            passed = _passed(part)
            said = f"passed on {passed['commit']} in {passed['seconds']} s" if passed else "has not passed"
            click.echo(f"{part.name}: {len(part.tests())} files, {said}{', due' if part in due_now else ''}")
        return
    failed = []
    for part in chosen if names else due_now:
        click.echo(f"--- {part.name}: {len(part.tests())} files")
        if not _run(part):
            failed.append(part.name)
    click.echo(f"failed: {', '.join(failed)}" if failed else "passed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
