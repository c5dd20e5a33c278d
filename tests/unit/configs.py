"""Resolved configs for tests that plan nothing."""

from llamabatch.config import ResolvedConfig


def resolved(model="m", **options) -> ResolvedConfig:
    """Returns a config with every choice made: the given options, and small values for the rest."""
    defaults = {
        "strategy": "batched",
        "n_slots": 1,
        "start_slots": options.get("n_slots", 1),
        "n_ctx": 4096,
        "n_ubatch": 512,
        "prefill_budget": 512,
        "n_threads": 1,
        "n_threads_batch": 1,
        "instances": 1,
        "kv": "split",
        "kv_cells": 0,
        "cache_ram": 0,
        "pooling": "mean",
    }
    return ResolvedConfig(model, **{**defaults, **options})
