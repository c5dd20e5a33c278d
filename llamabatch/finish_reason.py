"""How a generation ends."""

from __future__ import annotations

from enum import Enum


class FinishReason(str, Enum):
    """Why a sequence ended."""

    STOP = "stop"  # an end-of-generation token, a stop string or a stop token
    LENGTH = "length"  # max_tokens reached, or n_ctx used up
    ABORT = "abort"  # the caller took it back
    ERROR = "error"  # see RequestOutput.error

    __str__ = str.__str__
