"""A separate context for embeddings and scores of prompts, on the weights of an open model."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamabatch.config import ResolvedConfig
from llamabatch.errors import EngineClosedError, EngineError
from llamabatch.gguf.pooling import POOLINGS, RANK
from llamabatch.llama import library, log
from llamabatch.llama.batch import Batch
from llamabatch.llama.context import context_params
from llamabatch.llama.model import Model
from llamabatch.llama.projector import Projector
from llamabatch.planning.passes import padded
from llamabatch.request.adapters import AdapterSet
from llamabatch.request.media import MediaRun
from llamabatch.request.request import Request

MAX_TEXTS = 64  # maximum number of texts in a pass; each text is a sequence of the context


@dataclass
class EmbedCounts:
    """Numbers of embedding passes, prompts and tokens since the start."""

    embed_passes: int = 0
    embed_texts: int = 0
    embed_tokens: int = 0


class Embedder:
    """Computes embeddings or scores of texts. Only one thread may use it at a time. Close it before its model.

    The first text makes the context, and a longer text replaces it with a larger context. The context is kept small
    because llama.cpp reserves logits of the whole vocabulary for each token of a pass.
    """

    def __init__(self, model: Model, config: ResolvedConfig) -> None:
        self.counts = EmbedCounts()
        self._lib = library.load()
        self._model = model
        self._config = config
        self._n_tokens = 0  # maximum number of tokens in the context
        self._handle: Any = None
        self._adapters: AdapterSet = ()

    def close(self) -> None:
        if self._handle:
            self._lib.llama_free(self._handle)
        self._handle = None
        self._n_tokens = 0
        self._adapters = ()

    def forget_adapter(self, name: str) -> None:
        """Removes an adapter from the context, before the adapter is unloaded."""
        if self._handle and any(name == held for held, _ in self._adapters):
            self._set_adapters(())

    def run(self, texts: Sequence[Sequence[int]], adapters: AdapterSet) -> list[array[float]]:
        """Computes one pass. Returns float32 values for each text. Their meaning depends on Model.pooling.

        "none" gives a vector of n_embd elements for each token, one after another. "rank" gives the outputs of the
        classification head. All other poolings give one vector.

        Raises:
            EngineError: there is no memory for the context, or the pass fails. The embedder stays usable.
            EngineClosedError: the pass was halted.
        """
        self._prepare(sum(map(len, texts)), adapters)
        self.counts.embed_texts += len(texts)
        return self._pass(self._batch.fill_texts(texts), [len(ids) for ids in texts])

    def encodes(self, request: Request, seconds: float) -> bool:
        """Encodes the pictures and the audio of a prompt for at most `seconds`. Returns True once all are encoded.

        Raises:
            EngineError: the encoder failed, or the model cannot read a prompt in several passes.
            EngineClosedError: the model was closed.
        """
        if not self._model.is_causal:
            raise EngineError("this model reads a text in both directions, in one pass; such a pass has no pictures")
        end = time.perf_counter() + seconds
        return all(
            self._projector.embeddings(request.media[run.media], run.chunk, max(0.0, end - time.perf_counter()))
            for run in request.media_runs
        )

    def run_media(self, request: Request) -> array[float]:
        """Computes a prompt with pictures or audio. The result and the errors are those of `run`. Each piece of text
        and each run of media is a separate pass, because llama.cpp does not mix token ids and embeddings in a pass."""
        token_ids, at, position = request.prompt_token_ids, 0, 0
        self._prepare(len(token_ids), request.adapters)
        self.counts.embed_texts += 1
        found: list[tuple[int, array[float]]] = []  # for each pass: the number of its tokens, and its result
        for run in (*request.media_runs, None):
            text = token_ids[at:] if run is None else token_ids[at : run.start]
            if text:
                [part] = self._pass(self._batch.fill_texts([text], position), [len(text)])
                found.append((len(text), part))
                position += len(text)
            if run is not None:
                found.append((run.length, self._media_pass(request, run, position)))
                position += run.n_pos
                at = run.end
        return self._joined(found)

    def _media_pass(self, request: Request, run: MediaRun, position: int) -> array[float]:
        encoded = self._projector.embeddings(request.media[run.media], run.chunk)
        assert encoded is not None  # only a call with `seconds` returns None
        positions = encoded.positions(position, slice(run.length))
        self._lib.llama_set_causal_attn(self._handle, run.is_causal)
        try:
            [part] = self._pass(self._batch.fill_media(0, encoded.rows, positions), [run.length])
        finally:
            self._lib.llama_set_causal_attn(self._handle, True)
        return part

    def _joined(self, found: list[tuple[int, array[float]]]) -> array[float]:
        """Joins the results of a prompt's passes. `found` has two values for each pass: the number of tokens, and the
        result."""
        pooling, parts = self._model.pooling, [part for _, part in found]
        if pooling == "none":
            return array("f", np.concatenate(parts).tobytes())
        if pooling == "mean":
            mean = np.average(np.array(parts, np.float64), axis=0, weights=[count for count, _ in found])
            return array("f", mean.astype(np.float32).tobytes())
        return parts[0 if pooling == "cls" else -1]

    @property
    def _projector(self) -> Projector:
        if self._model.projector is None:
            raise EngineError("a prompt has a picture or a sound, and no mmproj was given")
        return self._model.projector

    def _prepare(self, n_tokens: int, adapters: AdapterSet) -> None:
        """Makes the context ready for a pass: with room for the tokens, with these adapters, and with empty cells."""
        if n_tokens > self._n_tokens:
            self._make(n_tokens)
        if adapters != self._adapters:
            self._set_adapters(adapters)
        memory = self._lib.llama_get_memory(self._handle)
        if memory:  # an encoder has no llama_memory
            self._lib.llama_memory_clear(memory, False)

    def _pass(self, batch: Any, lengths: list[int]) -> list[array[float]]:
        """Computes a batch of sequences. Returns the values of each sequence. `lengths` has the number of tokens of
        each sequence."""
        code = int(self._lib.llama_decode(self._handle, batch))
        if code != 0 and self._model.halt.is_halted:
            raise EngineClosedError("the engine was closed while it computed")
        if code != 0:
            raise EngineError(f"llama_decode failed: {code}")
        self.counts.embed_passes += 1
        self.counts.embed_tokens += sum(lengths)
        if self._model.pooling == "none":
            return self._token_vectors(lengths)
        return [self._vector(number) for number in range(len(lengths))]

    def _make(self, n_tokens: int) -> None:
        self.close()
        lib, config = self._lib, self._config
        n_tokens = padded(max(n_tokens, min(config.n_ubatch, config.n_batch)))
        params = context_params(lib, self._model, config)
        params.n_ctx = params.n_batch = params.n_ubatch = params.n_outputs_max = n_tokens
        params.n_seq_max = min(MAX_TEXTS, n_tokens)
        params.kv_unified = True
        params.embeddings = True
        params.pooling_type = POOLINGS.index(self._model.pooling)
        log.recent_complaints()
        self._handle = lib.llama_init_from_model(self._model.handle, params)
        if not self._handle:
            reason = log.reason()
            raise EngineError(f"no context for embeddings of {n_tokens} tokens can be made: {reason}")
        self._n_tokens = n_tokens
        self._batch = Batch(lib, n_tokens, marks_prompts=library.takes_prompts(self._handle))

    def _set_adapters(self, adapters: AdapterSet) -> None:
        self._model.adapters.apply(self._handle, self._adapters, adapters)
        self._adapters = adapters

    def _vector(self, number: int) -> array[float]:
        pointer = self._lib.llama_get_embeddings_seq(self._handle, number)
        if not pointer:
            raise EngineError("llama.cpp gave no embedding")
        length = len(self._model.labels) if self._model.pooling == RANK else self._model.n_embd_out
        values = np.ctypeslib.as_array(pointer, shape=(length,))
        return array("f", values.astype(np.float32).tobytes())

    def _token_vectors(self, lengths: list[int]) -> list[array[float]]:
        pointer = self._lib.llama_get_embeddings(self._handle)
        if not pointer:
            raise EngineError("llama.cpp gave no embedding")
        rows = np.ctypeslib.as_array(pointer, shape=(sum(lengths), self._model.n_embd_out))
        parts = np.split(rows, np.cumsum(lengths)[:-1])
        return [array("f", part.astype(np.float32).tobytes()) for part in parts]
