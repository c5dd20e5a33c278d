"""The callers of an hour of load. They make random calls of the whole public API, and count the requests."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from llamabatch import LLM, AsyncLLM, FinishReason, LlamaBatchError, RequestOutput, SamplingParams

WORDS = (
    *("the", "a", "red", "blue", "small", "old", "house", "tree", "river", "king"),
    *("dog", "sleeps", "runs", "sees", "under", "over", "and", "why", "who", "seven"),
)
LORA, EXTRA = "lora", "extra"

_OK = (FinishReason.STOP, FinishReason.LENGTH)


class Count:
    """The prompts of one kind of caller, and their ends. Each prompt counts once in `submitted` and once in `ended`.

    Attributes:
        submitted: number of submitted prompts.
        ended: number of prompts by their end: "ok", "error" or "aborted".
        calls: number of calls of each action.
    """

    def __init__(self) -> None:
        self.submitted = 0
        self.ended: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.failures: list[str] = []
        self.last_call_s = time.monotonic()
        self._lock = threading.Lock()

    def ask(self, n: int) -> None:
        with self._lock:
            self.submitted += n

    def end(self, how: str, n: int = 1) -> None:
        with self._lock:
            self.ended[how] += n

    def outputs(self, outputs: Iterable[RequestOutput]) -> None:
        """Counts the ends of requests from their outputs."""
        for output in outputs:
            reason = output.finish_reason
            self.end("ok" if reason in _OK else "aborted" if reason is FinishReason.ABORT else "error")

    def called(self, action: str) -> None:
        with self._lock:
            self.calls[action] += 1
            self.last_call_s = time.monotonic()


class Caller:
    """Makes calls to one LLM on one thread."""

    def __init__(self, llm: LLM, seed: int, count: Count, lora: Path, *, loads: bool) -> None:
        """Args:
        lora: path of an adapter file. The LLM has loaded it under the name LORA.
        loads: this caller also loads and frees a second adapter.
        """
        self._llm, self._count, self._lora = llm, count, lora
        self._rng = random.Random(seed)
        self._actions: list[tuple[Callable[[], None], int]] = [
            (self.generate, 8), (self.chat, 4), (self.leave_a_stream, 6), (self.as_completed, 4), (self.structured, 3),
            (self.embed, 4), (self.score, 3), (self.with_adapter, 3), (self.bad_prompts, 3), (self.late, 3),
            (self.look, 2), *([(self.load_adapter, 1)] if loads else []),
        ]  # fmt: skip

    def run(self, until_s: float) -> None:
        """Makes calls until `until_s`. The first unexpected error ends the caller, and is added to the failures."""
        actions, weights = zip(*self._actions, strict=True)
        try:
            while time.monotonic() < until_s:
                [action] = self._rng.choices(actions, weights)
                action()
                self._count.called(action.__name__)
                time.sleep(self._rng.random() * 0.05)
        except Exception as error:
            self._count.failures.append(f"{action.__name__}: {type(error).__name__}: {error}")

    # --- actions --------------------------------------------------------------------------------------------------

    def generate(self) -> None:
        n = self._rng.randrange(1, 9)
        self._run(self._llm.generate, [self.prompt() for _ in range(n)], n)

    def chat(self) -> None:
        n = self._rng.randrange(1, 5)
        self._run(self._llm.chat, [[{"role": "user", "content": self.prompt()}] for _ in range(n)], n)

    def _run(self, call: Callable[..., list[RequestOutput]], prompts: list[Any], n: int, **more: Any) -> None:
        self._count.ask(n)
        outputs = call(prompts, self.params(), **more)
        assert len(outputs) == n
        self._count.outputs(outputs)

    def leave_a_stream(self) -> None:
        n = self._rng.randrange(1, 5)
        self._count.ask(n)
        pieces, ended = self._rng.randrange(0, 12), 0
        with contextlib.closing(self._llm.stream([self.prompt() for _ in range(n)], self.params())) as stream:  # type: ignore[type-var]
            for piece in stream:
                if piece.finished is not None:
                    self._count.outputs([piece.finished])
                    ended += 1
                if pieces == 0:
                    break
                pieces -= 1
        self._count.end("aborted", n - ended)

    def as_completed(self) -> None:
        n = self._rng.randrange(2, 7)
        self._count.ask(n)
        leave_after, ended = self._rng.randrange(1, n + 3), 0
        with contextlib.closing(self._llm.as_completed([self.prompt() for _ in range(n)], self.params())) as pairs:  # type: ignore[type-var]
            for _, output in pairs:
                self._count.outputs([output])
                ended += 1
                if ended == leave_after:
                    break
        self._count.end("aborted", n - ended)

    def structured(self) -> None:
        asked: dict[str, Any]
        if self._rng.random() < 0.1:  # a form that no earlier request had
            asked = {"choice": [f"{self.word()} {self._rng.randrange(10**9)}" for _ in range(3)]}
        else:
            properties = {name: {"type": "integer"} for name in WORDS[: self._rng.randrange(1, 4)]}
            asked = {"json": {"type": "object", "properties": properties}}
        self._count.ask(1)
        self._count.outputs(
            self._llm.generate([self.prompt()], SamplingParams(max_tokens=24, structured_outputs=asked))
        )

    def embed(self) -> None:
        n = self._rng.randrange(1, 6)
        self._count.ask(n)
        vectors = self._llm.embed([self.prompt() for _ in range(n)])
        assert len(vectors) == n
        self._count.end("ok", n)

    def score(self) -> None:
        n = self._rng.randrange(1, 4)
        self._count.ask(n)
        scores = self._llm.score(self.prompt(), [f" {self.word()} {self.word()}" for _ in range(n)])
        assert [score.error for score in scores] == [None] * n
        self._count.end("ok", n)

    def with_adapter(self) -> None:
        n = self._rng.randrange(1, 4)
        self._run(
            self._llm.generate, [self.prompt() for _ in range(n)], n, adapters={LORA: self._rng.choice((0.5, 1.0))}
        )

    def load_adapter(self) -> None:
        self._llm.load_adapter(EXTRA, self._lora)
        self._run(self._llm.generate, [self.prompt()], 1, adapters={EXTRA: 1.0})
        self._llm.unload_adapter(EXTRA)

    def bad_prompts(self) -> None:
        bad = [self._rng.choice(["", [10**6], "word " * 2000, [], [-1]]) for _ in range(2)]
        self._count.ask(4)
        outputs = self._llm.generate([bad[0], self.prompt(), bad[1], self.prompt()], self.params(), errors="return")  # type: ignore[list-item]
        assert [outputs[i].finish_reason for i in (0, 2)] == [FinishReason.ERROR] * 2
        self._count.outputs(outputs)
        try:
            self._llm.generate("")
        except LlamaBatchError:
            return
        raise AssertionError("an empty prompt was run")

    def late(self) -> None:
        n = self._rng.randrange(1, 4)
        params = SamplingParams(max_tokens=200, ignore_eos=True, deadline_s=self._rng.random() * 0.1)
        self._count.ask(n)
        self._count.outputs(self._llm.generate([self.prompt() for _ in range(n)], params, errors="return"))

    def look(self) -> None:
        stats = self._llm.stats()
        assert stats.in_flight >= 0
        text = self.prompt()
        assert self._llm.detokenize(self._llm.tokenize(text, add_special=False)).strip() == text

    # --- what is asked --------------------------------------------------------------------------------------------

    def word(self) -> str:
        return self._rng.choice(WORDS)

    def prompt(self) -> str:
        shared = "Tell me a story. " if self._rng.random() < 0.3 else ""  # a prefix that may be copied
        return shared + " ".join(self.word() for _ in range(self._rng.randrange(3, 40)))

    def params(self) -> SamplingParams:
        rng = self._rng
        options: dict[str, Any] = {"max_tokens": rng.randrange(1, 48), "temperature": rng.choice((0, 0.7, 1.5))}
        if rng.random() < 0.2:
            options |= {"n": rng.randrange(1, 3), "stop": ["the", "\n"]}
        if rng.random() < 0.2:
            options |= {"logprobs": 2, "repetition_penalty": 1.2, "background": rng.random() < 0.5}
        return SamplingParams(**options)


class AsyncCaller:
    """Runs tasks on one event loop, and cancels many of them."""

    def __init__(self, seed: int, count: Count, options: dict[str, Any]) -> None:
        self._rng, self._count, self._options = random.Random(seed), count, options

    def run(self, until_s: float) -> None:
        """Makes calls of an AsyncLLM of its own until `until_s`, as Caller.run does."""
        try:
            asyncio.run(self._main(until_s))
        except Exception as error:
            self._count.failures.append(f"asyncio: {type(error).__name__}: {error}")

    async def _main(self, until_s: float) -> None:
        async with AsyncLLM("tiny", **self._options) as llm:
            while time.monotonic() < until_s:
                asked = [self._rng.randrange(1, 4) for _ in range(self._rng.randrange(1, 6))]
                tasks = [asyncio.create_task(self._ask(llm, n)) for n in asked]
                for task, n in zip(tasks, asked, strict=True):
                    self._count.ask(n)
                    if self._rng.random() < 0.5:
                        await asyncio.sleep(self._rng.random() * 0.05)
                        task.cancel()
                for done, n in zip(await asyncio.gather(*tasks, return_exceptions=True), asked, strict=True):
                    if isinstance(done, asyncio.CancelledError):
                        self._count.end("aborted", n)
                    elif isinstance(done, BaseException):
                        raise done
                    else:
                        self._count.outputs(done)
                self._count.called("asyncio")
                await asyncio.sleep(self._rng.random() * 0.1)
            await self._nothing_left(llm)

    async def _ask(self, llm: AsyncLLM, n: int) -> list[RequestOutput]:
        params = SamplingParams(max_tokens=self._rng.randrange(1, 64))
        return await llm.generate([" ".join(self._rng.choices(WORDS, k=12)) for _ in range(n)], params)

    async def _nothing_left(self, llm: AsyncLLM) -> None:
        for _ in range(600):
            stats = await llm.stats()
            if stats.in_flight == 0:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"{stats.in_flight} requests have not ended 60 s after the last was cancelled")
