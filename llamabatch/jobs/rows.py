"""The types that reading, running and writing share: a row, a bad row, the options of reading, the index in a shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from llamabatch.chat.conversation import check_template
from llamabatch.chat.messages import Conversation
from llamabatch.chat.options import ChatOptions
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
ALL = "all"  # the value of ReadOptions.keep that keeps all columns
OWN_IDS = ("id", "custom_id")  # these fields of a line, or columns of a table, hold the id of a row
CHAT_FIELDS = (
    *("tools", "tool_choice", "parallel_tool_calls"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
)


@dataclass(frozen=True)
class ServiceForm:
    """The functions by which a service handles a line of OpenAI's batch format. The line may have fields that a job
    does not know.

    Attributes:
        prepare: makes the request of the line; raises InputError.
        answer: makes the body of the response; raises InputError. Not called for a failed request.
    """

    prepare: Callable[[InputProcessor], Request]
    answer: Callable[[RequestOutput], Mapping[str, Any]]


@dataclass(frozen=True)
class Row:
    """One request of a job.

    Attributes:
        number: the position among all rows of all inputs, from 0. Bad rows and rows of other shards count, too. Order
            and resume depend on the number: the same inputs give the same numbers with any `limit` and `shard`, and
            in any later run.
        id: the "id" or "custom_id" of the line or table row, a text or a whole number; otherwise the number as text.
            No two ids of a job are equal as texts.
        task: the kind of request. "embedding" ignores `params`, and only "chat" has `options`.
        prompt: a text or token ids, or the messages of a "chat". Only the form is checked here. The engine checks later
            if the prompt fits, and if the model's chat template accepts it.
        params: the parameters of the job, overlaid by the parameters of the line.
        options: tools and variables of the chat template.
        openai: true for a line of OpenAI's batch format. The answer may have the same format.
        model: the model's name in a line of OpenAI's batch format. The answer repeats the name.
        place: the position of the row for messages: "prompts.jsonl, line 7".
        kept: the kept columns of the input by name, as values of JSON; None: no columns are kept.
        form: the functions of a service that make the request and the answer; None: the job makes both.
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
        number: as in Row. Good and bad rows are counted together.
        id: as in Row; None: the id cannot be read, or an earlier line has the same id, which must not occur twice.
        error: the place of the line, and the reason.
        openai: true for a line in the shape of OpenAI's batch format.
        place, kept: as in Row.
    """

    number: int
    id: str | int | None
    error: str
    openai: bool = False
    place: str = ""
    kept: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ReadOptions:
    """The rules for turning inputs into rows. The constructor checks these rules.

    Attributes:
        params: the parameters of every row. The fields of a line override them.
        template: the template of a row's prompt, in jinja2 (`{{ column }}`) or in the older notation: {column} is the
            value of a column, {{ is a brace. None: "{prompt}" for tables; lines of JSON have their own prompts.
        prompt: like `template`, but always jinja2.
        task: the kind of the requests if a template makes them. Without a template, each line of JSON sets its kind.
        system: with task="chat", a system message before the template's text. The message is jinja2 if it has {{ or {%.
        id_column: the column whose values are the ids. None: the column "id" or "custom_id" of a line or a table,
            otherwise the numbers of the rows. "": the numbers, for a table whose column "id" holds no ids.
        shard: (i, n), i from 1: only rows with number % n == i - 1. The n shards together are the whole job, with the
            same rows, numbers and ids.
        limit: the number of the first row that is left out; the numbers count the rows of all shards. None: all rows.
        chat_template: jinja2 source that replaces the model's chat template; None: the model's template.
        max_line_bytes: a longer line becomes a BadRow, and is never in memory as a whole.
        keep: columns of the input, or fields of lines of JSON, to copy to the output; "all": all but the id.
        image_columns, audio_columns: columns, or fields of lines of JSON, with a picture, an audio clip, or a list
            of these. The media come before the template's text, and task="completion" becomes a chat.
            Relative paths start at the folder of the input.
        params_from: with a template, the columns or fields that hold parameters of their row. Possible names are the
            fields of SamplingParams, and with task="chat" also CHAT_FIELDS. All other columns are data.

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
        """Raises ConfigError if a name in params_from is not a parameter of the task."""
        if self.task == "embedding":
            raise ConfigError(
                f"params_from is {show(self.params_from)}; nothing is sampled for an embedding, so leave it out"
            )
        known = PARAMETERS | {*CHAT_FIELDS} if self.task == "chat" else PARAMETERS
        for name in self.params_from or ():
            if name not in known:
                raise ConfigError(f"params_from names {show(name)}, which is no parameter{nearest(name, known)}")

    @property
    def has_template(self) -> bool:
        """True if a template makes the prompts."""
        return self.template is not None or self.prompt is not None or self.has_media

    @property
    def has_media(self) -> bool:
        """True if columns hold pictures or audio."""
        return self.image_columns is not None or self.audio_columns is not None

    def wants(self, number: int) -> bool:
        """Returns True if the row of this number is in the shard and below the limit."""
        i, n = self.shard
        return number % n == i - 1 and (self.limit is None or number < self.limit)


def _names(what: str, given: object, other: str = "") -> tuple[str, ...]:
    """Returns a non-empty list of column names as a tuple. Raises ConfigError, also for a repeated name."""
    names = list(given) if isinstance(given, (list, tuple)) else []
    if not names or not all(isinstance(each, str) and each for each in names):
        raise ConfigError(f"{what} is {show(given)}; give the names of columns{other}")
    if len(set(names)) < len(names):
        raise ConfigError(f"{what} is {show(given)}; name each column once")
    return tuple(names)


@dataclass(frozen=True)
class ShardIndex:
    """The index of a row in its shard: row `number` of shard (i, n) has index number // n.

    Shard (i, n) has every n-th row, starting with row i - 1. So its indices have no gaps.
    """

    shard: tuple[int, int] = (1, 1)

    def index(self, number: int) -> int | None:
        """Returns the index of a row; None: the row belongs to another shard."""
        i, n = self.shard
        return number // n if number % n == i - 1 else None

    def number(self, index: int) -> int:
        """Returns the number of the row with this index."""
        i, n = self.shard
        return index * n + i - 1


class Bits:
    """A set of indices or numbers of rows, one bit each."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def __contains__(self, n: int) -> bool:
        i = n >> 3
        return i < len(self._bytes) and bool(self._bytes[i] >> (n & 7) & 1)

    def add(self, n: int) -> None:
        i = n >> 3
        if i >= len(self._bytes):
            self._bytes.extend(bytes(i + 1 - len(self._bytes)))
        self._bytes[i] |= 1 << (n & 7)
