"""Times llama_decode alone, and sums the log probability of texts, as a child program: no scheduler, no sampling.

It loads the libraries of LLAMA_CPP_LIB_PATH, if that variable is set. The first message names the model, the threads,
the sequences, the cells of each sequence, and whether flash attention is used. Every later message is one of

    {"fill": n}                  prefill n tokens into every sequence; returns the seconds of the first sequence
    {"rows": r, "steps": k}      run k decode steps with one token for each of the first r sequences; returns their
                                 seconds
    {"texts": [[n, tokens]]}     return the sum of the log probabilities of all but the first n tokens of each text

If the first message has "profile", the answers to "fill" and "rows" also contain three objects, for the whole prompt or
for the fastest step. "operations" has the seconds of each kind of operation; matrix products are divided by the type of
the weights. "products" has the number of multiplications of each kind of product, and "weight_bytes" the bytes of the
weights that they read (of experts: all of a layer's). Profiling makes the threads wait for each other after each
operation, so the steps are a little slower.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import marks  # type: ignore[import-not-found]  # beside this file
import numpy as np
from lines import Handler, serve  # type: ignore[import-not-found]  # beside this file


class _Watch:
    """A callback that llama.cpp's scheduler calls before and after each operation. It adds up their seconds."""

    _SHAPE, _OP, _SOURCES = 16, 80, 152  # offsets in ggml_tensor

    def __init__(self, libraries: Path) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.products: dict[str, int] = defaultdict(int)
        self.weight_bytes: dict[str, int] = defaultdict(int)
        library = ctypes.CDLL(str(next(libraries.glob("libggml-base.*"))))
        self._type_name, self._op_name = library.ggml_type_name, library.ggml_op_name
        self._type_name.restype = self._op_name.restype = ctypes.c_char_p
        self._bytes = library.ggml_nbytes
        self._bytes.restype, self._bytes.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
        self._begin = 0.0

    def __call__(self, tensor: int, before: bool, _data: object) -> bool:
        if before:
            self._begin = time.perf_counter()
            return True
        spent = time.perf_counter() - self._begin
        name: str = self._op_name(ctypes.c_int.from_address(tensor + self._OP).value).decode()
        if name.startswith("MUL_MAT"):
            weights = ctypes.c_void_p.from_address(tensor + self._SOURCES).value
            assert weights is not None
            name += " " + self._type_name(ctypes.c_int.from_address(weights).value).decode()
            self.products[name] += math.prod(self._shape(tensor)) * self._shape(weights)[0]
            self.weight_bytes[name] += self._bytes(weights)
        self.seconds[name] += spent
        return True

    def _shape(self, tensor: int) -> list[int]:
        return list((ctypes.c_int64 * 4).from_address(tensor + self._SHAPE))

    def clear(self) -> None:
        for counts in (self.seconds, self.products, self.weight_bytes):
            counts.clear()

    def figures(self) -> dict[str, dict[str, float]]:
        return {
            "operations": dict(self.seconds), "products": dict(self.products), "weight_bytes": dict(self.weight_bytes)
        }  # fmt: skip


class Steps:
    def __init__(self, options: dict[str, Any]) -> None:
        import llama_cpp as llama

        self._llama = llama
        self._silence = llama.llama_log_callback(lambda level, text, data: None)
        llama.llama_log_set(self._silence, None)
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(options["model"].encode(), llama.llama_model_default_params())
        self.n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self.facts = {
            "n_vocab": self.n_vocab,
            "n_params": llama.llama_model_n_params(self._model),
            "n_embd": llama.llama_model_n_embd(self._model),
            "weight_bytes": llama.llama_model_size(self._model),
        }
        self._n_seq = options["sequences"]
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max = options["cells"] * self._n_seq, self._n_seq
        params.n_batch = params.n_ubatch = 512
        params.n_outputs_max = self._n_seq
        params.n_threads = params.n_threads_batch = options["threads"]
        params.flash_attn_type = int(options["flash_attention"])
        params.kv_unified = False
        self._watch: _Watch | None = None
        if options.get("profile"):
            self._watch = _Watch(Path(llama.__file__).parent / "lib")
            self._callback = llama.ggml_backend_sched_eval_callback(self._watch)
            params.cb_eval = self._callback
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("no context")
        self._of_prompt = marks.of_prompt(llama, self._context)
        self._batch = llama.llama_batch_init(512, 0, 1)
        self._positions = [0] * self._n_seq
        self._filled = 0

    def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        if "fill" in message:
            return {"seconds": self._fill(message["fill"]), **self._prompt}
        if "texts" in message:
            return {"sum": sum(self._score(texts) for texts in _chunks(message["texts"], self._n_seq))}
        steps = [(self._step(message["rows"]), self._figures()) for _ in range(message["steps"])]
        fastest = min(steps, key=lambda step: step[0])
        return {"seconds": [seconds for seconds, _ in steps], **fastest[1]}

    def _figures(self) -> dict[str, dict[str, float]]:
        return {} if self._watch is None else self._watch.figures()

    def _decode(self, rows: list[tuple[int, int, int, int]]) -> float:
        """Decodes rows and returns the seconds.

        Rows are (sequence, position, token, mark). A mark is 1 for a row with logits, plus 2 in a prompt.
        """
        batch = self._batch
        for row, (sequence, position, token, output) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, output
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        batch.n_tokens = len(rows)
        if self._watch is not None:
            self._watch.clear()
        begin = time.perf_counter()
        if self._llama.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        self._llama.llama_synchronize(self._context)
        return time.perf_counter() - begin

    def _clear(self) -> None:
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), False)
        self._positions = [0] * self._n_seq

    def _fill(self, n: int) -> float:
        self._clear()
        tokens = [(0, i, (i * 17 + 3) % (self.n_vocab - 16) + 16, (i == n - 1) + self._of_prompt) for i in range(n)]
        seconds = 0.0
        prompt: dict[str, dict[str, float]] = {}
        for at in range(0, n, 512):
            seconds += self._decode(tokens[at : at + 512])
            for what, counts in self._figures().items():
                sums = prompt.setdefault(what, defaultdict(float))
                for name, count in counts.items():
                    sums[name] += count
        self._prompt = prompt
        memory = self._llama.llama_get_memory(self._context)
        for sequence in range(1, self._n_seq):
            self._llama.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        self._positions, self._filled = [n] * self._n_seq, n
        self._step(self._n_seq)  # the first step after seq_cp copies the cells
        return seconds

    def _step(self, rows: int) -> float:
        """Decodes one token of each of the first `rows` sequences, then removes it, so that all lengths stay equal."""
        seconds = self._decode([(s, self._filled, 16 + s, 1) for s in range(rows)])
        memory = self._llama.llama_get_memory(self._context)
        for sequence in range(rows):
            self._llama.llama_memory_seq_rm(memory, sequence, self._filled, -1)
        return seconds

    def _score(self, scored: list[tuple[int, list[int]]]) -> float:
        self._clear()
        total, texts = 0.0, [text for _, text in scored]
        for position in range(max(map(len, texts)) - 1):
            going = [s for s, text in enumerate(texts) if position + 1 < len(text)]
            self._decode([(s, position, texts[s][position], 1) for s in going])
            for row, sequence in enumerate(going):
                if position + 1 < scored[sequence][0]:
                    continue
                address = self._llama.llama_get_logits_ith(self._context, row)
                logits = np.ctypeslib.as_array(address, (self.n_vocab,)).astype(np.float64)
                top = logits.max()
                total += logits[texts[sequence][position + 1]] - top - np.log(np.exp(logits - top).sum())
        return float(total)


def _chunks(texts: list[tuple[int, list[int]]], size: int) -> list[list[tuple[int, list[int]]]]:
    texts = sorted(
        texts, key=lambda text: len(text[1]), reverse=True
    )  # longest first, so that unfinished texts have the first sequences
    return [texts[at : at + size] for at in range(0, len(texts), size)]


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Handler]:
    steps = Steps(options)
    return steps.facts, steps.handle


if __name__ == "__main__":
    serve(start)
