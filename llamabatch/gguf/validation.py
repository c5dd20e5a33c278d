"""Checks a model file before llama.cpp reads it. Refuses files that would make llama.cpp abort or read too far.

llama.cpp reports most damage as an error. Other damage, such as a block_count of 0 or a repeated token, fails an
assertion. The checks follow gguf.cpp, llama-model-loader.cpp, llama-model.cpp (load_hparams) and llama-vocab.cpp. A bad
file that passes the checks crashes only the child process of a trial load (llama/trial_load.py).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from llamabatch.errors import ModelFileError
from llamabatch.gguf.header import Header, read_parts
from llamabatch.gguf.overrides import KvOverrides, overridden
from llamabatch.gguf.reader import ARRAY, FLOAT32, INT32, TEXT, TOKENS, TYPE_NAMES, Items, TensorInfo, read_texts
from llamabatch.utils.checks import counted, show
from llamabatch.utils.paths import one_line

MAX_LAYERS, MAX_EXPERTS, MAX_TOKENS = 512, 1024, 2**24  # the first two are limits of llama.cpp
_UINT16 = 2
_MAX_SIZE = 2**24
# ggml cannot multiply by weights of these types: Q8_1, Q8_K, integers, F64. But a table of expert numbers may be I32.
_NO_WEIGHTS = (9, 15, 24, 25, 26, 27, 28)
_TABLES = ("tid2eid",)
_MAX_CTX = 2**31 - 1
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_LAYER = re.compile(r"blk\.(\d+)\.")
_NO_VOCABULARY = ("none", "no_vocab")
_NO_ID = 2**32 - 1  # some files write this id for a special token that they do not have
_NO_POOLING = 2**32 - 1  # LLAMA_POOLING_TYPE_UNSPECIFIED, -1, as llama_model_save_to_file writes it
# These are the lowest and highest values of the architecture's keys. For a list, they apply to each item.
_RANGES = {
    "block_count": (1, MAX_LAYERS),
    "context_length": (1, _MAX_CTX),
    "embedding_length": (1, _MAX_SIZE),
    "feed_forward_length": (0, _MAX_SIZE),
    "vocab_size": (1, MAX_TOKENS),
    "attention.head_count": (0, 2**16),
    "attention.head_count_kv": (0, 2**16),
    "attention.key_length": (0, 2**16),
    "attention.value_length": (0, 2**16),
    "rope.dimension_count": (0, 2**16),
    "expert_count": (0, MAX_EXPERTS),
    "expert_used_count": (0, MAX_EXPERTS),
    "pooling_type": (0, 4),
}
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.group_norm_epsilon")
# The ids of these special tokens must be in range. For all other special tokens, llama.cpp ignores ids out of range.
_ENDS = ("bos", "eos", "eot")


def check_model(path: Path, overrides: KvOverrides = ()) -> tuple[Header, ...]:
    """Checks all parts of a model. Returns their headers, the first with the overrides applied.

    Raises:
        ConfigError: an override has another type than the file's value.
        ModelFileError: the file is refused; the message names the file, the field, its value and the allowed values.
        OSError: the file cannot be read.
    """
    first, *others = read_parts(path)
    headers = (overridden(first, overrides), *others)
    for header in headers:
        _check_layout(header)
    _check_split(headers)
    tensors = {tensor.name: tensor for header in headers for tensor in header.tensors}
    _check_shape(headers[0], tensors)
    _check_experts(headers[0])
    _check_vocabulary(headers[0], tensors.get("token_embd.weight"))
    return headers


def _refuse(header: Header, field: str, value: object, allowed: str) -> ModelFileError:
    return ModelFileError(f"{one_line(header.path)}: {field} is {show(value)}; {allowed}")


def _check_layout(header: Header) -> None:
    """Checks types and shapes of tensors, and that their data has no gaps (gguf.cpp) and lies within the file."""
    expected, room = 0, header.file_bytes - header.data_start
    for tensor in header.tensors:
        if tensor.type in _NO_WEIGHTS and len(tensor.dims) > 1 and not any(each in tensor.name for each in _TABLES):
            raise _refuse(header, f"the type of {tensor.name}", tensor.type_name, "no weights have this type")
        if 0 in tensor.dims:
            raise _refuse(header, f"the shape of {tensor.name}", tensor.dims, "each dimension must be at least 1")
        if tensor.offset != expected:
            raise _refuse(header, f"the offset of {tensor.name}", tensor.offset, f"it must be {expected}")
        if tensor.offset + tensor.n_bytes > room:
            raise ModelFileError(
                f"{one_line(header.path)} is truncated: {tensor.name} ends at byte "
                f"{header.data_start + tensor.offset + tensor.n_bytes} of {header.file_bytes}"
            )
        expected += -(-tensor.n_bytes // header.alignment) * header.alignment


def _check_split(headers: tuple[Header, ...]) -> None:
    """Checks part numbers and counts in a split model. llama.cpp finds the files by the count in the first part."""
    first, names = headers[0], Counter(tensor.name for header in headers for tensor in header.tensors)
    count = first.metadata.get("split.count", 1)
    if isinstance(count, int) and count > 1 and count != len(headers):
        raise _refuse(first, "split.count", count, f"by its name the model has {counted(len(headers), 'file')}")
    for number, header in enumerate(headers if len(headers) > 1 else ()):
        part = header.metadata.get("split.no")
        if part != number or header.types["split.no"] != _UINT16:
            raise _refuse(header, "split.no", part, f"it must be {number}, as uint16")
    twice = [name for name, n in names.items() if n > 1]
    if twice:
        raise ModelFileError(f"{first.path}: the tensor {twice[0]} occurs in several of its files")
    total = first.metadata.get("split.tensors.count")
    if len(headers) > 1 and total != len(names):
        raise _refuse(first, "split.tensors.count", total, f"its files have {len(names)} tensors")


def _numbers(header: Header, key: str) -> list[int]:
    """Returns the whole numbers of an architecture's key: one number, one per layer, or [] if the key is missing."""
    value = header.own(key)
    if value is None:
        return []
    items = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        raise _refuse(header, f"{header.architecture}.{key}", value, "it must be a whole number, or one for each layer")
    return [int(item) for item in items if not isinstance(item, str | Items)]


def _check_shape(header: Header, tensors: dict[str, TensorInfo]) -> None:
    if not header.architecture or header.types["general.architecture"] != TEXT:
        name = header.metadata.get("general.architecture")
        raise _refuse(header, "general.architecture", name, "it must be the name of one that llama.cpp knows")
    for key, (low, high) in _RANGES.items():
        for number in _numbers(header, key):
            if not low <= number <= high and (key, number) != ("pooling_type", _NO_POOLING):
                raise _refuse(header, f"{header.architecture}.{key}", number, f"allowed are {low} to {high}")
    for n_dims in _numbers(header, "rope.dimension_count"):
        if n_dims % 2:
            raise _refuse(header, f"{header.architecture}.rope.dimension_count", n_dims, "it must be even")
    for key in _EPSILONS:
        value = header.own(key)
        if isinstance(value, float) and not 0 <= value < math.inf:
            raise _refuse(header, f"{header.architecture}.{key}", value, "it must be a number of at least 0")
    scaling = header.own("rope.scaling.type")
    if scaling is not None and scaling not in ROPE_SCALINGS:
        allowed = f"allowed are {', '.join(ROPE_SCALINGS)}"
        raise _refuse(header, f"{header.architecture}.rope.scaling.type", scaling, allowed)
    _check_layers(header, tensors)
    _check_heads(header, tensors)


def _check_layers(header: Header, tensors: Iterable[str]) -> None:
    layers = {int(match[1]) for match in map(_LAYER.match, tensors) if match}
    for count in _numbers(header, "block_count"):
        extra = max(_numbers(header, "nextn_predict_layers"), default=0)
        if extra > count:
            raise _refuse(header, f"{header.architecture}.nextn_predict_layers", extra, f"block_count is {count}")
        if layers and not count - extra <= max(layers) + 1 <= count:
            n = max(layers) + 1
            allowed = f"its tensors are those of {counted(n, 'layer')}"
            raise _refuse(header, f"{header.architecture}.block_count", count, allowed)


def _check_heads(header: Header, tensors: dict[str, TensorInfo]) -> None:
    """Checks that the number of KV heads divides the number of heads, and that the number of heads divides the width if
    the file gives no size of a head. llama.cpp's attention asserts both.
    """
    name, n_layer = f"{header.architecture}.attention", max(_numbers(header, "block_count"), default=1)
    heads, kv_heads = _numbers(header, "attention.head_count"), _numbers(header, "attention.head_count_kv")
    attends = any(f"blk.{n}.attn_{part}.weight" in tensors for n in range(n_layer) for part in ("q", "qkv"))
    if heads == [0] and attends:
        raise _refuse(header, f"{name}.head_count", 0, "a model with attention has at least 1")
    each = heads * n_layer if len(heads) == 1 else heads
    for n_head, n_kv in zip(each, kv_heads * n_layer if len(kv_heads) == 1 else kv_heads, strict=False):
        if n_head and n_kv and n_head % n_kv:
            raise _refuse(header, f"{name}.head_count_kv", n_kv, f"it must divide head_count, {n_head}")
    [width] = _numbers(header, "embedding_length")[:1] or [0]
    if attends and len(heads) == 1 and width % heads[0] and header.own("attention.key_length") is None:
        raise _refuse(header, f"{name}.head_count", heads[0], f"it must divide embedding_length, {width}")


def _check_experts(header: Header) -> None:
    experts, used = _numbers(header, "expert_count"), _numbers(header, "expert_used_count")
    n_experts, most = max(experts, default=0), max(used, default=0)
    if most > n_experts or (n_experts and not most and not header.architecture.startswith("hunyuan")):
        allowed = f"allowed are {min(1, n_experts)} to expert_count, {n_experts}"
        raise _refuse(header, f"{header.architecture}.expert_used_count", most, allowed)
    groups = max(_numbers(header, "expert_group_count"), default=0)
    if groups and (groups >= n_experts or n_experts % groups):
        allowed = f"it must divide expert_count, {n_experts}, and be less"
        raise _refuse(header, f"{header.architecture}.expert_group_count", groups, allowed)
    chosen = max(_numbers(header, "expert_group_used_count"), default=0)
    if groups > 1 and not 0 < chosen < groups:
        raise _refuse(
            header, f"{header.architecture}.expert_group_used_count", chosen, f"allowed are 1 to {groups - 1}"
        )


def _check_vocabulary(header: Header, embeddings: TensorInfo | None) -> None:
    if header.metadata.get("tokenizer.ggml.model") in _NO_VOCABULARY:
        return
    tokens = header.metadata.get(TOKENS)
    if not isinstance(tokens, Items) or tokens.type != TEXT or not 1 <= tokens.count <= MAX_TOKENS:
        found = f"an array of {tokens.count}" if isinstance(tokens, Items) else tokens
        if header.texts().get("general.architecture") == "clip":
            raise ModelFileError(
                f"{one_line(header.path)} is an mmproj file, an encoder; give the language model, and this as mmproj"
            )
        raise _refuse(header, TOKENS, found, f"it must be an array of 1 to {MAX_TOKENS} texts")
    _check_along(header, "tokenizer.ggml.scores", (FLOAT32, INT32), tokens.count)
    _check_along(header, "tokenizer.ggml.token_type", (INT32,), tokens.count)
    for end in _ENDS:
        key = f"tokenizer.ggml.{end}_token_id"
        value = header.metadata.get(key, 0)
        if not isinstance(value, int) or not (0 <= value < tokens.count or value == _NO_ID):
            raise _refuse(header, key, value, f"allowed are 0 to {tokens.count - 1}")
    if embeddings is not None and len(embeddings.dims) > 1 and embeddings.dims[1] != tokens.count:
        allowed = f"it must have {counted(tokens.count, 'row')}, one for each token"
        raise _refuse(header, "the shape of token_embd.weight", embeddings.dims, allowed)
    _check_distinct(header, tokens)


def _check_along(header: Header, key: str, types: tuple[int, ...], n_tokens: int) -> None:
    """Checks an array with one item for each token. llama.cpp ignores additional items."""
    value = header.metadata.get(key)
    if value is None:
        return
    names = " or ".join(TYPE_NAMES[kind] for kind in types)
    count = value.count if isinstance(value, Items) else len(value) if isinstance(value, tuple) else -1
    if header.types[key] != ARRAY or header.item_types[key] not in types or count < n_tokens:
        found = "no array" if count < 0 else f"an array of {count}"
        raise _refuse(header, key, found, f"it must be an array of {n_tokens} of {names}, one for each token")


def _check_distinct(header: Header, tokens: Items) -> None:
    """Checks that no token occurs twice, because llama.cpp asserts that there are as many different texts as ids."""
    texts = read_texts(header.path, tokens)
    if b"\0" in b"".join(texts):  # llama.cpp reads a text only up to a NUL
        texts = [text.partition(b"\0")[0] for text in texts]
    if not all(texts):  # llama.cpp replaces an empty text by [EMPTY_n]
        texts = [text or b"[EMPTY_%d]" % n for n, text in enumerate(texts)]
    if len(set(texts)) < len(texts):
        [(text, count)] = Counter(texts).most_common(1)
        ids = [n for n, each in enumerate(texts) if each == text]
        raise ModelFileError(
            f"{one_line(header.path)}: {TOKENS} has the token {show(text.decode('utf-8', 'replace'))} {count} times, "
            f"as {', '.join(map(str, ids[:4]))}; each must come once"
        )
