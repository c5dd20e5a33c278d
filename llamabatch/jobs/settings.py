"""The settings of a job: one frozen object, checked by its constructor."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from llamabatch.config import CONTENT_OPTIONS, EngineConfig, with_paths
from llamabatch.errors import ConfigError, ModelFileError
from llamabatch.gguf.mmproj import resolve_mmproj
from llamabatch.gguf.resolve import model_identity, resolve
from llamabatch.jobs.input import sources
from llamabatch.jobs.input.sources import Source
from llamabatch.jobs.input.tables import own_id_column
from llamabatch.jobs.output.output import OutputOptions
from llamabatch.jobs.output.records import fields_of
from llamabatch.jobs.output.stream import STDOUT
from llamabatch.jobs.rows import ReadOptions
from llamabatch.utils.checks import integer, number, show
from llamabatch.utils.paths import absolute, one_line


@dataclass(frozen=True)
class Settings:
    """The settings of a job: the options of `llamabatch run` as one value.

    Attributes:
        inputs: files, globs, or "-" for stdin. The constructor makes these and all other paths absolute.
        output: a file, or "-" for stdout.
        model: as for LLM.
        reading: how inputs become rows, and the parameters of all rows.
        writing: how results are written. The shard in `writing` is set to the shard in `reading`.
        seed: the seed of the job. A row without a seed gets a seed made of this seed and the row's number. None: a
            random seed, stored in the manifest of the output.
        adapters: {name: scale} for all rows; the names are those of engine["adapters"].
        price_per_hour: the price of the machine, for the cost in the summary; None: no cost.
        max_start_errors: the job stops if its first `max_start_errors` rows all end with the same error, and writes
            none of these rows. 0: the job never stops for that reason. Rows of a stream are never held back.
        metrics_file: a Prometheus file with the engine's metrics, written while the job runs; None: no file.
        engine: options of EngineConfig by name. llama.cpp always runs in a child process.

    Raises:
        ConfigError: a value is out of range.
    """

    inputs: tuple[str, ...]
    output: str
    model: str = "tiny"
    reading: ReadOptions = ReadOptions()
    writing: OutputOptions = field(default_factory=OutputOptions)
    seed: int | None = None
    adapters: Mapping[str, float] | None = None
    price_per_hour: float | None = None
    metrics_file: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    max_start_errors: int = 20

    def __post_init__(self) -> None:
        if isinstance(self.inputs, (str, os.PathLike)):  # the caller gave one input, not a list
            object.__setattr__(self, "inputs", (os.fspath(self.inputs),))
        if not self.inputs:
            raise ConfigError("inputs is empty; name a file, a glob of files, or '-' for stdin")
        object.__setattr__(self, "inputs", tuple(sources.resolved(os.fspath(each)) for each in self.inputs))
        object.__setattr__(self, "output", os.fspath(self.output))
        if not self.output or "\0" in self.output:
            raise ConfigError(f"output is {show(self.output)}; give a file, or '-' for stdout")
        if self.output != STDOUT:
            object.__setattr__(self, "output", absolute(self.output))
        if self.metrics_file is not None:
            object.__setattr__(self, "metrics_file", absolute(self.metrics_file))
        object.__setattr__(self, "model", with_paths({"model": self.model})["model"])
        object.__setattr__(self, "engine", with_paths(self.engine))
        records = self.writing.records
        if not records.model:
            records = replace(records, model=os.path.basename(str(self.model)))
        if records.parse is True:
            records = replace(records, parse=fields_of(self.reading.params))
        if self.reading.keep is not None or records.parse:
            if records.shape == "openai":
                raise ConfigError("keep goes with flat rows; those of shape='openai' have no place for columns")
            records = replace(records, shape="flat")
        object.__setattr__(self, "writing", replace(self.writing, shard=self.reading.shard, records=records))
        if self.seed is not None:
            integer(ConfigError, "seed", self.seed, 0, 2**64 - 1)
        if self.price_per_hour is not None:
            number(ConfigError, "price_per_hour", self.price_per_hour, 0.0, 1e9)
        integer(ConfigError, "max_start_errors", self.max_start_errors, 0, 10_000)
        _ = self.config

    @property
    def taken(self) -> frozenset[str]:
        """The names of the output's own columns, which no kept column may have."""
        return self.writing.records.taken

    @property
    def config(self) -> EngineConfig:
        """The options of the engine. Raises ConfigError."""
        if self.engine.get("max_queue") is not None:
            raise ConfigError("a job keeps its own queue; leave max_queue out")
        return EngineConfig.from_options(self.model, {**self.engine, "isolate": True})


def _adapter_identity(path: str) -> dict[str, Any]:
    """Returns the identity of an adapter's file. Raises ModelFileError."""
    try:
        return model_identity(Path(path))
    except OSError as error:
        raise ModelFileError(f"adapter {one_line(path)} cannot be read: {error.strerror}") from error


def identity(settings: Settings, inputs: list[Source], known_inputs: object = None) -> dict[str, Any]:
    """Returns the settings that decide the content of the rows. If one setting differs, the job is another job.

    Args:
        known_inputs: the inputs in the output's manifest. They say how many bytes of a stream the fingerprint covers.
    """
    reading = {name: value for name, value in vars(settings.reading).items() if name not in ("params", "shard")}
    reading["id_column"] = _id_column(settings.reading, inputs)
    if settings.reading.chat_template is not None:
        reading["chat_template"] = hashlib.sha256(settings.reading.chat_template.encode(errors="replace")).hexdigest()
    engine = {name: getattr(settings.config, name) for name in ("n_ctx", "type_k", "type_v")}
    thinking = {name: getattr(settings.config, name) for name in ("reasoning_format", "reasoning_tags")}
    thinking = {name: value for name, value in thinking.items() if value not in ("auto", None)}
    for name in CONTENT_OPTIONS:
        value = getattr(settings.config, name)
        if value not in (None, ()):
            engine[name] = [list(pair) for pair in value] if isinstance(value, tuple) else value
    adapters = {
        name: {**_adapter_identity(path), "scale": (settings.adapters or {}).get(name)}
        for name, path in settings.config.adapters
    }
    if (mmproj := settings.config.mmproj) is not None:
        bounds = {name: getattr(settings.config, name) for name in ("image_min_tokens", "image_max_tokens")}
        engine["mmproj"] = {**model_identity(resolve_mmproj(mmproj, settings.model)), **bounds}
    return {
        "model": model_identity(resolve(settings.model)),
        "inputs": sources.fingerprint(inputs, known_inputs),
        **reading,
        "params": asdict(settings.reading.params),
        "seed": settings.seed,
        **engine,
        **thinking,
        **({"adapters": adapters} if adapters else {}),
    }


def _id_column(reading: ReadOptions, inputs: list[Source]) -> str | list[str] | None:
    """Returns the column of the ids, even if no option names it; a list if tables have different columns of ids."""
    found = {own_id_column(source, reading) for source in inputs} - {None}
    names = sorted(name for name in found if name is not None)
    return names if len(names) > 1 else names[0] if names else reading.id_column or None
