"""What top_n_sigma, typical_p, XTC, mirostat and dynamic temperature do to a row, each a function of its values.

Values are the logits of the tokens that may come, float32, in order of their ids; a cut gives the places that it
leaves, rising. Weights are those of sampler_numpy; sums and logarithms are in float64.
"""

from __future__ import annotations

import math

import numpy as np

from llamabatch.filled_params import FilledParams
from llamabatch.llama.sampler_numpy import Floats, Ids, top_of, weights_of

_MIROSTAT_M = 100  # the likeliest tokens, from which mirostat 1 estimates how steep the distribution is
_LOOKS = (512, 8192)  # tokens that typical_p sorts before it sorts them all
_UNIT = 2.0**33  # the weight of the likeliest token


def top_n_sigma(values: Floats, n: float) -> Ids:
    """Values within n standard deviations of the largest (Tang et al. 2024)."""
    return np.flatnonzero(values >= float(values.max()) - n * float(values.std(dtype=np.float64)))


def typical(values: Floats, mass: float) -> Ids:
    """The fewest tokens whose surprise is nearest to the entropy and whose probabilities exceed `mass` (Meister et al.
    2022)."""
    weights = weights_of(values, values.max())
    places = np.flatnonzero(weights)
    probabilities = weights[places] / weights.sum()
    surprise = -np.log(probabilities)
    distance = np.abs(surprise - (probabilities * surprise).sum())
    near = np.arange(len(places))
    for look in _LOOKS:  # sorting a whole vocabulary takes its time
        if look < len(places):
            close = np.flatnonzero(distance <= np.partition(distance, look)[look])
            if probabilities[close].sum() > mass:
                near = close
                break
    near = near[np.argsort(distance[near], kind="stable")]
    reach = int(np.searchsorted(np.cumsum(probabilities[near]), mass, side="right")) + 1
    return np.sort(places[near[:reach]])


def xtc(values: Floats, threshold: float) -> Ids:
    """All but the tokens at least as probable as the threshold; of those the least likely stays."""
    weights = weights_of(values, values.max())
    above = np.flatnonzero(weights >= threshold * weights.sum())
    if len(above) < 2:
        return np.arange(len(values))
    lowest = values[above].min()
    stays = above[values[above] == lowest][-1]  # where two are equal, the higher id counts as less likely
    return np.delete(np.arange(len(values)), above[above != stays])


def dynamic_temperature(values: Floats, params: FilledParams) -> float:
    """Between temperature - range, where one token is certain, and + range, where all are equally likely."""
    if params.dynatemp_range <= 0 or len(values) < 2:
        return params.temperature
    low = max(0.0, params.temperature - params.dynatemp_range)
    high = params.temperature + params.dynatemp_range
    share = entropy(values) / math.log(len(values))
    return low + (high - low) * float(share**params.dynatemp_exponent)


def entropy(values: Floats) -> float:
    """In nats."""
    weights = weights_of(values, values.max())
    probabilities = weights[weights > 0] / weights.sum()
    return max(0.0, -float((probabilities * np.log(probabilities)).sum()))


def mirostat(values: Floats, params: FilledParams, mu: float) -> Ids:
    """Tokens of a whole row that mirostat leaves, at least one (Basu et al. 2021): as many of the likeliest as version
    1 estimates to hold mu bits of surprise, or with version 2 those of at most mu bits each."""
    if params.mirostat == 2:
        weights = weights_of(values, values.max(), params.temperature)
        bound = max(1.0, weights.sum() * 2.0**-mu)
        return np.flatnonzero(weights >= bound) if bound <= _UNIT else np.array([values.argmax()])
    tempered = values[top_of(values, _MIROSTAT_M)].astype(np.float64) / params.temperature
    return np.sort(top_of(values, mirostat_k(tempered, mu, len(values))))


def mirostat_k(likeliest: Floats, mu: float, n_vocab: int) -> int:
    """How many tokens mirostat 1 keeps, 1 to n_vocab, if probabilities fall as those of Zipf's law.

    Args:
        likeliest: the logits of the _MIROSTAT_M likeliest tokens, falling.
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
    except (OverflowError, ZeroDivisionError):  # nearly flat
        k = math.inf
    return max(1, int(min(k, n_vocab)))
