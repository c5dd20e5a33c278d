"""A program: `python -m llamabatch.llama.probe` runs the bundled model with extra buffers.

Exit status 0: the build works. 3: the model or its context cannot be made. 4: the logits are wrong. A broken build
may also end the process by a signal.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from llamabatch.llama import library, log
from llamabatch.utils import paths
from llamabatch.utils.system import set_limits

_BATCH_SIZES = (1, 8)  # llama.cpp has separate kernels for one row and for several


def run(model_path: Path, *, use_extra_bufts: bool = True, batch_sizes: tuple[int, ...] = _BATCH_SIZES) -> int:
    """Loads a model on the CPU and decodes one batch of each size. Returns the exit status."""
    llama = library.load(model_path.stat().st_size)
    model_params = llama.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model_params.use_extra_bufts = use_extra_bufts
    model = llama.llama_model_load_from_file(os.fsencode(model_path), model_params)
    if not model:
        print("the model could not be loaded:", "; ".join(log.recent_complaints()))
        return 3
    context_params = llama.llama_context_default_params()
    context_params.n_ctx = 64 * max(batch_sizes)
    context_params.n_seq_max = max(batch_sizes)
    context_params.n_threads = context_params.n_threads_batch = 2
    context = llama.llama_init_from_model(model, context_params)
    if not context:
        print("no context could be made:", "; ".join(log.recent_complaints()))
        return 3
    n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    healthy = all(_decode(llama, context, n_vocab, rows) for rows in batch_sizes)
    llama.llama_free(context)
    llama.llama_model_free(model)
    return 0 if healthy else 4


def _decode(llama: ModuleType, context: Any, n_vocab: int, rows: int) -> bool:
    """Decodes a step of `rows` sequences. Returns True if the last row's logits are finite and not all equal."""
    import numpy as np

    batch = llama.llama_batch_init(rows, 0, 1)
    batch.n_tokens = rows
    for row in range(rows):
        batch.token[row] = row % n_vocab
        batch.pos[row] = 0
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = row
        batch.logits[row] = 1
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    status = llama.llama_decode(context, batch)
    healthy = False
    if status == 0:
        row = llama.llama_get_logits_ith(context, rows - 1)
        logits = np.ctypeslib.as_array(row, shape=(n_vocab,))
        healthy = bool(np.isfinite(logits).all()) and float(logits.std()) > 0
    llama.llama_batch_free(batch)
    return healthy


def no_core_dump() -> None:
    """Turns core files off, because a crash of this program is an expected result."""
    set_limits("RLIMIT_CORE", 0, 0)


if __name__ == "__main__":
    no_core_dump()
    sys.exit(run(Path(sys.argv[1]) if len(sys.argv) > 1 else paths.bundled_model()))
