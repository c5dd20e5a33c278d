"""A program that reads paths of models, one a line, and writes its findings on each as a line of JSON.

Each model answers fourteen prompts greedily: first alone, in an engine of one slot, then in eight slots, in each of
the ways in which an engine may compute them. If a model kills the process, its line of JSON is missing.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llamabatch import LLM, RequestOutput, SamplingParams
from llamabatch.errors import ConfigError, LlamaBatchError
from llamabatch.llama.library import load
from llamabatch.request.outputs import CompletionOutput, SequenceOutput
from tests.clients import innermost

# Limit for the gap of the two best logprobs where a text parts from the text alone, and for differences of a logprob.
# docs/design/sampling-and-equality.md allows a trained model 0.15. These weights are F32: rounding gave 2e-6 at most.
MAX_GAP = 0.01
N_TOKENS = 16
N_VOCAB = 128  # vocabulary of the smallest model
GREEDY = SamplingParams(temperature=0, max_tokens=N_TOKENS, ignore_eos=True, logprobs=2)
ALONE: dict[str, Any] = {"strategy": "sequential", "n_slots": 1, "cache_prefix": False, "trial": "on"}
TOGETHER: dict[str, Any] = {"strategy": "batched", "n_slots": 8, "trial": "off"}
SIZES: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1}
CHUNKS = {"n_batch": 32, "n_ubatch": 16, "prefill_budget": 16}
UNIFIED = {"kv": "unified"}
GUESSES = {"speculate": "lookup", "speculate_always": True}


def prompts() -> list[list[int]]:
    """Returns fourteen prompts of 5 to 64 tokens: eight random ones, three that begin like one of these, and three that
    repeat themselves."""
    rng = random.Random(0)
    found = [[rng.randrange(N_VOCAB) for _ in range(n)] for n in (5, 17, 40, 64, 23, 9, 33, 12)]
    found += [[*found[3][:48], *(rng.randrange(N_VOCAB) for _ in range(n))] for n in (1, 7, 16)]
    found += [[n % period for n in range(length)] for period, length in ((3, 20), (5, 48), (7, 61))]
    return found


def burst() -> list[list[int]]:
    """Returns ten prompts that begin with the same 48 tokens. Nine of them can copy these: SHARED tokens in all."""
    rng = random.Random(1)
    head = [rng.randrange(N_VOCAB) for _ in range(48)]
    return [[*head, *(rng.randrange(N_VOCAB) for _ in range(n))] for n in range(3, 13)]


SHARED = 9 * 48
Text = list[tuple[int, dict[int, float]]]  # for each token: its id, and the logprobs by token id


@dataclass
class Comparison:
    """Compares the texts that one way of computing gives with the texts of requests that run alone.

    Attributes:
        texts: number of texts.
        equal_bits: number of texts with the same tokens and the same bits of their logprobs.
        gap: the largest distance of the two best logprobs at a place where two texts part.
        difference: the largest difference of a token's two logprobs, before the texts part.
        errors: errors of requests.
    """

    texts: int = 0
    equal_bits: int = 0
    gap: float = 0.0
    difference: float = 0.0
    errors: list[str] = field(default_factory=list)

    def add(self, alone: Text, other: Text) -> None:
        self.texts += 1
        if len(other) != N_TOKENS:
            self.errors.append(f"{len(other)} tokens in place of {N_TOKENS}")
            return
        at = next((i for i, (a, b) in enumerate(zip(alone, other, strict=True)) if a[0] != b[0]), N_TOKENS)
        gaps = [abs(row[token] - other[i][1][token]) for i, (token, row) in enumerate(alone[:at])]
        self.difference = max([self.difference, *gaps])
        if at == N_TOKENS:
            self.equal_bits += not any(gaps)
        else:
            [best, second] = sorted(alone[at][1].values(), reverse=True)[:2]
            self.gap = max(self.gap, best - second)

    @property
    def wrong(self) -> str | None:
        if self.errors:
            return self.errors[0]
        if self.gap >= MAX_GAP:
            return f"a text parts where the two best logprobs are {self.gap:.3g} apart"
        return f"a logprob differs by {self.difference:.3g}" if self.difference >= MAX_GAP else None


def _text(*pieces: CompletionOutput | SequenceOutput) -> Text:
    return [
        (token, {other: each.logprob for other, each in row.items()})
        for piece in pieces
        for token, row in zip(piece.token_ids, piece.logprobs or (), strict=True)
    ]


class Case:
    """A model and the texts that it writes alone."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._prompts, self._burst = prompts(), burst()
        self._alone: list[Text] = []
        self._burst_alone: list[Text] = []
        self.found: dict[str, Any] = {"ways": {}, "wrong": {}}

    def run(self) -> dict[str, Any]:
        """Returns the findings on the model: `refused` with the error, or the following ones.

        `kind` and `ragged` are those of _facts. `shares` is the number of SHARED tokens that a cold burst did not
        compute. `equal_bits` is the plan's reason. `guesses` is True or the reason why no token was guessed. `ways` has
        a Comparison for each way, `wrong` the problem of each way that has one. `preempted` counts preemptions.
        """
        try:
            with LLM(self._path, **ALONE, **SIZES) as llm:
                self._alone = [_text(*llm.generate([prompt], GREEDY)[0].outputs) for prompt in self._prompts]
                self._burst_alone = [_text(*llm.generate([prompt], GREEDY)[0].outputs) for prompt in self._burst]
        except LlamaBatchError as error:
            self.found["refused"] = (
                str(error).replace(f"{self._path}", "the model").replace(Path(self._path).name, "it")
            )
            return self.found
        self.found["refused"] = None
        with LLM(self._path, preempt=True, **TOGETHER, **SIZES) as llm:
            self._in_company(llm)
            self.found["kind"], self.found["ragged"] = innermost(llm).ask(_facts).result()
            reason = llm.plan.reasons["batch_invariant"]
            # The exception of this reason (AMX) is an answer in a later prompt. No prompt here has an answer.
            if "prompts have kernels of their own" in reason:
                reason = "equal bits: yes"
            self.found["equal_bits"] = reason
        with LLM(self._path, **TOGETHER, **CHUNKS, **SIZES) as llm:
            self._compare("chunks", llm.generate(self._prompts, GREEDY))
        with LLM(self._path, **TOGETHER, **UNIFIED, **SIZES) as llm:
            self._compare("unified", llm.generate(self._prompts, GREEDY))
        try:
            with LLM(self._path, **TOGETHER, **GUESSES, **SIZES) as llm:
                self._compare("guesses", llm.generate(self._prompts, GREEDY))
                self.found["guesses"] = llm.stats().drafted_tokens > 0 or "no token was guessed"
        except ConfigError as error:
            self.found["guesses"] = str(error).replace(Path(self._path).name, "it")
        self._check_bits()
        return self.found

    def _in_company(self, llm: LLM) -> None:
        self._compare("burst", llm.generate(self._burst, GREEDY), alone=self._burst_alone)
        self.found["shares"] = llm.stats().shared_tokens + llm.stats().prefix_tokens
        self._compare("company", llm.generate(self._prompts, GREEDY))
        self._compare("prefix", llm.generate(self._prompts, GREEDY))
        cancelled = llm.stream(self._prompts[:6], replace(GREEDY, logprobs=None))
        for _ in range(12):
            next(cancelled)
        cancelled.close()
        self._compare("after cancelled ones", llm.generate(self._prompts, GREEDY))
        kept = llm.stats().preemptions
        low = llm.stream(self._prompts[:8], replace(GREEDY, priority=5))
        pieces = [next(low)]
        self._compare("beside preempted ones", llm.generate(self._prompts[6:], replace(GREEDY, priority=-5)), 6)
        pieces += low
        texts = [_text(*(piece for piece in pieces if piece.prompt_index == index)) for index in range(8)]
        self._compare("preempted", texts)
        self.found["preempted"] = llm.stats().preemptions - kept

    def _compare(
        self, way: str, found: Sequence[RequestOutput | Text], start: int = 0, alone: list[Text] | None = None
    ) -> None:
        comparison, texts = Comparison(), alone or self._alone[start:]
        for alone_text, other in zip(texts, found, strict=False):
            comparison.add(alone_text, _text(*other.outputs) if isinstance(other, RequestOutput) else other)
        self.found["ways"][way] = vars(comparison)
        if comparison.wrong:
            self.found["wrong"][way] = comparison.wrong

    def _check_bits(self) -> None:
        """Records each way as wrong that breaks the plan's promise of equal bits for a split cache."""
        if self.found["equal_bits"].startswith("equal bits: yes"):
            for way, comparison in self.found["ways"].items():
                if way != "unified" and comparison["equal_bits"] < comparison["texts"]:
                    self.found["wrong"].setdefault(way, "the plan says equal bits, and they differ")


def _facts(engine: Any) -> tuple[str, bool]:
    """Returns the kind of the model, and whether one pass may compute any tokens of any sequences."""
    model = engine.model
    kind = "window" if model.has_window else "attention"
    if model.is_recurrent:
        kind = "hybrid" if load().llama_model_is_hybrid(model.handle) else "recurrent"
    elif any(key.endswith(".key_length_mla") and int(value) > 0 for key, value in model.metadata.items()):
        kind = "latent attention"
    return kind, bool(engine._runner.limits.is_ragged)


def main(read: Callable[[], str] = sys.stdin.readline) -> None:
    while path := read().strip():
        print(json.dumps(Case(path).run()), flush=True)


if __name__ == "__main__":
    main()
