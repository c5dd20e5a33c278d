"""Lowers thresholds: short prefixes are worth a copy, so that short prompts are handled as long ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from unittest.mock import patch

# states of tiny models are small, so that prompts of a few tokens are worth a saved state
SMALL = {"MIN_CHECKPOINT": 16, "MIN_GAIN": 8, "MIN_SHARED": 8, "MIN_READ": 8}
_MODULES = (
    *(f"scheduler.{name}" for name in ("common_prefix", "kv_cache", "prefix_cache", "prefix_store")),
    "engine.prefix_folder",
)


@contextmanager
def small_thresholds() -> Iterator[None]:
    """Shares prefixes from eight tokens on, and saves states from sixteen tokens on."""
    with ExitStack() as stack:
        for module in _MODULES:
            for name, value in SMALL.items():
                place = f"llamabatch.{module}"
                if hasattr(import_module(place), name):
                    stack.enter_context(patch(f"{place}.{name}", value))
        yield
