"""Times llama_decode with a split KV cache and dense rows: the cost of one pass without scheduling and sampling."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from llamabatch.config import ResolvedConfig
from llamabatch.errors import EngineError
from llamabatch.llama import library
from llamabatch.llama.batch import Batch
from llamabatch.llama.context import Context, DecodeCode
from llamabatch.llama.model import Model
from llamabatch.request.request import Request
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.output import Call, ScheduledSpan

_PAUSE_S = 1e-4  # about as long as an engine's pause between two steps; waiting threads may fall asleep in it
_LEAST_STEPS = 2
_LONG_S = 1.5
_ANY_PRIME = 7919


class Bench:
    """Measures one model under several settings, and reuses its context where the settings allow this.

    Args:
        model: must stay open until close().
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._lib = library.load()
        self._context: Context | None = None
        self._made_from: tuple[object, ...] = ()
        self._filled = 0  # number of slots, from slot 0 on, that contain the prompt

    def close(self) -> None:
        if self._context is not None:
            self._context.close()
            self._context = None

    def measure(
        self,
        config: ResolvedConfig,
        n_slots: int,
        prompt: int,
        rows: tuple[int, ...],
        seconds: float,
        *,
        time_prompt: bool = True,
    ) -> dict[str, float]:
        """Measures a prompt and decode steps of several numbers of rows.

        Args:
            config: settings of the context. A step attends to the prompt and to the tokens after it, up to n_ctx.
            n_slots: slots of the context, at least max(rows).
            prompt: number of tokens in the prompt of each sequence; less than n_ctx.
            rows: numbers of rows to measure.
            seconds: time for each number of rows. At least two steps are timed, or one if steps are slow.
            time_prompt: False leaves "prompt" out.

        Returns:
            Times in milliseconds. "prompt" is the time for one token of the prompt. For 8 rows, "8" is the median time
            of a decode step, and "p95 8" its 95th percentile; likewise for other numbers of rows.

        Raises:
            EngineError: the context cannot be made, or llama_decode failed.
        """
        self._prepare(config, n_slots, prompt)
        figures = {"prompt": self._prompt_ms(prompt)} if time_prompt else {}
        for count in rows:
            times = self._step_times(count, prompt, config.n_ctx, seconds)
            figures[str(count)] = statistics.median(times) * 1000
            figures[f"p95 {count}"] = times[min(len(times) - 1, int(0.95 * len(times)))] * 1000
        return figures

    def _prepare(self, config: ResolvedConfig, n_slots: int, prompt: int) -> None:
        made_from = (
            config.flash_attn, config.type_k, config.type_v, config.n_ubatch, config.n_batch, config.n_ctx, n_slots,
            prompt,
        )  # fmt: skip
        if self._context is None or made_from != self._made_from:
            self.close()
            self._context = Context(self._model, config, n_slots)
            self._made_from = made_from
            self._batch = Batch(self._lib, config.n_batch)
            n_ctx = config.n_ctx
            tokens = tuple(1 + i * _ANY_PRIME % max(1, self._model.n_vocab - 1) for i in range(n_ctx))
            self._sequence = Sequence(Request("bench", tokens), self._model.vocabulary, n_ctx)
            self._prompt_ms(prompt)  # a warm-up that touches weights and buffers
        threads = config.n_threads, config.n_threads_batch
        self._lib.llama_set_n_threads(self._open.handle, *threads)

    @property
    def _open(self) -> Context:
        assert self._context is not None
        return self._context

    def _prompt_ms(self, prompt: int) -> float:
        """Computes the prompt in slot 0. Returns the milliseconds for one token."""
        self._open.clear(0)
        self._filled = 0
        seconds = self._decode((ScheduledSpan(self._sequence, 0, 0, prompt, True),))
        self._filled = 1
        return seconds * 1000 / prompt

    def _step_times(self, rows: int, prompt: int, n_ctx: int, seconds: float) -> list[float]:
        """Returns the seconds of each step, in ascending order."""
        times: list[float] = []
        position, start = n_ctx, time.perf_counter()
        while (spent := time.perf_counter() - start) < seconds or len(times) < self._steps_at_least(spent):
            if position >= n_ctx:
                position = self._rewind(rows, prompt)
            times.append(
                self._decode(tuple(ScheduledSpan(self._sequence, row, position, 1, True) for row in range(rows)))
            )
            position += 1
            _busy_wait(_PAUSE_S)
        self._rewind(rows, prompt)
        return sorted(times[1:])  # the first step also builds the graph and executes the pending copies

    @staticmethod
    def _steps_at_least(spent: float) -> int:
        """Returns the minimum number of steps: 3, or 2 if steps are slow. The returned times do not include the first
        of these steps."""
        return _LEAST_STEPS + 1 if spent < _LONG_S else 2

    def _rewind(self, rows: int, prompt: int) -> int:
        """Cuts each row's slot back to the prompt. Clears all slots if a state cannot be cut. Returns the next
        position."""
        context = self._open
        cut = [context.clear(row, prompt) for row in range(rows)]
        if not all(cut):
            for row in range(context.n_slots):
                context.clear(row)
            self._filled = 0
            return 0
        for row in range(self._filled, rows if self._filled else 0):
            context.copy_prefix(0, row, prompt)
        self._filled = max(self._filled, rows) if self._filled else 0
        return prompt if self._filled else 0

    def _decode(self, spans: tuple[ScheduledSpan, ...]) -> float:
        """Decodes the spans. Returns the seconds until their logits can be read."""
        struct, sampled = self._batch.fill(Call(spans))
        start = time.perf_counter()
        code = self._open.decode(struct)
        if code is DecodeCode.OK:
            self._open.rows(len(sampled))  # waits for a GPU that still computes
        seconds = time.perf_counter() - start
        if code is not DecodeCode.OK:
            raise EngineError(f"llama_decode failed: {code.name.lower()} ({code.value})")
        return seconds


def _busy_wait(seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
    """Keeps the core busy, as an engine does. time.sleep would release the core."""
    end = clock() + seconds
    while clock() < end:
        pass
