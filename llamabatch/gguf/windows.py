"""The memory of architectures: which layers attend over a sliding window, and what can be done with their state."""

from __future__ import annotations

from collections.abc import Mapping

# llama.cpp's src/models/*.cpp, load_swa_pattern: the last of so many layers attends to all tokens; None: the file has a
# list. All keep their cells in a llama_kv_cache_iswa. Others are not known here, since theirs are kept in other ways.
_PERIODS: dict[str, int | None] = {
    "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gemma4": None, "cohere2": 4, "gpt-oss": 2, "olmo2": 4, "plamo3": 8,
    "afmoe": 4,
}  # fmt: skip
_DEFAULTS = {"gemma2": 4096}  # where the file does not name the window
# A copy of a sequence, or of its saved state, gives other logits than the sequence itself: llama-kv-cache-dsv4.cpp.
UNCOPIED = frozenset({"deepseek4"})
# llama.cpp keeps snapshots of their recurrent state, one for each of the last tokens: llm_arch_supports_rs_rollback
_SNAPSHOTS = frozenset({
    "bailingmoe3", "glm5-next", "kimi-k3", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe",
    "qwen4exp",
})  # fmt: skip


def windows(architecture: str, own: Mapping[str, str], n_layer: int) -> tuple[int, ...]:
    """Tokens of each layer's window, 0 for a layer that attends to all; empty: the layers with a window are not known.

    Args:
        own: the metadata of the architecture, without its name, as texts.
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
    """True if `swa_full` makes llama.cpp keep the cells of this architecture's window layers as those of the others."""
    return architecture in _PERIODS


def keeps_snapshots(architecture: str) -> bool:
    """True if the state of a sequence can be rolled back by some tokens, as wrong guesses need it."""
    return architecture in _SNAPSHOTS


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
