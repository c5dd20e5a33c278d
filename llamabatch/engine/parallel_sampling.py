"""Splits requests with several continuations into one sequence each, and merges their outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from llamabatch.request.outputs import RequestOutput, SequenceOutput
from llamabatch.request.request import Request

_LARGEST_SEED = 2**64 - 1


class ParallelSampling:
    """The requests in flight that ask for more than one continuation.

    To the scheduler, each continuation is a request of its own. The scheduler computes the prompt once and copies its
    cells, as for any two prompts with a common prefix.
    """

    def __init__(self) -> None:
        self._parents: dict[str, _ParentRequest] = {}
        self._children: dict[str, tuple[str, int]] = {}  # by id of the continuation: (id of its request, index)

    def __bool__(self) -> bool:
        return bool(self._parents)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._parents

    def split(self, request: Request) -> list[Request]:
        """Returns one request for each continuation; continuation k draws with seed + k."""
        params = request.params
        first = replace(params, n=1, best_of=None)
        # only the first continuation reads prompt logprobs, so that the other ones can copy its cells
        other = replace(first, prompt_logprobs=None)
        parent = _ParentRequest(request, params.n_copies, streams=params.n_copies == params.n)
        self._parents[request.request_id] = parent
        copies = []
        for index in range(parent.n_copies):
            child_id = f"{request.request_id}\0{index}"
            self._children[child_id] = (request.request_id, index)
            seed = (request.seed + index) & _LARGEST_SEED
            params = other if index else first
            ranked = parent.n_copies > request.params.n
            copies.append(replace(request, request_id=child_id, params=params, seed=seed, ranked=ranked))
        return copies

    def copies_of(self, request_id: str) -> list[str]:
        """Returns the ids of the continuations that have not ended."""
        parent = self._parents[request_id]
        return [f"{request_id}\0{index}" for index in range(parent.n_copies) if index not in parent.finished]

    def forget(self, request_id: str) -> None:
        """Drops a request and all its continuations, even if some of them were never made."""
        parent = self._parents.pop(request_id, None)
        for index in range(0 if parent is None else parent.n_copies):
            self._children.pop(f"{request_id}\0{index}", None)

    def request_of(self, request_id: str) -> str:
        """Returns the id of a continuation's request. Any other id is returned unchanged."""
        child = self._children.get(request_id)
        return request_id if child is None else child[0]

    def ids_of(self, request_id: str) -> tuple[str, int]:
        """Returns the id of a continuation's request, and the index of the continuation."""
        return self._children.get(request_id, (request_id, 0))

    def merge(self, outputs: Iterable[SequenceOutput]) -> list[SequenceOutput]:
        """Returns the outputs, with the outputs of continuations turned into outputs of their requests."""
        merged = []
        for output in outputs:
            child = self._children.get(output.request_id)
            if child is None:
                merged.append(output)
                continue
            request_id, index = child
            parent, whole = self._parents[request_id], None
            if output.finished is not None:
                parent.finished[index] = output.finished
                del self._children[output.request_id]
                if len(parent.finished) == parent.n_copies:
                    del self._parents[request_id]
                    whole = _whole(parent)
            if parent.streams:
                ended = None if output.finished is None else output.finished.finish_reason
                merged.append(replace(output, request_id=request_id, index=index, finished=whole, ended=ended))
            elif whole is not None:
                merged.append(SequenceOutput(request_id, (), "", whole, prompt_index=output.prompt_index))
        return merged


@dataclass
class _ParentRequest:
    """A request in flight, and the outputs of its continuations that have ended.

    Attributes:
        streams: True: each step returns the new outputs of all continuations. False (best_of is above n): only the best
            continuations are returned, at the end.
    """

    request: Request
    n_copies: int
    streams: bool
    finished: dict[int, RequestOutput] = field(default_factory=dict)


def _whole(parent: _ParentRequest) -> RequestOutput:
    outputs = [parent.finished[index] for index in range(parent.n_copies)]
    best = outputs if parent.streams else sorted(outputs, key=_mean_logprob, reverse=True)[: parent.request.params.n]
    completions = tuple(replace(output.outputs[0], index=index) for index, output in enumerate(best))
    failed = next((output for output in outputs if output.error is not None), None)
    first, timings = best[0], [output.timings for output in outputs]
    return replace(
        first,
        request_id=parent.request.request_id,
        outputs=completions,
        error=None if failed is None else failed.error,
        error_type=None if failed is None else failed.error_type,
        prompt_logprobs=outputs[0].prompt_logprobs,
        num_cached_tokens=outputs[0].num_cached_tokens,
        timings=replace(
            first.timings,
            queued_s=min((t.queued_s for t in timings if t.queued_s is not None), default=None),
            ttft_s=min((t.ttft_s for t in timings if t.ttft_s is not None), default=None),
            total_s=max(t.total_s for t in timings),
        ),
    )


def _mean_logprob(output: RequestOutput) -> float:
    """Returns the mean logprob of a token. OpenAI also uses this number to choose among best_of continuations."""
    completion = output.outputs[0]
    if completion.cumulative_logprob is None or not completion.token_ids:
        return -math.inf
    return completion.cumulative_logprob / len(completion.token_ids)
