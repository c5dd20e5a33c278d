"""`llamabatch synth`: a model file with random weights in a real shape, to measure speed without a download.

The text of such a model means nothing, but every tensor has the size and the type that llama.cpp's own quantiser would
give it, so a step costs the same as with the real model.

The tensors come first, then the file, its byte-level BPE vocabulary (made up: right in kind and size), and the random
quantised blocks in the layouts of ggml-common.h.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from llamabatch.errors import InputError, SetupError
from llamabatch.utils.atomic_file import replacement
from llamabatch.utils.checks import nearest
from llamabatch.utils.paths import absolute

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]

QUANTS = ("Q8_0", "Q4_0", "Q4_K_M", "F16")
_FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15}  # llama_ftype
_ALIGNMENT = 32
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class Shape:
    """The numbers that decide the size and the speed of a model."""

    arch: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx: int
    rope_base: float
    rms_eps: float
    tied: bool
    rope_factor: float = 0.0
    """Llama 3's stretching of the slow rotary frequencies; 0: none."""

    @property
    def qkv_bias(self) -> bool:
        return self.arch == "qwen2"


def _qwen(n_layer: int, n_embd: int, n_ff: int, n_head: int, n_head_kv: int) -> Shape:
    head_dim = n_embd // n_head
    return Shape("qwen2", n_layer, n_embd, n_ff, n_head, n_head_kv, head_dim, 151_936, 32_768, 1e6, 1e-6, tied=True)


def _llama(n_layer: int, n_embd: int, n_ff: int, n_head: int, tied: bool, rope_factor: float) -> Shape:
    head_dim = n_embd // n_head
    return Shape(
        "llama", n_layer, n_embd, n_ff, n_head, 8, head_dim, 128_256, 131_072, 5e5, 1e-5, tied, rope_factor
    )  # fmt: skip


SHAPES: dict[str, Shape] = {
    "qwen2.5-0.5b": _qwen(24, 896, 4864, 14, 2),
    "qwen2.5-1.5b": _qwen(28, 1536, 8960, 12, 2),
    "llama-3.2-1b": _llama(16, 2048, 8192, 32, tied=True, rope_factor=32.0),
    "llama-3.2-3b": _llama(28, 3072, 8192, 24, tied=True, rope_factor=32.0),
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, tied=False, rope_factor=8.0),
}


def find_shape(name: str) -> Shape:
    """The shape of that name, in upper or lower case. Raises InputError with the known names."""
    shape = SHAPES.get(name.lower())
    if shape is None:
        raise InputError(f"unknown shape {name!r}{nearest(name.lower(), SHAPES)}")
    return shape


def write_model(
    shape: Shape, path: Path, quant: str = "Q8_0", seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> int:
    """Write a GGUF file and return its size in bytes. The same arguments give the same file.

    `progress(done, total)` gets bytes of weights as they are written. The file gets its name only when it is whole.
    Raises InputError for a bad argument or a full disk, SetupError without the gguf package.
    """
    if quant.upper() not in QUANTS:
        raise InputError(f"unknown quantisation {quant!r}{nearest(quant, QUANTS)}")
    if seed < 0:
        raise InputError(f"seed is {seed}; it must be 0 or more")
    path = Path(absolute(path))
    tensors = list(_tensors(shape, quant.upper()))
    total = sum(tensor.size for tensor in tensors)
    _check_target(path, total)
    with replacement(path) as temporary:
        _write_header(str(temporary), shape, quant.upper(), tensors)
        with open(temporary, "ab") as file:
            _write_tensors(file, tensors, seed, lambda done: progress(done, total) if progress else None)
            size = file.tell()
        temporary.chmod(0o644)
    return size


def _check_target(path: Path, total: int) -> None:
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the name of a file to write")
    if not path.parent.is_dir():
        raise InputError(f"the folder {path.parent} does not exist; make it first")
    needed, free = total + (64 << 20), shutil.disk_usage(path.parent).free
    if free < needed:
        raise InputError(
            f"{path} needs {needed / 1e9:.1f} GB and its disk has {free / 1e9:.1f} GB free; "
            "free some space or write elsewhere"
        )


@dataclass(frozen=True)
class Tensor:
    """A tensor to write, rows x columns: random weights of standard deviation `std`, or given values."""

    name: str
    kind: BlockType
    rows: int
    columns: int
    std: float
    values: Any = None

    @property
    def blocks(self) -> int:
        return self.rows * self.columns // self.kind.weights

    @property
    def size(self) -> int:
        return self.blocks * self.kind.size


def _tensors(shape: Shape, quant: str) -> Iterator[Tensor]:
    """The tensors, in the order of llama.cpp's own converter."""
    base = _BASE_TYPES[quant]
    rich = Q6_K if quant == "Q4_K_M" else base  # for the tensors most sensitive to quantisation
    top = Q6_K if quant in {"Q4_0", "Q4_K_M"} else base  # the output matrix
    n_embd, n_kv = shape.n_embd, shape.n_head_kv * shape.head_dim
    n_q = shape.n_head * shape.head_dim

    def matrix(name: str, kind: BlockType, rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return Tensor(f"{name}.weight", _fitting(kind, columns), rows, columns, gain * columns**-0.5)

    def norm(name: str) -> Tensor:
        return Tensor(f"{name}.weight", F32, 1, n_embd, 0.0, np.ones(n_embd, np.float32))

    # a gain of 3 spreads the logits about as a trained model's, as samplers meet them
    if not shape.tied:
        yield matrix("output", top, shape.n_vocab, n_embd, gain=3.0)
    yield matrix("token_embd", top if shape.tied else base, shape.n_vocab, n_embd, gain=3.0)
    if shape.rope_factor:
        factors = _rope_factors(shape)
        yield Tensor("rope_freqs.weight", F32, 1, factors.size, 0.0, factors)
    for layer in range(shape.n_layer):
        at = f"blk.{layer}."
        better = rich if _more_bits(layer, shape.n_layer) else base
        yield norm(f"{at}attn_norm")
        for letter, kind, rows in (("q", base, n_q), ("k", base, n_kv), ("v", better, n_kv)):
            yield matrix(f"{at}attn_{letter}", kind, rows, n_embd)
            if shape.qkv_bias:
                yield Tensor(f"{at}attn_{letter}.bias", F32, 1, rows, 0.1)
        yield matrix(f"{at}attn_output", base, n_embd, n_q)
        yield norm(f"{at}ffn_norm")
        yield matrix(f"{at}ffn_gate", base, shape.n_ff, n_embd)
        yield matrix(f"{at}ffn_up", base, shape.n_ff, n_embd)
        yield matrix(f"{at}ffn_down", better, n_embd, shape.n_ff)
    yield norm("output_norm")


def _more_bits(layer: int, n_layer: int) -> bool:
    """llama-quant.cpp, use_more_bits: the layers where Q4_K_M keeps attn_v and ffn_down at Q6_K."""
    eighth = n_layer // 8
    return layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2


def _fitting(kind: BlockType, columns: int) -> BlockType:
    """llama-quant.cpp, tensor_type_fallback: rows that are no multiple of 256 take types with blocks of 32."""
    if columns % kind.weights == 0:
        return kind
    return {"Q4_K": Q5_0, "Q6_K": Q8_0}[kind.name]


def _rope_factors(shape: Shape) -> Any:
    """Llama 3's rope scaling, as llama.cpp's converter writes it: low frequencies are stretched by `rope_factor`."""
    low_wavelength, high_wavelength = 8192 / 1.0, 8192 / 4.0  # trained context over low and high frequency factor
    frequencies = shape.rope_base ** -(np.arange(0, shape.head_dim, 2, dtype=np.float32) / shape.head_dim)
    wavelengths = 2 * np.pi / frequencies
    smooth = (8192 / wavelengths - 1.0) / (4.0 - 1.0)
    between = 1 / ((1 - smooth) / shape.rope_factor + smooth)
    factors = np.where(wavelengths > low_wavelength, shape.rope_factor, between)
    return np.where(wavelengths < high_wavelength, 1.0, factors).astype(np.float32)


def _write_header(path: str, shape: Shape, quant: str, tensors: list[Tensor]) -> None:
    try:
        import gguf
    except ImportError as error:
        raise SetupError('writing model files needs the gguf package: pip install "llamabatch[tools]"') from error
    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_name(f"random weights, {shape.n_layer} layers of {shape.n_embd}")
    writer.add_description("Random weights for measuring speed; the text means nothing.")
    writer.add_file_type(_FILE_TYPES[quant])
    writer.add_quantization_version(2)
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_layer_norm_rms_eps(shape.rms_eps)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.n_vocab)
    _add_vocab(writer, shape)
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.kind.name]
        dims = [tensor.columns] if tensor.rows == 1 else [tensor.rows, tensor.columns]
        writer.add_tensor_info(tensor.name, dims, np.dtype(np.float32), tensor.size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _write_tensors(file: BinaryIO, tensors: list[Tensor], seed: int, report: Callable[[int], None]) -> None:
    """Append the weights, each tensor at a multiple of the alignment, never more than a chunk in memory."""
    done = 0
    for index, tensor in enumerate(tensors):
        file.write(bytes(-file.tell() % _ALIGNMENT))
        for chunk in _chunks(tensor, RandomBits(seed, index)):
            file.write(chunk)
            done += len(chunk)
            report(done)
    file.write(bytes(-file.tell() % _ALIGNMENT))


def _chunks(tensor: Tensor, bits: RandomBits) -> Iterator[memoryview]:
    if tensor.values is not None:
        yield memoryview(tensor.values.tobytes())
        return
    step = _CHUNK_BYTES // tensor.kind.size // 8 * 8  # whole blocks, and whole words of the random stream
    for start in range(0, tensor.blocks, step):
        rows = min(step, tensor.blocks - start)
        yield memoryview(np.ascontiguousarray(tensor.kind.fill(bits, rows, tensor.std)).reshape(-1).data)


def _add_vocab(writer: Any, shape: Shape) -> None:
    vocab, ids = _qwen_vocab(shape) if shape.arch == "qwen2" else _llama_vocab(shape)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if shape.arch == "qwen2" else "llama-bpe")
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.types)
    writer.add_token_merges(vocab.merges)
    writer.add_bos_token_id(ids["bos"])
    writer.add_eos_token_id(ids["eos"])
    writer.add_pad_token_id(ids["pad"])
    writer.add_add_bos_token(shape.arch == "llama")
    writer.add_chat_template(_CHATML if shape.arch == "qwen2" else _LLAMA3)


def _qwen_vocab(shape: Shape) -> tuple[Vocab, dict[str, int]]:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    start = shape.n_vocab - min(293, shape.n_vocab // 8)  # 151643 in the real vocabulary
    ids = {"bos": start, "eos": start + 2, "pad": start}
    return make_vocab(shape.n_vocab, special, start), ids


def _llama_vocab(shape: Shape) -> tuple[Vocab, dict[str, int]]:
    special = [f"<|reserved_special_token_{i}|>" for i in range(min(256, shape.n_vocab // 8))]
    names = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 8: "eom_id", 9: "eot_id"}
    for index, name in names.items():
        special[index] = f"<|{name}|>"
    start = shape.n_vocab - len(special)  # 128000 in the real vocabulary
    return make_vocab(shape.n_vocab, special, start), {"bos": start, "eos": start + 9, "pad": start + 1}


_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' "
    "+ m['content'] + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)


NORMAL, CONTROL, UNUSED = 1, 3, 5  # llama.cpp's token types
_SPACE = "Ġ"  # how byte-level BPE writes a space


@dataclass(frozen=True)
class Vocab:
    """Tokens by id with their types, and the merges that reach some of them from bytes."""

    tokens: list[str]
    types: list[int]
    merges: list[str]


def make_vocab(size: int, special: Sequence[str], special_start: int) -> Vocab:
    """`size` tokens: the 256 bytes, frequent pairs of letters, made-up words; `special` from id `special_start` on.

    Ids behind the special tokens are padding of type UNUSED, as in the real files.
    """
    tokens = [*_byte_tokens(), *_pairs()][:special_start]
    tokens += _words(special_start - len(tokens))
    tokens += special
    types = [NORMAL] * special_start + [CONTROL] * len(special)
    padding = size - len(tokens)
    tokens += [f"[PAD{len(tokens) + i}]" for i in range(padding)]
    types += [UNUSED] * padding
    known = set(tokens[:special_start])
    merges = [f"{pair[0]} {pair[1]}" for pair in _pairs() if pair in known]
    return Vocab(tokens, types, merges)


def _byte_tokens() -> list[str]:
    """GPT-2's letters for the 256 bytes: printable ones stand for themselves, the rest follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def _pairs() -> list[str]:
    letters = "etaoinshrdlucm"
    return [a + b for a, b in product(_SPACE + letters, letters)]


def _words(count: int) -> list[str]:
    """Different strings of one space and three syllables, about as long as the tokens of a real vocabulary."""
    syllables = [c + v for c, v in product("bdfghjklmnprstvwyz", "aeiou")]
    words = (_SPACE + a + b + c for a, b, c in product(syllables, repeat=3))
    return [word for word, _ in zip(words, range(count), strict=False)]


class RandomBits:
    """A fast stream of random bits; the same seed and index give the same stream."""

    def __init__(self, seed: int, index: int) -> None:
        self._generator = np.random.SFC64(np.random.SeedSequence([seed, index]))

    def bytes(self, rows: int, columns: int) -> Bytes:
        """An array of random bytes."""
        count = rows * columns
        words = np.asarray(self._generator.random_raw(-(-count // 8)), np.uint64)
        return words.view(np.uint8)[:count].reshape(rows, columns)

    def scales(self, count: int, mean: float, *, signed: bool = False) -> Halves:
        """Block scales from 0.5 to 1.5 times `mean`, unequal as in real models.

        `signed` negates half of them: four-bit numbers go from -8 to 7, and the surplus on one side would add up over
        the layers until every token gave the same logits.
        """
        raw = self.bytes(count, 1).astype(np.float32)
        scales = mean * (0.5 + raw / 255.0)
        halves: Halves = np.where(raw % 2 == 0, -scales if signed else scales, scales).astype(np.float16)
        return halves


@dataclass(frozen=True)
class BlockType:
    """One of ggml's tensor types. `fill(bits, rows, std)` makes `rows` blocks, one a row."""

    name: str
    weights: int
    size: int
    fill: Callable[[RandomBits, int, float], Bytes]


def _f32(bits: RandomBits, rows: int, std: float) -> Bytes:
    values = bits.bytes(rows, 1).astype(np.float32) - 127.5
    scaled: Bytes = (values * np.float32(std / 73.9)).view(np.uint8)
    return scaled


def _f16(bits: RandomBits, rows: int, std: float) -> Bytes:
    """Random sign and fraction under one of two exponents, without arithmetic on floats."""
    raw = bits.bytes(rows, 2).view(np.uint16)
    low = int(np.floor(np.log2(std / 1.7))) + 15  # 15 is the bias of a half's exponent
    exponent = np.uint16(max(1, low) << 10)
    halves: Bytes = ((raw & np.uint16(0x87FF)) + exponent).view(np.uint8)
    return halves


def _q8_0(bits: RandomBits, rows: int, std: float) -> Bytes:
    blocks = np.empty((rows, 34), np.uint8)
    blocks[:, :2] = bits.scales(rows, std / 73.9).view(np.uint8)
    # no quantiser writes -128, and kernels may rely on it
    blocks[:, 2:] = np.maximum(bits.bytes(rows, 32).view(np.int8), -127).view(np.uint8)
    return blocks


def _q4_0(bits: RandomBits, rows: int, std: float) -> Bytes:
    blocks = np.empty((rows, 18), np.uint8)
    blocks[:, :2] = bits.scales(rows, std / 4.6, signed=True).view(np.uint8)
    blocks[:, 2:] = bits.bytes(rows, 16)
    return blocks


def _q5_0(bits: RandomBits, rows: int, std: float) -> Bytes:
    blocks = np.empty((rows, 22), np.uint8)
    blocks[:, :2] = bits.scales(rows, std / 9.2, signed=True).view(np.uint8)
    blocks[:, 2:] = bits.bytes(rows, 20)
    return blocks


def _q4_k(bits: RandomBits, rows: int, std: float) -> Bytes:
    """A weight is d * s * q - dmin * m with q in 0..15; m = s and dmin = 7.5 d centre it."""
    blocks = np.empty((rows, 144), np.uint8)
    d = bits.scales(rows, std / 4.6 / 40)
    blocks[:, 0:2] = d.view(np.uint8)
    blocks[:, 2:4] = (d.astype(np.float32) * 7.5).astype(np.float16).view(np.uint8)
    s = 32 + (bits.bytes(rows, 8) & 15)  # eight six-bit scales of 32..47
    blocks[:, 4:8] = blocks[:, 8:12] = s[:, :4] | ((s[:, 4:] >> 4) << 6)
    blocks[:, 12:16] = (s[:, 4:] & 15) * 17  # low halves of the last four, for scale and minimum
    blocks[:, 16:] = bits.bytes(rows, 128)
    return blocks


def _q6_k(bits: RandomBits, rows: int, std: float) -> Bytes:
    blocks = np.empty((rows, 210), np.uint8)
    blocks[:, :192] = bits.bytes(rows, 192)
    blocks[:, 192:208] = 56 + (bits.bytes(rows, 16) & 15)  # sixteen signed scales of 56..71
    blocks[:, 208:] = bits.scales(rows, std / 18.5 / 64, signed=True).view(np.uint8)
    return blocks


F32 = BlockType("F32", 1, 4, _f32)
F16 = BlockType("F16", 1, 2, _f16)
Q8_0 = BlockType("Q8_0", 32, 34, _q8_0)
Q4_0 = BlockType("Q4_0", 32, 18, _q4_0)
Q5_0 = BlockType("Q5_0", 32, 22, _q5_0)
Q4_K = BlockType("Q4_K", 256, 144, _q4_k)
Q6_K = BlockType("Q6_K", 256, 210, _q6_k)
_BASE_TYPES = {"F16": F16, "Q4_0": Q4_0, "Q8_0": Q8_0, "Q4_K_M": Q4_K}
