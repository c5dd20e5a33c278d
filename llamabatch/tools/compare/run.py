"""Runs a whole comparison: the baseline, then each strategy, then each batch size. Only one of them runs at a time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from llamabatch.config import MAX_SLOTS, EngineConfig, with_paths
from llamabatch.engine.resolve_config import plan
from llamabatch.errors import ConfigError, LlamaBatchError
from llamabatch.gguf.resolve import file_bytes, resolve
from llamabatch.llama.library import extra_bufts_safe
from llamabatch.llama.model import Model
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.scheduler.policies import STRATEGIES, has_one_slot
from llamabatch.tools.compare.advice import advise
from llamabatch.tools.compare.measure import BASELINE, Measurement, measure
from llamabatch.tools.compare.report import Report, Row, compared, row, sweep
from llamabatch.tools.machine_facts import MachineFacts
from llamabatch.tools.processes import OtherProcesses, no_child_left
from llamabatch.tools.workload import Workload, load
from llamabatch.utils.checks import choice, integer
from llamabatch.utils.paths import absolute

MAX_ROUNDS = 100


class Progress(Protocol):
    """A receiver of the progress of a comparison."""

    def start(self, label: str, total: int) -> None:
        """Starts the next row. `label`: its name; `total`: its number of requests."""

    def advance(self) -> None:
        """Counts one more request of the current row as done."""

    def end(self, wall_s: float | None, error: str | None) -> None:
        """Ends the row. `wall_s`: the seconds that its requests took; `error`: its error."""


@dataclass(frozen=True)
class Settings:
    """The options of a comparison. The constructor checks them. Raises ConfigError and SamplingError.

    Attributes:
        model: path of a .gguf file, or "tiny".
        prompts: a file (see workload.load); None: the bundled prompts.
        strategies: names of strategies; () means all.
        max_tokens: the maximum number of tokens to generate for each prompt.
        slots: numbers of slots. (): the plan decides. One number: all strategies with several slots use it. Several
            numbers: all strategies use the largest number, and the batched strategy is measured with each number.
        baseline: measure the loop over llama_cpp.Llama, too.
        rounds: measurements of each row; the median counts.
        engine: options of EngineConfig.
    """

    model: str = "tiny"
    prompts: Path | None = None
    strategies: tuple[str, ...] = ()
    max_tokens: int = 64
    slots: tuple[int, ...] = ()
    baseline: bool = True
    rounds: int = 1
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", with_paths({"model": self.model})["model"])
        object.__setattr__(self, "engine", with_paths(self.engine))
        if self.prompts is not None:
            object.__setattr__(self, "prompts", Path(absolute(self.prompts)))
        SamplingParams(max_tokens=self.max_tokens)
        integer(ConfigError, "rounds", self.rounds, 1, MAX_ROUNDS)
        for number in self.slots:
            integer(ConfigError, "slots", number, 1, MAX_SLOTS)
        for name in self.strategies:
            choice(ConfigError, "strategies", name, STRATEGIES)
        for name in self.names:
            self.config(name)  # an invalid option fails before anything runs

    @property
    def names(self) -> tuple[str, ...]:
        """The strategies in the order of their runs."""
        return tuple(dict.fromkeys(self.strategies)) or STRATEGIES

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes to measure one by one; empty if `slots` has fewer than two."""
        sizes = tuple(sorted(set(self.slots)))
        return sizes if len(sizes) > 1 else ()

    def config(self, strategy: str, n_slots: int | None = None) -> EngineConfig:
        """Returns the options of one run."""
        options = {**self.engine, "strategy": strategy}
        if has_one_slot(strategy):
            options["n_slots"] = 1
        elif n_slots is not None or self.slots:
            options["n_slots"] = n_slots or max(self.slots)
        return EngineConfig.from_options(self.model, options)


@dataclass(frozen=True)
class _Job:
    strategy: str
    label: str
    config: EngineConfig


def run(settings: Settings, progress: Progress) -> Report:
    """Measures all rows. If a strategy fails, its row has the error, and the other strategies still run.

    Raises:
        InputError: model, prompts or options are refused.
        SetupError, MemoryPlanError: no engine can run here.
    """
    others = OtherProcesses()
    with no_child_left():
        path = resolve(settings.model)
        config = settings.config("sequential")
        with closing(Model(path, config, vocab_only=True)) as vocabulary:
            n_ctx = plan(config, path).config.n_ctx
            workload = load(settings.prompts, vocabulary, n_ctx)
            model_name = vocabulary.metadata.get("general.name", path.name)
        rows, sized = _measure_all(settings, workload, progress)
        rows = compared(rows, rows)
        return Report(
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            machine=MachineFacts.here(),
            model=model_name,
            model_bytes=file_bytes(path),
            workload=workload,
            max_tokens=settings.max_tokens,
            rows=rows,
            sweep=sweep(compared(sized, rows)) if sized else None,
            advice=advise(rows),
            others=others.use(),
        )


def _measure_all(settings: Settings, workload: Workload, progress: Progress) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Returns the rows of the baseline and the strategies, and the rows of the batch sizes."""
    # extra_bufts="auto" is decided once here, since otherwise each child would decide, and repeat the warning.
    chosen = settings.engine.get("extra_bufts", "auto")
    buffers = ("on" if extra_bufts_safe() else "off") if chosen == "auto" else chosen
    settings = Settings(**{**vars(settings), "engine": {**settings.engine, "extra_bufts": buffers}})
    jobs = [_Job(BASELINE, BASELINE, settings.config("sequential"))] if settings.baseline else []
    jobs += [_Job(name, name, settings.config(name)) for name in settings.names]
    n_strategies = len(jobs)
    jobs += [_Job("batched", f"batched, n_slots = {n}", settings.config("batched", n)) for n in settings.sizes]
    done: list[list[Measurement]] = [[] for _ in jobs]
    errors: dict[int, str] = {}
    for _ in range(settings.rounds):  # each round runs all jobs, so that a slow phase of the machine affects all
        for number, job in enumerate(jobs):
            if number not in errors:
                outcome = _measure(job, workload, settings.max_tokens, progress)
                if isinstance(outcome, str):
                    errors[number] = outcome
                else:
                    done[number].append(outcome)
    rows = tuple(
        Row(job.strategy, n_slots=_requested_slots(job.config), error=errors[number])
        if number in errors
        else row(job.strategy, done[number])
        for number, job in enumerate(jobs)
    )
    return rows[:n_strategies], rows[n_strategies:]


def _measure(job: _Job, workload: Workload, max_tokens: int, progress: Progress) -> Measurement | str:
    progress.start(job.label, len(workload.prompts))
    try:
        measurement = measure(
            job.config,
            workload.prompts,
            max_tokens,
            lambda output: progress.advance(),
            baseline=job.strategy == BASELINE,
        )
    except LlamaBatchError as error:
        progress.end(None, str(error))
        return str(error)
    progress.end(measurement.wall_s, None)
    return measurement


def _requested_slots(config: EngineConfig) -> int:
    return 1 if config.n_slots == "auto" else config.n_slots
