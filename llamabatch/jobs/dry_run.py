"""The dry run of a job: every line is read, rendered and tokenized; nothing is computed or written."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from llamabatch.config import EngineConfig
from llamabatch.engine.resolve_config import plan
from llamabatch.errors import InputError
from llamabatch.gguf.resolve import resolve as resolve_path
from llamabatch.jobs.estimate import Estimate, Sample
from llamabatch.jobs.loop import Feed, Refused
from llamabatch.jobs.rows import BadRow, Row
from llamabatch.llama.model import Model
from llamabatch.planning.plan import Plan
from llamabatch.request.request import Request
from llamabatch.sampling.prepared_params import PreparedParamsCache
from llamabatch.utils.histogram import Quantiles

_MOST_ERRORS = 20
_SHOWN_OPTIONS = ("strategy", "instances", "n_slots", "n_ctx", "kv", "n_threads", "n_threads_batch")


class DryRunEngine:
    """An engine that computes nothing. The Feed reads the plan and the model's vocabulary from this engine."""

    def __init__(self, config: EngineConfig) -> None:
        self.model = Model(resolve_path(config.model), config, vocab_only=True)
        try:
            self.plan = plan(config, self.model.path)
        except BaseException:
            self.model.close()
            raise
        self.adapters = [name for name, _ in config.adapters]
        self._prepared_params = PreparedParamsCache(self.model)

    def check(self, request: Request) -> None:
        """Raises InputError for bad_words and grammars that an engine would refuse. The Feed checks the rest."""
        if request.embed:
            return
        params = request.params
        self._prepared_params.of(params)
        if params.structure is not None:
            self.model.grammars.compile(params.structure).result()

    def close(self) -> None:
        self.model.close()


@dataclass
class DryRun:
    """The report of a dry run.

    Attributes:
        plan: the plan of the engine that a run would start.
        rows: the number of good rows of each task.
        n_bad: the number of bad rows.
        errors: the first error messages of bad rows, in order.
        prompt_tokens: the number of prompt tokens of all good rows together.
        most_output_tokens: the maximum number of tokens that all good rows together may generate; None: at least one
            row has no limit.
        lengths: the lengths of the prompts in tokens.
        sample: good rows drawn at random, each with the same probability.
        measured: the measurements from a run of the sample; None: the sample was not run.
        estimate: the expected time and cost; None: not computed yet.
    """

    plan: Plan
    rows: Counter[str] = field(default_factory=Counter)
    n_bad: int = 0
    errors: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    most_output_tokens: int | None = 0
    lengths: Quantiles = field(default_factory=Quantiles)
    sample: list[Row] = field(default_factory=list)
    measured: Sample | None = None
    estimate: Estimate | None = None

    @property
    def exit_code(self) -> int:
        return 1 if self.n_bad else 0

    def add(self, row: Row, request: Request) -> None:
        """Counts a good row."""
        self.rows[row.task] += 1
        n_prompt = len(request.prompt_token_ids)
        self.prompt_tokens += n_prompt
        self.lengths.add(n_prompt)
        if row.task == "embedding" or self.most_output_tokens is None:
            return
        most = row.params.max_tokens
        self.most_output_tokens = None if most is None else self.most_output_tokens + row.params.n_copies * most

    def add_error(self, error: str) -> None:
        """Counts a bad row."""
        self.n_bad += 1
        if len(self.errors) < _MOST_ERRORS:
            self.errors.append(error)

    def document(self) -> dict[str, Any]:
        """Returns the report as plain values for JSON."""
        return {
            "rows": {"by_task": dict(self.rows), "bad": self.n_bad},
            "tokens": {"prompt": self.prompt_tokens, "output_at_most": self.most_output_tokens},
            "sample": None if self.measured is None else self.measured.document(),
            "estimate": None if self.estimate is None else self.estimate.document(),
            "prompt_lengths": {f"p{p}": self.lengths.at(p) for p in (50, 95, 100)},
            "plan": {
                "engine": {name: getattr(self.plan.config, name) for name in _SHOWN_OPTIONS},
                "reasons": dict(self.plan.reasons),
                "memory": self.plan.memory.document(),
            },
            "errors": list(self.errors),
        }

    def describe(self) -> str:
        """Returns the report as lines of text."""
        tasks = ", ".join(f"{count:,} {task}" for task, count in self.rows.most_common()) or "none"
        lines = [f"rows to run: {tasks}; {self.n_bad:,} bad"]
        if self.rows:
            most = self.most_output_tokens
            output = "no limit" if most is None else f"{most:,} at most"
            longest = ", ".join(f"p{p} {self.lengths.at(p):,.0f}" for p in (50, 95, 100))
            lines.append(f"tokens: {self.prompt_tokens:,} of prompts ({longest}); output: {output}")
            lines += [] if self.estimate is None else self.estimate.describe()
        lines += [f"bad: {error}" for error in self.errors]
        if self.n_bad > len(self.errors):
            lines.append(f"bad: and {self.n_bad - len(self.errors):,} more")
        config = self.plan.config
        engine = ", ".join(f"{name} = {getattr(config, name)}" for name in _SHOWN_OPTIONS)
        return "\n".join([*lines, f"engine: {engine}", self.plan.describe()])


def dry_run(
    engine: DryRunEngine, rows: Iterator[Row | BadRow], adapters: Mapping[str, float] | None, n_sample: int = 0
) -> DryRun:
    """Reads, renders and tokenizes all rows, and returns the report.

    Args:
        n_sample: the number of rows to draw at random (reservoir sampling, Vitter's algorithm R). The seed is fixed, so
            the same inputs give the same sample.
    """
    report = DryRun(engine.plan)
    draw, n_good = random.Random(0), 0
    feed = Feed(engine, rows, 1, engine.plan.config.n_ctx, 0, adapters)
    while not feed.exhausted:
        requests, refused = feed.next_requests()
        for request in requests:
            row = feed.pop(request.request_id)
            try:
                engine.check(request)
            except InputError as error:
                refused.append(Refused(row, str(error)))
            else:
                report.add(row, request)
                n_good += 1
                if len(report.sample) < n_sample:
                    report.sample.append(row)
                elif n_sample and (at := draw.randrange(n_good)) < n_sample:
                    report.sample[at] = row
        for each in sorted(refused, key=lambda each: each.row.number):
            report.add_error(each.message)
    if feed.input_error is not None:
        raise feed.input_error
    return report
