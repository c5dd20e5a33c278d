"""From the outputs of embedding requests to numpy arrays: what LLM and AsyncLLM share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from llamabatch.errors import EngineError, LlamaBatchError
from llamabatch.front import ErrorPolicy
from llamabatch.request import RequestOutput

Vector = npt.NDArray[np.float32]


def vectors(outputs: Iterable[RequestOutput], *, normalize: bool, errors: ErrorPolicy) -> list[Any]:
    """One array of shape (n_embd,) for each output; where it has an error, that error.

    Raises:
        EngineError: an output has an error, or was aborted, and errors is "raise".
    """
    return [_vector(output, normalize, errors) for output in outputs]


def _vector(output: RequestOutput, normalize: bool, errors: ErrorPolicy) -> Vector | LlamaBatchError:
    if output.embedding is None:
        if errors == "raise":
            raise EngineError(output.error or "it was aborted")
        return LlamaBatchError(output.error or "it was aborted")
    vector: Vector = np.array(output.embedding, np.float32)
    length = float(np.linalg.norm(vector)) if normalize else 0.0
    return vector / np.float32(length) if length > 0 else vector
