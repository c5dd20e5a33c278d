"""Writes tiny adapter files for the bundled model. Their random values mean nothing, but change the text."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from llamabatch.utils import paths


def shapes() -> tuple[str, int, dict[str, tuple[int, int]]]:
    """Returns the bundled model's architecture, its number of layers, and (inputs, outputs) of weights by name."""
    reader = gguf.GGUFReader(paths.bundled_model())
    architecture = str(reader.fields["general.architecture"].contents())
    n_layer = int(reader.fields[f"{architecture}.block_count"].contents())
    wanted = ("attn_q.weight", "attn_v.weight", "attn_output.weight", "ffn_down.weight")
    return (
        architecture,
        n_layer,
        {t.name: (int(t.shape[0]), int(t.shape[1])) for t in reader.tensors if t.name.endswith(wanted)},
    )


def write_lora(
    path: Path, *, seed: int = 0, size: float = 0.4, rank: int = 4, alpha: float = 8.0, architecture: str | None = None
) -> Path:
    """Writes a LoRA adapter for attention and feed-forward weights. `size` is the deviation of its values."""
    arch, _, weights = shapes()
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture or arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, (n_in, n_out) in weights.items():
        writer.add_tensor(f"{name}.lora_a", rng.normal(0, size / 4, (rank, n_in)).astype(np.float32))
        writer.add_tensor(f"{name}.lora_b", rng.normal(0, size / 4, (n_out, rank)).astype(np.float32))
    _write(writer)
    return path


def write_control_vector(path: Path, *, seed: int = 0, size: float = 1.0, n_embd: int | None = None) -> Path:
    """Writes a control vector with a direction for each layer but the first, as llama.cpp's cvector-generator does."""
    arch, n_layer, weights = shapes()
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", arch)
    writer.add_int32("controlvector.layer_count", n_layer - 1)
    width = n_embd or next(iter(weights.values()))[0]
    for layer in range(1, n_layer):
        writer.add_tensor(f"direction.{layer}", rng.normal(0, size, width).astype(np.float32))
    _write(writer)
    return path


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
