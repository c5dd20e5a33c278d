"""What a job is: one frozen object, checked when it is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llamabatch.checks import boolean, choice, number, show
from llamabatch.config import EngineConfig
from llamabatch.errors import ConfigError
from llamabatch.jobs.rows import ReadOptions

ORDERS = ("input", "finished")
FORMATS = ("auto", "flat", "openai", "parquet")


@dataclass(frozen=True)
class Settings:
    """A job: `llamabatch run` as a value.

    Attributes:
        inputs: files, globs, or "-" for stdin.
        output: a file, or "-" for stdout.
        model: as of LLM.
        reading: how inputs become rows, and the parameters of all of them.
        order: "input": rows come out in the order in which they went in; "finished": as they are done.
        format: "flat", "openai" (results of its batch API), "parquet", or "auto": by the name, and by the line.
        token_ids: tell the ids of the generated tokens.
        times: tell when a row waited, began and ended.
        retry_errors: run rows again that stand in the output with an error.
        force: go on with an output of another model, other inputs or parameters.
        adapters: {name: scale} of those in engine["adapters"]; for all rows.
        price_per_hour: of the machine, for the summary.
        engine: options of EngineConfig by name; llama.cpp always runs in a child process.

    Raises:
        ConfigError: a value is out of range.
    """

    inputs: tuple[str, ...]
    output: str
    model: str = "tiny"
    reading: ReadOptions = ReadOptions()
    order: str = "input"
    format: str = "auto"
    token_ids: bool = False
    times: bool = False
    retry_errors: bool = False
    force: bool = False
    adapters: Mapping[str, float] | None = None
    price_per_hour: float | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.inputs, (str, os.PathLike)):  # what is meant is clear
            object.__setattr__(self, "inputs", (os.fspath(self.inputs),))
        if not self.inputs:
            raise ConfigError("inputs is empty; name a file, a glob of files, or '-' for stdin")
        object.__setattr__(self, "inputs", tuple(os.fspath(each) for each in self.inputs))
        object.__setattr__(self, "output", os.fspath(self.output))
        if not self.output:
            raise ConfigError(f"output is {show(self.output)}; give a file, or '-' for stdout")
        choice(ConfigError, "order", self.order, ORDERS)
        choice(ConfigError, "format", self.format, FORMATS)
        for name in ("token_ids", "times", "retry_errors", "force"):
            boolean(ConfigError, name, getattr(self, name))
        if self.price_per_hour is not None:
            number(ConfigError, "price_per_hour", self.price_per_hour, 0.0, 1e9)
        _ = self.config

    @property
    def config(self) -> EngineConfig:
        """The options of the engine. Raises ConfigError."""
        if self.engine.get("max_queue") is not None:
            raise ConfigError("a job keeps its own queue; leave max_queue out")
        return EngineConfig.from_options(self.model, {**self.engine, "isolate": True})
