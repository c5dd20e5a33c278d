"""The shape of the model in a GGUF file, from its header.

Names of keys: gguf-py/gguf/constants.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llamabatch.gguf.header import read_header
from llamabatch.gguf.resolve import file_bytes


@dataclass(frozen=True)
class ModelShape:
    """The figures that decide the speed of a model; two files that agree here run alike.

    Attributes:
        architecture: as "qwen2".
        n_layer, n_embd, n_ff, n_head, n_head_kv: as in the file, lists with commas; "" if not there.
        n_vocab: 0 without a vocabulary.
        file_type: llama.cpp's number of the quantisation; "" if not there.
        n_tensors, file_bytes: they tell one quantisation from another.
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
    """The shape of the model in this file.

    Raises:
        ModelFileError: it is no GGUF file, or damaged.
        OSError: it cannot be read.
    """
    header = read_header(path)
    texts = header.texts()

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
        n_tensors=len(header.tensors),
        file_bytes=file_bytes(path),
    )
