"""Generate: adds columns to a batch of columns, in one call or in the workers of a framework."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from llamabatch.chat.options import ChatOptions
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
from llamabatch.utils.closing import Closing
from llamabatch.utils.paths import AUTO
from llamabatch.utils.progress import ProgressBar, ShowProgress

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from llamabatch.config import EngineOptions

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Generate(Closing):
    """A function that adds columns to a batch of columns. A model writes the new columns.

    ::

        with Generate("tiny", {"max_tokens": 8}, prompt="Once upon {{ what }}", chat=False) as generate:
            batch = generate({"what": ["a time", "a hill"]})
        print(batch["generated_text"], batch["error"])

    An instance can be pickled if its functions can be pickled. The first call with a row to run starts the engine. The
    engine ends with close() or with the process. Several threads may call an instance at once; the engine mixes the
    rows of these calls.

    The seed of a row is made of params.seed (None counts as 0) and the row's id, or its prompt if there are no ids. So
    the draws depend neither on the machine nor on the other rows of the batch.

    Args:
        model: as for LLM, or an LLM. A given LLM stays open, and the instance cannot be pickled.
        params: SamplingParams, or a mapping of their fields, for all rows.
        prompt: a jinja2 template over the columns, as "Classify: {{ text }}", or a function. A template runs in the
            sandbox of chat templates. {{ row["a name"] }} reads any column. A cell without a value is undefined, and a
            template must not write it. A function takes a row as a dictionary (None for a cell without a value) and
            returns a text, messages or token ids.
        output: the name of the text column, or a mapping from "text", "reasoning", "n_tokens", "finish_reason" and
            "error" to column names. None: "generated_text"; but with a schema, there are only the columns of its
            properties. There is always a column "error" with the reason why a row failed, or null.
        schema: a JSON schema of objects or a pydantic class, which the texts must fit. Its properties become columns of
            strings, 64-bit whole numbers, floats, booleans, and lists of these. Other values become texts of JSON.
        id: the column of the rows' ids, which are texts or whole numbers.
        image: the column, or columns, of pictures: paths, bytes, {"bytes": …, "path": …} as in Hugging Face datasets,
            PIL images, arrays, or lists of these. Pictures are put before the text of a conversation. The default of
            the option mmproj is then "auto".
        audio: like `image`, for audio. Samples are an array with its rate, as {"array": …, "sampling_rate": …}.
        system: the system message of each conversation, also a template.
        chat: True: texts are messages of a user, for the model's chat template. None: True if the model has a template.
        chat_template_kwargs: as for LLM.chat.
        adapter_scales: {name: scale} for all rows; the names are those of the option `adapters`.
        **options: as for LLM, but `isolate` is True by default, so that the engine restarts after a crash of llama.cpp.

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
            raise ConfigError("system, image, audio and chat_template_kwargs need a chat; leave chat=False out")
        ChatOptions(kwargs=chat_template_kwargs or {})
        if (image is not None or audio is not None) and not isinstance(model, LLM):
            options = {"mmproj": AUTO, **options}
        self._model, self._options = _checked(model, options)
        self._params = _params(params)
        self._schema = None if schema is None else Schema.of(schema)
        if self._schema is not None:
            if self._params.structured_outputs is not None:
                raise ConfigError("schema and structured_outputs of params are both given; leave one of them out")
            self._params = replace(self._params, structured_outputs={"json": self._schema.form.text})
        form = self._params.structure if self._schema is None else self._schema.form
        if form is not None and form.not_held:
            logger.warning("the outputs need not follow these parts of the schema: %s", ", ".join(form.not_held))
        media: dict[Kind, tuple[str, ...]] = {IMAGE: _names("image", image), SOUND: _names("audio", audio)}
        self._prompts = Prompts(prompt, system, id, self._params.seed or 0, media)
        self._columns = OutputColumns(output, self._schema)
        self._system, self._chat, self._kwargs, self._scales = system, chat, chat_template_kwargs, adapter_scales
        self._engine = _Engine()

    def __call__(self, batch: T, *, progress: ShowProgress = False) -> T:
        """Returns the batch with the new columns and its rows in the same order.

        Args:
            batch: a data frame of pandas, polars or another library that narwhals reads (`llamabatch[columns]`), a
                Table or RecordBatch of pyarrow, a relation of DuckDB (the result is a Table of pyarrow), or a
                dictionary of numpy arrays or lists. The batch itself does not change.
            progress: as for LLM.generate, but False by default.

        Raises:
            InputError: the batch is of an unknown kind, a column is missing, or a column has the name of a new column.
            EngineClosedError: the instance is closed; or the engine died too often, and rows have no result. In the
                second case the next call starts a new engine.
            ConfigError, ModelFileError, MemoryPlanError, SetupError, EngineError: as for LLM, in the first call.
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
        """Closes the engine and refuses later calls. An LLM that was passed in stays open. May be called twice."""
        self._engine.close(keep=isinstance(self._model, LLM))

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
        """Yields the prompt of each row. Raises InputError if a column is missing."""
        if not batch.names:  # frameworks may send a batch without columns
            return iter(())
        return self._prompts.of(rows_of(batch, self._prompts.wanted(batch.names)))

    def _run(self, rows: Iterable[tuple[int, RowPrompt]]) -> Generator[tuple[int, Result], None, None]:
        """Yields the number and the result of each row as it finishes. Closing the generator aborts the other rows."""
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
            if failed:  # the engine may have died, and a new one may have started
                llm.stats()  # raises EngineClosedError if the engine is dead
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
        """Returns the engine; the first call starts it."""
        if self._engine.is_of_another_process:  # after a fork, the engine's threads are gone and locks may be held
            self._engine = _Engine()
        return self._engine.get(self._model, self._options)


class _Engine:
    """The engine of a Generate in this process. It starts on demand."""

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
        """Forgets a dead engine, so that the next call starts a new one."""
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
    """Returns the model and the options of its engine, with absolute paths. Raises ConfigError."""
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
    """Returns the names of columns of media as a tuple. Raises ConfigError."""
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
