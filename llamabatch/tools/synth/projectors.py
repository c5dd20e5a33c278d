"""Writes mmproj files for tests and measurements of speed: encoders of pictures and sounds in real layouts, with random
weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llamabatch.errors import SetupError
from llamabatch.utils.atomic_file import replacement
from llamabatch.utils.paths import absolute

_F16, _F32 = np.float16, np.float32
_MEL, _FRAMES = 80, 3000  # frequency bands of Whisper's encoder, and the steps of 10 ms in one pass of it


@dataclass(frozen=True)
class ProjectorShape:
    """The numbers of an encoder.

    Attributes:
        kind: llama.cpp's name of the projector. For pictures: "gemma3" (one image, whose tokens all attend to one
            another), "mlp" (LLaVA: one image, causal), "idefics3" (SmolVLM: tiles, causal), "qwen2vl_merger"
            (Qwen2-VL: any size, positions in two dimensions), "qwen2.5vl_merger" (the same, with attention in windows),
            "qwen3vl_merger" (the same, with further values for the text model's first layers: "deepstack") or "pixtral"
            (any size, a token behind each row of patches). For sounds: "ultravox", "voxtral" or "qwen2a" (Qwen2-Audio).
        image_size, patch_size: pixels along a side of the picture, and of a patch.
        n_merge: patches along a side that become one token; unused for "mlp". For "ultravox" and "voxtral": steps in
            time that become one token.
        n_deepstack: for "qwen3vl_merger": an embedding has 1 + n_deepstack times the width of the text model.
    """

    kind: str
    n_layer: int = 2
    n_embd: int = 64
    n_ff: int = 128
    n_head: int = 4
    image_size: int = 64
    patch_size: int = 8
    n_merge: int = 2
    n_deepstack: int = 1

    @property
    def merges(self) -> bool:
        """True for the encoders of Qwen, which join n_merge x n_merge patches before the last two matrices."""
        return self.kind.startswith("qwen") and not self.hears

    @property
    def hears(self) -> bool:
        """True for an encoder of sounds."""
        return self.kind in ("ultravox", "voxtral", "qwen2a")

    @property
    def n_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


def write_projector(path: Path, shape: ProjectorShape, n_embd: int, seed: int = 0) -> int:
    """Writes an mmproj file for a text model of width `n_embd`, and returns its size in bytes.

    Raises SetupError without the gguf package.
    """
    try:
        import gguf
    except ImportError as error:
        raise SetupError('writing model files needs the gguf package: pip install "llamabatch[tools]"') from error
    path = Path(absolute(path))
    with replacement(path) as temporary:
        writer = gguf.GGUFWriter(str(temporary), "clip")
        writer.add_name(f"random {shape.kind} projector")
        writer.add_file_type(1)
        writer.add_string("clip.projector_type", shape.kind)
        sense = "audio" if shape.hears else "vision"
        writer.add_bool(f"clip.has_{sense}_encoder", True)
        writer.add_bool("clip.use_gelu", True)
        writer.add_float32(f"clip.{sense}.attention.layer_norm_epsilon", 1e-6)
        numbers = {
            "embedding_length": shape.n_embd,
            "feed_forward_length": shape.n_ff,
            "block_count": shape.n_layer,
            "projection_dim": n_embd,
            "attention.head_count": shape.n_head,
        }
        if shape.hears:
            numbers |= {"num_mel_bins": _MEL, "projector.stack_factor": shape.n_merge}
        else:
            writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
            writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
            numbers |= {"image_size": shape.image_size, "patch_size": shape.patch_size}
            numbers |= {"projector.scale_factor": shape.n_merge, "preproc_image_size": 2 * shape.image_size}
            numbers |= {"spatial_merge_size": shape.n_merge, "n_wa_pattern": 2 * (shape.kind == "qwen2.5vl_merger")}
        for key, value in numbers.items():
            writer.add_uint32(f"clip.{sense}.{key}", value)
        random = np.random.default_rng(seed)
        for name, values in _tensors(shape, n_embd, random):
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        size = temporary.stat().st_size
        temporary.chmod(0o644)
    return size


def _tensors(shape: ProjectorShape, n_embd: int, random: np.random.Generator) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    width, wide = shape.n_embd, shape.n_ff

    def matrix(rows: int, columns: int) -> npt.NDArray[Any]:
        values = random.standard_normal((rows, columns), _F32)
        return np.asarray(values / np.sqrt(columns), _F16)

    def norm(name: str) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        yield f"{name}.weight", np.ones(width, _F32)
        yield f"{name}.bias", np.zeros(width, _F32)

    def patch() -> npt.NDArray[Any]:
        values = random.standard_normal((width, 3, shape.patch_size, shape.patch_size), _F32)
        return np.asarray(values / np.sqrt(3 * shape.patch_size**2), _F16)

    def convolution(n_inputs: int) -> npt.NDArray[Any]:
        values = random.standard_normal((width, n_inputs, 3), _F32)
        return np.asarray(values / np.sqrt(3 * n_inputs), _F16)

    def mlp(first: str, second: str, n_inputs: int, hidden: int) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        yield f"{first}.weight", matrix(hidden, n_inputs)
        yield f"{first}.bias", np.zeros(hidden, _F32)
        yield f"{second}.weight", matrix(n_embd, hidden)
        yield f"{second}.bias", np.zeros(n_embd, _F32)

    prefix = "a" if shape.hears else "v"
    if shape.hears:
        yield "a.conv1d.1.weight", convolution(_MEL)
        yield "a.conv1d.2.weight", convolution(width)
        for name in ("a.conv1d.1.bias", "a.conv1d.2.bias"):
            yield name, np.zeros((width, 1), _F32)
        yield "a.position_embd.weight", 0.1 * random.standard_normal((_FRAMES // 2, width), _F32)
    else:
        yield "v.patch_embd.weight", patch()
    if shape.merges:
        yield "v.patch_embd.weight.1", patch()
    if shape.kind in ("gemma3", "mlp", "idefics3", "qwen3vl_merger"):
        yield "v.patch_embd.bias", np.zeros(width, _F32)
        yield "v.position_embd.weight", 0.1 * random.standard_normal((shape.n_patches, width), _F32)
    for layer in range(shape.n_layer):
        at = f"{prefix}.blk.{layer}"
        joined = shape.kind == "qwen3vl_merger"
        if joined:
            yield f"{at}.attn_qkv.weight", matrix(3 * width, width)
            yield f"{at}.attn_qkv.bias", np.zeros(3 * width, _F32)
        for name in ("attn_out",) if joined else ("attn_q", "attn_k", "attn_v", "attn_out"):
            yield f"{at}.{name}.weight", matrix(width, width)
            if not (shape.hears and name == "attn_k"):  # Whisper has no bias for K
                yield f"{at}.{name}.bias", np.zeros(width, _F32)
        yield from norm(f"{at}.ln1")
        yield from norm(f"{at}.ln2")
        yield f"{at}.ffn_up.weight", matrix(wide, width)
        yield f"{at}.ffn_up.bias", np.zeros(wide, _F32)
        yield f"{at}.ffn_down.weight", matrix(width, wide)
        yield f"{at}.ffn_down.bias", np.zeros(width, _F32)
    yield from norm(f"{prefix}.post_ln")
    if shape.kind == "ultravox":
        stacked = width * shape.n_merge
        yield "mm.a.norm_pre.weight", np.ones(stacked, _F32)
        yield "mm.a.mlp.1.weight", matrix(2 * n_embd, stacked)
        yield "mm.a.norm_mid.weight", np.ones(n_embd, _F32)
        yield "mm.a.mlp.2.weight", matrix(n_embd, n_embd)
    elif shape.kind == "voxtral":
        yield "mm.a.mlp.1.weight", matrix(n_embd, width * shape.n_merge)
        yield "mm.a.mlp.2.weight", matrix(n_embd, n_embd)
    elif shape.kind == "qwen2a":
        yield "mm.a.fc.weight", matrix(n_embd, width)
        yield "mm.a.fc.bias", np.zeros(n_embd, _F32)
    elif shape.kind == "gemma3":
        yield "mm.input_projection.weight", matrix(n_embd, width).T.copy()
        yield "mm.soft_emb_norm.weight", np.ones(width, _F32)
    elif shape.kind == "idefics3":
        yield "mm.model.fc.weight", matrix(n_embd, width * shape.n_merge**2)
    elif shape.kind == "pixtral":
        yield "v.token_embd.img_break", random.standard_normal(n_embd, _F32)
        yield from mlp("mm.1", "mm.2", width, n_embd)
    elif shape.merges:
        merged = width * shape.n_merge**2
        yield from mlp("mm.0", "mm.2", merged, merged)
        for layer in range(shape.n_deepstack if shape.kind == "qwen3vl_merger" else 0):
            at = f"v.deepstack.{layer}"
            yield f"{at}.norm.weight", np.ones(merged, _F32)
            yield f"{at}.norm.bias", np.zeros(merged, _F32)
            yield from mlp(f"{at}.fc1", f"{at}.fc2", merged, merged)
    else:
        yield from mlp("mm.0", "mm.2", width, n_embd)
