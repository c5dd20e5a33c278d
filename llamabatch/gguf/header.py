"""The header of a GGUF file: the values, the tensors, and the place of the vocabulary."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llamabatch.gguf.reader import START, TOKENS, HeaderReader, Items, Number, TensorInfo, Value

_PART = re.compile(r"-(\d{5})-of-(\d{5})(\.gguf)$", re.IGNORECASE)  # llama.cpp, llama_split_path
_MAX_PARTS = 1024


@dataclass(frozen=True)
class Header:
    """Everything before the weights of one GGUF file.

    Attributes:
        metadata: key -> number, text, tuple of up to 16,384 numbers, or Items.
        types: key -> GGUF's number of its type, ARRAY for arrays.
        item_types: key of an array -> GGUF's number of the type of its items.
        tensors: in the file's order.
        n_tokens: size of the vocabulary; 0 without one.
        alignment: bytes; the data of each tensor begins at a multiple of it.
        data_start: byte at which the data of the tensors begins.
        header_bytes: byte at which the description of the last tensor ends.
        file_bytes: size of this file.
    """

    path: Path
    version: int
    metadata: Mapping[str, Value]
    types: Mapping[str, int]
    item_types: Mapping[str, int]
    tensors: tuple[TensorInfo, ...]
    n_tokens: int
    alignment: int
    data_start: int
    header_bytes: int
    file_bytes: int

    @property
    def architecture(self) -> str:
        """As "qwen2"; "" where the file names none."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else ""

    def own(self, key: str) -> Value | None:
        """A value of this architecture: own("block_count") is that of "qwen2.block_count"."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def texts(self) -> dict[str, str]:
        """The values as texts, lists with commas, for ModelFacts.from_header; arrays that are not kept are left out."""
        return _texts(self.metadata)


@dataclass(frozen=True)
class HeaderStart:
    """The header up to the vocabulary, which takes microseconds to read.

    Attributes:
        n_tensors: as the file announces.
        texts: key -> value, as Header.texts.
        n_tokens: 0 where there is no vocabulary.
    """

    n_tensors: int
    texts: Mapping[str, str]
    n_tokens: int


def part_names(name: str) -> list[str]:
    """Names of the files of a model that was split (`model-00001-of-00003.gguf`), the first in front; else the name
    itself."""
    match = _PART.search(name)
    if match is None or not 1 <= int(match[2]) <= _MAX_PARTS:
        return [name]
    return [f"{name[: match.start()]}-{n:05d}-of-{match[2]}{match[3]}" for n in range(1, int(match[2]) + 1)]


def part_paths(path: Path) -> list[Path]:
    """The files of the model to which the file `path` belongs: one, unless it was split."""
    return [path.with_name(name) for name in part_names(path.name)] if path.name else [path]


def check_start(path: Path) -> None:
    """Reads the first bytes only. Raises as read_header."""
    with path.open("rb", buffering=0) as file:
        HeaderReader(path, file, chunk=START.size).start()


def read_header(path: Path) -> Header:
    """The header of one file. A file that did not change is not read again.

    Raises:
        ModelFileError: it is no GGUF file, or damaged; the message names the field and the value.
        OSError: it cannot be read.
    """
    status = path.stat()
    return _read_header(path, (status.st_size, status.st_mtime_ns, status.st_ino))


def read_parts(path: Path) -> tuple[Header, ...]:
    """The headers of all parts of a model; of one file, one. Raises as read_header."""
    return tuple(read_header(part) for part in part_paths(path))


def read_tensors(path: Path) -> tuple[TensorInfo, ...]:
    """The tensors of all parts of a model. Raises as read_header."""
    return tuple(tensor for header in read_parts(path) for tensor in header.tensors)


def read_start(path: Path) -> HeaderStart:
    """The header up to the vocabulary. Raises as read_header."""
    with path.open("rb", buffering=0) as file:
        reader = HeaderReader(path, file, chunk=1 << 16)
        _, n_tensors, n_values = reader.start()
        reader.read_values(n_values, stop=TOKENS)
        tokens = reader.values.get(TOKENS)
        return HeaderStart(n_tensors, _texts(reader.values), tokens.count if isinstance(tokens, Items) else 0)


@functools.lru_cache(maxsize=64)  # the parts of a model, each with some hundred tensors
def _read_header(path: Path, _unchanged: tuple[int, int, int]) -> Header:
    with path.open("rb", buffering=0) as file:
        reader = HeaderReader(path, file)
        version, n_tensors, n_values = reader.start()
        reader.read_values(n_values)
        alignment = reader.alignment()
        tensors = reader.tensors(n_tensors)
        tokens = reader.values.get(TOKENS)
        return Header(
            path=path,
            version=version,
            metadata=reader.values,
            types=reader.types,
            item_types=reader.item_types,
            tensors=tensors,
            n_tokens=tokens.count if isinstance(tokens, Items) else 0,
            alignment=alignment,
            data_start=-(-reader.at // alignment) * alignment,
            header_bytes=reader.at,
            file_bytes=reader.size,
        )


def _texts(values: Mapping[str, Value]) -> dict[str, str]:
    return {key: as_text(value) for key, value in values.items() if not isinstance(value, Items)}


def as_text(value: Number | str | tuple[Number, ...]) -> str:
    """A value as llama.cpp writes it, lists with commas."""
    if isinstance(value, tuple):
        return ",".join(map(as_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
