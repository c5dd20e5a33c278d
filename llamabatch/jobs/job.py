"""Runs a job from its inputs to its summary."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path

from llamabatch.chat.named_templates import ON_A_LINE
from llamabatch.client.base import EngineClient
from llamabatch.client.connect import connect
from llamabatch.client.front_client import slots_of
from llamabatch.engine.resolve_config import check_chat_template
from llamabatch.engine.resolve_config import plan as plan_of
from llamabatch.errors import ConfigError, EngineClosedError, InputError, JobStoppedError, LlamaBatchError
from llamabatch.gguf.resolve import resolve
from llamabatch.jobs.dry_run import DryRun, DryRunEngine, dry_run
from llamabatch.jobs.estimate import from_profile, from_sample, measure
from llamabatch.jobs.input import sources
from llamabatch.jobs.input.reader import ReadAhead, Reader
from llamabatch.jobs.input.sources import Source
from llamabatch.jobs.input.total import Total
from llamabatch.jobs.loop import Feed, Loop, Stop
from llamabatch.jobs.output.files import Files
from llamabatch.jobs.output.output import Output
from llamabatch.jobs.output.own_files import all_names
from llamabatch.jobs.output.stream import STDOUT, StreamOutput, open_output
from llamabatch.jobs.progress import JobStatus, Progress, Silent
from llamabatch.jobs.rows import BadRow, Row
from llamabatch.jobs.settings import Settings, identity
from llamabatch.jobs.shared import SharedEngine
from llamabatch.jobs.start_errors import StartErrors
from llamabatch.jobs.stats import Counts
from llamabatch.jobs.summary import Summary
from llamabatch.llama.tuned_load import profile_for
from llamabatch.monitor.energy import EnergyMeter
from llamabatch.monitor.monitor import Monitor
from llamabatch.monitor.prometheus import MetricsFile
from llamabatch.planning.plan import Plan
from llamabatch.request.outputs import FinishReason
from llamabatch.utils.checks import counted, integer, show
from llamabatch.utils.format import duration
from llamabatch.utils.paths import shown

READY = "the engine is ready"  # start of the message at the end of loading

_LOOK_S = 0.5
_MOST_SAMPLE = 10_000


def run(
    settings: Settings,
    progress: Progress | None = None,
    *,
    shared: SharedEngine | None = None,
    stop: Stop | None = None,
) -> Summary:
    """Runs a job to its end, or resumes a job that ended early.

    Ctrl-C, SIGTERM and SIGHUP end the job cleanly if the main thread runs it. Other threads do not handle signals.

    Args:
        progress: gets messages and the state of the job; None: both are dropped.
        shared: an engine with the model and the options of `settings`, which also serves other requests; None: the job
            starts its own engine.
        stop: its method `request` ends the job from any thread, as a signal does; None: only signals end the job.

    Raises:
        InputError: an input cannot be read, the output belongs to another job, or an option is wrong.
        JobStoppedError: the first rows all end with the same error; see Settings.max_start_errors.
        ModelFileError, MemoryPlanError, SetupError, EngineError: as for LLM.
        EngineClosedError: the engine died too often. Finished rows are written, and the next run resumes the job.
        OutputError: the output cannot be written. The next run resumes the job.
        JobInterrupted: a signal or a stop request ended the job.
    """
    stop = Stop() if stop is None else stop  # `stop or Stop()` is wrong: a Stop is false until it is requested
    job = _Job(settings, progress or Silent(), stop, shared)
    with stop.listening():
        try:
            summary = job.run()
        except KeyboardInterrupt:
            summary = job.summary()
        except JobStoppedError:
            raise  # no row was written, so there is no summary to show
        except LlamaBatchError:
            job.say_summary()
            raise
    if summary.signum is not None:
        raise JobInterrupted(summary)
    return summary


def preview(settings: Settings, n_sample: int = 0) -> DryRun:
    """Returns the report of a dry run: every line is read, rendered and tokenized. The output is not touched.

    Args:
        n_sample: the number of rows to run in order to measure the time and energy of the job. The texts of these rows
            are dropped. 0: no row is run, and no weights are loaded.

    Raises:
        InputError and others: the errors that `run` raises before it computes a row, except errors of the output.
    """
    integer(ConfigError, "sample", n_sample, 0, _MOST_SAMPLE)
    inputs = _find_inputs(settings)
    rows = Reader(inputs, settings.reading, settings.taken)
    _check_template(settings, inputs, rows)
    with contextlib.closing(DryRunEngine(settings.config)) as engine, contextlib.closing(rows):
        report = dry_run(engine, rows, settings.adapters, n_sample)
    config, price = report.plan.config, settings.price_per_hour
    if report.sample:
        report.measured = measure(settings.config, report.sample, settings.seed or 0, settings.adapters)
        n_rows, most = sum(report.rows.values()), report.most_output_tokens
        report.estimate = from_sample(report.measured, n_rows, report.prompt_tokens, most, price)
    else:
        profile = profile_for(resolve(settings.config.model), settings.config)
        report.estimate = from_profile(profile, slots_of(config), config.instances, report.most_output_tokens, price)
    return report


class JobInterrupted(KeyboardInterrupt):
    """The error of a job that a signal or a stop request ended. Finished rows are written, and the job can be resumed.

    Attributes:
        summary: the summary of the finished rows.
    """

    def __init__(self, summary: Summary) -> None:
        super().__init__("the job was interrupted; the same job goes on from there")
        self.summary = summary


class _Job:
    """One run of a job; see the function `run`."""

    def __init__(self, settings: Settings, progress: Progress, stop: Stop, shared: SharedEngine | None = None) -> None:
        self._settings = settings
        self._shared = shared
        self._config = settings.config
        self._progress = progress
        self._stop = stop
        self._counts = Counts()
        self._status = JobStatus(self._counts)
        self._load_s = self._run_s = 0.0
        self._energy_j: float | None = None
        self._plan: Plan | None = None
        model = os.path.basename(self._config.model)
        self._metrics = settings.metrics_file and MetricsFile(settings.metrics_file, model)

    def run(self) -> Summary:
        settings = self._settings
        with contextlib.ExitStack() as stack:
            inputs = _find_inputs(settings)
            read_line = None if self._shared is None else self._shared.read_line
            # The reader is made before the output, so that a usage error leaves no output behind.
            reader = Reader(inputs, settings.reading, settings.taken, read_line)
            if self._shared is None:
                _check_template(settings, inputs, reader)
            stack.enter_context(contextlib.closing(reader))
            output = stack.enter_context(contextlib.closing(self._open_output(inputs, reader)))
            self._counts.done_before, self._counts.failed_before = output.n_before, output.n_errors_before
            if output.finished:
                self._progress.say(f"{shown(settings.output)} is complete: {counted(output.n_before, 'row')}")
                return self.summary()
            if output.resumed:
                done = f"{output.n_before:,} {'row is' if output.n_before == 1 else 'rows are'} done"
                self._progress.say(f"{shown(settings.output)} is continued: {done}")
            form = settings.reading.params.structure
            if form is not None and form.not_held:
                self._progress.say(f"the outputs need not follow these parts of the schema: {', '.join(form.not_held)}")
            reader.skip(output.is_done)
            # Errors of a stream are not held back, because a program at the other end may wait for each answer.
            holds = not any(source.is_stream for source in inputs) and output.n_before == output.n_errors_before
            start_errors = StartErrors(output, settings.max_start_errors if holds else 0)
            rows = start_errors.watched(reader)
            first = self._first_good_row(rows, start_errors)
            if first is None:
                return self._end_without_engine(output, start_errors)
            client = self._client(stack)
            self._plan = client.plan
            self._compute(client, output, start_errors, reader, chain([first], rows), inputs)
            if form is not None and (n_cut := self._counts.reasons[FinishReason.LENGTH.value]):
                self._progress.say(
                    f"{counted(n_cut, 'answer')} reached max_tokens or n_ctx before the structure was complete"
                )
        return self.summary()

    def _client(self, stack: contextlib.ExitStack) -> EngineClient:
        """Returns the client of the engine. The stack closes the client if the job started the engine."""
        if self._shared is not None:
            return self._shared.client
        start = time.perf_counter()
        client = connect(self._config)
        stack.callback(client.close)
        self._load_s = time.perf_counter() - start
        self._progress.say(f"{READY} after {duration(self._load_s)}: {_describe(client.plan)}")
        return client

    def _open_output(self, inputs: list[Source], reader: Reader) -> Output | StreamOutput:
        settings = self._settings
        files = Files(self._progress.say, stopped=lambda: self._stop)
        check_ids = partial(_check_ids, shown(settings.output), inputs, reader)
        return open_output(settings.output, partial(identity, settings, inputs), settings.writing, files, check_ids)

    def _first_good_row(self, rows: Iterator[Row | BadRow], sink: StartErrors) -> Row | None:
        """Writes the bad rows before the first good row, and returns the good row; None: there is no good row."""
        start = time.perf_counter()
        row = next(rows, None)
        if isinstance(row, Row):
            return row
        if self._shared is None:
            plan_of(self._config, resolve(self._config.model))  # raises the error that the engine would raise
        while isinstance(row, BadRow):
            with self._stop.noted(_do_nothing):
                self._counts.add_error(row.error)
                sink.refused(row, row.error)
            if self._stop:
                sink.flush()
                raise KeyboardInterrupt
            self._run_s = time.perf_counter() - start
            self._progress.show(self._status.snapshot)
            row = next(rows, None)
        return row

    def _end_without_engine(self, output: Output | StreamOutput, start_errors: StartErrors) -> Summary:
        self._progress.say("there is no row to run, so that no engine is started")
        with self._stop.noted(_do_nothing):
            start_errors.flush()
            output.finish()
        return self.summary()

    def _compute(
        self,
        client: EngineClient,
        output: Output | StreamOutput,
        start_errors: StartErrors,
        reader: Reader,
        read: Iterator[Row | BadRow],
        inputs: list[Source],
    ) -> None:
        """Runs all rows and ends the output."""
        settings, config = self._settings, client.plan.config
        is_stream = any(source.is_stream for source in inputs)
        rows: Iterator[Row | BadRow | None] = ReadAhead(read) if is_stream else read
        seed = output.seed if settings.seed is None else settings.seed
        shared = self._shared
        feed = Feed(client, rows, slots_of(config), config.n_ctx, seed, settings.adapters, self._stop.__bool__, shared)
        loop = Loop(client, feed, start_errors, self._counts, self._stop, lambda: self._tick(output), shared)
        with contextlib.ExitStack() as stack:
            # A shared engine gets no monitor and no meter, because both would include other users' requests.
            monitor = stack.enter_context(self._monitor(client)) if shared is None else None
            meter = stack.enter_context(EnergyMeter()) if shared is None else None
            stack.enter_context(self._stop.noted(loop.wake))
            start = time.perf_counter()
            self._status.begin(slots_of(config), Total(inputs, settings.reading), reader)
            try:
                self._run_loop(loop, start_errors)
                if not self._stop:
                    output.finish()
                output.close()
            finally:
                self._run_s = time.perf_counter() - start
                if meter is not None:
                    self._energy_j = meter.read()
                if monitor is not None:
                    monitor.stop()  # takes a last snapshot
                self._status.add_point(at_once=True)

    @staticmethod
    def _run_loop(loop: Loop, start_errors: StartErrors) -> None:
        """Runs the loop, then writes the held errors. Writes them even after EngineClosedError and InputError."""
        try:
            loop.run()
        except JobStoppedError:
            raise
        except (EngineClosedError, InputError):
            start_errors.flush()
            raise
        start_errors.flush()

    def _monitor(self, client: EngineClient) -> Monitor:
        return Monitor(
            client,
            self._status.on_snapshot,
            every_s=_LOOK_S,
            metrics_file=self._metrics or None,
            publish=True,
            title=f"run {shown(self._settings.output)} · {client.model.path.name}",
            job=self._status.document,
        )

    def _tick(self, output: Output | StreamOutput) -> None:
        self._status.add_point()
        self._progress.show(self._status.snapshot)
        output.sync_if_due()

    def say_summary(self) -> None:
        """Shows the summary before an error ends the job, if there are finished rows."""
        if self._counts.ok or self._counts.failed:
            self._progress.say(self.summary().describe())

    def summary(self) -> Summary:
        """Returns the summary of the rows so far."""
        config = None if self._plan is None else self._plan.config
        return Summary(
            shown(self._settings.output),
            self._counts,
            self._status.timeline,
            self._load_s,
            self._run_s,
            os.path.basename(self._config.model if config is None else config.model),
            self._config.strategy if config is None else config.strategy,
            0 if config is None else slots_of(config),
            1 if config is None else config.instances,
            restarts=self._status.stats.restarts,
            energy_j=self._energy_j,
            price_per_hour=self._settings.price_per_hour,
            signum=self._stop.signum,
        )


def _find_inputs(settings: Settings) -> list[Source]:
    own = set() if settings.output == STDOUT else all_names(Path(settings.output))
    return sources.find(settings.inputs, sources.own_stdin(settings.inputs), without=own)


def _check_ids(output: str, inputs: list[Source], reader: Reader, ids: Mapping[int, str]) -> None:
    """Raises ConfigError if a row and the finished row of the same number have different ids.

    In this case the inputs have changed: some rows would be computed twice, and some never. Streams are not checked,
    because they cannot be read twice.
    """
    if not ids or any(source.is_stream for source in inputs):
        return
    last = max(ids)
    with contextlib.closing(reader.again()) as rows:
        for row in rows:
            done = ids.get(row.number)
            if done is not None and row.id is not None and str(row.id) != done:
                raise ConfigError(
                    f"row {row.number} of the inputs has the id {show(str(row.id))}, but row {row.number} of {output} "
                    f"has the id {show(done)}: rows have moved; some would come twice and others never. Restore "
                    "the inputs, or give the output another name"
                )
            if row.number >= last:
                break


def _check_template(settings: Settings, inputs: list[Source], reader: Reader) -> None:
    """Raises ConfigError if the job begins with a conversation and the model has no chat template.

    Without a template, every conversation would fail. The first row of a stream cannot be read twice. So a job with a
    stream is checked only if --chat is given.
    """
    if settings.reading.chat_template is not None:
        return
    if any(source.is_stream for source in inputs):
        begins_with = settings.reading.task
    else:
        with contextlib.closing(reader.again()) as rows:
            begins_with = next((row.task for row in rows if isinstance(row, Row)), "completion")
    if begins_with == "chat":
        check_chat_template(settings.config, ON_A_LINE)


def _do_nothing() -> None: ...


def _describe(plan: Plan) -> str:
    config = plan.config
    n, slots = config.instances, slots_of(config)
    engines = f" in {n} engines" if n > 1 else ""
    return f"{config.strategy}, {counted(slots, 'slot')}{engines}, up to {config.n_ctx:,} tokens a row"
