"""Advice to the system on the mapped file of a loaded model: what is read in small pieces is read by the page.

A page that the system took back is read again with those around it, up to 16 MiB on some disks. Norms lie all over a
file. In a small cgroup the pages around one norm took the place of another's, and each step read most of the file.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
from collections.abc import Iterable
from pathlib import Path

from llamabatch.errors import ModelFileError
from llamabatch.gguf.header import read_parts
from llamabatch.planning.weights import is_only_looked_up

logger = logging.getLogger(__name__)

_MADV_RANDOM = 1  # linux/mman-common.h; Python has the name on Linux alone


def read_by_page(path: Path, features: frozenset[str]) -> None:
    """Lets Linux read the vectors of a mapped model, and an embedding that is only looked up, by the page.

    Args:
        features: those for which this load repacks weights, as in planning.memory.weights.
    """
    if sys.platform != "linux":
        return
    try:
        headers = read_parts(path)
        tensors = [tensor for header in headers for tensor in header.tensors]
        for header in headers:
            pieces = [
                (header.data_start + tensor.offset, tensor.n_bytes)
                for tensor in header.tensors
                if len(tensor.dims) < 2 or is_only_looked_up(tensor, tensors, features)
            ]
            _advise(header.path, pieces)
    except (OSError, ModelFileError) as error:  # it is only slower without
        logger.debug("no advice on the pages of %s: %s", path, error)


def _advise(path: Path, pieces: Iterable[tuple[int, int]]) -> None:
    """Advises MADV_RANDOM for pieces of a file, (byte, bytes), wherever this process has mapped them."""
    libc, page = ctypes.CDLL(None), mmap.PAGESIZE
    mapped = _mappings(path)
    for start, n_bytes in pieces:
        first, last = start // page * page, -(-(start + n_bytes) // page) * page
        for address, offset, size in mapped:
            low, high = max(first, offset), min(last, offset + size)
            if low < high:
                at = ctypes.c_void_p(address + low - offset)
                libc.madvise(at, ctypes.c_size_t(high - low), _MADV_RANDOM)


def _mappings(path: Path) -> list[tuple[int, int, int]]:
    """The mappings of a file in this process: address, byte of the file, bytes."""
    inode, name = str(path.stat().st_ino), path.resolve().name
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and parts[4] == inode and parts[5].endswith(name):
            start, end = (int(each, 16) for each in parts[0].split("-"))
            found.append((start, int(parts[2], 16), end - start))
    return found
