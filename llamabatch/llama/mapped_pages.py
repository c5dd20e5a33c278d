"""Advises the system to read the small tensors of a model's mapped file page by page.

The system reads an evicted page again with the pages around it, up to 16 MiB on some disks. The small tensors of layer
norms are spread over the file. In a cgroup with little memory, the pages around one norm evicted the page of another
norm, and each step read most of the file.
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

_MADV_RANDOM = 1  # linux/mman-common.h; Python has the name on Linux only


def read_by_page(path: Path, features: frozenset[str]) -> None:
    """Lets Linux read some tensors of a mapped model page by page: vectors, and an embedding matrix that is used only
    to look up rows.

    Args:
        features: names of the kernels for which this load repacks weights, as in planning/weights.py.
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
    except (OSError, ModelFileError) as error:  # without the advice, the model is only slower
        logger.debug("no advice on the pages of %s: %s", path, error)


def _advise(path: Path, pieces: Iterable[tuple[int, int]]) -> None:
    """Advises MADV_RANDOM for pieces (offset, size) of a file, wherever this process has mapped them."""
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
    """Returns the mappings of a file in this process, each as address, offset in the file, and size in bytes."""
    inode, name = str(path.stat().st_ino), path.resolve().name
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and parts[4] == inode and parts[5].endswith(name):
            start, end = (int(each, 16) for each in parts[0].split("-"))
            found.append((start, int(parts[2], 16), end - start))
    return found
