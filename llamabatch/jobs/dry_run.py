"""A job without its engine: every line is read, rendered and tokenized, and nothing is computed or written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from llamabatch.config import EngineConfig
from llamabatch.engine.resolve_config import plan
from llamabatch.engine.validation import check_params
from llamabatch.errors import InputError
from llamabatch.gguf.resolve import resolve as resolve_path
from llamabatch.jobs.feed import Feed, Refused
from llamabatch.jobs.rows import BadRow, Row
from llamabatch.llama.model import Model
from llamabatch.planning.capacity import Plan
from llamabatch.request.logprobs import check_logprobs
from llamabatch.request.request import Request
from llamabatch.sampling.prepared_params import PreparedParamsCache
from llamabatch.utils.histogram import Quantiles

_MOST_ERRORS = 20


class DryRunEngine:
    """What a Feed needs of an engine: the plan, and the vocabulary of the model. It computes nothing."""

    def __init__(self, config: EngineConfig) -> None:
        self.model = Model(resolve_path(config.model))
        try:
            self.plan = plan(config, self.model.path)
        except BaseException:
            self.model.close()
            raise
        self.adapters = [name for name, _ in config.adapters]
        self._prepared_params = PreparedParamsCache(self.model)

    def check(self, request: Request) -> None:
        """What an engine would refuse when it takes the request in. Raises InputError."""
        if request.embed:
            return
        params = request.params
        check_params(params, self.model.n_vocab)
        check_logprobs(params, len(request.prompt_token_ids), self.plan.config.n_ctx, None)
        self._prepared_params.of(params)
        if params.structure is not None:
            self.model.grammars.compile(params.structure).result()

    def close(self) -> None:
        self.model.close()


@dataclass
class DryRun:
    """What a job would do.

    Attributes:
        plan: what the engine would be.
        rows: those that could be run, by task.
        n_bad: rows that could not be run; `errors` are the first of their messages, in order.
        prompt_tokens: of the rows that could be run. most_output_tokens: what they may generate at most; None where a
            row sets no limit.
        lengths: of the prompts, in tokens.
    """

    plan: Plan
    rows: Counter[str] = field(default_factory=Counter)
    n_bad: int = 0
    errors: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    most_output_tokens: int | None = 0
    lengths: Quantiles = field(default_factory=Quantiles)

    @property
    def exit_code(self) -> int:
        return 1 if self.n_bad else 0

    def take(self, row: Row, request: Request) -> None:
        self.rows[row.task] += 1
        n_prompt = len(request.prompt_token_ids)
        self.prompt_tokens += n_prompt
        self.lengths.add(n_prompt)
        if row.task == "embedding" or self.most_output_tokens is None:
            return
        most = row.params.max_tokens
        self.most_output_tokens = None if most is None else self.most_output_tokens + row.params.n_copies * most

    def refuse(self, error: str) -> None:
        self.n_bad += 1
        if len(self.errors) < _MOST_ERRORS:
            self.errors.append(error)

    def document(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "rows": {"by_task": dict(self.rows), "bad": self.n_bad},
            "tokens": {"prompt": self.prompt_tokens, "output_at_most": self.most_output_tokens},
            "prompt_lengths": {f"p{p}": self.lengths.at(p) for p in (50, 95, 100)},
            "plan": {
                "engine": {name: getattr(self.plan.config, name) for name in _TOLD},
                "reasons": dict(self.plan.reasons),
                "memory": self.plan.memory.document(),
            },
            "errors": list(self.errors),
        }

    def describe(self) -> str:
        """Lines for people."""
        tasks = ", ".join(f"{count:,} {task}" for task, count in self.rows.most_common()) or "none"
        lines = [f"rows to run: {tasks}; {self.n_bad:,} bad"]
        if self.rows:
            most = self.most_output_tokens
            output = "no limit" if most is None else f"{most:,} at most"
            longest = ", ".join(f"p{p} {self.lengths.at(p):,.0f}" for p in (50, 95, 100))
            lines.append(f"tokens: {self.prompt_tokens:,} of prompts ({longest}); output: {output}")
        lines += [f"bad: {error}" for error in self.errors]
        if self.n_bad > len(self.errors):
            lines.append(f"bad: and {self.n_bad - len(self.errors):,} more")
        config = self.plan.config
        engine = ", ".join(f"{name} = {getattr(config, name)}" for name in _TOLD)
        return "\n".join([*lines, f"engine: {engine}", self.plan.describe()])


_TOLD = ("strategy", "instances", "n_slots", "n_ctx", "kv", "n_threads", "n_threads_batch")


def dry_run(engine: DryRunEngine, rows: Iterator[Row | BadRow], adapters: Mapping[str, float] | None) -> DryRun:
    """Takes every row as far as its tokens."""
    found = DryRun(engine.plan)
    feed = Feed(engine, rows, 1, engine.plan.config.n_ctx, 0, adapters)
    while not feed.exhausted:
        requests, refused = feed.piece()
        for request in requests:
            row = feed.take(request.request_id)
            try:
                engine.check(request)
            except InputError as error:
                refused.append(Refused(row, str(error)))
            else:
                found.take(row, request)
        for each in sorted(refused, key=lambda each: each.row.number):
            found.refuse(each.message)
    if feed.broken is not None:
        raise feed.broken
    return found
