"""Checks requests in the server before they enter the queue. The checks cover the size of a call, logprobs, bad words,
grammars, and deadlines that would pass in the queue. A refused request gets its HTTP status before any work."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from llamabatch.engine.validation import requested_logprobs
from llamabatch.errors import ContextLengthError
from llamabatch.llama.model import Model
from llamabatch.planning.memory import mib
from llamabatch.planning.plan import Plan
from llamabatch.request.request import Request
from llamabatch.request.structured_outputs import Structure
from llamabatch.sampling.prepared_params import PreparedParamsCache
from llamabatch.server.http.errors import ApiError, retry_after
from llamabatch.server.serving.admission import Admission
from llamabatch.utils.checks import counted
from llamabatch.utils.format import file_size

# Default of max_queue, the number of prompts and continuations that may wait. OpenAI's embeddings endpoint accepts
# 2,048 texts in one request, and LangChain sends 1,000.
MAX_QUEUE = 2048

LOGPROB_BYTES = 300  # memory of a logprob as a Python object, in bytes


def check_size(wanted: int, n_slots: int, max_queue: int | None) -> None:
    """Raises ApiError if a call has more continuations than the slots and an empty queue can hold."""
    if max_queue is not None and wanted > n_slots + max_queue:
        raise ApiError(
            400,
            f"the request asks for {counted(wanted, 'continuation')} at once; allowed are 1 to {n_slots + max_queue}: "
            f"{n_slots} that run and max_queue={max_queue} that wait; send them in several requests",
            code="too_many_continuations",
        )


def with_cure(error: ContextLengthError, model: Model, plan: Plan) -> ContextLengthError:
    """Returns the error with advice: a value of -c that suffices for the prompt, and the memory of a slot with this
    value. If no value suffices, the advice says so. Returns the error unchanged if its limit is not n_ctx."""
    config, architecture = plan.config, model.metadata.get("general.architecture", "")
    trained = model.metadata.get(f"{architecture}.context_length", "")
    most = int(trained) if trained.isdigit() else config.n_ctx
    wanted = 1 << (error.n_tokens + error.n_tokens // 4).bit_length()  # leaves room for some turns and the answer
    if not error.is_cured_by_n_ctx or error.n_allowed != config.n_ctx:
        return error  # no option of the server would help
    wanted = min(wanted, most)
    cells = plan.memory.kv_cache + sum(gpu.kv_cache for gpu in plan.memory.gpus)
    each = cells * wanted // (config.kv_cells or config.n_slots * config.n_ctx)
    cure = f"start the server with -c {wanted} -np 1: each slot (-np) of {wanted} tokens takes {mib(each)}"
    if error.n_tokens >= most:
        cure = f"the model was trained for {most} tokens, so that no -c admits the prompt"
    found = ContextLengthError(f"{error}; {cure}")
    found.n_tokens, found.n_allowed = error.n_tokens, error.n_allowed
    return found


def check_answer(requests: Sequence[Request], n_ctx: int, n_vocab: int, n_held: int, most: int) -> None:
    """Raises ApiError for logprobs that would take too much memory: 400 if this call alone asks for too many logprobs,
    503 while earlier answers use the memory.

    Args:
        n_held: number of logprobs in answers that are not sent yet.
        most: the maximum number of bytes for logprobs.
    """
    wanted = sum(requested_logprobs(request, n_ctx, n_vocab) for request in requests)
    allowed = most // LOGPROB_BYTES
    if wanted > allowed:
        raise ApiError(
            400,
            f"the request asks for up to {wanted:,} logprobs; allowed are 0 to {allowed:,}, which are "
            f"{file_size(most)} (twice max_bodies_bytes); give a lower max_tokens, n or logprobs",
            code="too_many_logprobs",
        )
    if wanted and n_held > allowed:
        raise ApiError(
            503,
            f"answers with {n_held:,} logprobs are being sent; the limit is {allowed:,}; try again",
            headers=retry_after(None),
        )


def check_bad_words(requests: Sequence[Request], model: Model) -> None:
    """Raises SamplingError for bad_words that the model cannot write. The engine would refuse such words only later."""
    prepared = None
    for request in requests:
        if request.params.forbidden_strings:
            prepared = prepared or PreparedParamsCache(model)
            prepared.of(request.params)


def structures(requests: Sequence[Request]) -> list[Structure]:
    """Returns the structured outputs of the requests, without repeats."""
    found = (request.params.structure for request in requests)
    return list(dict.fromkeys(each for each in found if each is not None))


async def check_grammars(forms: Sequence[Structure], model: Model) -> None:
    """Waits until a separate process has tried the grammars of structured outputs.

    Raises:
        SamplingError: a grammar cannot be followed.
        EngineError: a grammar cannot be tried.
    """
    for structure in forms:
        await asyncio.wrap_future(model.grammars.check(structure))


def check_deadlines(requests: Sequence[Request], admission: Admission, now: float) -> None:
    """Raises ApiError (504) for a deadline that would pass while the request waits in the queue.

    Args:
        now: the current time.perf_counter().
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
