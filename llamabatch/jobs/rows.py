"""The nouns that reading, running and writing share: a row, a bad row, the options of reading, the index in a shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from llamabatch.chat.conversation import ChatOptions, check_template
from llamabatch.chat.messages import Conversation
from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.errors import ConfigError
from llamabatch.request.outputs import RequestOutput
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import PARAMETERS, SamplingParams
from llamabatch.utils.checks import choice, integer, nearest, show

Task = Literal["completion", "chat", "embedding"]
TASKS: tuple[Task, ...] = ("completion", "chat", "embedding")

MAX_LINE_BYTES = 8 * 2**20
MAX_SHARDS = 1_000_000
MAX_ID_CHARS = 512
ALL = "all"  # of ReadOptions.keep
OWN_IDS = ("id", "custom_id")  # fields of a line, and columns of a table, that hold its id
CHAT_FIELDS = (
    *("tools", "tool_choice", "parallel_tool_calls"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
)


@dataclass(frozen=True)
class ServiceForm:
    """A line of OpenAI's batch format as a service reads and answers it, which knows more fields than a job does.

    Attributes:
        prepare: makes the one request; raises InputError.
        answer: makes the body of the response, or raises InputError; a request that ended with an error does not come
            to it.
    """

    prepare: Callable[[InputProcessor], Request]
    answer: Callable[[RequestOutput], Mapping[str, Any]]


@dataclass(frozen=True)
class Row:
    """One request of a job.

    Attributes:
        number: the position among all rows of all inputs, from 0, bad ones and those of other shards included. It is
            the key of order and resume: the same inputs give the same numbers with any `limit`, `shard` and `is_done`.
        id: the "id" or "custom_id" of the line or of the table's row, a text or a whole number, else the number as
            text. No two rows of a job have the same, written as text.
        task: the kind of request; "embedding" ignores `params`, and only "chat" has `options`.
        prompt: a text or token ids; the messages of a "chat". Only its form is checked: the engine finds out if it
            fits, and if the model's template accepts it.
        params: the job's, overlaid by the line's.
        options: tools and variables of the chat template.
        openai: it came as a line of OpenAI's batch format, and may be answered in kind.
        model: the name in such a line, which its answer repeats.
        place: the position in a message: "prompts.jsonl, line 7".
        kept: columns of the input for the output, as values of JSON; None: no columns are kept.
        form: makes its request and its answer, in place of the fields above; None: they are those of a job.
    """

    number: int
    id: str | int
    task: Task
    prompt: str | tuple[int, ...] | Conversation
    params: SamplingParams = SamplingParams()
    options: ChatOptions = field(default_factory=ChatOptions)
    openai: bool = False
    model: str | None = None
    place: str = ""
    kept: Mapping[str, Any] | None = None
    form: ServiceForm | None = None


@dataclass(frozen=True)
class BadRow:
    """A line that cannot be run.

    Attributes:
        number: as of a Row, in one count with it.
        id: None: the line has one that cannot be read, or that another line has used before; so no id comes twice.
        error: the reason, with the place in front.
        openai: the line has the shape of OpenAI's batch format.
        place, kept: as of a Row.
    """

    number: int
    id: str | int | None
    error: str
    openai: bool = False
    place: str = ""
    kept: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ReadOptions:
    """The rules by which inputs become rows, checked when they are made.

    Attributes:
        params: the parameters of every row; a line's own fields are laid over them.
        template: the prompt of a row, in jinja2 (`{{ column }}`) or, in the older notation, with {column} for the value
            of a column and {{ for a brace; None: "{prompt}" for tables, and lines of JSON ask themselves.
        prompt: the same, always in jinja2.
        task: the kind of request that a template makes; a line of JSON without one has its own.
        system: with task="chat": a system message before the template's text; jinja2 where it holds {{ or {%.
        id_column: the column whose values are the ids; None: "id" or "custom_id" of a line or a table, else numbers;
            "": numbers, for a table whose column "id" holds no ids.
        shard: (i, n), i from 1: only the rows whose number leaves i - 1 when divided by n. Together the n shards are
            the whole job, with the same rows, numbers and ids.
        limit: only rows with a number below it, before the shard is taken; None: all.
        chat_template: jinja2 source for conversations in place of the model's own template; None: the model's.
        max_line_bytes: a longer line is a BadRow, and is not held in memory.
        keep: columns of the input, or fields of lines of JSON, that the output gets; "all": all but the id.
        image_columns, audio_columns: columns, or fields of lines of JSON, with a picture or a sound (or a list of them)
            that stands in front of the template's text; they make task="completion" a chat. Relative paths are those
            beside the input.
        params_from: with a template, the columns or fields that are parameters of their row, by the names of
            SamplingParams; with task="chat" also those of CHAT_FIELDS. All others are data.

    Raises:
        ConfigError: a value is out of range.
    """

    params: SamplingParams = SamplingParams()
    template: str | None = None
    task: Task = "completion"
    system: str | None = None
    id_column: str | None = None
    shard: tuple[int, int] = (1, 1)
    limit: int | None = None
    max_line_bytes: int = MAX_LINE_BYTES
    chat_template: str | None = None
    prompt: str | None = None
    keep: tuple[str, ...] | Literal["all"] | None = None
    params_from: tuple[str, ...] | None = None
    image_columns: tuple[str, ...] | None = None
    audio_columns: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.prompt is not None and self.template is not None:
            raise ConfigError("template and prompt both make the prompt of a row; give one of them")
        if self.keep is not None and self.keep != ALL:
            object.__setattr__(self, "keep", _names("keep", self.keep, f", or {ALL!r}"))
        for name in ("image_columns", "audio_columns"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, _names(name, given))
        if self.has_media:
            if self.task == "embedding":
                raise ConfigError("image_columns and audio_columns are for a chat; an embedding is one of a text")
            object.__setattr__(self, "task", "chat")
        if self.params_from is not None:
            object.__setattr__(self, "params_from", _names("params_from", self.params_from))
            self._check_params_from()
        choice(ConfigError, "task", self.task, TASKS)
        if self.system is not None and self.task != "chat":
            raise ConfigError("system is a message of a conversation; give task='chat' with it")
        if not isinstance(self.shard, tuple) or len(self.shard) != 2:
            raise ConfigError(f"shard is {show(self.shard)}; give (i, n)")
        integer(ConfigError, "the number of shards", self.shard[1], 1, MAX_SHARDS)
        integer(ConfigError, "shard", self.shard[0], 1, self.shard[1])
        if self.limit is not None:
            integer(ConfigError, "limit", self.limit, 1, 2**63 - 1)
        integer(ConfigError, "max_line_bytes", self.max_line_bytes, 64, 2**30)
        if self.chat_template is not None:
            check_template(self.chat_template)

    def _check_params_from(self) -> None:
        """Raises ConfigError: a column has the name of no parameter of such a row."""
        if self.task == "embedding":
            raise ConfigError(f"params_from is {show(self.params_from)}; nothing is sampled for an embedding")
        known = PARAMETERS | {*CHAT_FIELDS} if self.task == "chat" else PARAMETERS
        for name in self.params_from or ():
            if name not in known:
                raise ConfigError(f"params_from names {show(name)}, which is no parameter{nearest(name, known)}")

    @property
    def has_template(self) -> bool:
        """True where a template makes the prompts."""
        return self.template is not None or self.prompt is not None or self.has_media

    @property
    def has_media(self) -> bool:
        """True where columns hold pictures or sounds."""
        return self.image_columns is not None or self.audio_columns is not None

    def wants(self, number: int) -> bool:
        """True for the number of a row of the shard that is below the limit."""
        i, n = self.shard
        return number % n == i - 1 and (self.limit is None or number < self.limit)


def _names(what: str, given: object, other: str = "") -> tuple[str, ...]:
    """Names of columns, each once. Raises ConfigError."""
    names = list(given) if isinstance(given, (list, tuple)) else []
    if not names or not all(isinstance(each, str) and each for each in names):
        raise ConfigError(f"{what} is {show(given)}; give the names of columns{other}")
    if len(set(names)) < len(names):
        raise ConfigError(f"{what} is {show(given)}; name each column once")
    return tuple(names)


@dataclass(frozen=True)
class ShardIndex:
    """The index of a row in its shard: row `number` of shard (i, n) has index number // n.

    Shard (i, n) has every n-th row, from row i - 1 on, so that its indices have no gaps.
    """

    shard: tuple[int, int] = (1, 1)

    def index(self, number: int) -> int | None:
        """The index of a row; None: the row is of another shard."""
        i, n = self.shard
        return number // n if number % n == i - 1 else None

    def number(self, index: int) -> int:
        """The number of the row with an index."""
        i, n = self.shard
        return index * n + i - 1
