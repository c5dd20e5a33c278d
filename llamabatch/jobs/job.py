"""A job from its inputs to its summary."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from llamabatch.client.base import EngineClient
from llamabatch.client.connect import connect
from llamabatch.client.middleware import slots_of
from llamabatch.engine.resolve_config import plan as plan_of
from llamabatch.errors import LlamaBatchError
from llamabatch.gguf.resolve import resolve
from llamabatch.jobs.dry_run import DryRun, DryRunEngine, dry_run
from llamabatch.jobs.feed import Feed, ReadAhead
from llamabatch.jobs.input import sources
from llamabatch.jobs.input.reader import Reader
from llamabatch.jobs.input.sources import Source, Total
from llamabatch.jobs.loop import Loop, Stop
from llamabatch.jobs.output.files import Files
from llamabatch.jobs.output.manifest import look, model_identity, path_of
from llamabatch.jobs.output.output import Output
from llamabatch.jobs.output.stream import STDOUT, StreamOutput, open_output
from llamabatch.jobs.progress import JobStatus, Progress, Silent
from llamabatch.jobs.rows import BadRow, Row
from llamabatch.jobs.settings import Settings
from llamabatch.jobs.stats import Counts
from llamabatch.jobs.summary import Summary
from llamabatch.monitor.energy import EnergyMeter
from llamabatch.monitor.monitor import Monitor
from llamabatch.monitor.prometheus import MetricsFile
from llamabatch.planning.capacity import Plan
from llamabatch.utils.checks import counted
from llamabatch.utils.format import duration
from llamabatch.utils.paths import shown

_LOOK_S = 0.5

Target = Output | StreamOutput


class JobInterrupted(KeyboardInterrupt):
    """A signal ended the job. What had finished is written, and the same job goes on from there.

    Attributes:
        summary: of what was done.
    """

    def __init__(self, summary: Summary) -> None:
        super().__init__("the job was interrupted; the same job goes on from there")
        self.summary = summary


def run(settings: Settings, progress: Progress | None = None) -> Summary:
    """Runs a job to its end, or goes on with one that was ended before.

    While it runs, Ctrl-C, SIGTERM and SIGHUP end it in good order (in the main thread; in others signals are not its
    to take).

    Args:
        progress: who is told how it stands; None: nobody.

    Raises:
        InputError: an input cannot be read, the output is of another job, or an option is wrong.
        ModelFileError, MemoryPlanError, SetupError, EngineError: as LLM.
        EngineClosedError: the engine died too often. OutputError: the output cannot be written. What had finished is
            there, and the same job goes on from it.
        JobInterrupted: a signal came.
    """
    stop = Stop()
    job = _Job(settings, progress or Silent(), stop)
    with stop.listening():
        try:
            summary = job.run()
        except KeyboardInterrupt:
            summary = job.summary()
        except LlamaBatchError:
            job.tell_what_was_done()
            raise
    if summary.signum is not None:
        raise JobInterrupted(summary)
    return summary


def preview(settings: Settings) -> DryRun:
    """What `run` would do, without weights and without touching the output: every line is read, rendered and
    tokenized.

    Raises:
        What `run` raises before it computes anything, but for what is wrong with the output.
    """
    with (
        contextlib.closing(DryRunEngine(settings.config)) as engine,
        contextlib.closing(Reader(_sources(settings), settings.reading)) as rows,
    ):
        return dry_run(engine, rows, settings.adapters)


class _Job:
    """One run; see `run`."""

    def __init__(self, settings: Settings, progress: Progress, stop: Stop) -> None:
        self._settings = settings
        self._config = settings.config
        self._progress = progress
        self._stop = stop
        self._counts = Counts()
        self._standing = JobStatus(self._counts)
        self._load_s = self._run_s = 0.0
        self._energy_j: float | None = None
        self._plan: Plan | None = None
        model = os.path.basename(self._config.model)
        self._metrics = settings.metrics_file and MetricsFile(settings.metrics_file, model)

    def run(self) -> Summary:
        settings = self._settings
        with contextlib.ExitStack() as stack:
            found = _sources(settings)
            # before the output: a usage error leaves none behind
            reader = stack.enter_context(contextlib.closing(Reader(found, settings.reading)))
            output = stack.enter_context(contextlib.closing(self._open(found)))
            self._counts.done_before, self._counts.failed_before = output.n_before, output.n_errors_before
            if output.finished:
                self._progress.say(f"{shown(settings.output)} is complete: {counted(output.n_before, 'row')}")
                return self.summary()
            if output.resumed:
                done = f"{output.n_before:,} {'row is' if output.n_before == 1 else 'rows are'} done"
                self._progress.say(f"{shown(settings.output)} goes on: {done}")
            reader.pass_over(output.is_done)
            first = self._first_to_run(reader, output)
            if first is None:
                return self._end_without_engine(output)
            start = time.perf_counter()
            client = connect(self._config)
            stack.callback(client.close)
            self._plan = client.plan
            self._load_s = time.perf_counter() - start
            self._progress.say(f"the engine is ready after {duration(self._load_s)}: {_engine(client.plan)}")
            self._compute(client, output, reader, first, found)
        return self.summary()

    def _first_to_run(self, reader: Reader, output: Target) -> Row | None:
        """What is read before an engine is started: bad rows go to the output, up to the first good one. None: there
        is none."""
        start = time.perf_counter()
        row = next(reader, None)
        if isinstance(row, Row):
            return row
        plan_of(self._config, resolve(self._config.model))  # what an engine would refuse is refused without one
        while isinstance(row, BadRow):
            with self._stop.noted(_do_nothing):
                self._counts.fail(row.error)
                output.refused(row, row.error)
            if self._stop:
                raise KeyboardInterrupt
            self._run_s = time.perf_counter() - start
            self._progress.show(self._standing.now)
            row = next(reader, None)
        return row

    def _end_without_engine(self, output: Target) -> Summary:
        self._progress.say("there is no row to run, so that no engine is started")
        with self._stop.noted(_do_nothing):
            output.finish()
        return self.summary()

    def tell_what_was_done(self) -> None:
        """Before an error ends it."""
        if self._counts.ok or self._counts.failed:
            self._progress.say(self.summary().describe())

    def summary(self) -> Summary:
        """Of what was done so far."""
        config = None if self._plan is None else self._plan.config
        return Summary(
            shown(self._settings.output),
            self._counts,
            self._standing.timeline,
            self._load_s,
            self._run_s,
            os.path.basename(self._config.model if config is None else config.model),
            self._config.strategy if config is None else config.strategy,
            0 if config is None else slots_of(config),
            1 if config is None else config.instances,
            restarts=self._standing.stats.restarts,
            energy_j=self._energy_j,
            price_per_hour=self._settings.price_per_hour,
            signum=self._stop.signum,
        )

    def _open(self, found: list[Source]) -> Target:
        settings = self._settings
        files = Files(self._progress.say, stopped=lambda: self._stop)
        return open_output(settings.output, identity(settings, found, _known_inputs(settings)), settings.writing, files)

    def _compute(self, client: EngineClient, output: Target, reader: Reader, first: Row, found: list[Source]) -> None:
        """From the first row to run to the last one written."""
        settings, config = self._settings, client.plan.config
        is_stream = any(source.is_stream for source in found)
        read: Iterator[Row | BadRow] = chain([first], reader)
        rows: Iterator[Row | BadRow | None] = ReadAhead(read) if is_stream else read
        seed = output.seed if settings.seed is None else settings.seed
        feed = Feed(client, rows, slots_of(config), config.n_ctx, seed, settings.adapters, self._stop.__bool__)
        loop = Loop(client, feed, output, self._counts, self._stop, lambda: self._tick(output))
        with self._monitor(client) as monitor, EnergyMeter() as meter, self._stop.noted(loop.wake):
            start = time.perf_counter()
            self._standing.begin(slots_of(config), Total(found, settings.reading), reader)
            try:
                loop.run()
                if not self._stop:
                    output.finish()
                output.close()
            finally:
                self._run_s = time.perf_counter() - start
                self._energy_j = meter.read()
                monitor.stop()  # it looks a last time
                self._standing.note(at_once=True)

    def _monitor(self, client: EngineClient) -> Monitor:
        return Monitor(
            client,
            self._standing.take,
            every_s=_LOOK_S,
            metrics_file=self._metrics or None,
            publish=True,
            title=f"run {shown(self._settings.output)} · {client.model.path.name}",
            job=self._standing.job,
        )

    def _tick(self, output: Target) -> None:
        self._standing.note()
        self._progress.show(self._standing.now)
        output.sync_if_due()


def _sources(settings: Settings) -> list[Source]:
    own = set() if settings.output == STDOUT else Output.names(Path(settings.output))
    return sources.find(settings.inputs, _stdin(settings.inputs), without=own)


def _stdin(inputs: tuple[str, ...]) -> BinaryIO | None:
    """A stream of its own: the thread that reads it may still wait when Python ends, and must not hold sys.stdin."""
    if sources.STDIN in inputs:
        with contextlib.suppress(OSError, ValueError):  # no real file behind it
            return open(os.dup(sys.stdin.fileno()), "rb")
    return None


def _known_inputs(settings: Settings) -> object:
    """What the manifest of the output says of its inputs; None: there is none, or none that can be read."""
    if settings.output == STDOUT:
        return None
    found = look(path_of(Path(os.path.realpath(settings.output))))  # the output says what is wrong with it
    return None if found is None or found.manifest is None else found.manifest.settings.get("inputs")


def identity(settings: Settings, found: list[Source], known_inputs: object = None) -> dict[str, Any]:
    """All that decides what the rows of a job are: with another of these, it is another job.

    Args:
        known_inputs: what the output's manifest says of them, of which streams are read as far as it is needed.
    """
    reading = {name: value for name, value in vars(settings.reading).items() if name not in ("params", "shard")}
    engine = {name: getattr(settings.config, name) for name in ("n_ctx", "type_k", "type_v")}
    adapters = {
        name: {**model_identity(resolve(path)), "scale": (settings.adapters or {}).get(name)}
        for name, path in settings.config.adapters
    }
    return {
        "model": model_identity(resolve(settings.model)),
        "inputs": sources.fingerprint(found, known_inputs),
        **reading,
        "params": asdict(settings.reading.params),
        "seed": settings.seed,
        **engine,
        **({"adapters": adapters} if adapters else {}),
    }


def _do_nothing() -> None: ...


def _engine(plan: Plan) -> str:
    config = plan.config
    n, slots = config.instances, slots_of(config)
    engines = f" in {n} engines" if n > 1 else ""
    return f"{config.strategy}, {counted(slots, 'slot')}{engines}, up to {config.n_ctx:,} tokens a row"
