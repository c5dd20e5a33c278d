"""Logits processors: Python functions of a request, called for each of its tokens. What they do wrong is its own."""

from __future__ import annotations

from collections.abc import Sequence as ListLike

import numpy as np

from llamabatch.checks import show
from llamabatch.llama.sampler_numpy import Floats
from llamabatch.sampling_params import LogitsProcessor


class ProcessorError(Exception):
    """A logits processor raised something, or gave what is no row of logits; the message names it."""


def processed(row: Floats, processors: ListLike[LogitsProcessor], output: ListLike[int]) -> Floats:
    """What the functions make of a row, one after another; the row itself stays as it is.

    Args:
        output: the output tokens so far. Each function gets a list of its own, and a row of its own.

    Raises:
        ProcessorError.
    """
    for process in processors:
        name = getattr(process, "__qualname__", type(process).__qualname__)
        try:
            given = process(list(output), row.copy())
            made = np.asarray(given)
        except BaseException as error:  # SystemExit, too: it is raised on the engine's thread
            raise ProcessorError(
                f"logits_processors: {name} raised {type(error).__name__}: {show(str(error))}"
            ) from error
        if made.shape != row.shape or made.dtype.kind not in "fiu":
            what = show(given) if made.shape == () else f"an array of shape {made.shape}, {made.dtype}"
            raise ProcessorError(f"logits_processors: {name} gave {what}; give numbers of shape {row.shape}")
        with np.errstate(over="ignore", invalid="ignore"):
            row = made.astype(np.float32)
        if not row.max() <= np.finfo(np.float32).max:  # a NaN or +inf; `max` hands a NaN on
            raise ProcessorError(f"logits_processors: {name} gave NaN or +inf; give finite numbers or -inf")
    return row
