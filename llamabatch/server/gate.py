"""Checks of requests before they queue, beside those of every front: size of the call, words, grammars, and
deadlines that the queue alone would miss. What is refused here has its status before anything of it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from llamabatch.llama.model import Model
from llamabatch.request.request import Request
from llamabatch.request.structured_outputs import Structure
from llamabatch.sampling.prepared_params import PreparedParamsCache
from llamabatch.server.admission import Admission
from llamabatch.server.errors import ApiError, retry_after
from llamabatch.utils.checks import counted

# Prompts and continuations that may wait, unless max_queue says otherwise: 16 turns of 32 slots. What waits behind so
# many has mostly lost its client, as OpenAI's give up after ten minutes; lists of prompts, of which evaluation programs
# send some hundred at once, have room.
MAX_QUEUE = 512


def check_size(requests: Sequence[Request], n_slots: int, max_queue: int | None) -> None:
    """Raises ApiError for a call that has no room in an empty queue, so that waiting would not help it."""
    asked = sum(request.params.n_copies for request in requests)
    if max_queue is not None and asked > n_slots + max_queue:
        raise ApiError(
            400,
            f"the request asks for {counted(asked, 'continuation')} at once; allowed are 1 to {n_slots + max_queue}: "
            f"{n_slots} that run and max_queue={max_queue} that wait; send them in several requests",
            code="too_many_continuations",
        )


def check_words(requests: Sequence[Request], model: Model) -> None:
    """Raises SamplingError for bad_words that the model cannot write; an engine would find that out later."""
    prepared = None
    for request in requests:
        if request.params.forbidden_strings:
            prepared = prepared or PreparedParamsCache(model)
            prepared.of(request.params)


def structures(requests: Sequence[Request]) -> list[Structure]:
    """The different forms that requests must hold."""
    found = (request.params.structure for request in requests)
    return list(dict.fromkeys(each for each in found if each is not None))


async def check_grammars(asked: Sequence[Structure], model: Model) -> None:
    """Waits for the trials of these forms, in a process of their own.

    Raises:
        SamplingError: a form cannot be held. EngineError: it cannot be tried.
    """
    for structure in asked:
        await asyncio.wrap_future(model.grammars.check(structure))


def check_deadlines(requests: Sequence[Request], admission: Admission, now: float) -> None:
    """Raises ApiError (504) for a deadline that the queue alone would miss.

    Args:
        now: time.perf_counter().
    """
    for request in requests:
        deadline_s = request.params.deadline_s
        if deadline_s is None:
            continue
        wait_s = admission.wait_s(request, now)
        if wait_s is not None and now + wait_s > request.arrival_s + deadline_s:
            tier = ", in the background" if request.params.background else ""
            raise ApiError(
                504,
                f"deadline_s is {deadline_s:g}, but the request would wait about {wait_s:.1f} s for a slot{tier}: "
                f"{counted(admission.n_in_flight, 'continuation')} run or wait; it was not queued",
                headers=retry_after(wait_s),
            )
