"""Media: pictures and audio in a prompt. Runs of token ids stand for the cells of each picture or sound."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["image", "sound"]
IMAGE: Kind = "image"
SOUND: Kind = "sound"


@dataclass(frozen=True)
class Media:
    """One picture or sound. A file is kept as it is, because its decoded data is about ten times as large.

    Attributes:
        data: depends on `form`. "raw": rows of pixels with 3 bytes each (red, green, blue), or samples of a sound as
            32-bit floats; "file": the bytes of a file; "path": an absolute path.
        width, height: size in pixels. For a sound, width is the number of samples, and height is 1.
        kind: picture or sound.
        form: the form of `data`.
        digest: SHA-256 of kind, size and raw data, in hexadecimal digits; equal media have equal digests in any form.
    """

    data: bytes | str = field(repr=False, compare=False)
    width: int
    height: int
    kind: Kind = IMAGE
    form: Literal["raw", "file", "path"] = field(default="raw", compare=False)
    digest: str = ""

    def __post_init__(self) -> None:
        if not self.digest and isinstance(self.data, bytes):
            object.__setattr__(self, "digest", digest_of(self.kind, self.data, self.width, self.height))

    @property
    def n_bytes(self) -> int:
        """Number of bytes of `data` in main memory. For a path: its number of characters."""
        return len(self.data)

    @property
    def n_raw_bytes(self) -> int:
        """Bytes of the raw data."""
        return (3 if self.kind == IMAGE else 4) * self.width * self.height


def digest_of(kind: Kind, raw: bytes, width: int, height: int) -> str:
    """Returns the digest of a Media with this raw data."""
    return hashlib.sha256(f"{kind} {width} {height} ".encode() + raw).hexdigest()


class MediaRun(NamedTuple):
    """Neighbouring tokens of a prompt. One encoder pass computes the cells of these tokens. The pass reads a whole
    picture or sound, or a part of one.

    Attributes:
        start: index of the first token in the prompt.
        length: number of tokens; each has a cell.
        media: index of the picture or sound in Request.media.
        chunk: position among the encoder passes of this picture or sound (from 0).
        is_causal: True: each token attends only to earlier tokens. False: all tokens of the run attend to one another,
            and one call must compute all of them.
        n_pos: number of positions from the start of the run to the text after the run. This is the number of tokens,
            but with M-RoPE the longer side of the picture in tokens.
        n_time: number of positions of the run on the time axis. llama.cpp distinguishes cells by these positions. With
            M-RoPE, n_time is usually 1.
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
    """A picture or a sound as a part of a prompt.

    Attributes:
        token_ids: ids of the model's vocabulary, and negative ids for the cells of the runs.
        runs: the runs in order. `start` of a run counts from the first of these tokens.
    """

    token_ids: tuple[int, ...]
    runs: tuple[MediaRun, ...]


def cell_ids(digest: str, chunk: int, length: int) -> list[int]:
    """Returns negative ids for the cells of a run. The ids are derived from the content of the picture or sound, so
    equal token lists mean equal cells. Code that compares the tokens of two prompts thus compares the media, too."""
    drawn = hashlib.shake_128(f"{digest} {chunk}".encode()).digest(4 * length)
    return [-1 - (word >> 1) for word in struct.unpack(f"<{length}I", drawn)]  # a token id has 31 bits and a sign


def moved(runs: Sequence[MediaRun], by: int, media: int) -> tuple[MediaRun, ...]:
    """Returns the runs of a picture or sound as runs of a prompt: moved by `by` tokens, and with the index `media`."""
    return tuple(run._replace(start=run.start + by, media=media) for run in runs)
