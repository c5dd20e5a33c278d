"""Finds, checks and calls the compiled helper, native_patches/sampler/sampler.cpp. The import loads nothing.

The search begins in the folder of this module (a checkout or an editable install). It continues next to the libraries
of the llama.cpp build in use, and then next to those of the installed llamabatch-llama. Without the helper everything
works with numpy. `LLAMABATCH_NATIVE=0` in the environment turns the helper off. The variable is read when a model is
loaded.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llamabatch.errors import EngineError
from llamabatch.planning import binding_choice
from llamabatch.sampling.defaults import FilledParams
from llamabatch.sampling.token_counts import TokenCounts
from llamabatch.utils.version import __version__

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]
    Mask = npt.NDArray[np.uint32]

ABI_VERSION = 2
PATH = Path(__file__).with_name("libllamabatch.dylib" if sys.platform == "darwin" else "libllamabatch.so")
VARIABLE = "LLAMABATCH_NATIVE"


class Params(ctypes.Structure):
    """The struct lb_params."""

    _fields_ = (
        ("top_p", ctypes.c_double),
        ("log_min_p", ctypes.c_double),
        ("temperature", ctypes.c_float),
        ("repetition_penalty", ctypes.c_float),
        ("presence_penalty", ctypes.c_float),
        ("frequency_penalty", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("n_bias", ctypes.c_int32),
        ("bias_ids", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("allowed", ctypes.c_void_p),
        ("n_allowed_words", ctypes.c_int64),
    )


class Prepared:
    """SamplingParams in the form that the helper reads. `address` is valid while this object lives."""

    __slots__ = ("_kept", "address")

    def __init__(self, params: FilledParams) -> None:
        ids = array("i", [token_id for token_id, _ in params.biases])
        biases = array("f", [bias for _, bias in params.biases])
        allowed = allowed_words(params.allowed_ids)
        struct = Params(
            params.top_p,
            params.log_min_p,
            params.temperature,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.top_k,
            len(ids),
            ids.buffer_info()[0],
            biases.buffer_info()[0],
            None if allowed is None else allowed.buffer_info()[0],
            0 if allowed is None else len(allowed),
        )
        self._kept = (struct, ids, biases, allowed)
        self.address = ctypes.addressof(struct)


def allowed_words(ids: Sequence[int] | None) -> array[int] | None:
    """Returns a mask of token ids up to the highest id. Bit i % 32 of word i / 32 is 1 if id i is among `ids`. Returns
    None for None."""
    if ids is None:
        return None
    words = array("I", bytes(4 * (max(ids) // 32 + 1)))
    for token_id in ids:
        words[token_id // 32] |= 1 << token_id % 32
    return words


class RowState(Protocol):
    """The fields of a SamplerState for the compiled helper."""

    seed: int
    index: int
    counts: TokenCounts | None
    mask: Mask | None

    @property
    def prepared(self) -> Prepared: ...


@dataclass(frozen=True)
class _Helper:
    """The loaded library and its file, or the reason why no library is loaded."""

    library: Any
    reason: str
    path: Path | None = None


@functools.cache
def _helper() -> _Helper:
    if os.environ.get(VARIABLE) == "0":
        return _Helper(None, f"{VARIABLE} is 0")
    unusable = _Helper(None, "missing: llamabatch was installed without it")
    for path, unfit in _places():
        helper = _Helper(None, unfit) if unfit else _load(path)
        if helper.library is not None:
            return helper
        unusable = helper
    return unusable


def _places() -> Iterator[tuple[Path, str]]:
    """Yields (file, reason) for each possible file of the helper, best first. The reason says why the file cannot be
    used; "": it can be used."""
    if PATH.is_file():
        yield PATH, ""
    choice = binding_choice.chosen()
    if choice is not None and choice.build.origin is not binding_choice.Origin.WHEEL:
        path = choice.build.libraries / PATH.name
        if choice.build.is_ours and path.is_file():
            yield path, ""
    package = binding_choice.installed(binding_choice.OURS)
    if package is not None and (package / "lib" / PATH.name).is_file():
        try:
            version = importlib.metadata.version("llamabatch-llama")
        except importlib.metadata.PackageNotFoundError:  # a copied folder has no version, but _load checks ABI_VERSION
            version = __version__
        unfit = "" if version == __version__ else f"of llamabatch-llama {version}, and this is llamabatch {__version__}"
        yield package / "lib" / PATH.name, unfit


def _load(path: Path) -> _Helper:
    try:
        library = ctypes.CDLL(str(path))
        found = int(library.lb_abi_version())
    except (OSError, AttributeError) as error:
        return _Helper(None, f"cannot be loaded ({' '.join(str(error).split())})")
    if found != ABI_VERSION:
        return _Helper(None, f"of another release (interface {found}, expected {ABI_VERSION})")
    number, long, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    library.lb_sample_rows.argtypes = [
        pointer, long, number, number, pointer, pointer, pointer, pointer, pointer, long, number, pointer
    ]  # fmt: skip
    library.lb_candidates.argtypes = [pointer, number, pointer, pointer, pointer, long, pointer, pointer]
    library.lb_logprobs.argtypes = [
        pointer, long, number, number, pointer, pointer, pointer, number, number, pointer, pointer, pointer, pointer
    ]  # fmt: skip
    return _Helper(library, "", path)


def available() -> bool:
    """Returns True if the helper is used. The first call loads it."""
    return _helper().library is not None


def why_not() -> str:
    """Returns the reason why the helper is not used, or "" if it is used."""
    return _helper().reason


def file() -> Path | None:
    """Returns the file of the helper that is used; None if numpy is used."""
    return _helper().path


def forget() -> None:
    """Makes the next call look for the helper again. This is needed if the environment or the file has changed."""
    _helper.cache_clear()


def sample_rows(logits: Floats, states: Sequence[RowState], n_threads: int) -> list[int]:
    """Returns a token id for each row; -1 if no token can be sampled.

    Args:
        logits: shape (len(states), vocabulary), float32, each row contiguous; read in place, not changed.
        states: one for each row; ids beyond the vocabulary are ignored.
        n_threads: maximum number of threads. More than one is used only with OpenMP and enough rows.
    """
    n_rows, n_vocab = logits.shape
    if len(states) != n_rows or not _can_read(logits):
        raise ValueError(f"{len(states)} states for logits of shape {logits.shape}, {logits.dtype}, {logits.strides}")
    # all of these arrays must live until the call returns
    tokens = array("i", bytes(4 * n_rows))
    params = array("Q", [state.prepared.address for state in states])
    seeds = array("Q", [state.seed for state in states])
    indices = array("Q", [state.index for state in states])
    counts, given = [state.counts for state in states], [state.mask for state in states]
    histories = masks = None
    n_mask_words = 0
    if any(counts):
        histories = array("Q", [word for each in counts for word in _history(each)])
    if [mask for mask in given if mask is not None]:
        masks = array("Q", [0 if mask is None else _address(mask) for mask in given])
        n_mask_words = _mask_words(given)
    failed = _helper().library.lb_sample_rows(
        _address(logits),
        logits.strides[0] // 4,
        n_rows,
        n_vocab,
        params.buffer_info()[0],
        seeds.buffer_info()[0],
        indices.buffer_info()[0],
        None if histories is None else histories.buffer_info()[0],
        None if masks is None else masks.buffer_info()[0],
        n_mask_words,
        n_threads,
        tokens.buffer_info()[0],
    )
    if failed:
        raise EngineError("no memory is left for sampling")
    return tokens.tolist()


def candidates(row: Floats, state: RowState) -> tuple[array[int], array[float]]:
    """Returns the token ids that can be drawn from one row, in ascending order, and the weight of each id. Both are
    empty if no token can be drawn."""
    ids, weights = array("i", bytes(4 * len(row))), array("d", bytes(8 * len(row)))
    history = None if state.counts is None else array("Q", _history(state.counts))
    count = _helper().library.lb_candidates(
        _address(row),
        len(row),
        state.prepared.address,
        None if history is None else history.buffer_info()[0],
        None if state.mask is None else _address(state.mask),
        _mask_words([state.mask]),
        ids.buffer_info()[0],
        weights.buffer_info()[0],
    )
    if count < 0:
        raise EngineError("no memory is left for sampling")
    return ids[:count], weights[:count]


def row_logprobs(
    logits: Floats, rows: Sequence[int], tokens: Sequence[int], tops: Sequence[int], n_threads: int
) -> Iterator[tuple[Sequence[int], Sequence[float], int]]:
    """Yields (ids, logprobs, rank) for each of `rows`: the ids of the given token and the likeliest tokens, the
    logprobs of these ids, and the rank of the given token. Ids and logprobs are empty if the logits are not numbers.
    See llamabatch.sampling.row_logprobs."""
    n_rows, n_vocab = logits.shape
    if not _can_read(logits) or not all(0 <= row < n_rows for row in rows):
        raise ValueError(f"rows {list(rows)} of logits of shape {logits.shape}, {logits.dtype}, {logits.strides}")
    if not all(0 <= token < n_vocab for token in tokens) or not len(rows) == len(tokens) == len(tops):
        raise ValueError(f"tokens {list(tokens)}, tops {list(tops)} for {len(rows)} rows of {n_vocab} tokens")
    most = max(0, min(max(tops, default=0), n_vocab))
    n, width = len(rows), most + 1
    given = [array("i", values) for values in (rows, tokens, [min(top, n_vocab) for top in tops])]
    ids, logprobs = array("i", bytes(4 * n * width)), array("d", bytes(8 * n * width))
    ranks, counts = array("i", bytes(4 * n)), array("i", bytes(4 * n))
    failed = _helper().library.lb_logprobs(
        _address(logits),
        logits.strides[0] // 4,
        n_vocab,
        n,
        *[values.buffer_info()[0] for values in given],
        most,
        n_threads,
        *[values.buffer_info()[0] for values in (ids, logprobs, ranks, counts)],
    )
    if failed:
        raise EngineError("no memory is left for logprobs")
    for at, count, rank in zip(range(0, n * width, width), counts, ranks, strict=True):
        yield ids[at : at + count].tolist(), logprobs[at : at + count].tolist(), rank


def _can_read(logits: Floats) -> bool:
    """Returns True if the helper can read these rows in place: float32, contiguous."""
    return logits.itemsize == 4 and logits.dtype.kind == "f" and logits.strides[1] == 4


def _history(counts: TokenCounts | None) -> tuple[int, int, int]:
    """Returns the fields of the struct lb_history: addresses of ids and counts, and their number."""
    if counts is None:
        return 0, 0, 0
    ids, n = counts.ids.buffer_info()
    return ids, counts.counts.buffer_info()[0], n


def _mask_words(masks: Sequence[Mask | None]) -> int:
    lengths = {len(mask) for mask in masks if mask is not None}
    if len(lengths) > 1:
        raise ValueError(f"masks of one call have {sorted(lengths)} words; they must have equally many")
    return max(lengths, default=0)


def _address(values: npt.NDArray[Any]) -> int:
    address: int = values.__array_interface__["data"][0]
    return address
