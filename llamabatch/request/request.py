"""The nouns of a request: what was asked (Request), how it stands (Sequence), what came of it (RequestOutput)."""

from __future__ import annotations

import itertools
import secrets
import time
from dataclasses import dataclass, field

from llamabatch.request.adapters import AdapterSet
from llamabatch.request.logprobs import TokenLogprobs
from llamabatch.request.sampling_params import SamplingParams

# ----------------------------------------------------------------------------------------------------
# What callers were told of a request by an engine that is gone. Pure Python.


@dataclass(frozen=True)
class ResumedOutput:
    """Output tokens with which the next engine goes on: it computes them like a prompt and does not tell them again.

    Attributes:
        token_ids: the tokens. times_s: time.perf_counter() when each was told.
        logprobs: one for each, where they were asked for.
        admitted_s: time.perf_counter() when the request first had a slot.
    """

    token_ids: tuple[int, ...]
    times_s: tuple[float, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    admitted_s: float | None = None


_group_numbers = itertools.count()


@dataclass(frozen=True)
class Request:
    """One prompt to continue; immutable, and all that has to cross a wire.

    Attributes:
        request_id: unique among the requests in flight.
        prompt_token_ids: the prompt as ids of the model's vocabulary.
        params: how to sample.
        prompt: the text that the ids came from, where there was one.
        arrival_s: time.perf_counter() when the caller asked, seconds.
        group: requests of one call share a number; later calls have higher ones. Policies sort inside a group only,
            so that a later call never overtakes an earlier one for good.
        seed: params.seed, or a random one drawn here, so that a retry draws the same tokens.
        ranked: its cumulative logprob is wanted, though no single ones are.
        embed: a vector of it is wanted, not a continuation; `params` mean nothing then.
        adapters: what the model is to compute it with; see adapters.adapter_set.
        score_from: sample nothing; tell the logprobs of the prompt's tokens from this one on, 1 .. their number - 1,
            and end. None: an ordinary request.
        num_truncated: tokens that the prompt has lost at its left (overflow="truncate").
        known: output tokens of it that another engine brought before it died.
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
    num_truncated: int = 0
    known: ResumedOutput | None = None

    def __post_init__(self) -> None:
        if self.seed < 0:
            seed = self.params.seed if self.params.seed is not None else secrets.randbits(64)
            object.__setattr__(self, "seed", seed)

    @property
    def tier(self) -> tuple[bool, int]:
        """Who goes first: the lower one."""
        return self.params.background, self.params.priority

    def is_late(self, now: float) -> bool:
        """Has its deadline passed?"""
        return self.params.deadline_s is not None and now > self.arrival_s + self.params.deadline_s

    @property
    def expected_tokens(self) -> int:
        """Tokens that this request will occupy at most, as far as is known now: the measure of load."""
        output = self.params.n_copies * (self.params.max_tokens or 256)
        return len(self.prompt_token_ids) + (output if self.score_from is None and not self.embed else 0)


def new_group() -> int:
    """A group number for the requests of one call."""
    return next(_group_numbers)
