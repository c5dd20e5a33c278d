"""PreparedParams: SamplingParams with a model's defaults, tokenized bad words, and masks. Makes SamplerStates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from llamabatch.errors import SamplingError
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.sampling.defaults import FilledParams, defaults_of, fill
from llamabatch.sampling.dry import DryPenalty, Tails, breaker_tokens
from llamabatch.sampling.infill import Infill
from llamabatch.sampling.reasoning import Tokenizer, behind_break
from llamabatch.sampling.sampler import SamplerState
from llamabatch.sampling.token_counts import token_counts
from llamabatch.sampling.token_masks import BadWords, Bitmask, Masks, NotBefore, all_but
from llamabatch.utils.checks import show

_MOST_KEPT = 32  # maximum number of PreparedParams that are kept; a call usually needs one for all its prompts


class Vocabulary(Tokenizer, Protocol):
    """The part of a Model that this module uses."""

    n_vocab: int
    metadata: Mapping[str, str]
    special_ids: Mapping[str, int]

    @property
    def eog_ids(self) -> tuple[int, ...]: ...

    def tokenize_bytes(self, data: bytes) -> list[int]: ...


class PreparedParams:
    """One SamplingParams prepared for one model. Any number of sequences share it.

    Args:
        tails: the result of breaker_tokens for the DRY breakers; None: no DRY.

    Raises:
        SamplingError: a bad word has no tokens.
    """

    def __init__(self, params: FilledParams, model: Vocabulary, tails: Tails | None = None) -> None:
        self.params = params
        self._tails = tails
        self._n_vocab = model.n_vocab
        self._no_end = _no_end(params, model) if params.min_tokens else None
        self._infill = _infill(model) if "infill" in (params.chain or ()) else None
        self._bad_words = BadWords(_bad_runs(params, model), model.n_vocab) if params.forbidden_strings else None

    def sampler_state(self, request: Request) -> SamplerState:
        """Returns a new sampler state for one sequence of this request. All tokens of the sequence use it."""
        params = self.params
        counts = None
        if params.penalised:
            seen = request.prompt_token_ids[params.prompt_ignore_length or 0 :]
            if request.media:  # ids of picture cells are not tokens, so no penalty counts them
                seen = tuple(token_id for token_id in seen if token_id >= 0)
            counts = token_counts(seen, params.repeat_last_n)
        dry = None
        if self._tails is not None:
            dry = DryPenalty(self._tails, params.dry_allowed_length, params.dry_penalty_last_n)
        state = SamplerState(params, request.seed, counts=counts, dry=dry, infill=self._infill)
        if self._no_end is not None or self._bad_words is not None:
            state.masks = Masks(self._n_vocab)
            if self._no_end is not None:
                state.masks.add(NotBefore(params.min_tokens, self._no_end))
            if self._bad_words is not None:
                state.masks.add(self._bad_words)
        return state


class PreparedParamsCache:
    """Keeps up to _MOST_KEPT PreparedParams of a model. The key is the SamplingParams object. Not thread-safe."""

    def __init__(self, model: Vocabulary) -> None:
        self._model = model
        self._defaults = defaults_of(model.metadata)
        self._breakers: tuple[tuple[str, ...], Tails] | None = None
        # keys are id() of SamplingParams, because hashing long lists takes time
        self._known: dict[int, tuple[SamplingParams, PreparedParams]] = {}

    def of(self, params: SamplingParams) -> PreparedParams:
        """Returns `params` prepared for the model. Raises SamplingError if a bad word has no tokens."""
        known = self._known.get(id(params))
        if known is not None:
            return known[1]
        filled = fill(params, self._defaults)
        prepared = PreparedParams(filled, self._model, self._tails_of(filled) if filled.dry else None)
        if len(self._known) >= _MOST_KEPT:
            del self._known[next(iter(self._known))]
        self._known[id(params)] = (params, prepared)  # params are kept, so that their id is not reused
        return prepared

    def _tails_of(self, params: FilledParams) -> Tails:
        """Returns the tails of the breakers. Keeps the last result, because the search for tails reads the whole
        vocabulary."""
        if self._breakers is None or self._breakers[0] != params.breakers:
            model = self._model
            tails = breaker_tokens(params.breakers, model.n_vocab, model.all_bytes, model.tokenize_bytes)
            self._breakers = (params.breakers, tails)
        return self._breakers[1]


def _infill(model: Vocabulary) -> Infill:
    marks = model.special_ids
    return Infill(model.eog_ids, marks.get("eot", marks.get("eos")), model.token_bytes)


def _no_end(params: FilledParams, model: Vocabulary) -> Bitmask:
    """Returns a mask of all tokens except those that would end the text."""
    ends = set(params.stop_ids)
    if not params.ignore_eos:
        ends.update(model.eog_ids)
    return all_but(ends, model.n_vocab)


def _bad_runs(params: FilledParams, model: Vocabulary) -> Iterator[tuple[int, ...]]:
    """Yields the bad words as tokens, each with and without a space before it, as in vLLM."""
    for word in params.forbidden_strings:
        runs = list(_spellings(word, model))
        if not runs:
            raise SamplingError(f"bad_words has {show(word)}, for which this model has no tokens")
        yield from runs


def _spellings(word: str, model: Vocabulary) -> Iterator[tuple[int, ...]]:
    for text in (word.lstrip(), " " + word.lstrip(), word):
        tokens = model.tokenize(text, add_special=False)
        if tokens:
            yield tuple(tokens)
        is_padded = tokens and not text[:1].isspace() and model.token_bytes(tokens[0])[:1] == b" "
        if is_padded and (tokens := behind_break(text, model, parse_special=False)):
            yield tuple(tokens)
