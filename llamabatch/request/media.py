"""Media: pictures in a prompt, and the runs of token ids that stand for their cells."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Media:
    """One picture, whose pixels are decoded where they are needed: a file has a tenth of their bytes, a path none.

    Attributes:
        data: as `form` says: rows of pixels, 3 bytes each (red, green, blue); the bytes of a file; an absolute path.
        width, height: in pixels.
        form: the kind of `data`.
        digest: SHA-256 of size and pixels, in hexadecimal digits; equal pictures have equal digests in any form.
    """

    data: bytes | str = field(repr=False, compare=False)
    width: int
    height: int
    form: Literal["pixels", "file", "path"] = field(default="pixels", compare=False)
    digest: str = ""

    def __post_init__(self) -> None:
        if not self.digest and isinstance(self.data, bytes):
            object.__setattr__(self, "digest", digest_of(self.data, self.width, self.height))

    @property
    def n_bytes(self) -> int:
        """Bytes of main memory that it takes."""
        return len(self.data)


def digest_of(pixels: bytes, width: int, height: int) -> str:
    """The digest of a Media with these pixels."""
    return hashlib.sha256(f"image {width} {height} ".encode() + pixels).hexdigest()


class MediaRun(NamedTuple):
    """Neighbouring tokens of a prompt whose cells come from one encoder pass over a picture, or over a tile of one.

    Attributes:
        start: index of the first of the tokens.
        length: number of tokens, each of which has a cell.
        media: index of the picture in Request.media.
        chunk: number of the encoder pass among those of this picture.
        is_causal: each token attends to earlier ones only; False: all of the run to one another, so that one call must
            compute all of them.
        n_pos: positions by which the run moves those of the text behind it; as many as tokens, but with M-RoPE the
            longer side of the picture, in tokens.
        n_time: positions of its tokens on the axis by which llama.cpp tells cells apart: with M-RoPE 1, as a rule.
    """

    start: int
    length: int
    media: int
    chunk: int
    is_causal: bool
    n_pos: int
    n_time: int

    @property
    def end(self) -> int:
        return self.start + self.length


class MediaTokens(NamedTuple):
    """A picture as a part of a prompt.

    Attributes:
        token_ids: ids of the model's vocabulary, and ids below 0 for the cells of the runs.
        runs: in order; `start` counts from the first of these tokens.
    """

    token_ids: tuple[int, ...]
    runs: tuple[MediaRun, ...]


def cell_ids(digest: str, chunk: int, length: int) -> list[int]:
    """Ids below 0 for the cells of a run, drawn from what the picture shows: lists of tokens that are equal stand for
    equal cells, so that all that compares tokens (shared prefixes, kept ones, families) compares pictures, too."""
    drawn = hashlib.shake_128(f"{digest} {chunk}".encode()).digest(4 * length)
    return [-1 - (word >> 1) for word in struct.unpack(f"<{length}I", drawn)]  # a token id has 31 bits and its sign


def moved(runs: Sequence[MediaRun], by: int, media: int) -> tuple[MediaRun, ...]:
    """Runs of one picture as runs of a prompt: `by` tokens stand before them, and the picture has this index there."""
    return tuple(run._replace(start=run.start + by, media=media) for run in runs)
