"""What the memory arithmetic needs to know of a model, from its metadata. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MOST_CTX = 4096  # of a model that does not say how long its context is


@dataclass(frozen=True)
class ModelFacts:
    """What the arithmetic needs of a model; all of it stands in the GGUF's metadata.

    Attributes:
        file_bytes: size of the file, or of all its parts: what the weights take.
        k_values, v_values: elements that one token keeps in K and in V, summed over the layers. Layers that attend over
            a sliding window count like the others: llama.cpp keeps all their cells, too.
        n_embd, n_head, n_vocab, n_ctx_train: as in the metadata.
        state_values: elements of the state that a sequence has however long it is, summed over the recurrent layers.
        draft: the model that guesses for it, if one does; no file bytes where both are one file.
    """

    name: str
    file_bytes: int
    k_values: int
    v_values: int
    n_embd: int
    n_head: int
    n_vocab: int
    n_ctx_train: int
    state_values: int = 0
    draft: ModelFacts | None = None

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], file_bytes: int, n_vocab: int) -> ModelFacts:
        """Reads llama.cpp's own keys (gguf-py/gguf/constants.py); llama.cpp's defaults where one is absent."""
        arch = metadata.get("general.architecture", "")
        own = {key.removeprefix(f"{arch}."): text for key, text in metadata.items() if key.startswith(f"{arch}.")}
        n_layer, n_embd = _first(own, "block_count", 1), _first(own, "embedding_length", 1)
        n_head = _first(own, "attention.head_count", 1)  # 0: there is no attention
        kv_heads = _each_layer(own, "attention.head_count_kv", n_layer, n_head) if n_head else [0] * n_layer
        head = n_embd // max(1, n_head)
        latent = _first(own, "attention.key_length_mla", 0) > 0  # K and V of a token are one vector, kept once
        return cls(
            name=metadata.get("general.name", arch),
            file_bytes=file_bytes,
            k_values=sum(kv_heads) * _first(own, "attention.key_length", head),
            v_values=0 if latent else sum(kv_heads) * _first(own, "attention.value_length", head),
            n_embd=n_embd,
            n_head=max(1, n_head),
            n_vocab=n_vocab,
            n_ctx_train=_first(own, "context_length", MOST_CTX),
            state_values=(kv_heads.count(0) or n_layer) * _state(own, n_embd, n_head),
        )


def _state(own: Mapping[str, str], n_embd: int, n_head: int) -> int:
    """Elements of one recurrent layer: llama-hparams.cpp, n_embd_r and n_embd_s. 0 for a transformer."""
    wkv = _first(own, "wkv.head_size", 0)
    if wkv:
        return n_embd * (_first(own, "token_shift_count", 2) + wkv)
    conv = _first(own, "shortconv.l_cache", 0)
    if conv:
        return n_embd * (conv - 1)
    conv = max(0, _first(own, "ssm.conv_kernel", 0) - 1)
    kda = _first(own, "kda.head_dim", 0)
    if kda:
        return n_head * kda * (3 * (conv or 3) + kda)
    inner, state = _first(own, "ssm.inner_size", 0), _first(own, "ssm.state_size", 0)
    return conv * (inner + 2 * _first(own, "ssm.group_count", 0) * state) + state * inner


def _each_layer(own: Mapping[str, str], key: str, n_layer: int, default: int) -> list[int]:
    values = _ints(own.get(key, "")) or [default]
    return values if len(values) == n_layer else [values[0]] * n_layer


def _first(own: Mapping[str, str], key: str, default: int) -> int:
    """A number; of a list, one a layer, the largest."""
    return max(_ints(own.get(key, "")), default=default)


def _ints(text: str) -> list[int]:
    """Whole numbers of a metadata value: "8" or "[8, 8, 4]"."""
    return [int(part) for part in text.strip("[] ").replace(",", " ").split() if part.isdigit()]
