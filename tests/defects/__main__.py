"""`make test-defects`: plants each defect in a copy of the checkout, and runs the tests that should catch it.

The gate must catch IN_GATE of the defects, and `make test-all` must catch all. Results are stored in
build/test-defects.json, so a stopped run can be continued. A defect is tried again when its tests, or the files on
which they depend, have changed.
"""

from __future__ import annotations

import hashlib
import os
import queue
import sys
from concurrent.futures import ThreadPoolExecutor

import click

from native_patches.check import cpu_flags
from tests.all import inputs
from tests.defects import Defect, elsewhere, jobs, kernels, scheduler, server
from tests.defects.copies import Copy, Native
from tests.gate.run import NO_TESTS
from tests.memory import Memory

ROOMS = {each.__name__.rpartition(".")[2]: each.DEFECTS for each in (kernels, scheduler, jobs, server, elsewhere)}
IN_GATE = 40
FOLDER = inputs.ROOT / "build" / "defects"
RUNS = {"gate": "not slow", "test-all": "slow"}


def _key(defect: Defect) -> str:
    """Returns a key that changes with the defect, its tests, or the files on which the tests depend."""
    tests = [name for name in inputs.files() if name.endswith(".py") and name.startswith(defect.tests)]
    planted = hashlib.sha256(repr(defect).encode()).hexdigest()
    return f"{planted[:8]} {inputs.digest({*inputs.seen_by(tests), defect.file})[:8]} {defect.what}"


def _caught_by(copy: Copy, defect: Defect) -> str:
    has_run = False
    with copy.planted(defect) as more:
        for name, marked in RUNS.items():
            code, output = copy.pytest(["-x", "-m", marked, *defect.tests], more)
            if code not in (0, NO_TESTS):
                return name
            has_run |= " passed" in output
    if not has_run:
        raise click.ClickException(f"no test of {', '.join(defect.tests)} runs here, with {defect.what!r}")
    return "nobody"


@click.command()
@click.argument("rooms", nargs=-1, metavar="[ROOM]...")
def main(rooms: tuple[str, ...]) -> None:
    """Tries the defects of the ROOMs, or else of all. Exit codes: 0 enough were caught, 1 too few, 2 usage."""
    for room in rooms:
        if room not in ROOMS:
            raise click.UsageError(f"there is no room {room!r} (known: {', '.join(ROOMS)})")
    flags, memory = cpu_flags(), Memory(inputs.ROOT / "build" / "test-defects.json")
    asked = [(room, defect) for room in rooms or ROOMS for defect in ROOMS[room]]
    able = [(room, defect) for room, defect in asked if defect.runs_on(flags)]
    keys = {defect: _key(defect) for _, defect in able}
    due = [defect for _, defect in able if memory.get(keys[defect]) is None]
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    native = Native(FOLDER / "native")
    for number in range(min(len(due), os.cpu_count() or 1)):
        copies.put(Copy(FOLDER / f"copy-{number}", native))
    if due:
        _tests_pass_without(copies, {test for defect in due for test in defect.tests})

    def try_one(defect: Defect) -> None:
        copy = copies.get()
        try:
            by = _caught_by(copy, defect)
        finally:
            copies.put(copy)
        memory.remember(keys[defect], by)
        click.echo(f"{by:9}{defect.file}: {defect.what}")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(try_one, due))
    sys.exit(_report(asked, {defect: memory.get(keys[defect]) for _, defect in able}))


def _tests_pass_without(copies: queue.SimpleQueue[Copy], tests: set[str]) -> None:
    """Raises ClickException if a test fails without a defect: such a test would seem to catch every defect."""
    copy = copies.get()
    code, output = copy.pytest(["-x", *sorted(tests)], {})
    copies.put(copy)
    if code != 0:
        raise click.ClickException(f"the tests fail without a defect:\n{output[-4000:]}")


def _report(asked: list[tuple[str, Defect]], found: dict[Defect, str | None]) -> int:
    """Prints how many defects the gate, test-all and nobody caught in each room. Returns the exit code."""
    click.echo(f"\n{'room':12}{'gate':>6}{'test-all':>10}{'nobody':>8}{'not for this CPU':>18}")
    for room in dict.fromkeys(room for room, _ in asked):
        counts = [found.get(defect, "cpu") for each, defect in asked if each == room]
        click.echo(
            f"{room:12}{counts.count('gate'):6}{counts.count('test-all'):10}{counts.count('nobody'):8}{counts.count('cpu'):18}"
        )
    missed = [defect for defect, by in found.items() if by == "nobody"]
    for defect in missed:
        click.echo(f"nobody caught: {defect.file}: {defect.what}")
    by_gate, wanted = sum(by == "gate" for by in found.values()), round(len(found) * IN_GATE / 60)
    click.echo(f"the gate caught {by_gate} of {len(found)} ({wanted} are wanted), all tests {len(found) - len(missed)}")
    return int(bool(missed) or by_gate < wanted)


if __name__ == "__main__":
    main()
