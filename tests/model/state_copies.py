"""Random histories of chats on a small random model. In few slots, states are forked, saved and restored.

Each request must give the same bits as in a fresh engine, alone and without a prefix.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llamabatch.config import EngineConfig
from llamabatch.engine.engine import Engine
from llamabatch.llama import library
from llamabatch.request.outputs import RequestOutput
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.request.sequence import Sequence

N_CTX = 256
N_VOCAB = 128
N_TOKENS = 3
N_TOKENS_GUESSED = 9
SIZES: dict[str, Any] = {
    "n_ctx": N_CTX, "n_threads": 1, "n_threads_batch": 1, "n_batch": 64, "n_ubatch": 32, "profile": False,
    "trial": "off",
}  # fmt: skip
# With wrong guesses, one to three tokens are rolled back between forks, saves, restores and preemptions.
GUESSING: dict[str, Any] = {"speculate": "lookup", "speculate_always": True, "n_draft": 3}
# architecture, options of the engine, tolerance of logprobs (0: equal bits)
KINDS: list[tuple[str, dict[str, Any], float]] = [
    ("llama", {}, 0.0),
    ("llama", {"flash_attn": "off"}, 1e-4),
    ("llama", {"kv": "unified", "kv_cells": 512}, 1e-4),
    ("qwen35", {}, 0.0),
    ("granitehybrid", {}, 0.0),
    ("falcon-h1", {}, 0.0),
    ("mamba2", {}, 0.0),
    ("qwen35", {"kv": "unified", "kv_cells": 512}, 1e-4),
    ("lfm2", {}, 1e-4),
    ("llama", GUESSING, 0.0),
    ("qwen35", GUESSING, 0.0),
    ("nemotron_h", GUESSING, 0.0),
    ("qwen4exp", GUESSING, 0.0),
    ("lfm2", GUESSING, 1e-4),
    ("qwen35", {**GUESSING, "kv": "unified", "kv_cells": 512}, 1e-4),
    ("gpt-oss", {}, 1e-4),
    ("gpt-oss", {"swa_full": False}, 1e-4),
]
Text = tuple[tuple[int, ...], tuple[float, ...]]


_ARITHMETIC = ("swa_full", "flash_attn", "n_ctx", "batch_invariant")


class Fresh:
    """An engine of a single slot and without a prefix cache. Its texts are those that other engines must write.

    Args:
        path: the model.
        tolerance: logprobs may differ by so much, and texts may part if the two best logprobs are as close; 0: equal
            bits.
        n_tokens: length of the texts.
        options: options of the other engine. This engine uses those that change its arithmetic.
    """

    def __init__(self, path: Path | str, tolerance: float, n_tokens: int, options: dict[str, Any]) -> None:
        given: dict[str, Any] = {"n_slots": 1, "strategy": "sequential", "cache_prefix": False, "cache_ram": 0, **SIZES}
        given |= {name: value for name, value in options.items() if name in _ARITHMETIC}
        self._engine = Engine(EngineConfig(str(path), **given))
        self._tolerance = tolerance
        self._n_tokens = n_tokens
        self._known: dict[tuple[int, ...], Text] = {}

    def text(self, prompt: tuple[int, ...]) -> Text:
        """Returns the greedy text after a prompt."""
        if prompt not in self._known:
            self._engine.add(request("alone", prompt, self._n_tokens))
            while self._engine.has_work:
                for output in self._engine.step():
                    if output.finished is not None:
                        self._known[prompt] = text_of(output.finished)
        return self._known[prompt]

    def compare(self, prompt: tuple[int, ...], found: Text) -> None:
        """Raises AssertionError if the text of another engine differs."""
        wanted = self.text(prompt)
        if not self._tolerance:
            assert found == wanted, f"{len(prompt)} tokens: {found} in place of {wanted}"
            return
        for token, other, a, b in zip(found[0], wanted[0], found[1], wanted[1], strict=True):
            assert abs(a - b) < self._tolerance, f"{len(prompt)} tokens: a logprob of {a} in place of {b}"
            if token != other:
                return

    def close(self) -> None:
        self._engine.close()


class Histories:
    """Compares an engine of few slots with a Fresh engine. Path and tolerance are those of Fresh."""

    def __init__(self, path: Path, tolerance: float = 0.0, **options: Any) -> None:
        # with AMX, only batch_invariant gives equal bits to a turn whose prompt contains an answer
        options = {"batch_invariant": tolerance == 0.0 and library.has_equal_rows(), **options}
        given = {"n_slots": 3, "strategy": "batched", "preempt": True, "cache_ram": 1, **SIZES, **options}
        self._config = EngineConfig(str(path), **given)
        self.engine = Engine(self._config)
        self.n_read = 0  # tokens that closed engines have read from the disk
        self._n_tokens = N_TOKENS if self.engine._speculation is None else N_TOKENS_GUESSED
        self._fresh = Fresh(path, tolerance, self._n_tokens, options)
        if self.engine._speculation is not None:
            self.engine._speculation._proposer = _Guesses(self._fresh)

    def close(self) -> None:
        self.engine.close()
        self._fresh.close()

    def case(self, number: int) -> None:
        """Runs one history. Raises AssertionError if a request gives other bits than alone."""
        rng = random.Random(number)
        head = [rng.randrange(N_VOCAB) for _ in range(40)]
        chats = [[*head[: rng.choice([12, 24, 40])], *_tokens(rng, 1, 20)] for _ in range(3)]
        salts = [rng.choice([None, None, "tenant"]) for _ in chats]
        asked: dict[str, tuple[int, ...]] = {}
        outputs: dict[str, RequestOutput] = {}
        for turn in range(3):
            for _ in range(rng.choice([1, 2, 3])):
                chat = rng.randrange(len(chats))
                prompt, name = tuple(chats[chat]), f"{number}.{turn}.{len(asked)}"
                asked[name] = prompt
                self.engine.add(
                    request(name, prompt, self._n_tokens, priority=rng.choice([0, 0, 1]), cache_salt=salts[chat])
                )
                if len(prompt) < 170:
                    own = self._fresh.text(prompt)[0] if rng.random() < 0.6 else ()
                    chats[chat] = [*prompt, *own, *_tokens(rng, 1, 12)]
            for _ in range(rng.randrange(1, 9)):
                self._step(outputs)
            if asked and rng.random() < 0.15:
                victim = rng.choice(list(asked))
                if self.engine.abort(victim) is not None:
                    del asked[victim]
            if self._config.cache_disk is not None and rng.random() < 0.5:
                while self.engine.has_work:
                    self._step(outputs)
                self._start_again()
        while self.engine.has_work:
            self._step(outputs)
        if rng.random() < 0.1:
            self.engine.reset_prefix_cache()
        for name, prompt in asked.items():
            self._fresh.compare(prompt, text_of(outputs[name]))

    def _start_again(self) -> None:
        """Replaces the engine by a new one. The old engine writes the prefixes in its slots to the disk at its end."""
        self.n_read += self.engine.stats().read_tokens
        self.engine.close()
        self.engine = Engine(self._config)

    def _step(self, outputs: dict[str, RequestOutput]) -> None:
        for output in self.engine.step():
            if output.finished is not None:
                outputs[output.request_id] = output.finished


class _Guesses:
    """A Proposer that knows the texts. It often guesses one token of a run wrong on purpose."""

    is_free = True

    def __init__(self, fresh: Fresh) -> None:
        self._fresh = fresh
        self._rng = random.Random(0)

    def propose(self, sequences: Iterable[Sequence], n: int) -> list[list[int]]:
        found = []
        for sequence in sequences:
            text, at = self._fresh.text(tuple(sequence.token_ids[: sequence.num_prompt]))[0], sequence.num_output
            guesses = list(text[at : at + self._rng.randint(0, n)])
            wrong = self._rng.randrange(n + 1)
            found.append([(token + (place == wrong)) % N_VOCAB for place, token in enumerate(guesses)])
        return found

    def close(self) -> None:
        """Does nothing, since there is nothing to free."""


def _tokens(rng: random.Random, least: int, most: int) -> list[int]:
    return [rng.randrange(N_VOCAB) for _ in range(rng.randint(least, most))]


def request(name: str, prompt: tuple[int, ...], n_tokens: int, **params: Any) -> Request:
    given = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True, logprobs=1, **params)
    return Request(name, prompt, given)


def text_of(output: RequestOutput) -> Text:
    assert output.error is None, output.error
    [completion] = output.outputs
    rows = completion.logprobs or ()
    return completion.token_ids, tuple(row[t].logprob for t, row in zip(completion.token_ids, rows, strict=True))
