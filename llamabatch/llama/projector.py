"""The projector of an mmproj file: libmtmd turns pictures and audio into tokens of a prompt and into embeddings."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llamabatch.errors import ConfigError, EngineClosedError, EngineError, ModelFileError, PromptError, describe
from llamabatch.llama import log
from llamabatch.llama.sliced_thread import SlicedThread
from llamabatch.media.pictures import pixels_of
from llamabatch.media.sounds import samples_of
from llamabatch.planning.projector import KEPT_BYTES
from llamabatch.request.media import SOUND, Media, MediaRun, MediaTokens, cell_ids
from llamabatch.utils.paths import one_line

# This function exists only in the patched build. Its last argument is one of the next three values (mtmd_weights).
WITH_WEIGHTS = "mtmd_init_with_weights"
_AS_STORED, _NO_WEIGHTS, _REPACKED = 0, 1, 2
logger = logging.getLogger(__name__)
# An encoder pass is cancelled if another picture waits and the last request for the pass was more than this number of
# seconds ago.
_ABANDONED_S = 2.0
# Embeddings are kept for this number of seconds after their last use, even if all embeddings together exceed the memory
# limit. Otherwise a run might be encoded again for each of its small chunks.
_HELD_S = 5.0
_TEXT, _IMAGE = 0, 1  # MTMD_INPUT_CHUNK_TYPE_TEXT, …_IMAGE
_PROBE = Media(b"", 64, 64)


class Embeddings(NamedTuple):
    """The embeddings and positions of one run. A run is the tokens of a picture or an audio clip, or of a part of one.

    Attributes:
        rows: embeddings, of shape (tokens, width of the model).
        steps: positions of the tokens in a prompt that begins with the run. The shape is (1, tokens), or (4, tokens)
            with M-RoPE: time, row, column, and a fourth axis.
        moves: array of shape (axes, 1). An axis has 1 if its positions depend on the run's place in the prompt, else 0.
    """

    rows: npt.NDArray[np.float32]
    steps: npt.NDArray[np.int32]
    moves: npt.NDArray[np.int32]

    def positions(self, start: int, part: slice) -> npt.NDArray[np.int32]:
        """Returns the positions of the tokens in `part`, for a run that begins at position `start` of a prompt."""
        return np.ascontiguousarray(self.steps[:, part] + start * self.moves, np.int32)


class Projector:
    """Owns an mtmd_context. `tokens` is safe from any thread; `embeddings` is for the threads of engines.

    An encoder pass may take seconds. It runs on its own thread in slices of time and pauses between two operations
    of its graph. The engine computes tokens in these pauses, so encoder and engine never compete for the cores.

    Args:
        path: the mmproj file.
        lib: the binding of llama.cpp. The same package has the module for libmtmd.
        model: the llama_model. A model with the vocabulary alone is enough.
        n_embd: width of the model's input embeddings; 0 for a vocabulary alone.
        n_threads: threads of an encoder pass.
        use_gpu: compute on a GPU, if there is one.
        token_bounds: minimum and maximum number of tokens of a picture, for encoders that accept any size; 0 means the
            value in the file.
        plans: build the graph and the buffers of an encoder pass now instead of with the first picture.
        encodes: False if `embeddings` will never be called. The weights are then not read.
        repacks: keep the weights in the layouts of the CPU's fast kernels, unless a GPU encodes.

    Attributes:
        reads_pictures: True if the file has an encoder for pictures.
        sound_rate: sampling rate of the audio encoder in samples per second; 0 if there is no audio encoder.

    Raises:
        ModelFileError: libmtmd refuses the file, or it does not fit the model.
        ConfigError: this build has no libmtmd.
    """

    def __init__(
        self,
        path: Path,
        lib: ModuleType,
        model: Any,
        *,
        n_embd: int,
        n_threads: int,
        use_gpu: bool,
        token_bounds: tuple[int, int] = (0, 0),
        plans: bool = False,
        encodes: bool = True,
        repacks: bool = False,
    ) -> None:
        self.path = path
        self._n_embd = n_embd
        self._mtmd = mtmd = _module(lib)
        self._lock = threading.Lock()  # keeps close() from freeing the context during `tokens`
        self._encode_lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], Embeddings] = OrderedDict()
        self._kept_bytes = 0
        self._asked: dict[tuple[str, int], float] = {}  # time.perf_counter() of the last use of each entry of _kept
        self._prepared: tuple[str, Any] = ("", None)  # digest and chunks of the picture that is being encoded
        self._thread = SlicedThread("llamabatch-encoder")
        self._under_way: tuple[str, int] = ("", 0)  # digest and chunk that the thread encodes
        self._asked_s = 0.0  # time.perf_counter() when a request last asked for _under_way
        params = mtmd.mtmd_context_params_default()
        params.use_gpu, params.n_threads, params.print_timings, params.warmup = use_gpu, n_threads, False, plans
        if any(token_bounds):
            params.image_min_tokens, params.image_max_tokens = (bound or -1 for bound in token_bounds)
        if encodes:
            self._callback = _pausing(lib, self._thread)  # must stay alive, because libmtmd has only its address
            params.cb_eval = self._callback
        make = _init_function(mtmd, _NO_WEIGHTS if not encodes else _REPACKED if repacks else _AS_STORED)
        log.recent_complaints()
        self._context = make(os.fsencode(path), model, params)
        if not self._context:
            raise ModelFileError(f"mmproj {one_line(path)} cannot be loaded: {log.reason()}")
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        mtmd, name = self._mtmd, f"mmproj {one_line(self.path)}"
        self.reads_pictures = bool(mtmd.mtmd_support_vision(self._context))
        self.sound_rate = max(0, mtmd.mtmd_get_audio_sample_rate(self._context))
        try:
            if self.reads_pictures:
                self.tokens(_PROBE)
            if self.sound_rate:
                self.tokens(Media(b"", self.sound_rate, 1, SOUND))
        except PromptError as error:
            raise ModelFileError(f"{name} does not fit the model: {error}") from None

    def close(self) -> None:
        with self._lock, self._encode_lock:
            self._thread.close()
            if self._context:
                self._let_go()
                self._mtmd.mtmd_free(self._context)
                self._context = None
                self._kept.clear()
                self._asked.clear()
                self._kept_bytes = 0

    def tokens(self, media: Media) -> MediaTokens:
        """Returns the tokens of a picture or an audio clip, and the text tokens around them. Does not read
        `media.data`.

        Raises:
            PromptError: libmtmd cannot read a picture of this size, or the vocabulary lacks one of the text tokens.
            EngineClosedError: the model was closed.
        """
        token_ids: list[int] = []
        runs: list[MediaRun] = []
        with self._lock, self._chunks(media, with_data=False) as chunks:
            for chunk in self._each(chunks):
                if self._mtmd.mtmd_input_chunk_get_type(chunk) == _TEXT:
                    token_ids += self._text_ids(chunk)
                    continue
                length = int(self._mtmd.mtmd_input_chunk_get_n_tokens(chunk))
                n_pos = int(self._mtmd.mtmd_input_chunk_get_n_pos(chunk))
                is_causal = not self._mtmd.mtmd_decode_use_non_causal(self._context, chunk)
                n_time = int(self._steps(chunk, (0, length - 1))[0].max()) + 1
                runs.append(MediaRun(len(token_ids), length, 0, len(runs), is_causal, n_pos, n_time))
                token_ids += cell_ids(media.digest, len(runs) - 1, length)
        return MediaTokens(tuple(token_ids), tuple(runs))

    def embeddings(self, media: Media, chunk: int, seconds: float = math.inf) -> Embeddings | None:
        """Returns the embeddings of a run, from an earlier call if they are still kept, else from a new encoder pass.

        Returns None if the wait for the pass takes longer than `seconds`. A pass of another picture may come first. The
        next call continues the pass.

        Raises:
            EngineError: the encoder failed.
            EngineClosedError: the model was closed.
        """
        key = media.digest, chunk
        end = time.perf_counter() + seconds
        with self._encode_lock:
            self._check_open()
            while key not in self._kept:
                if not self._thread.is_busy:
                    self._thread.start(partial(self._encode, media, chunk))
                    self._under_way = key
                now = time.perf_counter()
                if key == self._under_way:
                    self._asked_s = now
                elif now - self._asked_s > _ABANDONED_S:
                    self._thread.cancel()
                try:
                    if not self._thread.advance(max(0.0, end - now)):
                        return None
                except Exception as error:
                    if key == self._under_way:
                        raise
                    logger.warning("a picture of a cancelled request could not be encoded: %s", describe(error))
            self._kept.move_to_end(key)
            self._asked[key] = time.perf_counter()
            return self._kept[key]

    def _check_open(self) -> None:
        if not self._context:
            raise EngineClosedError("the model is closed")

    def _encode(self, media: Media, chunk: int) -> None:
        if self._prepared[0] != media.digest:
            self._let_go()
            self._prepared = media.digest, self._make_chunks(media, with_data=True)
        chunks = self._each(self._prepared[1])
        found = [each for each in chunks if self._mtmd.mtmd_input_chunk_get_type(each) != _TEXT][chunk]
        log.recent_complaints()
        code = self._mtmd.mtmd_encode_chunk(self._context, found)
        if self._thread.is_cancelled:
            return
        if code != 0:
            raise EngineError(f"{_named(media)} could not be encoded: {log.reason()}")
        n_rows = int(self._mtmd.mtmd_input_chunk_get_n_tokens(found))
        pointer = self._mtmd.mtmd_get_output_embd(self._context)
        rows = np.ctypeslib.as_array(pointer, shape=(n_rows, self._n_embd)).copy()
        if not np.isfinite(rows).all():  # the file is damaged, or llama.cpp's graph left memory unwritten
            raise EngineError(f"{_named(media)} could not be encoded: llama.cpp gave values that are not finite")
        steps = self._steps(found, range(n_rows))
        self._kept[media.digest, chunk] = Embeddings(rows, steps, self._steps(found, (0,), 1) - steps[:, :1])
        self._kept_bytes += rows.nbytes
        unused = time.perf_counter() - _HELD_S
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            if self._asked.get(oldest, 0.0) > unused:
                break
            self._kept_bytes -= self._kept.pop(oldest).rows.nbytes
            self._asked.pop(oldest, None)

    def _steps(self, chunk: Any, tokens: Iterable[int], start: int = 0) -> npt.NDArray[np.int32]:
        """Returns the positions of the given tokens of a chunk, in the form of Embeddings.steps. The chunk begins at
        position `start`."""
        if not self._mtmd.mtmd_decode_use_mrope(self._context):
            return np.array([[start + token for token in tokens]], np.int32)
        if self._mtmd.mtmd_input_chunk_get_type(chunk) != _IMAGE:  # audio has one dimension, like text
            return np.tile(np.array([start + token for token in tokens], np.int32), (4, 1))
        image = self._mtmd.mtmd_input_chunk_get_tokens_image(chunk)
        found = [self._mtmd.mtmd_image_tokens_get_decoder_pos(image, start, token) for token in tokens]
        return np.array([(each.t, each.y, each.x, each.z) for each in found], np.int32).T

    def _let_go(self) -> None:
        if self._prepared[1] is not None:
            self._mtmd.mtmd_input_chunks_free(self._prepared[1])
        self._prepared = ("", None)

    @contextlib.contextmanager
    def _chunks(self, media: Media, *, with_data: bool) -> Iterator[Any]:
        chunks = self._make_chunks(media, with_data=with_data)
        try:
            yield chunks
        finally:
            self._mtmd.mtmd_input_chunks_free(chunks)

    def _make_chunks(self, media: Media, *, with_data: bool) -> Any:
        """Returns the mtmd_input_chunks of a picture or an audio clip. Without data, the chunks contain only sizes."""
        self._check_open()
        mtmd = self._mtmd
        bitmap = self._bitmap(media, with_data=with_data)
        chunks = mtmd.mtmd_input_chunks_init()
        part = mtmd.mtmd_input_part(bitmap=bitmap)
        parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
        log.recent_complaints()
        code = mtmd.mtmd_tokenize_from_parts(self._context, chunks, parts, 1, False)
        mtmd.mtmd_bitmap_free(bitmap)
        if code != 0:
            mtmd.mtmd_input_chunks_free(chunks)
            raise PromptError(f"{_named(media)} cannot be read: {log.reason()}")
        return chunks

    def _bitmap(self, media: Media, *, with_data: bool) -> Any:
        if media.kind == SOUND:
            data = ctypes.c_char_p(samples_of(media, self.sound_rate) if with_data else None)  # libmtmd copies the data
            samples = ctypes.cast(data, ctypes.POINTER(ctypes.c_float)) if with_data else None
            return self._mtmd.mtmd_bitmap_init_from_audio(media.width, samples)
        data = ctypes.c_char_p(pixels_of(media) if with_data else None)
        pixels = ctypes.cast(data, ctypes.POINTER(ctypes.c_uint8)) if with_data else None
        return self._mtmd.mtmd_bitmap_init(media.width, media.height, pixels)

    def _each(self, chunks: Any) -> list[Any]:
        count = self._mtmd.mtmd_input_chunks_size(chunks)
        return [self._mtmd.mtmd_input_chunks_get(chunks, at) for at in range(count)]

    def _text_ids(self, chunk: Any) -> list[int]:
        count = ctypes.c_size_t()
        pointer = self._mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
        found = [int(pointer[at]) for at in range(count.value)]
        if min(found, default=0) < 0:
            raise PromptError("the vocabulary lacks a token that this model puts around pictures and sounds")
        return found


def _named(media: Media) -> str:
    if media.kind == SOUND:
        return f"a sound of {media.width:,} samples"
    return f"a picture of {media.width} x {media.height} pixels"


def _module(lib: ModuleType) -> ModuleType:
    """Returns the binding's module for libmtmd and forwards its log. Raises ConfigError if the module is missing."""
    try:
        mtmd = importlib.import_module(f"{lib.__name__}.mtmd_cpp")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ConfigError(f"mmproj needs libmtmd, which this build of llama.cpp does not have: {error}") from error
    log.forward_media(lib, mtmd)
    return mtmd


def _pausing(lib: ModuleType, thread: SlicedThread) -> Any:
    """Returns a callback for ggml's scheduler. The scheduler calls it before each operation of a graph (`asks` is True)
    and after it."""

    def pause(_tensor: Any, asks: bool, _data: Any) -> bool:
        return True if asks else thread.may_go_on()

    return lib.ggml_backend_sched_eval_callback(pause)


def _init_function(mtmd: ModuleType, weights: int) -> Any:
    """Returns the function that makes a context with `weights`. Without the patch, the weights are always
    _AS_STORED."""
    make = getattr(mtmd._libmtmd, WITH_WEIGHTS, None)
    if make is None or weights == _AS_STORED:
        return mtmd.mtmd_init_from_file
    make.argtypes = [*mtmd.mtmd_init_from_file.argtypes, ctypes.c_int]
    make.restype = mtmd.mtmd_init_from_file.restype
    return lambda *arguments: make(*arguments, weights)
