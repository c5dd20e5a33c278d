"""Damaged or hostile model files: each is refused with an error that names it, or runs, and the process lives."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from llamabatch import LLM, LlamaBatchError, SamplingParams
from llamabatch.gguf.reader import START, HeaderReader
from llamabatch.utils import paths
from tests.model.architectures import write

HOLDS = "the process lives, and the file is refused with one of our errors or answers a request"
TOTAL = 500
QUICK = 25

KINDS = ("llama", "gemma2", "qwen2moe", "deepseek2", "mamba", "jamba", "granitehybrid", "lfm2", "rwkv7", "bert", "t5")
EXTREMES = (0, 1, 2, 3, 7, 63, 255, 256, 513, 1025, 2047, 2049, 65_535, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
LONG_EXTREMES = (*EXTREMES, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
WORDS = (b"", b"llama", b"bert", b"gpt2", b"none", b"t5", b"rwkv", b"yarn", b"qwen2", b"\xff\xfe", b"a" * 300)
TYPE_OF_TEXT, TYPE_OF_ARRAY = 8, 9
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
MOST_TOKENS = 4


@dataclass
class Pieces:
    """The parts of a GGUF file: the bytes of each metadata value and each tensor's description, and the tensor data."""

    values: list[bytes]
    tensors: list[bytes]
    data: bytes
    claimed: tuple[int, int] | None = None  # counts of tensors and values in the header; None: the true counts

    @classmethod
    def of(cls, path: Path) -> Pieces:
        whole = path.read_bytes()
        with path.open("rb") as file:
            walk = HeaderReader(path, file)
            _, n_tensors, n_values = walk.start()
            marks = [walk.at]
            for _ in range(n_values):
                walk.read_values(1)
                marks.append(walk.at)
            tensors = [walk.at]
            for _ in range(n_tensors):
                walk.tensors(1)
                tensors.append(walk.at)
        return cls(_cut(whole, marks), _cut(whole, tensors), whole[-(-walk.at // 32) * 32 :])

    def join(self) -> bytes:
        n_tensors, n_values = self.claimed or (len(self.tensors), len(self.values))
        head = START.pack(b"GGUF", 3, n_tensors, n_values) + b"".join(self.values + self.tensors)
        return head + bytes(-len(head) % 32) + self.data


def _cut(whole: bytes, marks: list[int]) -> list[bytes]:
    return [whole[a:b] for a, b in itertools.pairwise(marks)]


def case(number: int, folder: Path) -> None:
    """Mutates a model in a way that the number draws, and opens it. The cache of verdicts on files is in the folder."""
    rng = random.Random(number)
    source = paths.bundled_model() if rng.random() < 0.3 else tiny(rng.choice(KINDS), folder)
    path = folder / f"mutated-{number}.gguf"
    path.write_bytes(mutated(source, rng))
    try:
        with mock.patch.dict(os.environ, {"LLAMABATCH_CACHE": str(folder / "cache")}):
            _open(path)
    finally:
        path.unlink()


def _open(path: Path) -> None:
    try:
        llm = LLM(path, n_ctx=64, n_slots=2, n_threads=1, n_threads_batch=1, n_gpu_layers=0)
    except LlamaBatchError:
        return
    with llm:
        answers = [_answer(llm, prompt) for prompt in ([1, 2, 3], "Once upon a time\n\tÄ漢🙂\x00")]
        assert any(answers), "it was loaded, and does nothing"


def _answer(llm: LLM, prompt: list[int] | str) -> bool:
    """Asks the model for a text and a vector. Returns True if it gives one. An error is allowed, because senseless
    numbers may give NaN logits."""
    answered = False
    with contextlib.suppress(LlamaBatchError):  # for an encoder, or more than n_ctx tokens
        params = SamplingParams(max_tokens=MOST_TOKENS, temperature=0, ignore_eos=True)
        [output] = llm.generate([prompt], params, errors="return")
        assert output.error or len(output.token_ids) == MOST_TOKENS, output
        answered = True
    with contextlib.suppress(LlamaBatchError):
        answered |= len(llm.embed([prompt])) == 1
    return answered


def tiny(kind: str, folder: Path) -> Path:
    path = folder / f"{kind}.gguf"
    return path if path.exists() else write(kind, path)


def mutated(source: Path, rng: random.Random) -> bytes:
    pieces = Pieces.of(source)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice(STRUCTURAL)(pieces, rng)
    whole = pieces.join()
    return rng.choice(RAW)(whole, len(whole) - len(pieces.data), rng) if rng.random() < 0.25 else whole


def _split_value(value: bytes) -> tuple[bytes, int, bytes]:
    """Splits a value into its key with the key's length, its type, and the rest."""
    (length,) = struct.unpack_from("<Q", value)
    (kind,) = struct.unpack_from("<I", value, 8 + length)
    return value[: 8 + length], kind, value[12 + length :]


def _of_type(pieces: Pieces, rng: random.Random, wanted: Callable[[int], bool]) -> int:
    fitting = [n for n, value in enumerate(pieces.values) if wanted(_split_value(value)[1])]
    return rng.choice(fitting)


def change_number(pieces: Pieces, rng: random.Random) -> None:
    n = _of_type(pieces, rng, lambda kind: kind in WIDTHS)
    key, kind, _ = _split_value(pieces.values[n])
    value = rng.choice(LONG_EXTREMES).to_bytes(8, "little")[: WIDTHS[kind]]
    pieces.values[n] = key + struct.pack("<I", kind) + value


def change_text(pieces: Pieces, rng: random.Random) -> None:
    n = _of_type(pieces, rng, lambda kind: kind == TYPE_OF_TEXT)
    key, kind, _ = _split_value(pieces.values[n])
    word = rng.choice(WORDS)
    pieces.values[n] = key + struct.pack("<IQ", kind, len(word)) + word


def change_type(pieces: Pieces, rng: random.Random) -> None:
    n = rng.randrange(len(pieces.values))
    key, _, rest = _split_value(pieces.values[n])
    pieces.values[n] = key + struct.pack("<I", rng.choice((*range(14), 255, 2**31))) + rest


def retype_number(pieces: Pieces, rng: random.Random) -> None:
    """Gives a number another type, and bytes that fit this type."""
    n = _of_type(pieces, rng, lambda kind: kind in WIDTHS)
    key, _, rest = _split_value(pieces.values[n])
    kind = rng.choice((*WIDTHS, TYPE_OF_TEXT, TYPE_OF_ARRAY))
    if kind in WIDTHS:
        body = (rest + bytes(8))[: WIDTHS[kind]]
    elif kind == TYPE_OF_TEXT:
        body = struct.pack("<Q", 2) + b"12"
    else:
        count = rng.choice((0, 1, 2, 4, 600))
        body = struct.pack("<IQ", 4, count) + (rest + bytes(4))[:4] * count
    pieces.values[n] = key + struct.pack("<I", kind) + body


def change_array(pieces: Pieces, rng: random.Random) -> None:
    """Changes an array's length, the type of its items, or some of its bytes."""
    n = _of_type(pieces, rng, lambda kind: kind == TYPE_OF_ARRAY)
    key, kind, rest = _split_value(pieces.values[n])
    item, count = struct.unpack_from("<IQ", rest)
    body = bytearray(rest[12:])
    what = rng.randrange(4)
    if what == 0:
        count = rng.choice((count - 1, count + 1, *LONG_EXTREMES)) % 2**64
    elif what == 1:
        item = rng.choice((*range(14), 99))
    elif what == 2 and item in WIDTHS:  # another length, with bytes that fit it
        count = max(0, count + rng.choice((-count, -1, 1, 1000)))
        body = (body + body + bytes(8000))[: count * WIDTHS[item]]
    elif body:
        for _ in range(rng.choice((1, 20))):
            body[rng.randrange(len(body))] = rng.randrange(256)
    pieces.values[n] = key + struct.pack("<IIQ", kind, item, count) + bytes(body)


def change_tokens(pieces: Pieces, rng: random.Random) -> None:
    """Changes tokens: some come twice, are empty, longer, not UTF-8, or missing."""
    [n] = [n for n, value in enumerate(pieces.values) if _split_value(value)[0].endswith(b"tokenizer.ggml.tokens")]
    key, _, rest = _split_value(pieces.values[n])
    if len(rest) < 12:  # the array was changed before
        return
    (count,) = struct.unpack_from("<Q", rest, 4)
    texts, at = [], 12
    for _ in range(count):
        if at + 8 > len(rest):
            break
        (length,) = struct.unpack_from("<Q", rest, at)
        texts.append(rest[at + 8 : at + 8 + length])
        at += 8 + length
    for _ in range(rng.choice((1, 1, 30)) if texts else 0):
        token = rng.randrange(len(texts))
        texts[token] = rng.choice(
            (texts[token - 1], b"", b"\xff\xc0", b"x" * 5000, texts[token] + b"\0", b"<0x41>", b"<")
        )
    del texts[: rng.choice((0, 0, 0, 1, len(texts)))]
    body = b"".join(struct.pack("<Q", len(text)) + text for text in texts)
    pieces.values[n] = key + struct.pack("<IIQ", TYPE_OF_ARRAY, TYPE_OF_TEXT, len(texts)) + body


def drop_twice_or_swap(pieces: Pieces, rng: random.Random) -> None:
    """Drops, repeats or swaps entries of the values or of the tensors."""
    those = rng.choice((pieces.values, pieces.tensors))
    a, b = rng.randrange(len(those)), rng.randrange(len(those))
    what = rng.randrange(3)
    if what == 0:
        del those[a]
    elif what == 1:
        those.insert(b, those[a])
    else:
        those[a], those[b] = those[b], those[a]


def swap_bodies(pieces: Pieces, rng: random.Random) -> None:
    """Swaps the contents of two values. The keys stay."""
    a, b = rng.randrange(len(pieces.values)), rng.randrange(len(pieces.values))
    (key_a, kind_a, rest_a), (key_b, kind_b, rest_b) = map(_split_value, (pieces.values[a], pieces.values[b]))
    pieces.values[a] = key_a + struct.pack("<I", kind_b) + rest_b
    pieces.values[b] = key_b + struct.pack("<I", kind_a) + rest_a


def change_tensor(pieces: Pieces, rng: random.Random) -> None:
    """Changes a tensor's name, dimensions, type or offset."""
    n = rng.randrange(len(pieces.tensors))
    info = pieces.tensors[n]
    (length,) = struct.unpack_from("<Q", info)
    name = info[8 : 8 + length]
    (n_dims,) = struct.unpack_from("<I", info, 8 + length)
    dims = list(struct.unpack_from(f"<{n_dims}Q", info, 12 + length))
    kind, offset = struct.unpack_from("<IQ", info, 12 + length + 8 * n_dims)
    what = rng.randrange(6)
    if what == 0:
        name = rng.choice((b"", b"blk.77.attn_q.weight", b"x" * 64, name[:-1], b"blk.0.ffn_up.weight", b"\xff"))
    elif what == 1:
        dims[rng.randrange(len(dims))] = rng.choice(LONG_EXTREMES)
    elif what == 2:
        dims = rng.choice((dims[::-1], [*dims, 1], dims[:1], [], [1] * 5, [dims[0] * 2, *dims[1:]]))
    elif what == 3:
        kind = rng.choice((0, 1, 2, 4, 8, 9, 12, 15, 24, 26, 28, 30, 31, 35, 39, 41, 43, 2**31))
    elif what == 4:
        offset = rng.choice((offset + 1, offset + 32, *LONG_EXTREMES)) % 2**64
    else:
        other = pieces.tensors[n - 1]
        pieces.tensors[n - 1] = info[: 8 + length] + other[8 + struct.unpack_from("<Q", other)[0] :]
        name = other[8 : 8 + struct.unpack_from("<Q", other)[0]]
    body = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    pieces.tensors[n] = struct.pack("<Q", len(name)) + name + body


def change_counts(pieces: Pieces, rng: random.Random) -> None:
    n_tensors, n_values = len(pieces.tensors), len(pieces.values)
    pieces.claimed = rng.choice(
        ((n_tensors + 1, n_values), (n_tensors, n_values - 1), (0, n_values), (n_tensors, 0), (2**40, n_values))
    )


STRUCTURAL = (
    *(change_number, change_number, change_number, change_text, change_type, retype_number, change_array),
    *(change_tokens, drop_twice_or_swap, drop_twice_or_swap, swap_bodies, change_tensor, change_tensor, change_counts),
)


def flip_bits(whole: bytes, header: int, rng: random.Random) -> bytes:
    damaged = bytearray(whole)
    for _ in range(rng.choice((1, 2, 8))):
        damaged[rng.randrange(header)] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def cut_off(whole: bytes, header: int, rng: random.Random) -> bytes:
    return whole[: rng.randrange(rng.choice((header, len(whole))))]


def put_number(whole: bytes, header: int, rng: random.Random) -> bytes:
    """Overwrites 4 or 8 bytes anywhere in the header with an extreme number."""
    width = rng.choice((4, 8))
    at = rng.randrange(header - width)
    value = rng.choice(LONG_EXTREMES).to_bytes(8, "little")[:width]
    return whole[:at] + value + whole[at + width :]


RAW = (flip_bits, cut_off, put_number)
