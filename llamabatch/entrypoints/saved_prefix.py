"""Saves a prefix: a request computes the prompt. The engine then writes the prompt's KV cells if they still exist."""

from __future__ import annotations

from collections.abc import Sequence

from llamabatch.errors import InputError
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.scheduler.common_prefix import MIN_SHARED
from llamabatch.utils.checks import counted

TRIES = 3
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)  # for a request that only computes a prompt
CROWDED = "other requests took the cells of the prefix before it was saved; try again while fewer requests run"


def tokens_to_save(token_ids: Sequence[int]) -> list[int]:
    """Returns the tokens of a prefix as a list. Raises InputError if they are too few to save."""
    if len(token_ids) < MIN_SHARED:
        raise InputError(f"the prefix has {counted(len(token_ids), 'token')}; at least {MIN_SHARED} are worth saving")
    return list(token_ids)
