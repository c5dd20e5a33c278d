"""map: adds columns to a whole table in one call. A file of results makes the call resumable."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from llamabatch.columns.generate import Generate
from llamabatch.columns.prompts import PromptFunction, RowPrompt
from llamabatch.columns.results import Result
from llamabatch.entrypoints.input_processor import OneAdapters, OneParams
from llamabatch.entrypoints.llm import LLM
from llamabatch.errors import ConfigError, OutputError
from llamabatch.gguf.resolve import model_identity
from llamabatch.jobs import formats
from llamabatch.jobs.input.sources import STDIN
from llamabatch.jobs.output.files import Files
from llamabatch.jobs.output.output import Output, OutputOptions
from llamabatch.jobs.output.records import lines_of
from llamabatch.jobs.rows import ReadOptions
from llamabatch.jobs.settings import Settings, identity
from llamabatch.utils.checks import boolean, show
from llamabatch.utils.paths import absolute
from llamabatch.utils.progress import ProgressBar, ShowProgress

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from llamabatch.config import EngineOptions

logger = logging.getLogger(__name__)

T = TypeVar("T")


def map(
    frame: T,
    prompt: str | PromptFunction,
    *,
    model: str | os.PathLike[str] | LLM,
    params: OneParams | None = None,
    output: str | Mapping[str, str] | None = None,
    schema: object = None,
    path: str | os.PathLike[str] | None = None,
    retry_errors: bool = False,
    force: bool = False,
    progress: ShowProgress = None,
    id: str | None = None,
    image: str | Sequence[str] | None = None,
    audio: str | Sequence[str] | None = None,
    system: str | None = None,
    chat: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    adapter_scales: OneAdapters = None,
    **options: Unpack[EngineOptions],
) -> T:
    """Returns the table with more columns, written by a model. map makes a Generate, calls it once, and closes it.

    Args:
        frame: as in Generate.__call__.
        prompt, model, params, output, schema, id, image, audio, system, chat, chat_template_kwargs, adapter_scales,
            **options: as in Generate.
        path: a file (.jsonl) for the result of each row, in the order of the rows, written while rows finish. Another
            call with this path computes only the missing rows, also after kill -9, and returns the same table as one
            uninterrupted call. Side files lie next to the file while rows are missing (docs/run.md). Model, prompts and
            parameters must be those of the first call; `output` may differ. None: nothing is written.
        retry_errors: runs rows again if they failed in an earlier call.
        force: uses the path even if model, rows or parameters have changed, or lines are damaged.
        progress: as in LLM.generate.

    Raises:
        ConfigError: an argument is wrong, or the path belongs to other rows. OutputError: the path cannot be written.
        EngineClosedError: the engine died too often. The finished rows are in the file.
        InputError, ModelFileError, MemoryPlanError, SetupError, EngineError: as in Generate.
    """
    boolean(ConfigError, "retry_errors", retry_errors)
    boolean(ConfigError, "force", force)
    if path is None and (retry_errors or force):
        raise ConfigError("retry_errors and force are about the rows in a path; give path, too")
    target = None if path is None else _target(path)
    with Generate(
        model,
        params,
        prompt=prompt,
        output=output,
        schema=schema,
        id=id,
        image=image,
        audio=audio,
        system=system,
        chat=chat,
        chat_template_kwargs=chat_template_kwargs,
        adapter_scales=adapter_scales,
        **options,
    ) as generate:
        if target is None:
            return generate(frame, progress=progress)
        return _Resumable(generate, target, retry_errors=retry_errors, force=force).run(frame, progress)


def _target(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path) or "\0" in str(path):
        raise ConfigError(f"path is {show(path)}; give the name of a file")
    target = Path(absolute(path))
    if target.suffix.lower() not in formats.LINES:
        raise ConfigError(f"path is {show(str(path))}; its lines are JSON: end it with {' or '.join(formats.LINES)}")
    return target


class _Resumable:
    """One call of a Generate. The results are written to a file, as in a job, so that a later call can resume."""

    def __init__(self, generate: Generate, path: Path, *, retry_errors: bool, force: bool) -> None:
        self._generate = generate
        self._path = path
        self._options = OutputOptions(retry_errors=retry_errors, force=force)

    def run(self, frame: T, progress: ShowProgress) -> T:
        generate = self._generate
        batch = generate._opened(frame)
        rows = list(generate._rows(batch))
        with self._output(rows) as output:
            left = ((number, row) for number, row in enumerate(rows) if not output.is_done(number))
            with (
                ProgressBar(len(rows), progress, done=output.n_before) as bar,
                contextlib.closing(generate._run(left)) as run,
            ):
                for number, result in run:
                    output.write(number, _record(number, rows[number], result))
                    bar.advance(result.n_tokens or 0)
            output.finish()
            path = output.path
        results = list(_results(path))
        if len(results) != batch.n_rows:
            raise OutputError(f"{path} has {len(results):,} rows of {batch.n_rows:,}; something else has changed it")
        return cast(T, batch.extended(generate._columns.of(results)))

    def _output(self, rows: list[RowPrompt]) -> Output:
        identity = _identity(self._generate, self._path)
        digest = hashlib.sha256()
        for row in rows:
            digest.update(row.digest())
        identity["rows"] = {"number": len(rows), "sha256": digest.hexdigest()}
        try:
            return Output(self._path, identity, self._options, Files(logger.warning))
        except ConfigError as error:
            raise ConfigError(str(error).replace("--force", "force=True")) from error


def _identity(generate: Generate, path: Path) -> dict[str, Any]:
    """Returns the settings that decide the results, apart from the rows. Raises ConfigError for logits_processors."""
    params, model = generate._params, generate._model
    if params.logits_processors:
        raise ConfigError("logits_processors cannot be saved in the file at path; leave one of them out")
    is_open = isinstance(model, LLM)
    settings = Settings(
        (STDIN,),
        str(path),
        model="tiny" if is_open else str(model),
        reading=ReadOptions(params),
        adapters=cast("Any", generate._scales),
        engine={} if is_open else generate._options,
    )
    found = identity(settings, [])
    if isinstance(model, LLM):
        found["model"] = _model_of(model)
    return {**found, "chat": generate._chat, "chat_template_kwargs": dict(generate._kwargs or {})}


def _model_of(llm: LLM) -> dict[str, Any]:
    file = llm._client.model.path
    try:
        return model_identity(file)
    except OSError:  # a FakeLLM has no model file, and the file of an LLM may have been removed
        return {"name": file.name}


def _record(number: int, row: RowPrompt, result: Result) -> dict[str, Any]:
    """Returns the record of a row. The number is first and the error last, as jobs.output.survey expects."""
    return {"row": number, "id": number if row.id is None else row.id, **vars(result)}


def _results(path: Path) -> Iterator[Result]:
    """Yields the result in each line. Raises OutputError."""
    for line in lines_of(path):
        try:
            record = json.loads(line.content)
            yield Result(**{field.name: record[field.name] for field in fields(Result)})
        except (ValueError, KeyError, TypeError) as error:
            raise OutputError(f"{path}: the line at byte {line.offset:,} is not as it was written: {error}") from error
