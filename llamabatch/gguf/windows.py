"""Properties of architectures: which layers attend over a sliding window, and which operations a state allows."""

from __future__ import annotations

from collections.abc import Mapping

# The number of layers in a group, by architecture. Only the last layer of a group attends to all tokens (llama.cpp's
# src/models/*.cpp, load_swa_pattern). None: the file lists the layers. All of these architectures store their cells in
# a llama_kv_cache_iswa. Other architectures with windows store them differently and are left out.
_PERIODS: dict[str, int | None] = {
    "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gemma4": None, "cohere2": 4, "gpt-oss": 2, "olmo2": 4, "plamo3": 8,
    "afmoe": 4,
}  # fmt: skip
_DEFAULTS = {"gemma2": 4096}  # tokens of the window if the file does not name it
# With these architectures, a copy of a sequence or of its saved state gives other logits than the original
# (llama-kv-cache-dsv4.cpp).
UNCOPIED = frozenset({"deepseek4"})
# For these architectures, llama.cpp stores a snapshot of the recurrent state after each of the last tokens
# (llm_arch_supports_rs_rollback).
_SNAPSHOTS = frozenset({
    "bailingmoe3", "glm5-next", "kimi-k3", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe",
    "qwen4exp",
})  # fmt: skip


def windows(architecture: str, own: Mapping[str, str], n_layer: int) -> tuple[int, ...]:
    """Returns the window of each layer in tokens; 0 for a layer that attends to all tokens. Returns () if the windows
    are not known.

    Args:
        own: the architecture's metadata as texts. The keys do not contain the architecture's name.
    """
    if architecture not in _PERIODS:
        return ()
    window = _number(own.get("attention.sliding_window", "")) or _DEFAULTS.get(architecture, 0)
    pattern = own.get("attention.sliding_window_pattern", "").strip("[] ")
    flags = pattern.replace(",", " ").lower().split()
    if len(flags) > 1:
        return tuple(window if flag in ("true", "1") else 0 for flag in flags) if len(flags) == n_layer else ()
    period = _number(pattern) if pattern else _PERIODS[architecture]
    if period is None:
        return ()
    return tuple(window if period == 0 or layer % period < period - 1 else 0 for layer in range(n_layer))


def keeps_windows_whole(architecture: str) -> bool:
    """Returns True if `swa_full` makes llama.cpp keep the cells of window layers in the same way as other cells."""
    return architecture in _PERIODS


def keeps_snapshots(architecture: str) -> bool:
    """Returns True if the recurrent state of a sequence can be rolled back by some tokens, as after wrong guesses."""
    return architecture in _SNAPSHOTS


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
