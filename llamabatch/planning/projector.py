"""Computes the memory of a projector from the header of its mmproj file."""

from __future__ import annotations

from pathlib import Path

from llamabatch.config import EngineConfig
from llamabatch.errors import ModelFileError
from llamabatch.gguf.header import read_header
from llamabatch.utils.paths import one_line

# Bytes of the cache of media embeddings, for later requests with the same media. A picture takes 2.6 MB with Gemma 3
# 4B.
KEPT_BYTES = 64 * 2**20
# Maximum number of tokens of a picture, in encoders that take pictures of any size (clip.cpp, set_limit_image_tokens).
_MOST_TOKENS = 4096
_ANY_SIZE = ("qwen", "pixtral", "lfm2", "kimi", "glm", "exaone", "mimo", "paddle", "hunyuan", "youtu", "dots")
_SOUND_STEPS = 1500  # time steps in one pass of an audio encoder: half a minute
# A pass keeps this many values at once for each patch: _WIDTHS times the encoder's width, plus _FF_WIDTHS times its
# feed-forward width. Both numbers were measured.
_WIDTHS, _FF_WIDTHS = 8, 2


def projector_bytes(path: Path, config: EngineConfig) -> int:
    """Returns the bytes of a projector in use: its weights, the buffers of one encoder pass, and kept embeddings.

    Raises:
        ModelFileError: the file is not an mmproj file.
    """
    header = read_header(path)
    texts = header.texts()
    if texts.get("general.architecture") != "clip":
        found = texts.get("general.architecture", "none")
        raise ModelFileError(f"{one_line(path)} is no mmproj file: its architecture is {found}, not clip")

    def number(name: str, default: int = 0, sense: str = "vision") -> int:
        text = texts.get(f"clip.{sense}.{name}", "")
        return int(text) if text.isdigit() else default

    kind = texts.get("clip.projector_type") or texts.get("clip.vision.projector_type", "")
    sound = _WIDTHS * number("embedding_length", 0, "audio") + _FF_WIDTHS * number("feed_forward_length", 0, "audio")
    n_patches = (number("image_size") // max(1, number("patch_size", 1))) ** 2
    if kind.startswith(_ANY_SIZE):
        merged = max(number("spatial_merge_size"), number("projector.scale_factor"), 2) ** 2
        n_patches = max(n_patches, (config.image_max_tokens or _MOST_TOKENS) * merged)
    width = _WIDTHS * number("embedding_length") + _FF_WIDTHS * number("feed_forward_length")
    return header.file_bytes + 4 * max(n_patches * width, _SOUND_STEPS * sound) + KEPT_BYTES
