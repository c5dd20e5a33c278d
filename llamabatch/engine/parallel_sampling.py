"""One request, several continuations: a sequence for each, and one output when the last of them has ended."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from llamabatch.request.outputs import RequestOutput, SequenceOutput
from llamabatch.request.request import Request

_LARGEST_SEED = 2**64 - 1


@dataclass
class _Fan:
    """A request under way, and what its continuations have come to."""

    request: Request
    n_copies: int
    streams: bool
    finished: dict[int, RequestOutput] = field(default_factory=dict)


class ParallelSampling:
    """The requests in flight that ask for more than one continuation.

    A continuation is a request of its own to the scheduler, which computes the prompt once and copies it as it does for
    any two prompts that begin alike.
    """

    def __init__(self) -> None:
        self._fans: dict[str, _Fan] = {}
        self._parents: dict[str, tuple[str, int]] = {}  # id of a continuation -> id of its request, its index

    def __bool__(self) -> bool:
        return bool(self._fans)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._fans

    def split(self, request: Request) -> list[Request]:
        """The requests for its continuations; continuation k draws with seed + k."""
        params = request.params
        first = replace(params, n=1, best_of=None)
        other = replace(first, prompt_logprobs=None)  # of one prompt; the others may then copy its cells
        fan = _Fan(request, params.n_copies, streams=params.n_copies == params.n)
        self._fans[request.request_id] = fan
        copies = []
        for index in range(fan.n_copies):
            child_id = f"{request.request_id}\0{index}"
            self._parents[child_id] = (request.request_id, index)
            seed = (request.seed + index) & _LARGEST_SEED
            params = other if index else first
            ranked = fan.n_copies > request.params.n
            copies.append(replace(request, request_id=child_id, params=params, seed=seed, ranked=ranked))
        return copies

    def copies_of(self, request_id: str) -> list[str]:
        """Ids of the continuations that have not ended."""
        fan = self._fans[request_id]
        return [f"{request_id}\0{index}" for index in range(fan.n_copies) if index not in fan.finished]

    def forget(self, request_id: str) -> None:
        """Nothing more will come of this request, be it that some of its continuations never began."""
        fan = self._fans.pop(request_id, None)
        for index in range(0 if fan is None else fan.n_copies):
            self._parents.pop(f"{request_id}\0{index}", None)

    def request_of(self, request_id: str) -> str:
        """The id of the request that a continuation belongs to; any other id as it is."""
        parent = self._parents.get(request_id)
        return request_id if parent is None else parent[0]

    def merge(self, outputs: Iterable[SequenceOutput]) -> list[SequenceOutput]:
        """Outputs of continuations become those of their requests; all others pass."""
        merged = []
        for output in outputs:
            parent = self._parents.get(output.request_id)
            if parent is None:
                merged.append(output)
                continue
            request_id, index = parent
            fan = self._fans[request_id]
            whole = None
            if output.finished is not None:
                fan.finished[index] = output.finished
                del self._parents[output.request_id]
                if len(fan.finished) == fan.n_copies:
                    del self._fans[request_id]
                    whole = _whole(fan)
            if fan.streams or whole is not None:
                piece = replace(output, request_id=request_id, index=index, finished=whole)
                merged.append(piece if fan.streams else replace(piece, token_ids=(), text="", index=0, logprobs=None))
        return merged


def _whole(fan: _Fan) -> RequestOutput:
    outputs = [fan.finished[index] for index in range(fan.n_copies)]
    best = outputs if fan.streams else sorted(outputs, key=_mean_logprob, reverse=True)[: fan.request.params.n]
    completions = tuple(replace(output.outputs[0], index=index) for index, output in enumerate(best))
    first, timings = best[0], [output.timings for output in outputs]
    return replace(
        first,
        request_id=fan.request.request_id,
        outputs=completions,
        error=next((output.error for output in outputs if output.error is not None), None),
        prompt_logprobs=outputs[0].prompt_logprobs,
        timings=replace(
            first.timings,
            queued_s=min((t.queued_s for t in timings if t.queued_s is not None), default=None),
            ttft_s=min((t.ttft_s for t in timings if t.ttft_s is not None), default=None),
            total_s=max(t.total_s for t in timings),
        ),
    )


def _mean_logprob(output: RequestOutput) -> float:
    """OpenAI's measure for best_of: the logprob per token."""
    completion = output.outputs[0]
    if completion.cumulative_logprob is None or not completion.token_ids:
        return -math.inf
    return completion.cumulative_logprob / len(completion.token_ids)
