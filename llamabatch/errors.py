"""Every exception that llamabatch raises.

::

    LlamaBatchError
    ├── InputError (ValueError)        what the caller gave is refused: the message names value and allowed range
    │   ├── ConfigError                an option of the engine
    │   ├── SamplingError              a field of SamplingParams
    │   ├── AdapterError               an adapter: unknown, in use, or its name is taken
    │   ├── PromptError                a prompt: empty, too long, token ids out of range
    │   └── ModelFileError             the model file: missing, truncated, not GGUF, a directory
    ├── QueueFull                      max_queue requests wait already; nothing of this call was queued
    ├── SetupError                     the installation: library missing, too old, struct layouts differ
    ├── MemoryPlanError                what was asked for does not fit; the message shows the sum
    ├── OutputError                    a job's output cannot be written; what is written stays
    └── EngineError                    the engine itself
        └── EngineClosedError          a call after close(), or the engine died

    PromptWarning (UserWarning)        some prompts of a call failed, and the others did not
"""

from __future__ import annotations

from typing import Any


class LlamaBatchError(Exception):
    """The root: `except LlamaBatchError` catches all that llamabatch raises on purpose.

    Attributes:
        outputs: of an error that ends a call for a list of prompts: the RequestOutput of each prompt that had ended by
            then, in its place, and None for each other; empty of every other error.
    """

    outputs: tuple[Any, ...] = ()


class InputError(LlamaBatchError, ValueError):
    """What the caller gave is refused."""


class ConfigError(InputError):
    """An engine option has a value outside its range, or no such option exists."""


class SamplingError(InputError):
    """A field of SamplingParams has a value outside its range."""


class AdapterError(InputError):
    """An adapter is not loaded, is in use, or its name is taken."""


class PromptError(InputError):
    """A prompt cannot be run: it is empty, does not fit n_ctx, or holds ids outside the vocabulary."""


class ModelFileError(InputError):
    """The model file is missing, unreadable, truncated or not GGUF."""


class QueueFull(LlamaBatchError):  # the name that servers give it
    """As many requests wait as max_queue allows. Nothing of the refused call was queued; try it again later."""


class SetupError(LlamaBatchError):
    """The installation cannot work as it is; the message says what to do."""


class MemoryPlanError(LlamaBatchError):
    """What was asked for does not fit in memory; the message shows the sum."""


class OutputError(LlamaBatchError):
    """A job's output cannot be written: the disk is full, or fails. The same job goes on from what is written."""


class EngineError(LlamaBatchError):
    """The engine cannot go on with this call."""


class EngineClosedError(EngineError):
    """The engine was closed, or it died."""


class PromptWarning(UserWarning):
    """Some prompts of a call failed. Each such output says why in `error`; the others are whole.

    Attributes:
        outputs: as in LlamaBatchError, for where warnings are made errors.
    """

    outputs: tuple[Any, ...] = ()


def describe(error: BaseException) -> str:
    """The text of an error for the output of a request; the name of its type comes first unless it is one of ours."""
    text = str(error)
    if isinstance(error, LlamaBatchError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
