"""Lists among the fields of SamplingParams: checked, and made into tuples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llamabatch.checks import integer, items, number, pairs, show, string
from llamabatch.errors import SamplingError

MAX_CHARS = 256  # of a stop string, a bad word or a breaker
MAX_BIASES = 1024
MAX_PROCESSORS = 64
MAX_TOKEN_ID = 2**20 - 1  # larger than any vocabulary; the engine refuses what its model does not have


def strings(name: str, given: object, most: int, *, to_tokens: bool = False) -> tuple[str, ...]:
    """One string or several, each of 1 to MAX_CHARS characters, of whole ones if they are to be tokenized."""
    if given is None:
        return ()
    values = [given] if isinstance(given, str) else items(given, most + 1)
    texts = None if values is None else [text for text in map(string, values) if text is not None]
    if values is None or texts is None or len(texts) < len(values):
        raise SamplingError(f"{name} is {show(given)}; give a string or a list of strings")
    if len(texts) > most:
        raise SamplingError(f"{name} holds more than {most} strings; at most {most} are allowed")
    for text in texts:
        if not 1 <= len(text) <= MAX_CHARS:
            raise SamplingError(f"{name} has a string of {len(text)} characters; allowed are 1 to {MAX_CHARS}")
        if to_tokens and any("\ud800" <= character <= "\udfff" for character in text):
            raise SamplingError(f"{name} has {show(text)}, which holds half a character; give whole ones")
    return tuple(texts)


def biases(given: object) -> tuple[tuple[int, float], ...]:
    """logit_bias as pairs, ids rising."""
    if given is None:
        return ()
    biased = pairs(given, MAX_BIASES + 1)
    if biased is None:
        raise SamplingError(f"logit_bias is {show(given)}; give a mapping from token id to bias")
    if len(biased) > MAX_BIASES:
        raise SamplingError(f"logit_bias holds more than {MAX_BIASES} ids; at most {MAX_BIASES} are allowed")
    found: dict[int, float] = {}
    for key, bias in biased:
        token_id = integer(SamplingError, "a token id of logit_bias", key, 0, MAX_TOKEN_ID)
        if token_id in found:
            raise SamplingError(f"logit_bias names token id {token_id} twice; give each once")
        found[token_id] = float(number(SamplingError, f"logit_bias of token {token_id}", bias, -100.0, 100.0))
    return tuple(sorted(found.items()))


def token_ids(name: str, given: object, least: int = 0) -> tuple[int, ...] | None:
    """Token ids, rising, each once; None stays None."""
    if given is None:
        return None
    ids = items(given, MAX_TOKEN_ID + 2)
    if ids is None:
        raise SamplingError(f"{name} is {show(given)}; give a list of token ids")
    if not least <= len(ids) <= MAX_TOKEN_ID + 1:
        raise SamplingError(f"{name} holds {len(ids)} ids; give {least} to {MAX_TOKEN_ID + 1}, or None")
    found = {integer(SamplingError, f"an id of {name}", token_id, 0, MAX_TOKEN_ID) for token_id in ids}
    return tuple(sorted(found))


def processors(given: object) -> tuple[Callable[[list[int], Any], Any], ...]:
    """Functions of (output token ids, logits)."""
    if given is None:
        return ()
    functions = items(given, MAX_PROCESSORS + 1)
    if functions is None or not all(map(callable, functions)):
        raise SamplingError(f"logits_processors is {show(given)}; give a list of functions")
    if len(functions) > MAX_PROCESSORS:
        raise SamplingError(f"logits_processors holds more than {MAX_PROCESSORS} functions; that many are allowed")
    return tuple(functions)
