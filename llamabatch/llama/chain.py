"""The samplers that few requests ask for, one row at a time in numpy, whether or not the compiled helper is there.

Order and meaning are llama.cpp's (common/sampling.cpp, src/llama-sampler.cpp): bias, penalties, DRY, masks,
top_n_sigma, top_k, typical_p, top_p, min_p, XTC, temperature, one draw; or with mirostat: temperature, then mirostat in
place of all cuts. Logits processors come before all of it. Four things differ on purpose. Temperature 0 is greedy
whatever else is asked. A token that cannot come counts nowhere, not for an entropy either. Mirostat keeps the
penalties, which llama.cpp then leaves out. And the weights of the draw are the whole numbers of sampler_numpy, so that
one seed gives one text.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from llamabatch.errors import EngineError
from llamabatch.filled_params import FilledParams
from llamabatch.llama import cuts, sampler_numpy
from llamabatch.llama.processors import ProcessorError, processed
from llamabatch.llama.sampler_numpy import NO_TOKEN, Draw, Floats, Ids, uniform, weights_of
from llamabatch.repeats import Repeats

_XTC_SALT = 0x9E6C63D0876A9A47  # makes XTC's chance another number than the draw's
_FLOAT_MAX = float(np.finfo(np.float32).max)
_FLOAT_MAX_LOG = 88.7228391  # dry_base ** run stays below the largest float32


class Chain:
    """One sequence's samplers, and what they remember of its tokens.

    Args:
        repeats: for DRY; None: none.
    """

    def __init__(self, params: FilledParams, repeats: Repeats | None = None) -> None:
        self._params = params
        self._repeats = repeats
        self._num_known: int | None = None  # output tokens that DRY has seen; None: not even the prompt
        self._is_torn = False  # of some tokens it has seen a part
        self._mus = [2 * params.mirostat_tau]  # mirostat's bound before each output token

    def sample(self, row: Floats, draw: Draw) -> int:
        """The token of one row, or NO_TOKEN. Asked again for the same output token, it answers the same."""
        if self._params.greedy:
            values = self._edited(row, draw)
            return NO_TOKEN if values is None else int(values.argmax())
        ids, weights = self.candidates(row, draw)
        if not len(ids):
            return NO_TOKEN
        sums = np.cumsum(weights)
        place = int(np.searchsorted(sums, uniform(draw.seed, draw.index) * sums[-1], side="right"))
        if self._params.mirostat:
            self.learn(draw.index, float(weights[place] / sums[-1]))
        return int(ids[place])

    def candidates(self, row: Floats, draw: Draw) -> tuple[Ids, Floats]:
        """The ids that the chain leaves, rising, and their weights in whole numbers; empty where nothing can come."""
        values = self._edited(row, draw)
        if values is None:
            return np.empty(0, np.int64), np.empty(0)
        params = self._params
        if params.mirostat:
            ids, temperature = cuts.mirostat(values, params, self.mu(draw.index)), params.temperature
        else:
            ids = self._cut(values, draw)
            temperature = cuts.dynamic_temperature(values[ids], params)
        left = values[ids]
        return ids, weights_of(left, left.max(), temperature)

    def mu(self, index: int) -> float:
        """Mirostat's bound in bits for output token `index`."""
        return self._mus[min(index, len(self._mus) - 1)]

    def learn(self, index: int, probability: float) -> None:
        """Output token `index` came, which had this probability among the candidates. What is known of later ones is
        forgotten, so that a token that is sampled anew counts once."""
        params = self._params
        mu = self.mu(index)
        del self._mus[index + 1 :]
        self._mus.append(mu - params.mirostat_eta * (-math.log2(probability) - params.mirostat_tau))

    def _edited(self, row: Floats, draw: Draw) -> Floats | None:
        draw.error = None
        if self._params.processors:
            try:
                row = processed(row, self._params.processors, draw.token_ids[len(draw.token_ids) - draw.index :])
            except ProcessorError as error:
                draw.error = str(error)
                return None
        values = sampler_numpy.values_of(row, draw)
        if values is None or self._repeats is None:
            return values
        if self._num_known != draw.index:
            start = 0 if self._num_known is None else self._num_known - draw.index  # counted from the end
            if self._is_torn:
                raise EngineError("DRY has lost count of the tokens, after an exception")
            self._is_torn = True
            self._repeats.extend(draw.token_ids[start:])
            self._num_known, self._is_torn = draw.index, False
        values = values.copy() if values is row else values
        for token_id, length in self._repeats.lengths().items():
            values[token_id] -= self._dry_penalty(length)
        return values if np.isfinite(values.max()) else None

    def _dry_penalty(self, length: int) -> Any:
        params, run = self._params, length - self._params.dry_allowed_length
        if params.dry_base > 1.000001:
            run = min(run, int(_FLOAT_MAX_LOG / math.log(params.dry_base)))
        return np.float32(min(params.dry_multiplier * params.dry_base**run, _FLOAT_MAX))

    def _cut(self, values: Floats, draw: Draw) -> Ids:
        """The ids that the cuts leave, rising."""
        params = self._params
        if params.top_n_sigma > 0:
            kept: Ids = np.flatnonzero(values > -np.inf)
            kept = kept[cuts.top_n_sigma(values[kept], params.top_n_sigma)]
            if 0 < params.top_k < len(kept):
                kept = kept[np.sort(sampler_numpy.top_of(values[kept], params.top_k))]
        elif 0 < params.top_k < len(values):
            kept = np.sort(sampler_numpy.top_of(values, params.top_k))
        else:
            kept = np.flatnonzero(values > -np.inf)
        if params.typical_p < 1:
            kept = kept[cuts.typical(values[kept], params.typical_p)]
        if params.top_p < 1:
            left = values[kept]
            kept = kept[np.sort(sampler_numpy.nucleus(left, left.max(), params.top_p))]
        if params.min_p > 0:
            left = values[kept]
            kept = kept[left.astype(np.float64) >= float(left.max()) + params.log_min_p]
        if params.xtc_probability > 0 and uniform(draw.seed ^ _XTC_SALT, draw.index) <= params.xtc_probability:
            kept = kept[cuts.xtc(values[kept], params.xtc_threshold)]
        return kept
