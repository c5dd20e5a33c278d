"""The shape of the model in a GGUF file, from its header. Names of keys: gguf-py/gguf/constants.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llamabatch.gguf.header import read_header
from llamabatch.gguf.resolve import file_bytes


@dataclass(frozen=True)
class ModelShape:
    """The figures that decide a model's speed. Two files with equal figures run equally fast.

    Attributes:
        architecture: for example "qwen2".
        n_layer, n_embd, n_ff, n_head, n_head_kv: the file's values as in Header.texts; "" if missing.
        n_vocab: number of tokens; 0 without a vocabulary.
        file_type: llama.cpp's number of the quantisation; "" if missing.
        n_tensors, file_bytes: sums over all files of a split model. Both differ between quantisations.
    """

    architecture: str
    n_layer: str
    n_embd: str
    n_ff: str
    n_head: str
    n_head_kv: str
    n_vocab: int
    file_type: str
    n_tensors: int
    file_bytes: int


def read_shape(path: Path) -> ModelShape:
    """Reads the shape of the model in this file.

    Raises:
        ModelFileError: the file is not a GGUF file, or it is damaged.
        OSError: the file cannot be read.
    """
    header = read_header(path)
    texts, in_all = header.texts(), header.metadata.get("split.tensors.count")

    def value(key: str) -> str:
        return texts.get(f"{header.architecture}.{key}", "")

    return ModelShape(
        architecture=header.architecture,
        n_layer=value("block_count"),
        n_embd=value("embedding_length"),
        n_ff=value("feed_forward_length"),
        n_head=value("attention.head_count"),
        n_head_kv=value("attention.head_count_kv"),
        n_vocab=header.n_tokens,
        file_type=texts.get("general.file_type", ""),
        n_tensors=in_all if isinstance(in_all, int) else len(header.tensors),
        file_bytes=file_bytes(path),
    )
