"""The reader of GGUF headers: what it returns, that it agrees with gguf-py, and that its bounds hold."""

import contextlib
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamabatch.errors import ModelFileError
from llamabatch.gguf.header import _read_header, check_start, read_header, read_parts, read_tensors
from llamabatch.gguf.reader import TENSOR_TYPES, Items
from llamabatch.utils import paths


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key, kind, body):
    return text(key) + struct.pack("<I", kind) + body


def tensor(name, dims, kind=0, offset=0):
    return text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


def file(*parts, tensors=0, pairs=None, version=3, magic=b"GGUF"):
    n = len(parts) - tensors if pairs is None else pairs
    return struct.pack("<4sIQQ", magic, version, tensors, n) + b"".join(parts)


def test_it_agrees_with_gguf_py_on_the_bundled_model():
    path = paths.bundled_model()
    header, peer = read_header(path), gguf.GGUFReader(path)
    assert [(t.name, t.dims, t.type, t.n_bytes, header.data_start + t.offset) for t in header.tensors] == [
        (t.name, tuple(map(int, t.shape)), int(t.tensor_type), int(t.n_bytes), int(t.data_offset)) for t in peer.tensors
    ]
    assert [t.n_elements for t in header.tensors] == [int(t.n_elements) for t in peer.tensors]
    fields = {name: field for name, field in peer.fields.items() if not name.startswith("GGUF.")}
    assert list(header.metadata) == list(fields)
    for name, field in fields.items():
        mine, theirs = header.metadata[name], field.contents()
        if isinstance(mine, Items):
            assert mine.count == len(theirs)
        else:
            assert (list(mine) if isinstance(mine, tuple) else mine) == theirs
    assert header.n_tokens == 2048
    assert header.own("block_count") == header.metadata["llama.block_count"]
    assert header.file_bytes == path.stat().st_size == header.data_start + sum(t.n_bytes for t in header.tensors)
    assert header.texts()["tokenizer.ggml.add_eos_token"] == "false"


def test_the_sizes_of_types_are_those_of_gguf_py():
    theirs = {int(kind): (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    del theirs[9]  # Q8_1: gguf-py counts 8 bytes for its two factors, ggml's struct has 4
    assert {n: TENSOR_TYPES[n] for n in theirs} == theirs


def test_a_large_vocabulary_is_passed_over_and_read_once(tmp_path):
    words = b"".join(text(f"word{n}") for n in range(152_000))
    path = tmp_path / "m.gguf"
    path.write_bytes(
        file(
            pair("general.architecture", 8, text("llama")),
            pair("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 152_000) + words),
            pair("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, 152_000) + bytes(4 * 152_000)),
            pair("list", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
        )
    )
    tracemalloc.start()
    try:
        header = read_header(path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert header.n_tokens == 152_000
    assert header.metadata["list"] == (1, -2, 3)
    assert most < 3 * path.stat().st_size, "no object for each token"
    assert read_header(path) is header
    assert header.texts() == {"general.architecture": "llama", "list": "1,-2,3"}
    path.write_bytes(path.read_bytes() + b"\0")
    assert read_header(path) is not header


def test_the_parts_of_a_split_model_come_together(tmp_path):
    for n, name in enumerate(("a", "b"), 1):
        (tmp_path / f"m-0000{n}-of-00002.gguf").write_bytes(file(tensor(name, (4, 2)), tensors=1) + bytes(96))
    first = tmp_path / "m-00001-of-00002.gguf"
    assert [h.path.name for h in read_parts(first)] == [first.name, "m-00002-of-00002.gguf"]
    assert [(t.name, t.n_bytes) for t in read_tensors(first)] == [("a", 32), ("b", 32)]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a GGUF file: it is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "pointer of Git LFS"),
        (b"\n<!DOCTYPE html><html>", "page of a web site"),
        (b"GGUF", "truncated: it has 4 bytes"),
        (file(magic=b"FUGG"), "starts with 'FUGG', not 'GGUF'"),
        (file(version=1), "is GGUF version 1; allowed are 2 and 3"),
        (file(version=3 << 24), "big-endian order"),
        (file(pairs=2**40), "claims 0 tensors and 1099511627776 values; allowed are"),
        (file(tensors=2**63, pairs=0), "claims 9223372036854775808 tensors"),
        (file(pairs=1), "key of value 0.*beyond the end"),
        (file(pair("", 4, b"\0\0\0\0")), "key of value 0 is empty"),
        (file(text("k") + b"\0"), "'k' reaches beyond the end"),
        (file(pair("a", 4, b"\0\0\0\0"), pair("a", 4, b"\0\0\0\0")), "'a' comes twice"),
        (file(pair("a", 13, b"")), "unknown type 13"),
        (file(pair("a", 8, struct.pack("<Q", 2**63))), "'a' has 9223372036854775808 bytes; allowed are up to"),
        (file(pair("a", 9, struct.pack("<IQ", 9, 1))), "array of 1 items of type 9"),
        (file(pair("a", 9, struct.pack("<IQ", 8, 2**60))), "array of 1152921504606846976 items"),
        (file(pair("a", 9, struct.pack("<IQ", 8, 3) + text("x"))), "'a' reaches beyond the end"),
        (file(pair("a", 9, struct.pack("<IQQ", 8, 2, 2**64 - 8))), "'a' reaches beyond the end"),
        (file(pair("a", 9, struct.pack("<IQ", 12, 2**61))), "reaches beyond the end"),
        (file(pair("a", 9, struct.pack("<IQ", 0, 100))), "'a' reaches beyond the end"),
        (file() + bytes(5_000), "has 4992 bytes behind its header, which ends at byte 32; allowed are up to 4128"),
        (file(pair("general.alignment", 4, struct.pack("<I", 24))), "general.alignment is 24; allowed are powers"),
        (file(pair("general.alignment", 4, struct.pack("<I", 0))), "general.alignment is 0"),
        (file(pair("general.alignment", 10, struct.pack("<Q", 32))), "as uint32"),
        (file(tensor("t", (4,)), tensor("t", (4,)), tensors=2), "tensor 't' comes twice"),
        (file(tensor("t" * 64, (4,)), tensors=1), "name of tensor 0' has 64 bytes; allowed are up to 63"),
        (file(tensor("t", (1, 1, 1, 1, 1)), tensors=1), "'t' has 5 dimensions; allowed are up to 4"),
        (file(tensor("t", (4,), kind=4), tensors=1), "'t' has the unknown type 4"),
        (file(tensor("t", (4,), kind=2**31), tensors=1), "unknown type 2147483648"),
        (file(tensor("t", (33,), kind=8), tensors=1), "of type Q8_0 has rows of 33, no multiple of 32"),
        (file(tensor("t", (2**32, 2**32)), tensors=1), "more than 2"),
        (file(tensor("t", (0, 2**63)), tensors=1), "more than 2"),
        (file(tensor("t", (2**60, 4)), tensors=1), "more than 2"),
    ],
)
def test_the_damaged_field_is_named(data, words, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=words):
        read_header(path)


@pytest.mark.parametrize(("extra", "is_refused"), [(32 + 4096, False), (32 + 4097, True), (2**43, True)])
def test_bytes_behind_the_last_tensor_are_at_most_a_page(extra, is_refused, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(file(tensor("first", (64,)), tensor("last", (8,), offset=256), tensors=2))
    end = -(-path.stat().st_size // 32) * 32 + 288
    with path.open("r+b") as hole:
        hole.truncate(end + extra)
    with contextlib.nullcontext() if not is_refused else pytest.raises(ModelFileError) as refused:
        read_header(path)
    if is_refused:
        words = f"{path} has {extra} bytes behind the data of its last tensor, 'last', which ends at byte {end}"
        assert str(refused.value) == f"{words}; allowed are up to 4128"


def test_numbers_that_are_not_kept_are_part_of_a_bounded_header(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(file(pair("a", 9, struct.pack("<IQ", 12, 2**40))))
    with path.open("r+b") as hole:
        hole.truncate(path.stat().st_size + 2**43)
    with pytest.raises(ModelFileError, match="its header is larger than 536870912 bytes"):
        read_header(path)


@settings(max_examples=300)
@given(st.data())
def test_a_mutated_header_is_read_or_refused(tmp_path_factory, data):
    body = bytearray(paths.bundled_model().read_bytes()[:64_300])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 1500)) if data.draw(st.booleans()) else data.draw(st.integers(59_000, 64_200))
        junk = data.draw(st.binary(min_size=1, max_size=9))
        body[at : at + len(junk)] = junk
    path = tmp_path_factory.mktemp("mutated") / "m.gguf"
    path.write_bytes(bytes(body[: data.draw(st.integers(0, len(body)))]))
    for read in (check_start, read_header):
        with contextlib.suppress(ModelFileError):
            read(path)
    _read_header.cache_clear()


def test_gguf_pys_writer_is_read(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(64)
    writer.add_array("names", ["a", "bc"])
    writer.add_float64("d", 0.5)
    writer.add_bool("b", True)
    writer.add_tensor("x", np.zeros((3, 5), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(tmp_path / "m.gguf")
    names = header.metadata["names"]
    assert (names.type, names.count, names.end - names.start) == (8, 2, 8 + 1 + 8 + 2)
    assert (header.metadata["d"], header.texts()["b"], header.alignment) == (0.5, "true", 64)
    assert header.data_start % 64 == 0
    assert (header.tensors[0].dims, header.tensors[0].type_name, header.tensors[0].n_bytes) == ((5, 3), "F16", 30)
