"""Makes blocks of random weights in the layouts of ggml-common.h."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]


class RandomBits:
    """A fast stream of random bits; the same seed and index give the same stream."""

    def __init__(self, seed: int, index: int) -> None:
        self._generator = np.random.SFC64(np.random.SeedSequence([seed, index]))

    def bytes(self, rows: int, columns: int) -> Bytes:
        """Returns an array of random bytes."""
        count = rows * columns
        words = np.asarray(self._generator.random_raw(-(-count // 8)), np.uint64)
        return words.view(np.uint8)[:count].reshape(rows, columns)

    def scales(self, count: int, mean: float, *, signed: bool = False) -> Halves:
        """Returns block scales from 0.5 to 1.5 times `mean`, unequal as in real models.

        Args:
            signed: negate half of the scales. Four-bit numbers range from -8 to 7, so their mean is negative. With
                positive scales this mean would add up over the layers until every token had the same logits.
        """
        raw = self.bytes(count, 1).astype(np.float32)
        scales = mean * (0.5 + raw / 255.0)
        halves: Halves = np.where(raw % 2 == 0, -scales if signed else scales, scales).astype(np.float16)
        return halves


@dataclass(frozen=True)
class BlockType:
    """One of ggml's tensor types.

    Attributes:
        weights: number of weights in a block.
        size: bytes of a block.
        fill: called as fill(bits, rows, std); returns `rows` blocks of weights with this standard deviation.
    """

    name: str
    weights: int
    size: int
    fill: Callable[[RandomBits, int, float], Bytes]


def _f32(bits: RandomBits, rows: int, std: float) -> Bytes:
    values = bits.bytes(rows, 1).astype(np.float32) - 127.5
    scaled: Bytes = (values * np.float32(std / 73.9)).view(np.uint8)
    return scaled


def _f16(bits: RandomBits, rows: int, std: float) -> Bytes:
    """Returns half floats with random signs, random fractions and one of two exponents, without float arithmetic."""
    raw = bits.bytes(rows, 2).view(np.uint16)
    low = int(np.floor(np.log2(std / 1.7))) + 15  # 15 is the bias of a half's exponent
    exponent = np.uint16(max(1, low) << 10)
    halves: Bytes = ((raw & np.uint16(0x87FF)) + exponent).view(np.uint8)
    return halves


def _q8_0(bits: RandomBits, rows: int, std: float) -> Bytes:
    blocks = np.empty((rows, 34), np.uint8)
    blocks[:, :2] = bits.scales(rows, std / 73.9).view(np.uint8)
    # Quantisers never write -128, and kernels may rely on this.
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
    """Returns Q4_K blocks. A weight is d * s * q - dmin * m with q in 0..15. m = s and dmin = 7.5 d give the mean 0."""
    blocks = np.empty((rows, 144), np.uint8)
    d = bits.scales(rows, std / 4.6 / 40)
    blocks[:, 0:2] = d.view(np.uint8)
    blocks[:, 2:4] = (d.astype(np.float32) * 7.5).astype(np.float16).view(np.uint8)
    s = 32 + (bits.bytes(rows, 8) & 15)  # eight six-bit scales of 32..47
    blocks[:, 4:8] = blocks[:, 8:12] = s[:, :4] | ((s[:, 4:] >> 4) << 6)
    blocks[:, 12:16] = (s[:, 4:] & 15) * 17  # each nibble is the low 4 bits of a scale or minimum
    blocks[:, 16:] = bits.bytes(rows, 128)
    return blocks


def _q6_k(bits: RandomBits, rows: int, std: float) -> Bytes:
    blocks = np.empty((rows, 210), np.uint8)
    blocks[:, :192] = bits.bytes(rows, 192)
    blocks[:, 192:208] = 56 + (bits.bytes(rows, 16) & 15)  # sixteen signed scales of 56..71
    blocks[:, 208:] = bits.scales(rows, std / 18.5 / 64, signed=True).view(np.uint8)
    return blocks


def _mxfp4(bits: RandomBits, rows: int, std: float) -> Bytes:
    """Returns MXFP4 blocks: a scale (one of two neighbouring powers of two) and 32 numbers of four bits."""
    blocks = np.empty((rows, 17), np.uint8)
    low = 127 + round(np.log2(std / (2.93 * 1.58)))  # RMS of the 16 possible numbers: 2.93; of 1 and 2: 1.58
    blocks[:, :1] = low + (bits.bytes(rows, 1) & 1)
    blocks[:, 1:] = bits.bytes(rows, 16)
    return blocks


F32 = BlockType("F32", 1, 4, _f32)
F16 = BlockType("F16", 1, 2, _f16)
Q8_0 = BlockType("Q8_0", 32, 34, _q8_0)
Q4_0 = BlockType("Q4_0", 32, 18, _q4_0)
Q5_0 = BlockType("Q5_0", 32, 22, _q5_0)
Q4_K = BlockType("Q4_K", 256, 144, _q4_k)
Q6_K = BlockType("Q6_K", 256, 210, _q6_k)
MXFP4 = BlockType("MXFP4", 32, 17, _mxfp4)
