"""ResolvedConfig: the options of an engine after capacity.resolve has replaced "auto", and sizes computed from them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from llamabatch.config.options import OF_DRAFT_MODELS, EngineConfig
from llamabatch.config.values import MIN_GUESSING_UBATCH
from llamabatch.errors import ConfigError
from llamabatch.utils.checks import integer

# The maximum size of the logits of a decode call that checks draft tokens, in bytes. With a vocabulary of 152k tokens,
# 8 draft tokens for each of 32 slots take 175 MB.
_MOST_GUESS_BYTES = 256 * 2**20
# Two limits of a call for the logprobs of a prompt: the number of output rows, and the size of their logits in bytes.
# With a vocabulary of 152k tokens, each row takes 0.6 MB.
_MOST_PROMPT_ROWS = 64
_MOST_PROMPT_ROW_BYTES = 32 * 2**20


@dataclass(frozen=True)
class ResolvedConfig(EngineConfig):
    """The options of an engine after capacity.resolve has replaced "auto" and "fit" by values. Raises ConfigError.

    Numbers are int, the strategy is one of the policies or "multi-instance", and kv is "split" or "unified".
    `flash_attn`, `extra_bufts` and `trial` may still be "auto": they are decided when the file is loaded.

    Attributes:
        kv_cells: cells that all slots share; 0 with a split KV cache, in which each slot has its own cells.
    """

    n_slots: int = field(kw_only=True)
    start_slots: int = field(kw_only=True)
    n_ctx: int = field(kw_only=True)
    n_ubatch: int = field(kw_only=True)
    prefill_budget: int = field(kw_only=True)
    n_threads: int = field(kw_only=True)
    n_threads_batch: int = field(kw_only=True)
    instances: int = field(kw_only=True)
    cache_ram: int = field(kw_only=True)
    kv_cells: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("strategy", "kv", "pooling"):
            if getattr(self, name) == "auto":
                raise ConfigError(f"{name} is 'auto'; a resolved config holds what was chosen")
        if (self.kv_cells > 0) != (self.kv == "unified"):
            needed = "at least n_ctx" if self.kv == "unified" else "0"
            raise ConfigError(f"kv_cells is {self.kv_cells}; with kv={self.kv!r} it must be {needed}")

    def _number(self, name: str, low: int, high: int) -> int:
        return integer(ConfigError, name, getattr(self, name), 0 if name == "kv_cells" else low, high)

    def _check_cache_ram(self) -> None:
        """Allows cache_disk with cache_ram 0, a value that is chosen if no memory is left. The engine then warns."""

    def requested(self) -> EngineConfig:
        return EngineConfig(**{**vars(self), "kv_cells": self.kv_cells or "auto"})

    def for_draft_model(self) -> ResolvedConfig:
        return replace(self, kv_cells=0, pooling="mean", **OF_DRAFT_MODELS)

    def for_one_engine(self) -> ResolvedConfig:
        """Returns the options of one engine. If several engines run in this process, each gets a share of the slots."""
        n = self.instances
        if n == 1 or self.strategy == "multi-instance":
            return self
        slots, start = -(-self.n_slots // n), -(-self.start_slots // n)
        return replace(self, instances=1, n_slots=slots, start_slots=start, cache_ram=self.cache_ram // n)

    @property
    def n_snapshots(self) -> int:
        """The number of earlier states that are kept for each sequence: one for each draft token, because each draft
        token may be wrong."""
        most = self.n_ubatch - MIN_GUESSING_UBATCH + 1
        return 0 if self.speculate == "off" else max(0, min(self.n_draft, most))

    def prompt_rows(self, n_vocab: int) -> int:
        """Returns the maximum number of output rows of one sequence in a call. The logprobs of a prompt need several
        rows."""
        return max(1, min(_MOST_PROMPT_ROWS, self.n_batch, _MOST_PROMPT_ROW_BYTES // (4 * n_vocab)))

    def output_rows(self, n_slots: int, n_vocab: int) -> int:
        """Returns the maximum number of output rows of a call. This is the largest of three numbers: one row for each
        slot, the rows for the logprobs of a prompt, and the rows for draft tokens."""
        guesses = min(n_slots * (1 + self.n_draft), _MOST_GUESS_BYTES // (4 * n_vocab))
        return max(n_slots, self.prompt_rows(n_vocab), 0 if self.speculate == "off" else guesses)
