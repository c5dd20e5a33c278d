"""Every exception that llamabatch raises.

::

    LlamaBatchError
    ├── InputError (ValueError)        a value from the caller is refused: the message names value and allowed range
    │   ├── ConfigError                an option of the engine
    │   │   ├── UnknownOptionError (TypeError)     no option has this name
    │   │   └── OutputBusyError                    another process is writing the output of a job
    │   ├── SamplingError              a field of SamplingParams
    │   │   └── UnknownParameterError (TypeError)  no field has this name
    │   ├── AdapterError               an adapter: unknown, in use, or its name is taken
    │   ├── PromptError                a prompt: empty, too long, token ids out of range
    │   │   └── ContextLengthError                 it has more tokens than a request may use
    │   ├── JobStoppedError            the first rows of a job all end with the same error; none of them is written
    │   └── ModelFileError             the model file: missing, truncated, not GGUF, a directory
    ├── QueueFull                      max_queue requests wait already; no request of this call was queued
    ├── SetupError                     the installation: library missing, too old, struct layouts differ
    ├── MemoryPlanError                the engine does not fit in memory; the message shows needed and free memory
    ├── OutputError                    a job's output cannot be written; the rows written so far stay
    └── EngineError                    the engine itself
        └── EngineClosedError          a call after close(), or the engine died

    PromptWarning (UserWarning)        some prompts of a call failed, and the others did not
"""

from __future__ import annotations

import re
from typing import Any

# Marks of text direction, line separators, lone surrogates, and all control characters but tab and newline.
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Returns the text with Python's escapes for the characters that a terminal would obey or cannot show. The name of
    a file, for example, can contain any character."""
    return _INVISIBLE.sub(lambda found: ascii(found[0])[1:-1], text)


class LlamaBatchError(Exception):
    """The base class: `except LlamaBatchError` catches every error that llamabatch raises on purpose.

    Attributes:
        outputs: for an error that ended a call with a list of prompts: the RequestOutput of each prompt, or None for a
            prompt that had not ended. Empty for any other error.
    """

    outputs: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return visible(super().__str__())


class InputError(LlamaBatchError, ValueError):
    """A value from the caller is refused."""


class ConfigError(InputError):
    """An engine option has a value outside its range, or no such option exists."""


class UnknownOptionError(ConfigError, TypeError):
    """No engine option has this name. Also a TypeError, which Python raises for an unknown keyword."""


class OutputBusyError(ConfigError):
    """Another process is writing the output of a job."""


class SamplingError(InputError):
    """A field of SamplingParams has a value outside its range."""


class UnknownParameterError(SamplingError, TypeError):
    """SamplingParams has no field of this name. Also a TypeError, which Python raises for an unknown keyword."""


class AdapterError(InputError):
    """An adapter is not loaded, is in use, or its name is taken."""


class PromptError(InputError):
    """A prompt cannot be run: it is empty, does not fit n_ctx, or contains ids outside the vocabulary."""


class ContextLengthError(PromptError):
    """A prompt or text has more tokens than a request of this engine may use.

    Attributes:
        n_tokens: the prompt's length in tokens.
        n_allowed: n_ctx; for a text to embed, the smaller of n_ctx and n_batch.
        is_cured_by_n_ctx: True if a larger n_ctx makes the prompt fit: n_tokens is exact, and n_ctx is the only limit.
    """

    n_tokens: int = 0
    n_allowed: int = 0
    is_cured_by_n_ctx: bool = False


class JobStoppedError(InputError):
    """The first rows of a job all ended with the same error. These rows are not written, so the same job runs them
    again."""


class ModelFileError(InputError):
    """The model file is missing, unreadable, truncated or not GGUF."""


class QueueFull(LlamaBatchError):  # named as other servers name this error
    """The queue is full: max_queue requests wait. No request of the refused call was queued; try again later.

    Attributes:
        retry_after_s: seconds until the queue should have room; None: not known.
    """

    retry_after_s: float | None = None


class SetupError(LlamaBatchError):
    """The installation cannot work as it is; the message says what to do."""


class MemoryPlanError(LlamaBatchError):
    """The requested engine does not fit in memory; the message shows needed and free memory."""


class OutputError(LlamaBatchError):
    """A job's output cannot be written: the disk is full or fails. If the job is started again, it continues after the
    written rows."""


class EngineError(LlamaBatchError):
    """The engine cannot finish this call."""


class EngineClosedError(EngineError):
    """The engine was closed, or it died."""


class PromptWarning(UserWarning):
    """Some prompts of a call failed. Their outputs have the reason in `error`; the other outputs are complete.

    Attributes:
        outputs: as in LlamaBatchError, for programs that turn warnings into errors.
    """

    outputs: tuple[Any, ...] = ()


def error_type(error: BaseException) -> str | None:
    """Returns the name of the error's class or nearest base class in this module; None: not a LlamaBatchError."""
    return next((kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__), None)


def error_class(name: str | None) -> type[LlamaBatchError]:
    """Returns the class for a name from `error_type`; EngineError for None and for an unknown name."""
    kind = globals().get(name or "")
    return kind if isinstance(kind, type) and issubclass(kind, LlamaBatchError) else EngineError


def describe(error: BaseException) -> str:
    """Returns an error's text for the output of a request. The type comes first, except for a LlamaBatchError."""
    try:
        text = str(error)
    except Exception:  # a caller's class can raise anything
        text = ""
    if isinstance(error, LlamaBatchError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
