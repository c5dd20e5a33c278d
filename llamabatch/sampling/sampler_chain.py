"""Chain: the uncommon samplers. A Chain samples one row at a time in numpy, even with the compiled helper.

Order and meaning are llama.cpp's (common/sampling.cpp, src/llama-sampler.cpp): bias, penalties, DRY, masks,
top_n_sigma, top_k, typical_p, top_p, min_p, XTC, temperature, one draw. With mirostat, the temperature comes before
mirostat, which takes the place of all cuts. Logits processors come first. If a request names an order, bias and masks
still come before the named samplers. Four things differ from llama.cpp on purpose. Temperature 0 is greedy with any
other option. A forbidden token never counts, not even for an entropy. Penalties also apply with mirostat. The weights
of the draw are the whole numbers of numpy_sampler, so that one seed gives one text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from llamabatch.errors import EngineError
from llamabatch.request.samplers import CHAIN, is_off
from llamabatch.request.sampling_params import LogitsProcessor
from llamabatch.sampling import numpy_sampler
from llamabatch.sampling.defaults import FilledParams
from llamabatch.sampling.dry import DryPenalty
from llamabatch.sampling.infill import Infill
from llamabatch.sampling.numpy_sampler import COLDEST, NO_TOKEN, Floats, Ids, RowState, top_of, uniform, weights_of
from llamabatch.utils.checks import show

_MIROSTAT_M = 100  # number of likeliest tokens from which mirostat 1 estimates the steepness
_LOOKS = (512, 8192)  # typical_p first sorts only this many tokens, and all tokens only if necessary
_XTC_SALT = 0x9E6C63D0876A9A47  # makes XTC's random number differ from the draw's
_CUTS = CHAIN[2:-1]  # all but penalties, DRY and temperature
_FLOAT_MAX = float(np.finfo(np.float32).max)
_FLOAT_MAX_LOG = 88.7228391  # log of _FLOAT_MAX; dry_base ** run must not exceed _FLOAT_MAX


class Chain:
    """The samplers of one sequence, with the state of DRY and mirostat.

    Args:
        dry: the repeated runs that DRY penalises; None: no DRY.
        infill: the sampler "infill" of the vocabulary; None: "infill" has no effect.
    """

    def __init__(self, params: FilledParams, dry: DryPenalty | None = None, infill: Infill | None = None) -> None:
        self._params = params
        self._dry = dry
        self._infill = infill
        self._cuts = [name for name in _CUTS if not is_off(name, vars(params))]
        self._num_known: int | None = None  # number of output tokens read by DRY; None: DRY has not read the prompt
        self._is_torn = False  # True: an exception has interrupted DRY while it read tokens
        self._mus = [2 * params.mirostat_tau]  # mirostat's bound (mu) before each output token

    def sample(self, row: Floats, state: RowState) -> int:
        """Returns the token of one row, or NO_TOKEN. Repeated calls for one output token return the same token."""
        if self._params.greedy and self._params.chain is None:
            values = self._edited(row, state)
            return NO_TOKEN if values is None else int(values.argmax())
        ids, weights = self.candidates(row, state)
        if not len(ids):
            return NO_TOKEN
        sums = np.cumsum(weights)
        place = int(np.searchsorted(sums, uniform(state.seed, state.index) * sums[-1], side="right"))
        if self._params.mirostat:
            self.learn(state.index, float(weights[place] / sums[-1]))
        return int(ids[place])

    def candidates(self, row: Floats, state: RowState) -> tuple[Ids, Floats]:
        """Returns the ids that remain after the chain, in ascending order, and their weights as whole numbers. Both may
        be empty."""
        params = self._params
        if params.chain is not None:
            return self._in_order(params.chain, row, state)
        values = self._edited(row, state)
        if values is None:
            return np.empty(0, np.int64), np.empty(0)
        if params.mirostat:
            ids, temperature = mirostat(values, params, self.mu(state.index)), params.temperature
        else:
            ids = self._cut(values, state)
            temperature = dynamic_temperature(values[ids], params)
        left = values[ids]
        return ids, weights_of(left, left.max(), temperature)

    def _in_order(self, names: Sequence[str], row: Floats, state: RowState) -> tuple[Ids, Floats]:
        """Returns the same as `candidates`, but the samplers run in the request's order."""
        start = self._start(row, state, penalised=False)
        if start is None:
            return np.empty(0, np.int64), np.empty(0)
        values: Floats = start.copy()
        ids: Ids = np.flatnonzero(values > -np.inf)
        for name in names:
            if name in ("penalties", "dry"):
                if name == "dry":
                    self._penalise_runs(values, state)
                elif state.counts is not None:
                    with np.errstate(over="ignore"):
                        numpy_sampler.penalise(values, self._params, state.counts)
                ids = ids[values[ids] > -np.inf]
                if not len(ids) or not np.isfinite(values[ids].max()):
                    return np.empty(0, np.int64), np.empty(0)
            elif name == "temperature":
                ids = self._temper(values, ids)
            elif name == "infill":
                ids = ids if self._infill is None else self._infill.left(values, ids)
            else:
                ids = ids[self._places(name, values[ids], state)]
        left = values[ids]
        if self._params.greedy:  # a chain may lack the sampler "temperature"
            ids, left = ids[[left.argmax()]], left[[left.argmax()]]
        return ids, weights_of(left, left.max())

    def _temper(self, values: Floats, ids: Ids) -> Ids:
        """Divides values by the temperature, in place. Returns the ids that remain. At temperature 0, only one id
        remains."""
        left = values[ids]
        temperature = dynamic_temperature(left, self._params)
        if self._params.greedy or temperature < COLDEST:  # below COLDEST, clip could make two large quotients equal
            return ids[[left.argmax()]]
        values[ids] = np.clip(left.astype(np.float64) / temperature, -_FLOAT_MAX, _FLOAT_MAX)
        return ids

    def mu(self, index: int) -> float:
        """Returns mirostat's bound in bits for output token `index`."""
        return self._mus[min(index, len(self._mus) - 1)]

    def learn(self, index: int, probability: float) -> None:
        """Records the probability that output token `index` had among the candidates. Drops the bounds of later tokens,
        because a token that is sampled again must count only once."""
        params = self._params
        mu = self.mu(index)
        del self._mus[index + 1 :]
        self._mus.append(mu - params.mirostat_eta * (-math.log2(probability) - params.mirostat_tau))

    def _edited(self, row: Floats, state: RowState) -> Floats | None:
        """Returns the row with all changes before the cuts; None if no token can be sampled."""
        values = self._start(row, state)
        if values is None or self._dry is None:
            return values
        values = values.copy() if values is row else values
        self._penalise_runs(values, state)
        return values if np.isfinite(values.max()) else None

    def _start(self, row: Floats, state: RowState, *, penalised: bool = True) -> Floats | None:
        state.error = None
        if self._params.processors:
            try:
                row = processed(row, self._params.processors, state.token_ids[len(state.token_ids) - state.index :])
            except ProcessorError as error:
                state.error = str(error)
                return None
        return numpy_sampler.values_of(row, state, penalised=penalised)

    def _penalise_runs(self, values: Floats, state: RowState) -> None:
        """Applies DRY to a row, in place."""
        if self._dry is None:
            return
        if self._num_known != state.index:
            start = 0 if self._num_known is None else self._num_known - state.index  # negative: counted from the end
            if self._is_torn:
                raise EngineError("DRY has lost count of the tokens, after an exception")
            self._is_torn = True
            self._dry.extend(state.token_ids[start:])
            self._num_known, self._is_torn = state.index, False
        for token_id, length in self._dry.lengths().items():
            values[token_id] -= self._dry_penalty(length)

    def _dry_penalty(self, length: int) -> Any:
        params, run = self._params, length - self._params.dry_allowed_length
        if params.dry_base > 1.000001:
            run = min(run, int(_FLOAT_MAX_LOG / math.log(params.dry_base)))
        return np.float32(min(params.dry_multiplier * params.dry_base**run, _FLOAT_MAX))

    def _cut(self, values: Floats, state: RowState) -> Ids:
        """Returns the ids that remain after all cuts, in ascending order."""
        params, first = self._params, 0
        if self._cuts[:1] == ["top_k"] and 0 < params.top_k < len(
            values
        ):  # most requests cut with top_k first, and top_k reads the whole row without a copy
            kept: Ids = np.sort(numpy_sampler.top_of(values, params.top_k))
            first = 1
        else:
            kept = np.flatnonzero(values > -np.inf)
        for name in self._cuts[first:]:
            kept = kept[self._places(name, values[kept], state)]
        return kept

    def _places(self, name: str, left: Floats, state: RowState) -> Ids | slice:
        """Returns the places of values that pass a cut, in ascending order.

        Args:
            left: the values that passed earlier samplers, at least one; none is -inf.
        """
        params = self._params
        if name == "top_n_sigma" and params.top_n_sigma > 0:
            return top_n_sigma(left, params.top_n_sigma)
        if name == "top_k" and 0 < params.top_k < len(left):
            return np.sort(numpy_sampler.top_of(left, params.top_k))
        if name == "typ_p" and params.typical_p < 1:
            return typical(left, params.typical_p)
        if name == "top_p" and params.top_p < 1:
            return np.sort(numpy_sampler.nucleus(left, left.max(), params.top_p))
        if name == "min_p" and params.min_p > 0:
            return np.flatnonzero(left.astype(np.float64) >= float(left.max()) + params.log_min_p)
        draws = params.xtc_probability > 0 and uniform(state.seed ^ _XTC_SALT, state.index) <= params.xtc_probability
        return xtc(left, params.xtc_threshold) if name == "xtc" and draws else slice(None)


def top_n_sigma(values: Floats, n: float) -> Ids:
    """Returns the places of the values that are within n standard deviations of the largest value (Tang et al.
    2024)."""
    return np.flatnonzero(values >= float(values.max()) - n * float(values.std(dtype=np.float64)))


def typical(values: Floats, mass: float) -> Ids:
    """Returns the places of the tokens whose surprise is nearest to the entropy. Takes only as many of these tokens as
    are needed for a sum of probabilities above `mass` (Meister et al. 2022)."""
    weights = weights_of(values, values.max())
    places = np.flatnonzero(weights)
    probabilities = weights[places] / weights.sum()
    surprise = -np.log(probabilities)
    distance = np.abs(surprise - (probabilities * surprise).sum())
    near = np.arange(len(places))
    for look in _LOOKS:  # sorting a whole vocabulary takes time
        if look < len(places):
            close = np.flatnonzero(distance <= np.partition(distance, look)[look])
            if probabilities[close].sum() > mass:
                near = close
                break
    near = near[np.argsort(distance[near], kind="stable")]
    reach = int(np.searchsorted(np.cumsum(probabilities[near]), mass, side="right")) + 1
    return np.sort(places[near[:reach]])


def xtc(values: Floats, threshold: float) -> Ids:
    """Returns the places of all tokens below the probability `threshold`, and of the least likely token above it."""
    weights = weights_of(values, values.max())
    above = np.flatnonzero(weights >= threshold * weights.sum())
    if len(above) < 2:
        return np.arange(len(values))
    lowest = values[above].min()
    stays = above[values[above] == lowest][-1]  # of equally likely tokens, the token with the highest id stays
    return np.delete(np.arange(len(values)), above[above != stays])


def dynamic_temperature(values: Floats, params: FilledParams) -> float:
    """Returns a value between `temperature - range` and `temperature + range`. The first applies if one token is
    certain, the second if all tokens are equally likely."""
    if params.dynatemp_range <= 0 or len(values) < 2:
        return params.temperature
    low = max(0.0, params.temperature - params.dynatemp_range)
    high = params.temperature + params.dynatemp_range
    share = entropy(values) / math.log(len(values))
    return low + (high - low) * float(share**params.dynatemp_exponent)


def entropy(values: Floats) -> float:
    """Returns the entropy of the softmax of a row, in nats."""
    weights = weights_of(values, values.max())
    probabilities = weights[weights > 0] / weights.sum()
    return max(0.0, -float((probabilities * np.log(probabilities)).sum()))


def mirostat(values: Floats, params: FilledParams, mu: float) -> Ids:
    """Returns the tokens of a whole row that pass mirostat, at least one (Basu et al. 2021). Version 1 keeps the
    likeliest tokens, and estimates their number from a surprise of mu bits. Version 2 keeps each token with a surprise
    of at most mu bits."""
    if params.mirostat == 2:
        weights = weights_of(values, values.max(), params.temperature)
        bound = max(1.0, weights.sum() * 2.0**-mu)
        return np.flatnonzero(weights >= bound) if bound <= numpy_sampler.UNIT else np.array([values.argmax()])
    tempered = values[top_of(values, _MIROSTAT_M)].astype(np.float64) / params.temperature
    return np.sort(top_of(values, mirostat_k(tempered, mu, len(values))))


def mirostat_k(likeliest: Floats, mu: float, n_vocab: int) -> int:
    """Returns the number of tokens (1 to n_vocab) that mirostat 1 keeps. Assumes that probabilities follow Zipf's law.

    Args:
        likeliest: the logits of the _MIROSTAT_M likeliest tokens, largest first.
    """
    if len(likeliest) < 2:
        return 1
    ranks = np.arange(1, len(likeliest), dtype=np.float64)
    steps = np.log((ranks + 1) / ranks)
    slope = float((steps * -np.diff(likeliest)).sum() / (steps * steps).sum())
    excess = slope - 1
    try:
        scale = excess / (1 - float(n_vocab) ** -excess) if excess else 1 / math.log(n_vocab)
        k = (scale * 2.0**mu) ** (1 / slope)
    except (OverflowError, ZeroDivisionError):  # the distribution is nearly flat
        k = math.inf
    return max(1, int(min(k, n_vocab)))


class ProcessorError(Exception):
    """A logits processor raised an exception, or did not return a row of logits. The message names the processor."""


def processed(row: Floats, processors: Sequence[LogitsProcessor], output: Sequence[int]) -> Floats:
    """Applies all logits processors, one after another. Returns the new row, and does not change the given row.

    Args:
        output: the output tokens so far. Each processor gets its own copy of the list and of the row.

    Raises:
        ProcessorError.
    """
    for process in processors:
        name = getattr(process, "__qualname__", type(process).__qualname__)
        try:
            given = process(list(output), row.copy())
            made = np.asarray(given)
        except BaseException as error:  # also SystemExit, because it would end the engine's thread
            raise ProcessorError(
                f"logits_processors: {name} raised {type(error).__name__}: {show(str(error))}"
            ) from error
        if made.shape != row.shape or made.dtype.kind not in "fiu":
            what = show(given) if made.shape == () else f"an array of shape {made.shape}, {made.dtype}"
            raise ProcessorError(f"logits_processors: {name} gave {what}; give numbers of shape {row.shape}")
        with np.errstate(over="ignore", invalid="ignore"):
            row = made.astype(np.float32)
        if not row.max() <= np.finfo(np.float32).max:  # a NaN or +inf: `max` of a row with a NaN is NaN
            raise ProcessorError(f"logits_processors: {name} gave NaN or +inf; give finite numbers or -inf")
    return row
