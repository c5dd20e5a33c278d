"""Damaged model files are refused with field, value and range before llama.cpp sees them; sound files pass."""

import struct

import pytest

from llamabatch.errors import ModelFileError
from llamabatch.gguf.validation import check_model

FORMS = {"u16": (2, "<H"), "u32": (4, "<I"), "i32": (5, "<i"), "f32": (6, "<f"), "bool": (7, "<?"), "u64": (10, "<Q")}


def raw(text):
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(item):
    """Packs a value by its Python type: int as uint32, (form, number) in this form, lists as int32, float32, texts."""
    if isinstance(item, (str, bytes)):
        return struct.pack("<I", 8) + raw(item)
    if isinstance(item, list):
        if item and isinstance(item[0], int):
            return struct.pack(f"<IIQ{len(item)}i", 9, 5, len(item), *item)
        if item and isinstance(item[0], float):
            return struct.pack(f"<IIQ{len(item)}f", 9, 6, len(item), *item)
        return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(raw, item))
    form, number = item if isinstance(item, tuple) else ("f32" if isinstance(item, float) else "u32", item)
    kind, layout = FORMS[form]
    return struct.pack("<I", kind) + struct.pack(layout, number)


VALUES = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 16,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "c", "d", "e"],
    "tokenizer.ggml.token_type": [1, 1, 1, 1, 3],
    "tokenizer.ggml.eos_token_id": 4,
}
TENSORS = {"token_embd.weight": (8, 5), "blk.0.attn_q.weight": (8, 8), "blk.1.attn_q.weight": (8, 8)}


def write(path, changes=None, tensors=None, move=0, cut=0, kind=0):
    """Writes a file of F32 tensors.

    `move` is added to the last tensor's offset. `kind` is the second one's type. `cut` is the number of missing bytes.
    """
    values = {key: item for key, item in (VALUES | (changes or {})).items() if item is not None}
    shapes = TENSORS if tensors is None else tensors
    infos, data = b"", b""
    for n, (name, dims) in enumerate(shapes.items()):
        offset = len(data) + (move if n == len(shapes) - 1 else 0)
        infos += raw(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind if n == 1 else 0, offset)
        size = 4
        for dim in dims:
            size *= dim
        data += bytes(-(-size // 32) * 32)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(shapes), len(values))
    head += b"".join(raw(key) + value(item) for key, item in values.items()) + infos
    whole = head + bytes(-len(head) % 32) + data
    path.write_bytes(whole[: len(whole) - cut])
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"llama.attention.head_count_kv": [2, 4]},
        {"llama.attention.head_count": [4, 0], "llama.attention.head_count_kv": [2, 0]},
        {"tokenizer.ggml.tokens": ["", "b", "", "d", "e"]},
        {"tokenizer.ggml.token_type": [1] * 9},
        {"tokenizer.ggml.padding_token_id": 99, "tokenizer.ggml.bos_token_id": 2**32 - 1},
        {"tokenizer.ggml.tokens": None, "tokenizer.ggml.model": "none", "llama.vocab_size": 5},
        {"llama.rope.scaling.type": "yarn"},
        {"llama.pooling_type": 2**32 - 1},  # llama_model_save_to_file writes this value
        {"llama.expert_count": 8, "llama.expert_used_count": [2, 4], "llama.expert_group_count": 2,
         "llama.expert_group_used_count": 1},
        {"llama.block_count": 3, "llama.nextn_predict_layers": 1},
    ],
)  # fmt: skip
def test_sound_files_pass(changes, tmp_path):
    check_model(write(tmp_path / "m.gguf", changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": None}, "general.architecture is None"),
        ({"general.architecture": 7}, "general.architecture is 7"),
        ({"llama.block_count": 0}, "llama.block_count is 0; allowed are 1 to 512"),
        ({"llama.block_count": 100_000}, "llama.block_count is 100000; allowed are 1 to 512"),
        ({"llama.block_count": 3}, "llama.block_count is 3; its tensors are those of 2 layers"),
        ({"llama.block_count": 1}, "llama.block_count is 1; its tensors are those of 2 layers"),
        ({"llama.block_count": "two"}, "llama.block_count is 'two'; it must be a whole number"),
        ({"llama.nextn_predict_layers": 3}, "nextn_predict_layers is 3; block_count is 2"),
        ({"llama.context_length": 0}, "context_length is 0; allowed are 1 to"),
        ({"llama.embedding_length": 0}, "embedding_length is 0"),
        ({"llama.vocab_size": 2**31}, "vocab_size is 2147483648; allowed are 1 to"),
        ({"llama.attention.head_count": 0}, "head_count is 0; a model with attention has at least 1"),
        ({"llama.attention.head_count": 3}, "must divide"),
        ({"llama.attention.head_count_kv": 3}, "head_count_kv is 3; it must divide head_count, 4"),
        ({"llama.attention.head_count_kv": [2, 3]}, "head_count_kv is 3; it must divide head_count, 4"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "epsilon is -1.0; it must be a number of at least 0"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
        ({"llama.rope.dimension_count": 7}, "rope.dimension_count is 7; it must be even"),
        ({"llama.pooling_type": 9}, "pooling_type is 9; allowed are 0 to 4"),
        ({"llama.rope.scaling.type": "bent"}, "rope.scaling.type is 'bent'; allowed are none, linear, yarn, longrope"),
        ({"llama.expert_count": 2000}, "expert_count is 2000; allowed are 0 to 1024"),
        ({"llama.expert_count": 4}, "expert_used_count is 0; allowed are 1 to expert_count, 4"),
        ({"llama.expert_used_count": 2}, "expert_used_count is 2; allowed are 0 to expert_count, 0"),
        ({"llama.expert_group_count": 2}, "expert_group_count is 2; it must divide expert_count, 0"),
        (
            {"llama.expert_count": 8, "llama.expert_used_count": 2, "llama.expert_group_count": 2},
            "expert_group_used_count is 0; allowed are 1 to 1",
        ),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is None; it must be an array of 1 to"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens is"),
        ({"tokenizer.ggml.tokens": []}, "'an array of 0'"),
        (
            {"tokenizer.ggml.tokens": ["a", "b", "a", "d", "a"]},
            "the token 'a' 3 times, as 0, 2, 4; each must come once",
        ),
        ({"tokenizer.ggml.tokens": ["a", "b", "c", "d", "b\0c"]}, "the token 'b' 2 times, as 1, 4"),
        ({"tokenizer.ggml.tokens": ["", "[EMPTY_0]", "c", "d", "e"]}, "2 times, as 0, 1"),
        (
            {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.eos_token_id": 1},
            r"token_embd.weight is \(8, 5\); it must have 2 rows",
        ),
        ({"tokenizer.ggml.token_type": [1, 1]}, "'an array of 2'; it must be an array of 5 of int32"),
        ({"tokenizer.ggml.token_type": [1.0] * 5}, "must be an array of 5 of int32"),
        ({"tokenizer.ggml.token_type": 1}, "'no array'"),
        ({"tokenizer.ggml.scores": [1.0]}, "must be an array of 5 of float32 or int32"),
        ({"tokenizer.ggml.eos_token_id": 5}, "eos_token_id is 5; allowed are 0 to 4"),
        ({"tokenizer.ggml.bos_token_id": "a"}, "bos_token_id is 'a'"),
        ({"split.count": ("u16", 3)}, "split.count is 3; by its name the model has 1 file"),
    ],
    ids=str,
)
def test_a_bad_value_is_named_with_what_is_allowed(changes, words, tmp_path):
    with pytest.raises(ModelFileError, match=words) as caught:
        check_model(write(tmp_path / "m.gguf", changes))
    assert "m.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensors": TENSORS | {"blk.0.x.weight": (0, 3)}}, r"shape of blk.0.x.weight is \(0, 3\); each dimension"),
        ({"kind": 26}, "type of blk.0.attn_q.weight is 'I32'; no weights have this type"),
        ({"move": 1}, "offset of blk.1.attn_q.weight is 417; it must be 416"),
        ({"move": 32}, "offset of blk.1.attn_q.weight is 448; it must be 416"),
        ({"cut": 1}, "truncated: blk.1.attn_q.weight ends at byte"),
    ],
)
def test_tensors_follow_one_another_up_to_the_end(options, words, tmp_path):
    with pytest.raises(ModelFileError, match=words):
        check_model(write(tmp_path / "m.gguf", **options))


def parts(folder, first=None, second=None, name="blk.1.attn_q.weight"):
    split = {"split.no": ("u16", 0), "split.count": ("u16", 2), "split.tensors.count": ("i32", 3)}
    tensors = {key: TENSORS[key] for key in ("token_embd.weight", "blk.0.attn_q.weight")}
    write(folder / "m-00001-of-00002.gguf", split | (first or {}), tensors)
    write(folder / "m-00002-of-00002.gguf", split | {"split.no": ("u16", 1)} | (second or {}), {name: (8, 8)})
    return folder / "m-00001-of-00002.gguf"


def test_parts_agree_with_each_other(tmp_path):
    assert len(check_model(parts(tmp_path))) == 2
    for options, words in (
        ({"first": {"split.count": ("u16", 5)}}, "split.count is 5; by its name the model has 2 files"),
        ({"second": {"split.no": ("u16", 0)}}, "00002-of-00002.gguf: split.no is 0; it must be 1"),
        ({"second": {"split.no": 1}}, "it must be 1, as uint16"),
        ({"second": {"split.no": None}}, "split.no is None"),
        ({"first": {"split.tensors.count": ("i32", 9)}}, "split.tensors.count is 9; its files have 3 tensors"),
        ({"name": "blk.0.attn_q.weight"}, "blk.0.attn_q.weight occurs in several of its files"),
    ):
        with pytest.raises(ModelFileError, match=words):
            check_model(parts(tmp_path, **options))
