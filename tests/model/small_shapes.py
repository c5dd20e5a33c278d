"""Small variants of llamabatch synth's shapes, with every kind of layer, for files of a few megabytes."""

from __future__ import annotations

from dataclasses import replace

from llamabatch.tools.synth import SHAPES, Shape, State

_SMALL = {"n_embd": 256, "n_ff": 512, "n_head": 4, "n_head_kv": 2, "head_dim": 64, "n_vocab": 2048}


def _small(name: str, layers: str = "", **changes: object) -> Shape:
    return replace(SHAPES[name], **{**_SMALL, "n_layer": len(layers), "layers": layers, **changes})  # type: ignore[arg-type]


HYBRIDS: dict[str, Shape] = {
    "qwen3.5": _small(
        "qwen3.5-0.8b", "MMM*", rope_dim=16, state=State(conv=4, heads=4, head_dim=32, size=32, groups=2)
    ),
    "lfm2": _small("lfm2-350m", "MM*M"),
    "granite-4.0-h": _small(
        "granite-4.0-h-350m", "MM*M", state=State(conv=4, heads=8, head_dim=64, size=32, groups=1),
        residual_scale=0.9,  # with the real scale and so few layers, the text would only repeat one token
    ),
    "nemotron-h": _small("nemotron-h-4b", "M-*-M-", state=State(conv=4, heads=8, head_dim=64, size=32, groups=2)),
}  # fmt: skip
WINDOWS: dict[str, Shape] = {
    "gpt-oss": _small("gpt-oss-20b", n_layer=4, window=32, n_expert=4, n_expert_used=2),
    "gemma-3": _small("gemma-3-270m", n_layer=6, n_head_kv=1, window=32),
}
