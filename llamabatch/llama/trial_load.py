"""A program: `python -m llamabatch.llama.trial_load PATH BYTES [CHANGES]` loads a model as an engine does.

A crash then ends only this process, not an engine. CHANGES is JSON: overrides of values, and patterns of tensors. Exit
status 0: the model can be loaded. 3: llama.cpp refused the file; the reason is on stdout as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from llamabatch.errors import InputError
from llamabatch.gguf.header import read_header, read_tensors
from llamabatch.gguf.overrides import CPU, KvOverrides
from llamabatch.gguf.pooling import POOLINGS, RANK, default_pooling, read_labels
from llamabatch.llama import library, log
from llamabatch.llama.overrides import kv_array, tensor_array
from llamabatch.llama.probe import no_core_dump
from llamabatch.utils.lifetime import end_with_parent, leave_signals_to_parent
from llamabatch.utils.system import set_limits

_REFUSED = 3
_ROOM = 2 * 2**30  # bytes of memory for the trial in addition to the weights
_MOST_TO_DECODE = 16 * 2**30  # bytes; with a larger file the trial does not decode: each token reads the file
# The lengths of the four sequences are unequal. A pass takes equally many tokens of each sequence, so the last tokens
# go into a second pass. The second pass tries states that do not begin at the first cell.
_LENGTHS = (1, 2, 2, 2)
_N_TOKENS = sum(_LENGTHS)
_N_CTX = 64  # tokens of each sequence
_HI = {"role": "user", "content": "Hi"}
_CONVERSATIONS = (
    [_HI],
    [{"role": "system", "content": "Be brief."}, _HI, {"role": "assistant", "content": "Hello"}, _HI],
)
_ALL_BYTES = "".join(map(chr, range(1, 0x180))) + " word 12345 漢字 🙂\n"


def run(path: Path, n_bytes: int, kv_overrides: KvOverrides = (), patterns: Sequence[str] = ()) -> int:
    """Uses the model as an engine would, on the CPU with a mapped file. Returns the exit status.

    The trial loads the model, renders the chat template, tokenizes text, writes all tokens, makes a context, and
    decodes.
    """
    llama = library.load(n_bytes)
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    params.use_extra_bufts = False  # avoids copies of the weights
    if kv_overrides:
        params.kv_overrides = kv_array(llama, kv_overrides)
    rules = tensor_array(tuple((pattern, CPU) for pattern in patterns))
    params.tensor_buft_overrides = ctypes.addressof(rules)
    model = llama.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        return refused(log.reason())
    refusal = _template_refusal(llama, model)
    if refusal is not None:
        return refused(refusal)
    vocabulary = llama.llama_model_get_vocab(model)
    tokens = _use_vocabulary(llama, vocabulary)
    if tokens and not llama.llama_model_has_encoder(model) and not llama.llama_model_is_diffusion(model):
        _compute(llama, model, tokens, n_bytes <= _MOST_TO_DECODE, _pooling(path))
    return 0


def refused(reason: str) -> int:
    """Prints why the file is refused. Returns the exit status of a refusal."""
    print(json.dumps({"refused": reason}), flush=True)
    return _REFUSED


def _use_vocabulary(llama: Any, vocabulary: Any) -> list[int]:
    """Tokenizes a text and writes every token as text. Returns up to seven token ids."""
    n_vocab = llama.llama_vocab_n_tokens(vocabulary)
    data = _ALL_BYTES.encode()
    room = 4 * len(data)
    tokens = (ctypes.c_int32 * room)()
    n = 0
    for special in (False, True):
        n = llama.llama_tokenize(vocabulary, data, len(data), tokens, room, True, special)
    text = ctypes.create_string_buffer(256)
    for token in range(n_vocab):
        llama.llama_token_to_piece(vocabulary, token, text, len(text), 0, True)
    return [token for token in tokens[: max(0, n)] if 0 <= token < n_vocab][:_N_TOKENS]


def _pooling(path: Path) -> str:
    """Returns the pooling for the context: that of the file, but "mean" instead of "rank" if the classification head
    does not fit its labels."""
    header = read_header(path)
    pooling = default_pooling(header.texts(), read_tensors(path))
    return pooling if pooling != RANK or read_labels(path) else "mean"


def _compute(llama: Any, model: Any, tokens: list[int], decode: bool, pooling: str) -> None:
    params = llama.llama_context_default_params()
    params.n_seq_max = len(_LENGTHS)
    params.n_ctx = _N_CTX * params.n_seq_max
    params.n_batch = params.n_ubatch = _N_CTX
    params.n_threads = params.n_threads_batch = 2
    if pooling == RANK or not _is_causal(llama, model):
        params.embeddings = True  # without this, an encoder aborts in a decode
        params.pooling_type = POOLINGS.index(pooling)
    context = llama.llama_init_from_model(model, params)
    if context and decode:
        from llamabatch.llama.batch import Batch  # imported here, because only this branch needs numpy

        ids = [tokens[i % len(tokens)] for i in range(_N_TOKENS)]
        ends = list(accumulate(_LENGTHS))
        texts = [ids[end - length : end] for end, length in zip(ends, _LENGTHS, strict=True)]
        llama.llama_decode(context, Batch(llama, _N_CTX).fill_texts(texts))


def _template_refusal(llama: Any, model: Any) -> str | None:
    """Returns the reason to refuse the chat template, or None. A template is refused if its rendering exceeds a limit.
    A template that only rejects the _CONVERSATIONS is accepted, because the model can still generate."""
    key = b"tokenizer.chat_template"
    n_bytes = llama.llama_model_meta_val_str(model, key, None, 0)
    if n_bytes < 1:
        return None
    text = ctypes.create_string_buffer(n_bytes + 1)
    llama.llama_model_meta_val_str(model, key, text, len(text))
    from llamabatch.chat.conversation import render  # imported here: models without a template do not need jinja2
    from llamabatch.chat.template import describe
    from llamabatch.chat.template_prices import TemplateLimit

    for conversation in _CONVERSATIONS:
        try:
            render(text.value.decode(errors="replace"), conversation, "<s>", "</s>")
        except InputError as error:
            if isinstance(error.__cause__, (TemplateLimit, MemoryError)):
                return f"its chat template is refused: {describe(error.__cause__)}; trial='off' loads it all the same"
    return None


def _is_causal(llama: Any, model: Any) -> bool:
    text = ctypes.create_string_buffer(256)
    llama.llama_model_meta_val_str(model, b"general.architecture", text, len(text))
    key = text.value + b".attention.causal"
    return llama.llama_model_meta_val_str(model, key, text, len(text)) < 0 or text.value != b"false"


def _limit_memory(n_bytes: int) -> None:
    """Limits the data segment. A mapped file does not count towards the limit."""
    most = n_bytes + _ROOM
    set_limits("RLIMIT_DATA", most, most)


if __name__ == "__main__":
    end_with_parent()
    leave_signals_to_parent()  # otherwise a signal to both processes would look like a fault of the file
    no_core_dump()
    _limit_memory(int(sys.argv[2]))
    changes = json.loads(sys.argv[3]) if len(sys.argv) > 3 else ((), ())
    code = run(Path(sys.argv[1]), int(sys.argv[2]), *changes)
    sys.stdout.flush()
    os._exit(code)  # freeing the model would show nothing new
