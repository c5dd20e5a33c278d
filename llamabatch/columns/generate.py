"""Generate: takes a batch of columns and returns it with more; for one call, or in the workers of a framework."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from llamabatch.chat.conversation import ChatOptions
from llamabatch.client.restart_policy import gave_up
from llamabatch.columns.frames import Batch, open_batch, rows_of
from llamabatch.columns.prompts import PromptFunction, Prompts, RowPrompt
from llamabatch.columns.results import OutputColumns, Result
from llamabatch.columns.schema import Schema
from llamabatch.config import EngineConfig, with_paths
from llamabatch.entrypoints.input_processor import OneAdapters, OneParams
from llamabatch.entrypoints.llm import LLM
from llamabatch.errors import ConfigError, EngineClosedError, InputError
from llamabatch.request.media import IMAGE, SOUND, Kind
from llamabatch.request.outputs import RequestOutput
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.utils.checks import show
from llamabatch.utils.paths import AUTO
from llamabatch.utils.progress import ProgressBar, ShowProgress

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from llamabatch.config import EngineOptions

T = TypeVar("T")


class Generate:
    """A function from a batch of columns to the same kind of batch with columns that a model has written.

    ::

        with Generate("tiny", {"max_tokens": 8}, prompt="Once upon {{ what }}", chat=False) as generate:
            batch = generate({"what": ["a time", "a hill"]})
        print(batch["generated_text"], batch["error"])

    An instance can be pickled, if a function in it can. The engine is made by the first call that has a row to run, and
    ends with close() or with the process. Several threads may call it at once: their rows share the engine's batches.

    The seed of a row is made of params.seed (None counts as 0) and of its id, or else of its prompt: its draws depend
    neither on the machine, nor on the batch that it is in.

    Args:
        model: as of LLM; or an LLM, which then stays open and cannot be pickled.
        params: SamplingParams, or a mapping of their fields; of all rows.
        prompt: a template of jinja2 over the columns, as "Classify: {{ text }}", in the sandbox of chat templates;
            {{ row["a name"] }} reads any column, and a cell without a value is undefined, an error where it is written.
            Or a function of a row, a dictionary with None for such a cell, that returns a text, messages or token ids.
        output: name of the column of texts; or a mapping to names of columns from "text", "reasoning", "n_tokens",
            "finish_reason" and "error". None: "generated_text", or with a schema its properties alone. There is always
            a column "error": the reason why a row has failed, else null.
        schema: a JSON schema of objects, or a pydantic class, that the texts must fit: its properties become columns of
            strings, 64-bit whole numbers, floats, booleans, and lists of these; other values are texts of JSON.
        id: the column of the rows' ids, texts or whole numbers.
        image: the column of a picture, or a list of such columns, before the text of a conversation: paths, bytes,
            {"bytes": …, "path": …} as in datasets of Hugging Face, PIL images, arrays, or lists of these. mmproj is
            "auto" then, unless given.
        audio: likewise of sounds; samples are an array with its rate, as {"array": …, "sampling_rate": …}.
        system: the system message of each conversation; a template, too.
        chat: texts are a user's messages, for the model's chat template. None: True where the model has one.
        chat_template_kwargs: as of LLM.chat.
        adapter_scales: {name: scale} of those in the option `adapters`, for all rows.
        **options: as for LLM, but that isolate is True unless given, so that a crash of llama.cpp is repaired there.

    Raises:
        ConfigError, SamplingError: an argument is wrong.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LLM,
        params: OneParams | None = None,
        *,
        prompt: str | PromptFunction,
        output: str | Mapping[str, str] | None = None,
        schema: object = None,
        id: str | None = None,
        image: str | Sequence[str] | None = None,
        audio: str | Sequence[str] | None = None,
        system: str | None = None,
        chat: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter_scales: OneAdapters = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        if chat not in (None, True, False):
            raise ConfigError(f"chat is {show(chat)}; give True, False or None")
        if chat is False and (system is not None or chat_template_kwargs or image is not None or audio is not None):
            raise ConfigError("system, image, audio and chat_template_kwargs are for chats; leave chat=False out")
        ChatOptions(kwargs=chat_template_kwargs or {})
        if (image is not None or audio is not None) and not isinstance(model, LLM):
            options = {"mmproj": AUTO, **options}
        self._model, self._options = _checked(model, options)
        self._params = _params(params)
        self._schema = None if schema is None else Schema.of(schema)
        if self._schema is not None:
            if self._params.structured_outputs is not None:
                raise ConfigError("schema and structured_outputs of params are both given; leave one of them out")
            self._params = replace(self._params, structured_outputs={"json": self._schema.text})
        media: dict[Kind, tuple[str, ...]] = {IMAGE: _names("image", image), SOUND: _names("audio", audio)}
        self._prompts = Prompts(prompt, system, id, self._params.seed or 0, media)
        self._columns = OutputColumns(output, self._schema)
        self._system, self._chat, self._kwargs, self._scales = system, chat, chat_template_kwargs, adapter_scales
        self._engine = _Engine()

    def __call__(self, batch: T, *, progress: ShowProgress = False) -> T:
        """The batch with the new columns, its rows in their order.

        Args:
            batch: a data frame of pandas, polars or another library that narwhals reads (`llamabatch[columns]`), a
                Table or RecordBatch of pyarrow, a relation of DuckDB, for which a Table of pyarrow comes back, or a
                dictionary of numpy arrays or lists. It is left as it is.
            progress: as for LLM.generate, but False unless given.

        Raises:
            InputError: it is no batch, a column that is read is missing, or one has the name of a new column.
            EngineClosedError: after close(); or the engine has died too often, and rows have no result. The next call
                makes a new engine.
            ConfigError, ModelFileError, MemoryPlanError, SetupError, EngineError: as LLM, from the first call.
        """
        opened = self._opened(batch)
        results: list[Result | None] = [None] * opened.n_rows
        rows = enumerate(self._rows(opened))
        with ProgressBar(opened.n_rows, progress) as bar, contextlib.closing(self._run(rows)) as run:
            for index, result in run:
                results[index] = result
                bar.advance(result.n_tokens or 0)
        return cast(T, opened.extended(self._columns.of(cast("list[Result]", results))))

    def close(self) -> None:
        """Ends the engine, and refuses later calls; an LLM that was given stays open. May be called twice."""
        self._engine.close(keep=isinstance(self._model, LLM))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self._model, LLM):
            raise TypeError("a Generate that was given an LLM cannot be pickled; give the model's path")
        return {name: value for name, value in vars(self).items() if name != "_engine"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._engine = _Engine()

    def __repr__(self) -> str:
        model = self._model if isinstance(self._model, LLM) else os.fspath(self._model)
        return f"{type(self).__name__}({model!r}, columns={list(self._columns.names)})"

    def _opened(self, given: object) -> Batch:
        batch = open_batch(given)
        self._columns.check(batch.names)
        return batch

    def _rows(self, batch: Batch) -> Iterator[RowPrompt]:
        """The prompt of each row. Raises InputError: a column is missing."""
        if not batch.names:  # an empty batch of a framework
            return iter(())
        return self._prompts.of(rows_of(batch, self._prompts.wanted(batch.names)))

    def _run(self, rows: Iterable[tuple[int, RowPrompt]]) -> Generator[tuple[int, Result], None, None]:
        """The result of each row with its number, in the order in which they end. Closed, it aborts the rest."""
        ready = []
        for number, row in rows:
            if row.error is None:
                ready.append((number, row))
            else:
                yield number, Result(error=row.error)
        if not ready:
            return
        llm = self._llm()
        failed = []
        try:
            with contextlib.closing(self._outputs(llm, [row for _, row in ready])) as outputs:
                for index, output in outputs:
                    result = Result.of(output)
                    if result.error is None:
                        yield ready[index][0], result
                    else:
                        failed.append((ready[index][0], result))
            if failed:  # not the rows' fault where the engine is gone, be it that another one has started since
                llm.stats()  # raises EngineClosedError
                if gone := next((result.error for _, result in failed if gave_up(result.error)), None):
                    raise EngineClosedError(gone)
            yield from failed
        except EngineClosedError:
            self._engine.forget(llm)
            raise

    def _outputs(self, llm: LLM, rows: Sequence[RowPrompt]) -> Generator[tuple[int, RequestOutput], None, None]:
        chat = self._is_chat(llm)
        prompts: list[Any] = [row.for_engine(chat) for row in rows]
        params = [replace(self._params, seed=row.seed) for row in rows]
        outputs = llm.as_completed(
            prompts,
            params,
            chat_template_kwargs=self._kwargs,
            adapters=self._scales,
            errors="return",
        )
        with contextlib.closing(cast("Generator[tuple[int, RequestOutput], None, None]", outputs)):
            yield from outputs

    def _is_chat(self, llm: LLM) -> bool:
        has_template = llm._client.model.chat_template is not None
        if self._system is not None and not has_template:
            raise ConfigError("system is a message of a conversation, and this model has no chat template")
        return has_template if self._chat is None else self._chat

    def _llm(self) -> LLM:
        """The engine, which the first call makes."""
        if self._engine.is_of_another_process:  # a fork has no threads of an engine, and locks in any state
            self._engine = _Engine()
        return self._engine.get(self._model, self._options)


class _Engine:
    """The engine of a Generate in this process, once it is needed."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._llm: LLM | None = None
        self._is_closed = False

    @property
    def is_of_another_process(self) -> bool:
        return self._pid != os.getpid()

    def get(self, model: str | os.PathLike[str] | LLM, options: Mapping[str, Any]) -> LLM:
        with self._lock:
            if self._is_closed:
                raise EngineClosedError("this Generate is closed")
            if self._llm is None:
                self._llm = model if isinstance(model, LLM) else LLM(model, **cast("Any", options))
            return self._llm

    def forget(self, dead: LLM) -> None:
        """Lets the next call make a new engine."""
        with self._lock:
            if self._llm is dead:
                self._llm = None

    def close(self, *, keep: bool) -> None:
        with self._lock:
            llm, self._llm, self._is_closed = self._llm, None, True
        if llm is not None and not keep:
            llm.close()


def _checked(
    model: str | os.PathLike[str] | LLM, options: EngineOptions
) -> tuple[str | os.PathLike[str] | LLM, dict[str, Any]]:
    """The model and the options of its engine, with absolute paths. Raises ConfigError."""
    given: dict[str, Any] = dict(options)
    if isinstance(model, LLM):
        if given:
            raise ConfigError(f"{', '.join(given)}: the model is an LLM already; give its options when it is made")
        return model, {}
    engine = {"isolate": True, **given}
    EngineConfig.from_options(model, engine)
    paths = with_paths({**engine, "model": model})
    return paths.pop("model"), paths


def _names(argument: str, given: object) -> tuple[str, ...]:
    """The names of columns of media. Raises ConfigError."""
    names = () if given is None else (given,) if isinstance(given, str) else given
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{argument} is {show(given)}; give the name of a column, or a list of them")
    return tuple(names)


def _params(given: object) -> SamplingParams:
    if given is None:
        params = SamplingParams()
    elif isinstance(given, SamplingParams):
        params = given
    elif isinstance(given, Mapping):
        params = SamplingParams.from_options(**given)
    else:
        raise InputError(f"params is {show(given)}; give SamplingParams, or a mapping of their fields")
    if params.n != 1:
        raise ConfigError(
            f"n of params is {params.n}; a row has one text: give 1, or repeat the rows with ids of their own"
        )
    return params
