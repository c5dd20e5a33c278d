"""Submission: the requests of one call, their outputs in the order of the prompts, and the call's errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from llamabatch.client.base import failure
from llamabatch.errors import EngineError, InputError, LlamaBatchError, PromptWarning
from llamabatch.llama.model import Model
from llamabatch.request.outputs import RequestOutput, SequenceOutput
from llamabatch.request.request import Request
from llamabatch.utils.caller import caller_level
from llamabatch.utils.checks import boolean, choice, counted

ErrorPolicy = Literal["warn", "raise", "return"]
ERROR_POLICIES = ("warn", "raise", "return")

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Refused:
    """A prompt that cannot be run. It keeps its place among the other prompts of its list."""

    request: Request
    error: InputError

    def __post_init__(self) -> None:
        # The frames of the traceback refer back to this error. Such a cycle would keep the LLM alive.
        self.error.__traceback__ = self.error.__cause__ = self.error.__context__ = None


class Outputs(list[RequestOutput]):
    """The list returned by generate and chat. Reading an attribute of a single output from the list, such as
    outputs.text, raises an error with advice.
    """

    def __getattr__(self, name: str) -> Any:
        if not hasattr(RequestOutput, name) and name not in RequestOutput.__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(
            f"this is a list of {counted(len(self), 'RequestOutput')}, one a prompt, also for a single prompt: "
            f"use outputs[0].{name}"
        )


class Submission:
    """The requests of one call, in the order of its prompts, and their outputs so far.

    Args:
        items: one item for each prompt.
        noun: the word for a prompt in messages, "prompt" for example.
        errors: the effect of a failed prompt. "warn": one warning after all prompts have ended, or the first error if
            all prompts failed; "raise": the first error is raised as soon as it is known; "return": neither.
        label: turns the index of a prompt into its place, for messages; None: a single prompt, not in a list.

    Attributes:
        n: the number of prompts.
        is_list: True if the prompts were given as a list.
        requests: the valid requests, ready to submit.
        refused: one event for each refused prompt, with its error.

    Raises:
        InputError: `errors` is unknown; errors is "raise" and a prompt is refused; or errors is "warn" and all are.
    """

    def __init__(
        self,
        items: Sequence[Request | Refused],
        noun: str,
        errors: ErrorPolicy,
        label: Callable[[int], str] | None,
    ) -> None:
        self.errors = choice(InputError, "errors", errors, ERROR_POLICIES)
        self.requests = [item for item in items if isinstance(item, Request)]
        self.refused = [failure(item.request, item.error) for item in items if isinstance(item, Refused)]
        requests = [item if isinstance(item, Request) else item.request for item in items]
        self._noun = noun
        self._label = label
        self.is_list = label is not None
        self._indices = {request.request_id: i for i, request in enumerate(requests)}
        self._outputs: list[RequestOutput | None] = [None] * len(items)
        self._failures: dict[int, LlamaBatchError] = {
            i: item.error for i, item in enumerate(items) if isinstance(item, Refused)
        }
        self.n = self._n_left = len(items)
        if self._failures and (self.errors == "raise" or (self.errors == "warn" and len(self._failures) == self.n)):
            for event in self.refused:
                self._record(event)
            raise self._error()

    def record(self, events: Sequence[SequenceOutput]) -> Iterator[SequenceOutput]:
        """Records the events of a step, and yields each event with the index of its prompt.

        Raises:
            EngineError: a request failed, and errors is "raise".
        """
        for event in [self._record(event) for event in events]:
            if self.errors == "raise" and event.finished is not None and event.finished.error is not None:
                raise self._error()
            yield event

    def _record(self, event: SequenceOutput) -> SequenceOutput:
        index = self._indices[event.request_id]
        if event.finished is not None:
            self._n_left -= self._outputs[index] is None  # an event may come again after an error of its sink
            self._outputs[index] = event.finished
            if event.finished.error is not None and (error := event.finished.exception()) is not None:
                self._failures.setdefault(index, error)
        return event if index == 0 else replace(event, prompt_index=index)

    def conclude(self) -> None:
        """Called at the end. With errors="warn", warns of failed prompts, or raises the first error if all failed."""
        if self.errors != "warn" or not self._failures:
            return
        if len(self._failures) == self.n:
            raise self._error()
        first = min(self._failures)
        message = (
            f"{len(self._failures):,} of {counted(self.n, self._noun)} failed, first: "
            f"{self._place_of(first)}{self._failures[first]}"
        )
        warning = PromptWarning(message)
        warning.outputs = tuple(self._outputs)
        warnings.warn(warning, stacklevel=caller_level())

    def _error(self) -> LlamaBatchError:
        """Returns the error of the first failed prompt, with the outputs so far."""
        first = min(self._failures)
        cause = self._failures[first]
        prefix = f"all {counted(self.n, self._noun)} failed, first: " if 1 < self.n == len(self._failures) else ""
        error = type(cause)(f"{prefix}{self._place_of(first)}{cause}")
        vars(error).update(vars(cause))  # copies n_tokens and the other fields of a ContextLengthError
        error.outputs = tuple(self._outputs)
        return error

    def _place_of(self, index: int) -> str:
        return "" if self._label is None else f"{self._label(index)}: "

    @property
    def done(self) -> bool:
        """True once every prompt has ended."""
        return self._n_left == 0

    @property
    def unfinished(self) -> list[str]:
        """The ids of the requests that are still in flight."""
        return [request_id for request_id, i in self._indices.items() if self._outputs[i] is None]

    @property
    def outputs(self) -> list[RequestOutput]:
        """The outputs in the order of the prompts; complete once `done` is True."""
        return Outputs(output for output in self._outputs if output is not None)


def vectors(
    outputs: Iterable[RequestOutput],
    *,
    normalize: bool,
    errors: ErrorPolicy,
    dimensions: int | None = None,
    n_embd: int | None = None,
) -> list[Any]:
    """Returns the embedding of each output, a float32 array of shape (n_embd,), or its error.

    Args:
        normalize: scale each vector to length 1.
        dimensions: the number of leading elements to keep.
        n_embd: the length of a vector if each output has one vector for each token. The arrays then have the shape
            (n_tokens, n_embd). None: each output is one vector.

    Raises:
        EngineError: an output failed or was aborted, and errors is "raise".
        InputError: `dimensions` is larger than the vector.
    """
    boolean(InputError, "normalize", normalize)
    return [_vector(output, normalize, errors, dimensions, n_embd) for output in outputs]


def token_vectors(model: Model) -> int | None:
    """Returns the length of a vector if the engine gives one vector for each token (pooling "none"); else None."""
    return model.n_embd_out if model.pooling == "none" else None


def failed(output: RequestOutput, errors: ErrorPolicy) -> LlamaBatchError:
    """Returns the error of an output that has no embedding, or raises it if `errors` is "raise"."""
    error = output.exception() or EngineError("the engine gave no embedding")
    if errors == "raise":
        raise error
    return error


def _vector(
    output: RequestOutput, normalize: bool, errors: ErrorPolicy, dimensions: int | None, n_embd: int | None
) -> Vector | LlamaBatchError:
    if output.embedding is None:
        return failed(output, errors)
    vector: Vector = np.array(output.embedding, np.float32)
    if n_embd is not None:
        vector = vector.reshape(-1, n_embd)
    if dimensions is not None:
        if dimensions > vector.shape[-1]:  # possible with a FakeLLM, whose vectors can have any length
            raise InputError(f"dimensions is {dimensions}; the vector has {vector.shape[-1]} elements")
        vector = vector[..., :dimensions].copy()  # a view would keep the whole vector in memory
    if not normalize:
        return vector
    lengths = np.linalg.norm(vector, axis=-1, keepdims=True).astype(np.float32)
    scaled: Vector = np.divide(vector, lengths, out=vector, where=lengths > 0)
    return scaled
