"""The requests to every peer: lengths and arrival times. Each round draws new token ids."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass

N_SLOTS = 32
TALKERS = 16
_SPECIAL = 300  # ids at each end of a vocabulary that are not drawn: bytes and special tokens
_MOST_CUT = 48  # requests that a cut workload keeps


@dataclass(frozen=True)
class Shape:
    """One request: tokens of its prompt, tokens to generate, and seconds from the start to its arrival."""

    prompt: int
    generated: int
    arrival_s: float = 0.0
    talker: bool = True
    """The gaps between the request's tokens are measured."""
    endless: bool = False
    """The request is aborted when the last request that is not endless has ended; `generated` is only its limit.

    With endless requests, `arrival_s` of the other requests counts from the moment when all endless ones have a token.
    """


@dataclass(frozen=True)
class Job:
    """A Shape with its token ids."""

    prompt: list[int]
    generate: int
    arrival_s: float
    talker: bool
    endless: bool = False


@dataclass(frozen=True)
class Workload:
    """A row of the table in docs/benchmarks.md.

    Attributes:
        model: "synth", "synth 1B", "synth hybrid", "synth window" or "tiny".
        n_ctx: tokens that one request may use; a multiple of 256, to which llama.cpp rounds.
        shared: tokens at the front of every prompt that are the same in all of them.
        warm: as many requests with the same shared part, but with other ids after it, run before the measurement.
        second_turn: of a warm workload: only the shared part runs before, as the first turn of a chat.
        neighbour: one other process uses a whole core meanwhile.
        streamed: tokens are delivered one by one, and the gaps between them are measured.
        loop_every: the loop over llama_cpp.Llama runs only every n-th request, sorted by length. Its speed depends on
            the lengths, not on the number of requests.
    """

    name: str
    model: str
    shapes: tuple[Shape, ...]
    n_ctx: int
    shared: int = 0
    neighbour: bool = False
    streamed: bool = False
    loop_every: int = 4
    warm: bool = False
    second_turn: bool = False

    @property
    def n_generated(self) -> int:
        return sum(shape.generated for shape in self.shapes)

    def outline(self) -> dict[str, object]:
        """Returns figures that describe the requests."""
        return {
            "model": self.model, "requests": len(self.shapes), "n_ctx": self.n_ctx, "shared": self.shared,
            "prompt_tokens": sum(shape.prompt for shape in self.shapes), "generated_tokens": self.n_generated,
        }  # fmt: skip

    def jobs(self, rng: random.Random, n_vocab: int) -> list[Job]:
        """Returns the requests with new random token ids."""
        common = _ids(rng, n_vocab, self.shared)
        return [
            Job([*common, *_ids(rng, n_vocab, s.prompt - self.shared)], s.generated, s.arrival_s, s.talker, s.endless)
            for s in self.shapes
        ]

    def earlier(self, jobs: list[Job], rng: random.Random, n_vocab: int) -> list[Job]:
        """Returns requests that leave the shared part of `jobs` in caches; none unless the workload is warm."""
        if not self.warm:
            return []
        n = self.shared
        behind = [0 if self.second_turn else len(job.prompt) - n for job in jobs]
        prompts = [[*job.prompt[:n], *_ids(rng, n_vocab, more)] for job, more in zip(jobs, behind, strict=True)]
        return [dataclasses.replace(job, prompt=prompt) for job, prompt in zip(jobs, prompts, strict=True)]

    def warm_up(self, rng: random.Random, n_vocab: int, n: int = N_SLOTS) -> list[Job]:
        """Returns requests that touch the weights and every slot, with ids that no measured request begins with."""
        return [Job(_ids(rng, n_vocab, 32), 4, 0.0, True) for _ in range(n)]

    def cut(self) -> Workload:
        """Returns the same kind of work in about a fifth of the time: fewer requests, a third of the generated tokens.

        Later requests arrive sooner, since earlier ones end sooner.
        """
        kept = [s for i, s in enumerate(self.shapes) if not s.arrival_s or i % 2]
        shorter = tuple(
            dataclasses.replace(s, generated=max(4, s.generated // 3), arrival_s=s.arrival_s / 3)
            for s in evenly(kept, _MOST_CUT)
        )
        return dataclasses.replace(self, shapes=shorter)

    def every(self, n: int) -> Workload:
        """Returns a workload of every n-th request by length, beginning in the middle of the first n."""
        by_length = sorted(self.shapes, key=lambda s: (s.generated, s.prompt))
        return dataclasses.replace(self, shapes=tuple(by_length[n // 2 :: n]) or self.shapes[:1])


def evenly(shapes: list[Shape], most: int) -> list[Shape]:
    """Returns at most `most` of the shapes, evenly spread over the list."""
    if len(shapes) <= most:
        return shapes
    return [shapes[i * len(shapes) // most] for i in range(most)]


def _ids(rng: random.Random, n_vocab: int, n: int) -> list[int]:
    return [rng.randrange(_SPECIAL, n_vocab - _SPECIAL) for _ in range(n)]


def _ragged(n: int, prompts: tuple[int, int], generated: tuple[int, int]) -> tuple[Shape, ...]:
    """Returns n shapes of log-uniform lengths. The seed is fixed, so every round and machine has the same lengths."""
    rng = random.Random(1)

    def draw(low: int, high: int) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    return tuple(Shape(draw(*prompts), draw(*generated)) for _ in range(n))


_BURST = tuple([Shape(64, 64)] * 32)
_SHARED = tuple([Shape(544, 64)] * 32)
_TALK = (
    *[Shape(64, 128)] * TALKERS,
    *[Shape(2000, 16, arrival_s, talker=False) for arrival_s in (1.5, 3.0, 4.5, 6.0)],
)

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("burst", "synth", _BURST, n_ctx=256),
        Workload("burst, 1B Q4_K_M", "synth 1B", _BURST, n_ctx=256),
        Workload("ragged", "synth", _ragged(96, (16, 256), (8, 256)), n_ctx=512, loop_every=8),
        Workload("shared prefix", "synth", _SHARED, n_ctx=768, shared=512),
        Workload("shared prefix, warm", "synth", _SHARED, n_ctx=768, shared=512, warm=True),
        Workload("one request", "synth", (Shape(64, 128),), n_ctx=256, loop_every=1),
        Workload("one long prompt", "synth", (Shape(1500, 16),), n_ctx=2048, streamed=True),
        Workload("long prompt among talkers", "synth", _TALK, n_ctx=2048, streamed=True),
        Workload("busy laptop", "synth", _BURST, n_ctx=256, neighbour=True, loop_every=16),
        Workload("tiny", "tiny", _ragged(256, (16, 256), (8, 256)), n_ctx=512, loop_every=8),
        *(
            workload
            for kind in ("hybrid", "window")
            for workload in (
                Workload(f"burst, {kind}", f"synth {kind}", _BURST, n_ctx=256),
                Workload(f"one request, {kind}", f"synth {kind}", (Shape(64, 128),), n_ctx=256, loop_every=1),
                Workload(f"shared prefix, {kind}", f"synth {kind}", _SHARED, n_ctx=768, shared=512),
                Workload(
                    f"second turn, {kind}", f"synth {kind}", (Shape(2100, 32),), n_ctx=2304, shared=2000, warm=True,
                    second_turn=True, streamed=True,
                ),
            )
        ),
    )
}  # fmt: skip

PEER_MODELS = {"synth": "", "synth BF16": "BF16", "synth 1B": "1B Q4_K_M", "smollm2": "SmolLM2 Q4_1"}
"""The models of bench_peers.py, and the suffixes of their workloads' names."""


def _peer_workloads(model: str, suffix: str) -> list[Workload]:
    kinds = [WORKLOADS[name] for name in ("burst", "one request", "shared prefix", "shared prefix, warm")]
    fewer = _ragged(32, (16, 256), (8, 256))
    kinds.append(dataclasses.replace(WORKLOADS["ragged"], name="ragged, 32 requests", shapes=fewer))
    kinds.append(WORKLOADS["one long prompt"])
    return [
        dataclasses.replace(kind, name=f"{kind.name}, {suffix}" if suffix else kind.name, model=model) for kind in kinds
    ]


PEER_WORKLOADS = {
    workload.name: workload for name, suffix in PEER_MODELS.items() for workload in _peer_workloads(name, suffix)
}
