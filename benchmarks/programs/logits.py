"""Measures the distance of a model's next-token probabilities from those of another model, as a child program.

It loads the libraries of LLAMA_CPP_LIB_PATH, if that variable is set. The first message names the model, the threads,
the number of sequences and the cells of each. Every later message is one of

    {"chunks": [...], "first": n, "keep": FILE}                write the log probabilities after each token from n on
    {"chunks": [...], "first": n, "base": FILE, "rows": r}     compare with such a file: for each row the KL divergence
                                                               from the base, whether both have the same best token, and
                                                               minus the log probability of the token that follows
    {"prompt": [...], "greedy": n, "ends": [...]}              n greedy tokens after a prompt, or fewer if one is in
                                                               `ends`, and the gap between the two best logits of each

With r == 0 the program computes each chunk in one pass, as a prompt is computed. Otherwise r chunks run side by side,
and from token n on each step has one token of each chunk, as in generation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import llama_cpp as llama
import marks  # type: ignore[import-not-found]  # beside this file
import numpy as np
from lines import Handler, serve  # type: ignore[import-not-found]  # beside this file

_PASS = 512


class Logits:
    def __init__(self, options: dict[str, Any]) -> None:
        self._silence = llama.llama_log_callback(lambda level, text, data: None)
        llama.llama_log_set(self._silence, None)
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(options["model"].encode(), llama.llama_model_default_params())
        self._n_seq = options["sequences"]
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max = options["cells"] * self._n_seq, self._n_seq
        params.n_batch = params.n_ubatch = _PASS
        params.n_threads = params.n_threads_batch = options["threads"]
        params.flash_attn_type = 1
        params.kv_unified = False
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("no context")
        self._of_prompt = marks.of_prompt(llama, self._context)
        self._batch = llama.llama_batch_init(_PASS, 0, 1)
        self.n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))

    def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        if "prompt" in message:
            return self._greedy(message["prompt"], message["greedy"], message["ends"])
        chunks, first, side_by_side = message["chunks"], message["first"], message.get("rows", 0)
        n_rows = len(chunks[0]) - 1 - first
        shape = (len(chunks), n_rows, self.n_vocab)
        if "keep" in message:
            kept = np.memmap(message["keep"], np.float32, "w+", shape=shape)
            for chunk, row, logits in self._rows(chunks, first, side_by_side):
                kept[chunk, row] = _log_softmax(logits)
            return {"rows": len(chunks) * n_rows}
        base = np.memmap(message["base"], np.float32, "r", shape=tuple(message["shape"]))
        begin = message["base_first"]
        found = np.zeros((3, len(chunks), n_rows))
        for chunk, row, logits in self._rows(chunks, first, side_by_side):
            wanted, got = base[chunk, first + row - begin], _log_softmax(logits)
            divergence = float(np.dot(np.exp(wanted), wanted - got))
            following = chunks[chunk][first + row + 1]
            found[:, chunk, row] = divergence, wanted.argmax() == got.argmax(), -got[following]
        divergences, same, losses = found.reshape(3, -1).tolist()
        return {"divergences": divergences, "same": same, "losses": losses}

    def _rows(self, chunks: list[list[int]], first: int, side_by_side: int) -> Iterator[tuple[int, int, Any]]:
        """Yields the number of a chunk, the number of a row in that chunk, and the row's logits."""
        size = max(1, side_by_side)
        for begin in range(0, len(chunks), size):
            group = chunks[begin : begin + size]
            self._clear()
            for sequence, chunk in enumerate(group):
                end = first if side_by_side else len(chunk) - 1
                outputs = range(end, end) if side_by_side else range(first, end)
                self._decode([(sequence, at, chunk[at], (at in outputs) + self._of_prompt) for at in range(end)])
                for row, at in enumerate(outputs):
                    yield begin + sequence, row, self._logits(at)
            for at in range(first, len(group[0]) - 1) if side_by_side else ():
                self._decode([(sequence, at, chunk[at], 1) for sequence, chunk in enumerate(group)])
                for sequence in range(len(group)):
                    yield begin + sequence, at - first, self._logits(sequence)

    def _greedy(self, prompt: list[int], n: int, ends: list[int]) -> dict[str, Any]:
        self._clear()
        last = len(prompt) - 1
        self._decode([(0, at, token, (at == last) + self._of_prompt) for at, token in enumerate(prompt)])
        tokens: list[int] = []
        gaps: list[float] = []
        row = len(prompt) - 1
        while True:
            logits = self._logits(row)
            second, first = np.partition(logits, -2)[-2:]
            tokens.append(int(logits.argmax()))
            gaps.append(float(first - second))
            if len(tokens) == n or tokens[-1] in ends:
                return {"tokens": tokens, "gaps": gaps}
            self._decode([(0, len(prompt) + len(tokens) - 1, tokens[-1], 1)])
            row = 0

    def _clear(self) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), False)

    def _decode(self, rows: list[tuple[int, int, int, int]]) -> None:
        """Decodes rows of (sequence, position, token, mark). A mark is 1 for a row with logits, plus 2 in a prompt."""
        batch = self._batch
        for row, (sequence, position, token, output) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, output
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        batch.n_tokens = len(rows)
        if llama.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")

    def _logits(self, row: int) -> Any:
        return np.ctypeslib.as_array(llama.llama_get_logits_ith(self._context, row), (self.n_vocab,))


def _log_softmax(logits: Any) -> Any:
    exact = logits.astype(np.float64)
    exact -= exact.max()
    exact -= np.log(np.exp(exact).sum())
    return exact


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Handler]:
    logits = Logits(options)
    return {"n_vocab": logits.n_vocab}, logits.handle


if __name__ == "__main__":
    serve(start)
