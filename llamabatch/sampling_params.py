"""How one request is sampled: vLLM's names, llama.cpp's defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields

from llamabatch.checks import boolean, integer, nearest, number, show
from llamabatch.errors import SamplingError

MAX_STOPS = 64
MAX_STOP_CHARS = 256
MAX_TOP_K = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """What to sample, and when to stop. Checked once, when it is made; raises SamplingError.

    The chain is llama.cpp's: top_k, then top_p, then min_p on the untempered probabilities, then temperature, then
    one draw. Defaults are those of llama.cpp's command line (common/common.h), but for max_tokens.

    Attributes:
        max_tokens: tokens to generate at most, the end-of-generation token included; None: until the model stops or
            the request has used its n_ctx.
        temperature: 0 is greedy: the likeliest token, the lowest id where two are equal.
        top_k: keep the k likeliest tokens; 0 or -1: all.
        top_p: keep the fewest tokens whose probabilities sum to at least top_p; 1: all.
        min_p: keep tokens at least min_p times as probable as the likeliest; 0: all.
        seed: 0 .. 2**64-1; the draw of output token i depends on (seed, i) alone, so that company, retries and
            preemption never shift it. None: a fresh random seed for each request.
        stop: strings that end the text; the text is cut before the first of them.
        ignore_eos: go on after an end-of-generation token, which then counts as any other.
    """

    max_tokens: int | None = 256
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None
    stop: tuple[str, ...] | list[str] | str | None = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        number(SamplingError, "temperature", self.temperature, 0.0, 100.0)
        number(SamplingError, "top_p", self.top_p, 0.0, 1.0)
        number(SamplingError, "min_p", self.min_p, 0.0, 1.0)
        integer(SamplingError, "top_k", self.top_k, -1, MAX_TOP_K)
        if self.max_tokens is not None:
            integer(SamplingError, "max_tokens", self.max_tokens, 1, 2**31 - 1)
        if self.seed is not None:
            integer(SamplingError, "seed", self.seed, 0, 2**64 - 1)
        boolean(SamplingError, "ignore_eos", self.ignore_eos)
        object.__setattr__(self, "stop", _stops(self.stop))  # the one normalisation: afterwards always a tuple

    @classmethod
    def from_options(cls, **options: object) -> SamplingParams:
        """SamplingParams from a mapping with names from outside; an unknown name is refused with the nearest one."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise SamplingError(f"SamplingParams has no field {name!r}{nearest(name, known)}")
        return cls(**options)  # type: ignore[arg-type]  # checked by __post_init__

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        assert isinstance(self.stop, tuple)
        return self.stop


def _stops(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, (tuple, list)) or not all(isinstance(s, str) for s in strings):
        raise SamplingError(f"stop is {show(stop)}; give a string or a list of strings")
    if len(strings) > MAX_STOPS:
        raise SamplingError(f"stop holds {len(strings)} strings; at most {MAX_STOPS} are allowed")
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_CHARS:
            raise SamplingError(f"a stop string has {len(string)} characters; allowed are 1 to {MAX_STOP_CHARS}")
    return tuple(strings)
