"""The types that scheduler and model runner exchange: the work of one step, and its results. Pure Python.

Spans and their results are named tuples, because making a named tuple is three times as fast as making a frozen
dataclass. A step of a small model takes 3 ms, and makes a span and a result for every row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import NamedTuple

from llamabatch.request.adapters import AdapterSet
from llamabatch.request.logprobs import LogprobRecord, RowLogprobs
from llamabatch.request.media import MediaRun
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.prefix_store import StoredPrefix


class ScheduledSpan(NamedTuple):
    """`length` tokens of a sequence from position `start` on.

    Attributes:
        output: True if the row of the last token is sampled.
        draft: guessed tokens in a verify call, else None. The span has one pending token, then the guesses, then
            padding up to `length`. The rows of the pending token and of the guesses are output rows.
        shift: the token at position p is token p + shift of the sequence. The value is above 0 once a full slot has
            forgotten some tokens.
        prompt_rows: number of rows that are read for logprobs of the prompt. These rows come just before the sampled
            row. If `output` is False, they are the last rows.
        media: the media run that contains the tokens; None: the tokens are text.
    """

    sequence: Sequence
    slot: int
    start: int
    length: int
    output: bool
    draft: tuple[int, ...] | None = None
    prompt_rows: int = 0
    shift: int = 0
    media: MediaRun | None = None

    @property
    def request_id(self) -> str:
        """Id under which the runner stores the sampler state of the sequence."""
        return self.sequence.request.request_id

    @property
    def token_ids(self) -> list[int]:
        """Token ids of prompt and output so far. Callers must not change the list."""
        return self.sequence.token_ids

    @property
    def num_output(self) -> int:
        """The number of output tokens so far. This is also the index of the next sampled token."""
        return self.sequence.num_output

    @property
    def logprobs(self) -> LogprobRecord | None:
        """The logprobs that the request asks for; None: it asks for no logprobs."""
        return self.sequence.logprobs

    @property
    def first_token(self) -> int:
        """Token at position `start`."""
        return self.sequence.token_ids[self.start + self.shift]

    @property
    def tokens(self) -> list[int]:
        """The tokens at the positions of the span. With a draft, only the first token, because the other tokens are
        guesses."""
        first = self.start + self.shift
        return self.sequence.token_ids[first : first + self.length]


@dataclass(frozen=True)
class Call:
    """One llama_decode: spans in slot order, and dummy rows. The dummy rows are in other slots, and keep the slot ids
    dense.

    Attributes:
        dummy_slots: the slots of dummy rows, in ascending order.
        n_guesses: in a verify call, the maximum number of rows after the known token of a span; 0 in other calls.
            Without Limits.packs_any, all spans have this number of rows after the known token, and a dummy slot has as
            many rows as a span.
        dummy_starts: for each of dummy_slots, the number of tokens in the slot. The call does not change these tokens.
            An empty tuple means that all these slots are empty.
        is_padded: True if dummy rows are also output rows. The call then has the same shape as a call without dummy
            rows; see RowLadder.
    """

    spans: tuple[ScheduledSpan, ...]
    dummy_slots: tuple[int, ...] = ()
    n_guesses: int = 0
    dummy_starts: tuple[int, ...] = ()
    is_padded: bool = False

    @property
    def dummies(self) -> tuple[tuple[int, int], ...]:
        """For each slot with dummy rows: the slot, and the position of the first dummy row."""
        return tuple(zip(self.dummy_slots, self.dummy_starts or (0,) * len(self.dummy_slots), strict=True))

    @property
    def adapters(self) -> AdapterSet:
        """The adapter set that all sequences of the call share."""
        return self.spans[0].sequence.request.adapters

    @property
    def media(self) -> MediaRun | None:
        """The media run of the only span; None: the call computes text."""
        return self.spans[0].media

    @cached_property
    def is_decode(self) -> bool:
        """True if each span is one token of text."""
        return self.spans[0].media is None and all(span.length == 1 for span in self.spans)


@dataclass(frozen=True)
class PrefixCopy:
    """A copy: slot `target` loses its tokens, and gets the first `count` tokens of slot `source`."""

    source: int
    target: int
    count: int


@dataclass(frozen=True)
class Cut:
    """A cut: slot `slot` keeps only its first `count` tokens."""

    slot: int
    count: int


@dataclass(frozen=True)
class Shift:
    """A shift: slot `slot` forgets `count` tokens from position `start` on, and all later tokens move down by `count`
    positions."""

    slot: int
    start: int
    count: int


@dataclass(frozen=True)
class Save:
    """A save: the model runner copies the state of slot `slot` to `prefix.state`. Before that, it cuts off the tokens
    after those of `prefix`. Only a slot that will be emptied has such tokens. If the cut is impossible, nothing is
    saved.

    Attributes:
        make_room: PrefixStore.make_room, called with the size of the state in bytes before the state is copied.
    """

    slot: int
    prefix: StoredPrefix
    make_room: Callable[[StoredPrefix, int], bool]


@dataclass(frozen=True)
class Restore:
    """A restore: the empty slot `slot` gets the first `count` tokens of a stored prefix."""

    slot: int
    prefix: StoredPrefix
    count: int


@dataclass(frozen=True)
class SchedulerOutput:
    """The work of one step, in this order: saves, restores, copies, cuts, shifts, calls.

    Attributes:
        encoder_share: maximum share of the step's time for the encoder of a picture, above 0; 1: no limit, because
            nobody reads the tokens of other requests one by one.
    """

    copies: tuple[PrefixCopy, ...] = ()
    cuts: tuple[Cut, ...] = ()
    calls: tuple[Call, ...] = ()
    shifts: tuple[Shift, ...] = ()
    restores: tuple[Restore, ...] = ()
    saves: tuple[Save, ...] = ()
    encoder_share: float = 1.0

    @property
    def output_rows(self) -> int:
        """The number of rows of a step whose only call continues sequences. Guesses and dummy rows count, too.

        The value is 0 for all other steps. The times of steps with equally many output rows can be compared.
        """
        if len(self.calls) != 1 or self.copies or self.restores or self.saves or self.shifts:
            return 0
        call = self.calls[0]
        if not (call.is_decode or call.n_guesses):
            return 0
        return sum(span.length for span in call.spans) + len(call.dummy_slots) * (1 + call.n_guesses)

    @property
    def has_media(self) -> bool:
        """True if a call computes tokens of a picture."""
        return any([call.spans[0].media for call in self.calls])  # noqa: C419  # a list is faster than a generator

    @property
    def spans(self) -> list[ScheduledSpan]:
        return [span for call in self.calls for span in call.spans]


class DecodeStatus(Enum):
    """The result of a span. Expected failures are members of this class. Bugs raise exceptions."""

    OK = auto()
    NO_ROOM = auto()  # there were no free cells; nothing of the span was computed
    NOT_YET = auto()  # the span's picture is still being encoded; nothing of the span was computed
    FAILED = auto()  # the span itself cannot be computed


class SpanOutput(NamedTuple):
    """The status of a span, and the tokens that were sampled after the span, if any.

    Attributes:
        logprobs: an entry for each of the span's prompt rows, then one for each token; empty if the request asks for no
            logprobs.
        encoder_s: seconds that the encoder of the span's picture took.
    """

    status: DecodeStatus
    token_ids: tuple[int, ...] = ()
    error: str | None = None
    logprobs: tuple[RowLogprobs, ...] = ()
    encoder_s: float = 0.0


@dataclass(frozen=True)
class Limits:
    """Sizes and abilities of a model runner.

    Attributes:
        n_slots: maximum number of seq ids of the context.
        start_slots: number of seq ids at the start; None: n_slots. The context grows once.
        n_batch: maximum number of tokens in one call.
        n_ubatch: maximum number of tokens in one pass over the weights.
        prefill_share: part of the time, 0.05 to 1, that prompts get while other requests wait for their next token.
        prefill_budget: maximum number of prompt tokens in a step while other requests wait for their next token.
        n_outputs: maximum number of output rows in one call.
        n_cells: number of cells of a unified KV cache, which all slots share; None: a split cache, in which each slot
            has its own cells.
        can_share: True if the cells of a slot can be copied to another slot.
        can_cut: True if a copy can be cut at any position; False if the contents of a slot can be used only as a whole
            (recurrent state, some sliding windows).
        has_window: True if some layers attend only to a sliding window. For these layers, a saved state has only the
            cells in the window.
        state_bytes: maximum bytes of main memory for saved states of slots.
        can_pad: True if dummy rows do no harm; False with recurrent state or a unified KV cache.
        can_shift: True if the positions of cells can change (overflow="shift").
        keeps_prefixes: True if the cells of finished sequences stay for requests with the same beginning; needs
            can_share.
        prompt_rows: maximum number of output rows in a call if one of its sequences has more than one output row.
        is_ragged: True if a pass accepts any slots, with any number of tokens for each slot. Otherwise a pass needs
            consecutive slots with equally many tokens.
        on_device: True if a GPU computes. The costs of rows and passes are then measured; see StepCosts.
        row_ladder: "off", "auto" or "on": see RowLadder.
        is_unified: True if the KV cache is unified, that is, if n_cells is given.
        packs_any: is_unified or is_ragged. A pass then accepts any slots, with any number of tokens for each slot.
    """

    n_slots: int
    n_batch: int
    n_ubatch: int
    prefill_budget: int
    n_outputs: int = 2**31
    n_cells: int | None = None
    can_share: bool = True
    can_cut: bool = True
    has_window: bool = False
    state_bytes: int = 0
    can_pad: bool = True
    can_shift: bool = True
    keeps_prefixes: bool = True
    prompt_rows: int = 64
    start_slots: int | None = None
    prefill_share: float = 0.5
    is_ragged: bool = False
    on_device: bool = False
    row_ladder: str = "off"
    is_unified: bool = field(init=False)
    packs_any: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_unified", self.n_cells is not None)
        object.__setattr__(self, "packs_any", self.is_unified or self.is_ragged)
