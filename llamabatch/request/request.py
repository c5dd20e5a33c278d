"""Request: one prompt with its parameters. A Sequence is the running state of a request, and a RequestOutput is the
result."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llamabatch.request.adapters import AdapterSet
from llamabatch.request.delta import AnswerParser
from llamabatch.request.logprobs import TokenLogprobs
from llamabatch.request.media import Media, MediaRun
from llamabatch.request.reasoning import Reasoning
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.utils.brief import brief

_group_numbers = itertools.count()


@dataclass(frozen=True)
class Request:
    """One prompt to continue. Immutable; contains all data that an engine in another process needs.

    Attributes:
        request_id: unique among the requests in flight.
        prompt_token_ids: the prompt as ids of the model's vocabulary, negative for the cells of pictures and sounds.
        params: how to sample.
        prompt: the text of the ids; None if the caller gave ids.
        arrival_s: time.perf_counter() when the caller made the request, seconds.
        group: requests of one call share a number; later calls have higher numbers. Policies sort only inside a group,
            so that later calls cannot delay an earlier one forever.
        seed: params.seed, or a random number that is drawn when the request is made. So a retry draws the same tokens.
        ranked: best_of needs the cumulative logprob, even if no logprobs are asked for.
        embed: the result is a vector, not a continuation. `params` are then ignored.
        classify: the result is the outputs of the model's classification head; `embed` is then also True.
        adapters: adapters to apply; see adapters.adapter_set.
        score_from: index of the first prompt token to score, 1 .. number of prompt tokens - 1. The request returns the
            logprobs of the prompt from this token on and samples nothing. None: an ordinary request.
        num_truncated: number of tokens that the prompt lost (overflow="truncate").
        resumed: output tokens that another engine emitted before that engine died.
        reasoning: the tags and the state of the thinking; None: unknown. Without tags, no budget applies, and
            structured_outputs apply from the first token on.
        preserved_token_ids: special tokens, in rising order, whose names stay in the text even with
            skip_special_tokens, because the parser of the answer needs these names.
        media: the pictures and sounds of the prompt, in order.
        media_runs: the runs of prompt_token_ids that represent the media, in order.
        make_parser: makes the parser of a continuation, from this request and the continuation's index; None: the text
            is not parsed. The engine never calls make_parser.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    prompt: str | None = None
    arrival_s: float = field(default_factory=time.perf_counter)
    group: int = field(default_factory=lambda: next(_group_numbers))
    seed: int = -1
    ranked: bool = False
    adapters: AdapterSet = ()
    score_from: int | None = None
    embed: bool = False
    classify: bool = False
    num_truncated: int = 0
    resumed: ResumedOutput | None = None
    reasoning: Reasoning | None = None
    preserved_token_ids: tuple[int, ...] = ()
    media: tuple[Media, ...] = ()
    media_runs: tuple[MediaRun, ...] = ()
    make_parser: Callable[[Request, int], AnswerParser] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.classify:
            object.__setattr__(self, "embed", True)
        if self.seed < 0:
            seed = self.params.seed if self.params.seed is not None else secrets.randbits(64)
            object.__setattr__(self, "seed", seed)

    def __repr__(self) -> str:
        return brief(self, hidden=("arrival_s", "group", "seed"))

    @property
    def tier(self) -> tuple[bool, int]:
        """The rank among the waiting requests; a lower rank enters first."""
        return self.params.background, self.params.priority

    def is_late(self, now: float) -> bool:
        """Returns True if the deadline has passed at time.perf_counter() `now`."""
        return self.params.deadline_s is not None and now > self.arrival_s + self.params.deadline_s

    @property
    def follows_reasoning(self) -> bool:
        """True if the engine must follow the thinking: there is a budget, or a structured output after the thinking."""
        params = self.params
        binds = params.structure is not None and not params.structure.in_reasoning
        return self.reasoning is not None and (binds or params.thinking_token_budget is not None)

    @property
    def expected_tokens(self) -> int:
        """The maximum number of prompt and output tokens, as a measure of load. A max_tokens of None counts as 256."""
        output = self.params.n_copies * (self.params.max_tokens or 256)
        return len(self.prompt_token_ids) + (output if self.score_from is None and not self.embed else 0)


@dataclass(frozen=True)
class ResumedOutput:
    """Output tokens of an engine that has died. The next engine computes these tokens like a prompt, and does not emit
    them.

    Attributes:
        token_ids: the tokens.
        times_s: time.perf_counter() when each token was emitted.
        logprobs: one for each token; None unless the request asks for logprobs.
        admitted_s: time.perf_counter() when the request first had a slot.
    """

    token_ids: tuple[int, ...]
    times_s: tuple[float, ...]
    logprobs: Sequence[TokenLogprobs] | None = None
    admitted_s: float | None = None


def new_group() -> int:
    """Returns a group number for the requests of one call."""
    return next(_group_numbers)
