"""`make test-long`: runs the missing cases of the figures, with their full counts. It may be stopped at any time."""

from __future__ import annotations

import fcntl
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import facts
from tests.long import figures
from tests.long.figures import HERE, ROOT, Figure
from tests.long.state import Outcome, State, publish
from tests.long.workers import Worker

STATE = ROOT / "build" / "test-long.json"
RESULTS = HERE / "results.json"


def run(
    chosen: list[Figure], state: State, *, folder: Path = HERE, jobs: int = 1,
    tell: Callable[[Figure, int, Outcome], None] = lambda figure, number, outcome: None, revision: str = "",
) -> None:  # fmt: skip
    """Runs the missing cases of figures in order, and stores each outcome.

    Args:
        jobs: number of cases that run at once, each in a process of its own.
        tell: called with each outcome after the outcome is stored.
    """
    for figure in chosen:
        numbers: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        outcomes: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
        missing = state.missing(figure)
        n_workers = min(jobs, len(missing))
        for number in [*missing, *[None] * n_workers]:
            numbers.put(number)
        with ExitStack() as stack:
            workers = [stack.enter_context(Worker(figure, folder, revision)) for _ in range(n_workers)]
            for worker in workers:
                threading.Thread(target=_work, args=(worker, numbers, outcomes), daemon=True).start()
            for _ in missing:
                number, outcome = outcomes.get()
                state.record(figure, number, outcome)
                tell(figure, number, outcome)


def _work(
    worker: Worker, numbers: queue.SimpleQueue[int | None], outcomes: queue.SimpleQueue[tuple[int, Outcome]]
) -> None:
    while (number := numbers.get()) is not None:
        outcome = worker.run(number)
        if outcome is None:
            return
        outcomes.put((number, outcome))


@click.command()
@click.option("--only", multiple=True, metavar="NAME", help="This figure alone; may be given several times.")
@click.option("--again", is_flag=True, help="Forget what was run, and run it anew.")
@click.option("--jobs", type=click.IntRange(1, 64), default=1, show_default=True, help="Cases at once.")
@click.option("--list", "listing", is_flag=True, help="Print the figures and how far each is, and run nothing.")
@click.option(
    "--state", "state_file", type=click.Path(path_type=Path), default=STATE, help="Where to keep what was run."
)
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, help="The summary that is committed.")
def main(only: tuple[str, ...], again: bool, jobs: int, listing: bool, state_file: Path, results: Path) -> None:
    """The figures of tests/long with their full counts.

    Each case is kept when it has ended, so that the next run goes on where this one was stopped; failed ones are tried
    again. Exit codes: 0 all hold, 1 some failed, 2 usage, 130 interrupted.
    """
    known = figures.find()
    for name in only:
        if name not in [figure.name for figure in known]:
            raise click.UsageError(f"there is no figure {name!r} (known: {', '.join(f.name for f in known)})")
    chosen = [figure for figure in known if not only or figure.name in only]
    state = State(state_file)
    if listing:
        for figure in chosen:
            outcomes = state.outcomes(figure)
            failed = sum(outcome.error is not None for outcome in outcomes.values())
            click.echo(f"{figure.name}: {len(outcomes)} of {figure.total} run, {failed} failed. {figure.holds}")
        return
    for figure in chosen:
        if not figure.can_run:
            click.echo(
                f"{figure.name} is left out: it needs {figure.needs}, which is not in this environment", err=True
            )
    chosen = [figure for figure in chosen if figure.can_run]
    with _alone(state_file):
        state = State(state_file)
        if again:
            state.forget(chosen)
        try:
            _run_shown(chosen, state, jobs)
        finally:
            _publish(results, chosen, state)
    failed = sum(outcome.error is not None for figure in chosen for outcome in state.outcomes(figure).values())
    sys.exit(1 if failed else 0)


@contextmanager
def _alone(state_file: Path) -> Iterator[None]:
    """Locks the state file. Of two runs with one file, each would overwrite the other's cases."""
    state_file.parent.mkdir(parents=True, exist_ok=True)
    with state_file.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise click.UsageError(f"another run writes {state_file}; this one needs a --state of its own") from None
        yield


def _run_shown(chosen: list[Figure], state: State, jobs: int) -> None:
    """Runs the figures. Shows a bar for each figure on a terminal, and a line for each failure and each figure that is
    done."""
    console = Console(stderr=True)
    columns: Any = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks = {
            figure.name: progress.add_task(
                figure.name, total=figure.total, completed=figure.total - len(state.missing(figure)), start=False
            )
            for figure in chosen
        }

        def tell(figure: Figure, number: int, outcome: Outcome) -> None:
            progress.start_task(tasks[figure.name])
            outcomes = state.outcomes(figure)
            failed = sum(each.error is not None for each in outcomes.values())
            progress.update(tasks[figure.name], completed=len(outcomes))
            if outcome.error is not None:
                console.print(f"{figure.name}, case {number}: {outcome.error}", markup=False, highlight=False)
            if len(outcomes) == figure.total:
                console.print(f"{figure.name}: {figure.total} cases, {failed} failed", markup=False, highlight=False)

        run(chosen, state, jobs=jobs, tell=tell, revision=facts.revision())


def _publish(results: Path, chosen: list[Figure], state: State) -> None:
    described = facts.facts("make test-long")
    machine = {**described["machine"], "versions": described["versions"]}
    publish(results, chosen, state, machine)


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except click.ClickException as problem:
        problem.show()
        sys.exit(problem.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted; the next run goes on from here.", err=True)
        sys.exit(130)
