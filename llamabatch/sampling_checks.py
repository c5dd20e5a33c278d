"""Lists among the fields of SamplingParams: checked, and made into tuples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from llamabatch.checks import integer, number, show
from llamabatch.errors import SamplingError

MAX_CHARS = 256  # of a stop string, a bad word or a breaker
MAX_BIASES = 1024
MAX_PROCESSORS = 64
MAX_TOKEN_ID = 2**20 - 1  # larger than any vocabulary; the engine refuses what its model does not have


def strings(name: str, given: object, most: int, *, to_tokens: bool = False) -> tuple[str, ...]:
    """One string or several, each of 1 to MAX_CHARS characters, of whole ones if they are to be tokenized."""
    if given is None:
        return ()
    values = (given,) if isinstance(given, str) else given
    if not isinstance(values, (tuple, list)) or not all(isinstance(s, str) for s in values):
        raise SamplingError(f"{name} is {show(given)}; give a string or a list of strings")
    if len(values) > most:
        raise SamplingError(f"{name} holds {len(values)} strings; at most {most} are allowed")
    for string in values:
        if not 1 <= len(string) <= MAX_CHARS:
            raise SamplingError(f"{name} has a string of {len(string)} characters; allowed are 1 to {MAX_CHARS}")
        if to_tokens and any("\ud800" <= character <= "\udfff" for character in string):
            raise SamplingError(f"{name} has {show(string)}, which holds half a character; give whole ones")
    return tuple(values)


def biases(given: object) -> tuple[tuple[int, float], ...]:
    """logit_bias as pairs, ids rising."""
    if given is None:
        return ()
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, (tuple, list)) or not all(isinstance(p, (tuple, list)) and len(p) == 2 for p in pairs):
        raise SamplingError(f"logit_bias is {show(given)}; give a mapping from token id to bias")
    if len(pairs) > MAX_BIASES:
        raise SamplingError(f"logit_bias holds {len(pairs)} ids; at most {MAX_BIASES} are allowed")
    for token_id, bias in pairs:
        integer(SamplingError, "a token id of logit_bias", token_id, 0, MAX_TOKEN_ID)
        number(SamplingError, f"logit_bias of token {token_id}", bias, -100.0, 100.0)
    if len({token_id for token_id, _ in pairs}) < len(pairs):
        raise SamplingError("logit_bias names a token id twice; give each once")
    return tuple(sorted((token_id, float(bias)) for token_id, bias in pairs))


def token_ids(name: str, given: object, least: int = 0) -> tuple[int, ...] | None:
    """Token ids, rising, each once; None stays None."""
    if given is None:
        return None
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise SamplingError(f"{name} is {show(given)}; give a list of token ids")
    ids = list(itertools.islice(given, MAX_TOKEN_ID + 2))
    if not least <= len(ids) <= MAX_TOKEN_ID + 1:
        raise SamplingError(f"{name} holds {len(ids)} ids; give {least} to {MAX_TOKEN_ID + 1}, or None")
    for token_id in ids:
        integer(SamplingError, f"an id of {name}", token_id, 0, MAX_TOKEN_ID)
    return tuple(sorted(set(ids)))


def processors(given: object) -> tuple[Callable[[list[int], Any], Any], ...]:
    """Functions of (output token ids, logits)."""
    if given is None:
        return ()
    if not isinstance(given, (tuple, list)) or not all(callable(f) for f in given):
        raise SamplingError(f"logits_processors is {show(given)}; give a list of functions")
    if len(given) > MAX_PROCESSORS:
        raise SamplingError(f"logits_processors holds {len(given)} functions; at most {MAX_PROCESSORS} are allowed")
    return tuple(given)
