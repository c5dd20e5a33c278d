"""Writes mmproj files for tests of function and speed. They have the layouts of real encoders, but random weights."""

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
_Tensor = tuple[str, npt.NDArray[Any]]
_MEL, _FRAMES = 80, 3000  # Whisper's encoder: frequency bands, and 10-ms steps in one pass


@dataclass(frozen=True)
class ProjectorShape:
    """The numbers of an encoder.

    Attributes:
        kind: llama.cpp's name of the projector. For pictures: "gemma3" (one image, whose tokens all attend to one
            another), "mlp" (LLaVA: one image, causal), "idefics3" (SmolVLM: tiles, causal), "qwen2vl_merger"
            (Qwen2-VL: any size, positions in two dimensions), "qwen2.5vl_merger" (the same, with attention in windows),
            "qwen3vl_merger" (the same, with further values for the text model's first layers: "deepstack"), "pixtral"
            (any size, a token after each row of patches) or "lfm2" (LFM2-VL: any size, tiles of large pictures,
            causal). For audio: "ultravox", "voxtral" or "qwen2a" (Qwen2-Audio).
        image_size: pixels along a side of the picture.
        patch_size: pixels along a side of a patch.
        n_merge: n_merge x n_merge patches become one token; unused for "mlp". For "ultravox" and "voxtral", n_merge
            steps in time become one token.
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
        """True for an audio encoder."""
        return self.kind in ("ultravox", "voxtral", "qwen2a")

    @property
    def n_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


PROJECTORS = {
    "clip-b16": ProjectorShape("mlp", 12, 768, 3072, 12, 224, 16),
    "clip-l14-336": ProjectorShape("mlp", 23, 1024, 4096, 16, 336, 14),  # LLaVA 1.5 leaves out the last layer
    "gemma-3": ProjectorShape("gemma3", 27, 1152, 4304, 16, 896, 14, 4),
    "pixtral": ProjectorShape("pixtral", 24, 1024, 4096, 16, 1024, 16, 1),
    "qwen2-vl": ProjectorShape("qwen2vl_merger", 32, 1280, 5120, 16, 560, 14, 2),
    "ultravox": ProjectorShape("ultravox", 32, 1280, 5120, 20, n_merge=8),
}
"""The shapes of real encoders, by name."""


def write_projector(
    path: Path, shape: ProjectorShape, n_embd: int, seed: int = 0, weights: str = "F16", *, widened: bool = False
) -> int:
    """Writes an mmproj file for a text model of width `n_embd`, and returns its size in bytes.

    Args:
        weights: the type of the layers' matrices, such as "Q8_0". Matrices outside the layers, and matrices whose rows
            are not whole blocks of this type, are F16. Positions are F32.
        widened: write the layers' matrices as F32, but with the same (rounded) values as without this option.

    Raises:
        SetupError: the gguf package is missing.
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
        kind = gguf.GGMLQuantizationType[weights]
        block = gguf.GGML_QUANT_SIZES[kind][0]
        for name, values in _Tensors(shape, n_embd, random):
            is_matrix = ".blk." in name and values.ndim == 2 and name.endswith(".weight")
            own = kind if is_matrix and values.shape[1] % block == 0 else None
            if own is not None:
                values = gguf.quantize(values.astype(_F32), own)
            if is_matrix and widened:
                values, own = gguf.dequantize(values, own or gguf.GGMLQuantizationType.F16).astype(_F32), None
            writer.add_tensor(name, values, raw_dtype=own)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        size = temporary.stat().st_size
        temporary.chmod(0o644)
    return size


class _Tensors:
    """An iterable over the tensors of an encoder: pairs of a name and values, in the order of the file.

    Args:
        n_embd: the width of the text model.
    """

    def __init__(self, shape: ProjectorShape, n_embd: int, random: np.random.Generator) -> None:
        self._shape, self._n_embd, self._random = shape, n_embd, random
        self._width = shape.n_embd
        self._prefix = "a" if shape.hears else "v"

    def __iter__(self) -> Iterator[_Tensor]:
        yield from self._input_of_sounds() if self._shape.hears else self._input_of_pictures()
        for layer in range(self._shape.n_layer):
            yield from self._layer(f"{self._prefix}.blk.{layer}")
        yield from self._norm(f"{self._prefix}.post_ln")
        yield from self._projection_of_sounds() if self._shape.hears else self._projection_of_pictures()

    def _input_of_sounds(self) -> Iterator[_Tensor]:
        yield "a.conv1d.1.weight", self._normal(self._width, _MEL, 3)
        yield "a.conv1d.2.weight", self._normal(self._width, self._width, 3)
        for name in ("a.conv1d.1.bias", "a.conv1d.2.bias"):
            yield name, np.zeros((self._width, 1), _F32)
        yield self._positions(_FRAMES // 2)

    def _input_of_pictures(self) -> Iterator[_Tensor]:
        patch = self._width, 3, self._shape.patch_size, self._shape.patch_size
        yield "v.patch_embd.weight", self._normal(*patch)
        if self._shape.merges:
            yield "v.patch_embd.weight.1", self._normal(*patch)
        if self._shape.kind in ("gemma3", "mlp", "idefics3", "qwen3vl_merger", "lfm2"):
            yield "v.patch_embd.bias", np.zeros(self._width, _F32)
            yield self._positions(self._shape.n_patches)

    def _layer(self, at: str) -> Iterator[_Tensor]:
        width, wide = self._width, self._shape.n_ff
        if self._shape.kind == "qwen3vl_merger":
            yield from self._matrix(f"{at}.attn_qkv", 3 * width, width)
        else:
            yield from self._matrix(f"{at}.attn_q", width, width)
            yield from self._matrix(f"{at}.attn_k", width, width, bias=not self._shape.hears)  # Whisper's K has no bias
            yield from self._matrix(f"{at}.attn_v", width, width)
        yield from self._matrix(f"{at}.attn_out", width, width)
        yield from self._norm(f"{at}.ln1")
        yield from self._norm(f"{at}.ln2")
        yield from self._matrix(f"{at}.ffn_up", wide, width)
        yield from self._matrix(f"{at}.ffn_down", width, wide)

    def _projection_of_sounds(self) -> Iterator[_Tensor]:
        kind, n_embd, stacked = self._shape.kind, self._n_embd, self._width * self._shape.n_merge
        if kind == "qwen2a":
            yield from self._matrix("mm.a.fc", n_embd, self._width)
        elif kind == "voxtral":
            yield from self._matrix("mm.a.mlp.1", n_embd, stacked, bias=False)
            yield from self._matrix("mm.a.mlp.2", n_embd, n_embd, bias=False)
        else:
            yield "mm.a.norm_pre.weight", np.ones(stacked, _F32)
            yield from self._matrix("mm.a.mlp.1", 2 * n_embd, stacked, bias=False)
            yield "mm.a.norm_mid.weight", np.ones(n_embd, _F32)
            yield from self._matrix("mm.a.mlp.2", n_embd, n_embd, bias=False)

    def _projection_of_pictures(self) -> Iterator[_Tensor]:
        kind, n_embd, width = self._shape.kind, self._n_embd, self._width
        merged = width * self._shape.n_merge**2
        if kind == "gemma3":
            yield "mm.input_projection.weight", self._normal(n_embd, width).T.copy()
            yield "mm.soft_emb_norm.weight", np.ones(width, _F32)
        elif kind == "idefics3":
            yield from self._matrix("mm.model.fc", n_embd, merged, bias=False)
        elif kind == "lfm2":
            yield from self._norm("mm.input_norm", merged)
            yield from self._two_layers("mm.1", "mm.2", merged, n_embd)
        elif kind == "pixtral":
            yield "v.token_embd.img_break", self._random.standard_normal(n_embd, _F32)
            yield from self._two_layers("mm.1", "mm.2", width, n_embd)
        elif self._shape.merges:
            yield from self._two_layers("mm.0", "mm.2", merged, merged)
        else:
            yield from self._two_layers("mm.0", "mm.2", width, n_embd)
        for layer in range(self._shape.n_deepstack if kind == "qwen3vl_merger" else 0):
            at = f"v.deepstack.{layer}"
            yield from self._norm(f"{at}.norm", merged)
            yield from self._two_layers(f"{at}.fc1", f"{at}.fc2", merged, merged)

    def _two_layers(self, first: str, second: str, n_inputs: int, hidden: int) -> Iterator[_Tensor]:
        yield from self._matrix(first, hidden, n_inputs)
        yield from self._matrix(second, self._n_embd, hidden)

    def _matrix(self, name: str, rows: int, columns: int, *, bias: bool = True) -> Iterator[_Tensor]:
        yield f"{name}.weight", self._normal(rows, columns)
        if bias:
            yield f"{name}.bias", np.zeros(rows, _F32)

    def _norm(self, name: str, width: int | None = None) -> Iterator[_Tensor]:
        yield f"{name}.weight", np.ones(width or self._width, _F32)
        yield f"{name}.bias", np.zeros(width or self._width, _F32)

    def _positions(self, n: int) -> _Tensor:
        return f"{self._prefix}.position_embd.weight", 0.1 * self._random.standard_normal((n, self._width), _F32)

    def _normal(self, rows: int, *inputs: int) -> npt.NDArray[Any]:
        """Returns random weights that convert inputs of variance 1 to outputs of variance 1."""
        values = self._random.standard_normal((rows, *inputs), _F32)
        return np.asarray(values / np.sqrt(np.prod(inputs)), _F16)
