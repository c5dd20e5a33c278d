"""A loaded GGUF model: its weights (or its vocabulary alone), its metadata, and its abilities."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamabatch.config import ROPE_OPTIONS, SPLIT_MODES, EngineConfig, ResolvedConfig
from llamabatch.errors import ConfigError, EngineClosedError, ModelFileError
from llamabatch.gguf.header import as_text, read_header, read_tensors
from llamabatch.gguf.mmproj import resolve_mmproj
from llamabatch.gguf.overrides import KvOverrides, overridden
from llamabatch.gguf.pooling import NO_DENSE_LAYER, RANK, default_pooling, lacks_dense_layer, read_labels
from llamabatch.gguf.reader import TensorInfo, Value
from llamabatch.gguf.resolve import file_bytes
from llamabatch.gguf.windows import UNCOPIED, keeps_snapshots, keeps_windows_whole
from llamabatch.llama import devices, library, log, overrides
from llamabatch.llama.adapters import Adapters
from llamabatch.llama.halt import Halt
from llamabatch.llama.mapped_pages import read_by_page
from llamabatch.llama.projector import Projector
from llamabatch.llama.tokenizer import NativeTokenizer
from llamabatch.llama.tuned_load import profile_for
from llamabatch.llama.vetting import ensure_loadable, ensure_projector_loadable
from llamabatch.media.sources import NOWHERE, MediaSources
from llamabatch.planning.machine import usable_cores
from llamabatch.utils.cancellation import can_be_cancelled, is_cancelled
from llamabatch.utils.lifetime import give_memory_back
from llamabatch.utils.paths import one_line

if TYPE_CHECKING:
    from llamabatch.sampling.grammar_compiler import Grammars

logger = logging.getLogger(__name__)

SEVERAL_POSITIONS = (8, 40)  # LLAMA_ROPE_TYPE_MROPE, LLAMA_ROPE_TYPE_IMROPE: a token has four positions


class Model(NativeTokenizer):
    """Owns a llama_model. Any thread may tokenize. Each owner closes its contexts before the model.

    Args:
        path: the .gguf file; gguf/resolve.py finds the file of a model name.
        config: placement of the weights; None loads the vocabulary alone.
        vocab_only: load the vocabulary alone. The digest check and the trial load are still done if the config asks for
            them.
        pooling: as EngineConfig.pooling; used only without a config.

    Attributes:
        projector: encodes the pictures and the audio of prompts; None if the config names no mmproj file.
        media_sources: the folder and the domains that are allowed for pictures in prompts.
        halt: stops the computations of all owners. Use it only if all owners will close the model.

    Raises:
        ModelFileError: llamabatch or llama.cpp refuses the file; the message gives the reason.
        EngineClosedError: the load was cancelled.
    """

    def __init__(
        self, path: Path, config: EngineConfig | None = None, *, vocab_only: bool = False, pooling: str = "auto"
    ) -> None:
        self.path = path
        # The overrides also apply when the vocabulary alone is loaded.
        self._kv_overrides: KvOverrides = () if config is None else config.kv_overrides
        self.media_sources = NOWHERE
        if config is not None:
            self.media_sources = MediaSources(config.allowed_local_media_path, config.allowed_media_domains)
        self._changes_rope = config is not None and config.changes_rope
        if config is None:
            ensure_loadable(path)
        else:
            ensure_loadable(path, config.trial, config.sha256, config.kv_overrides, config.override_tensor)
            pooling = config.pooling
        super().__init__()
        self._owners = 1
        self.halt = Halt()
        self._grammars: Grammars | None = None
        weights = None if vocab_only else config
        self._load(weights)
        self.metadata = self._read_metadata()
        self._arch = self.metadata.get("general.architecture", "")
        self._read_vocabulary()
        self._read_kind(pooling, weights)
        self.adapters = Adapters(self._lib, self.handle, self.metadata)
        try:
            self.projector = None if config is None else self._open_projector(config, encodes=weights is not None)
        except (ConfigError, ModelFileError):
            self._lib.llama_model_free(self.handle)
            raise

    def _load(self, config: EngineConfig | None) -> None:
        """Loads the file, or the vocabulary alone if `config` is None. Raises ConfigError, ModelFileError."""
        # The profile comes first because it decides how the library is loaded.
        profile = profile_for(self.path, config) if config is not None else None
        self._lib = library.load(file_bytes(self.path))
        library.check_usable()
        params = self._lib.llama_model_default_params()
        if config is None:
            params.vocab_only = True
            # With an empty list of devices, llama.cpp asks no GPU for its memory. Such a request would create a context
            # on the GPU.
            self._native_arrays = [_use_devices(params, ())]
        else:
            if profile is not None:
                config, _ = profile.fill(config)
            library.use_numa(config.numa)
            # The arrays must stay alive because llama.cpp reads them through pointers.
            self._native_arrays = _place(self._lib, params, config)
        if self._kv_overrides:
            params.kv_overrides = overrides.kv_array(self._lib, self._kv_overrides)  # `params` keeps the array alive
        if can_be_cancelled():  # `on_progress` must stay alive until the load has ended
            on_progress = self._lib.llama_progress_callback(lambda _share, _data: not is_cancelled())
            params.progress_callback = on_progress
        log.recent_complaints()  # drops the complaints of earlier calls
        with log.listening(self._lib) as lines:
            self.handle = self._lib.llama_model_load_from_file(os.fsencode(self.path), params)
        if not self.handle:
            if is_cancelled():
                raise EngineClosedError(f"the load of {one_line(self.path)} was cancelled")
            reason = log.reason()
            raise ModelFileError(f"{one_line(self.path)} cannot be loaded: {reason}")
        self.vocab_handle = self._lib.llama_model_get_vocab(self.handle)
        try:
            self._check_effects(config, lines)
            self._check_marks()
        except (ConfigError, ModelFileError):
            self._lib.llama_model_free(self.handle)
            raise
        if config is not None and config.use_mmap and not config.use_mlock:
            read_by_page(self.path, library.repack_features() if params.use_extra_bufts else frozenset())

    def _open_projector(self, config: EngineConfig, *, encodes: bool) -> Projector | None:
        """Returns the projector of the config's mmproj file, or None if the config names no file. Raises the errors of
        Projector."""
        if config.mmproj is None:
            return None
        path = resolve_mmproj(config.mmproj, config.model)
        ensure_projector_loadable(path, self.path, config.trial)
        threads = config.n_threads_batch if config.n_threads_batch != "auto" else config.n_threads
        return Projector(
            path,
            self._lib,
            self.handle,
            n_embd=int(self._lib.llama_model_n_embd_inp(self.handle)),
            n_threads=threads if threads != "auto" else usable_cores(),
            use_gpu=encodes and config.n_gpu_layers != 0,
            token_bounds=(config.image_min_tokens, config.image_max_tokens),
            encodes=encodes,
            repacks=encodes and _uses_extra_bufts(config),
        )

    def _read_kind(self, pooling: str, config: EngineConfig | None) -> None:
        """Stores the abilities of the model, because clients may read them after a failed engine has freed the model.

        Args:
            config: None if the vocabulary alone is loaded.
        """
        # Recurrent and hybrid models have state that cannot be cut at a position.
        self.is_recurrent = bool(
            self._lib.llama_model_is_recurrent(self.handle) or self._lib.llama_model_is_hybrid(self.handle)
        )
        self._rotates = int(self._lib.llama_model_rope_type(self.handle)) not in SEVERAL_POSITIONS
        # `window` is the size of the sliding window in tokens; 0 if all layers attend to all tokens.
        self.window = 0 if config is None else int(self._lib.llama_model_n_swa(self.handle))
        self.has_window = self._window_in_file() if config is None else self.window > 0
        # The pooling is one of the names in gguf/pooling.py.
        self.pooling = default_pooling(self.metadata, self._tensors()) if pooling == "auto" else pooling
        # The labels name the outputs of the classification head. They are empty unless the pooling is "rank".
        self.labels = read_labels(self.path) if self.pooling == RANK else ()
        if self.labels and config is not None and lacks_dense_layer(self.metadata, self._tensors()):
            logger.warning("%s: %s", self.path, NO_DENSE_LAYER)
        self.cannot_generate = self._kind_without_generation()
        # These texts tell users why the model gives no embeddings or no scores. The value None means that it does.
        self.cannot_embed = self._kind_without_embedding()
        self.cannot_classify = self._kind_without_classes()
        self.n_ctx_train = int(self._lib.llama_model_n_ctx_train(self.handle))
        self.n_embd_out = self._embd_in_file() if config is None else int(self._lib.llama_model_n_embd_out(self.handle))

    def _check_effects(self, config: EngineConfig | None, lines: list[str] | None) -> None:
        """Raises ConfigError for an option that has no effect on this model.

        Args:
            config: None if the vocabulary alone is loaded.
            lines: llama.cpp's log of the load; None if it is not known.
        """
        if self._kv_overrides and lines is not None:
            keys = read_header(self.path).metadata
            overrides.check_used(self._kv_overrides, lines, keys, all_read=config is not None)
        if config is not None and config.changes_rope and self._lib.llama_model_rope_type(self.handle) < 0:
            given = next(name for name in ROPE_OPTIONS if getattr(config, name) is not None)
            raise ConfigError(f"{given} is {getattr(config, given)!r}, but {self.path.name} has no rotary embedding")
        if config is not None and not config.swa_full and self._lib.llama_model_n_swa(self.handle) == 0:
            raise ConfigError(
                f"swa_full is False, but {self.path.name} has no layers with a sliding window; leave it out"
            )

    def _window_in_file(self) -> bool:
        """Returns True if the file names a sliding window that llama.cpp uses. llama.cpp ignores the window of phi3.

        A load of the vocabulary alone needs this method, because llama.cpp reads windows only with the weights.
        """
        window = self.metadata.get(f"{self._arch}.attention.sliding_window", "0")
        return self._arch != "phi3" and window not in ("", "0")

    def uncuttable(self, config: EngineConfig | ResolvedConfig) -> str | None:
        """Returns the reason why a sequence's cells cannot be cut at a position or copied in part; None if they can
        be."""
        if self.is_recurrent:
            return "recurrent state"
        if not self.has_window:
            return None
        found = "layers with a sliding window"
        if not config.swa_full:
            return f"{found}, and swa_full is False"
        if config.kv == "unified":  # llama.cpp may give a sequence's older cells to another sequence
            return f"{found}, and kv is 'unified'"
        return None if keeps_windows_whole(self._arch) else found

    def n_snapshots(self, config: ResolvedConfig) -> int:
        """Returns the maximum number of tokens by which llama.cpp can roll a recurrent state back; 0 if it cannot."""
        known = keeps_snapshots(self._arch)
        return config.n_snapshots if self.is_recurrent and known and hasattr(self._lib, "llama_n_rs_seq") else 0

    def can_copy(self, config: EngineConfig | ResolvedConfig) -> bool:
        """Returns True if a sequence can copy all cells of another sequence and then compute equal logits. Returns
        False for a sliding window in a unified KV cache. There, a copy shares the cells of the window, and llama.cpp
        reuses shared cells only after all their sequences have ended (llama-kv-cache.cpp, find_slot)."""
        is_copied = self._arch not in UNCOPIED
        return is_copied and not (self.has_window and config.kv == "unified")

    def can_shift(self, type_k: str) -> bool:
        """Returns True if cells can change positions without changing the cells of other slots (overflow="shift").

        llama.cpp rotates all of K at once. Cells that do not move are rotated by an angle of 0. But the rotation rounds
        a quantised K again, so K must not be quantised.

        Args:
            type_k: type of the K cache.
        """
        plain = not self.is_recurrent and not self.has_window and not self.scales_rope
        return self._rotates and plain and type_k in ("f32", "f16", "bf16")

    @property
    def scales_rope(self) -> bool:
        """True if the rotary embedding may also scale K (YaRN, LongRoPE). A rotation by 0 may then change K."""
        if self._changes_rope:  # the options may add a scaling
            return True
        return self.metadata.get(f"{self._arch}.rope.scaling.type", "none") not in ("none", "linear")

    def _tensors(self) -> Iterator[TensorInfo]:
        """Yields the tensors of the file. The file is read when the first tensor is requested."""
        yield from read_tensors(self.path)

    def _embd_in_file(self) -> int:
        """Returns the length of an embedding according to the file, or 0. llama.cpp reads this value only with the
        weights."""
        texts = (self.metadata.get(f"{self._arch}.{key}", "") for key in ("embedding_length_out", "embedding_length"))
        return next((int(text) for text in texts if text.isdigit() and int(text) > 0), 0)

    def _check_marks(self) -> None:
        """Raises ModelFileError if the vocabulary adds a special token to each text but does not contain this token.
        llama.cpp asserts for every text that the token exists (llama-vocab.cpp, llama_vocab::impl::tokenize)."""
        lib, vocab = self._lib, self.vocab_handle
        kind = int(lib.llama_vocab_type(vocab))
        is_wpm = kind == lib.LLAMA_VOCAB_TYPE_WPM
        if not is_wpm and kind not in (lib.LLAMA_VOCAB_TYPE_SPM, lib.LLAMA_VOCAB_TYPE_BPE, lib.LLAMA_VOCAB_TYPE_UGM):
            return
        wanted = {
            "bos": is_wpm or lib.llama_vocab_get_add_bos(vocab),
            "eos": not is_wpm and lib.llama_vocab_get_add_eos(vocab),
            "sep": is_wpm,
        }
        for name, is_added in wanted.items():
            if is_added and int(getattr(lib, f"llama_vocab_{name}")(vocab)) < 0:
                key = {"bos": "bos", "eos": "eos", "sep": "seperator"}[name]  # as GGUF spells it
                raise ModelFileError(
                    f"{one_line(self.path)} cannot be used: its vocabulary adds a {name.upper()} token to "
                    f"each text but has none: tokenizer.ggml.{key}_token_id is missing, or outside of the vocabulary"
                )

    @property
    def rerank_template(self) -> str | None:
        """The GGUF's own template for a query and a document, with the placeholders {query} and {document}."""
        return self.metadata.get("tokenizer.chat_template.rerank")

    @property
    def relevance_index(self) -> int | None:
        """The index of the classification output that gives a document's relevance; None if there is no such output.
        Qwen3-Reranker has two outputs, "yes" and "no". All other models that rank have one output."""
        if len(self.labels) == 1:
            return 0
        return self.labels.index("yes") if "yes" in self.labels else None

    @property
    def pools_only(self) -> bool:
        """True if the model cannot generate but gives embeddings or scores: an encoder or a reranker."""
        return self.cannot_generate is not None and (self.cannot_embed is None or self.cannot_classify is None)

    def share(self) -> Model:
        """Adds an owner, and returns this model. Each owner must close it."""
        with self._lock:
            self._check_owned()
            self._owners += 1
        return self

    def close(self, reason: str | None = None) -> None:
        """Frees the model once its last owner has closed it. `reason` becomes the error message of later calls."""
        with self._lock:
            self._owners -= 1
            if not self.handle or self._owners != 0:
                return
            self._closed_because = reason or self._closed_because
            grammars = self._grammars
        if grammars is not None:
            grammars.close()  # not under the lock, because the grammars' thread may need it for the vocabulary
        with self._text_lock, self._lock:
            if self.projector is not None:
                self.projector.close()
            self._lib.llama_model_free(self.handle)
            self.handle = None
            self._grammars = None
        give_memory_back()

    @property
    def grammars(self) -> Grammars:
        """The compiler of structured_outputs, one for all owners of the model."""
        with self._lock:
            self._check_owned()
            if self._grammars is None:
                from llamabatch.sampling.grammar_compiler import Grammars  # imported late: most programs do not need it

                self._grammars = Grammars(self)
            return self._grammars

    def _check_owned(self) -> None:
        if self._owners < 1:  # close() first waits for the grammars, so the handle may still exist
            raise EngineClosedError(self._closed_because)

    def _kind_without_pooling(self) -> str | None:
        """Returns None if the model can pool texts, else a text that says what kind of model it is, for a message."""
        if self._lib.llama_model_has_encoder(self.handle):
            return "an encoder that needs llama_encode, which is not supported"
        if self._lib.llama_model_is_diffusion(self.handle):
            return "a diffusion model"
        if self.is_recurrent:
            return "a model with recurrent state, for which they are not supported"
        return None

    def _kind_without_embedding(self) -> str | None:
        if self.pooling == RANK:
            return "a model that ranks texts, whose scores are no embeddings; pooling='mean' or 'cls' gives vectors"
        return self._kind_without_pooling()

    def _kind_without_classes(self) -> str | None:
        if self.pooling != RANK:
            return f"a model whose pooling is {self.pooling!r}; it takes 'rank', and a file with a classification head"
        if not self.labels:
            return "a model whose classification head has another number of outputs than labels"
        return self._kind_without_pooling()

    def _kind_without_generation(self) -> str | None:
        """Returns None for a decoder-only text model, because it can generate. For any other model, returns a text that
        says what kind of model it is. A message shows this text."""
        if self._lib.llama_model_has_encoder(self.handle):
            decodes = self._lib.llama_model_has_decoder(self.handle)
            return f"an {'encoder-decoder' if decodes else 'encoder'} ({self._arch}); only decoders are supported"
        if self._lib.llama_model_is_diffusion(self.handle):
            return f"a diffusion model ({self._arch}), which writes all tokens of a text at once"
        if self.pooling == RANK:
            head = "" if self.labels else ", but its classification head does not have one output for each label"
            return f"a model ({self._arch}) that ranks and classifies texts{head}"
        if not self.is_causal:
            return f"an encoder ({self._arch}), which reads a text in both directions and has no next token"
        return None

    @property
    def is_causal(self) -> bool:
        """False for a model whose tokens attend to later tokens, too."""
        return self.metadata.get(f"{self._arch}.attention.causal") != "false"

    def _read_metadata(self) -> dict[str, str]:
        lib, pairs = self._lib, dict[str, str]()
        with contextlib.suppress(ModelFileError):  # our reader also returns lists, but reads fewer files than llama.cpp
            pairs = read_header(self.path).texts()
        for i in range(lib.llama_model_meta_count(self.handle)):
            key = _string(lambda buffer, size, i=i: lib.llama_model_meta_key_by_index(self.handle, i, buffer, size))
            pairs[key] = _string(
                lambda buffer, size, i=i: lib.llama_model_meta_val_str_by_index(self.handle, i, buffer, size)
            )
        # llama.cpp returns the file's values, so the overrides replace them here.
        pairs.update((key, as_text(value)) for key, value in self._kv_overrides)
        return pairs

    @property
    def chat_template(self) -> str | None:
        """The GGUF's own jinja2 chat template; None if the GGUF has no template or an empty one."""
        return self.metadata.get("tokenizer.chat_template") or None

    @property
    def header(self) -> Mapping[str, Value]:
        """The metadata of the file's header, by key. Raises ModelFileError if the file can no longer be read."""
        try:
            return overridden(read_header(self.path), self._kv_overrides).metadata
        except OSError as error:
            raise ModelFileError(f"{one_line(self.path)} cannot be read any more: {error.strerror}") from error


def _place(lib: Any, params: Any, config: EngineConfig) -> list[Any]:
    """Sets the placement of the weights. Returns the arrays that must live as long as the model. Raises ConfigError."""
    arrays: list[Any] = []
    params.n_gpu_layers = config.n_gpu_layers if config.n_gpu_layers >= 0 else 0x7FFFFFFF
    chosen = devices.used(config, lib)
    params.main_gpu = config.main_gpu
    params.split_mode = SPLIT_MODES.index(config.split_mode)
    if config.devices is not None:
        # `devices.used` has already applied main_gpu. llama.cpp would apply it to this list again.
        arrays.append(_use_devices(params, chosen))
        params.main_gpu = 0
    params.use_extra_bufts = _uses_extra_bufts(config)
    if config.use_mlock:
        if not lib.llama_supports_mlock():
            raise ConfigError("use_mlock is True, but this build of llama.cpp cannot lock memory on this system")
        params.load_mode = lib.LLAMA_LOAD_MODE_MMAP_MLOCK if config.use_mmap else lib.LLAMA_LOAD_MODE_MLOCK
    elif not config.use_mmap:
        params.load_mode = lib.LLAMA_LOAD_MODE_NONE
    if config.tensor_split is not None:
        split = (ctypes.c_float * lib.llama_max_devices())(*config.tensor_split)
        params.tensor_split = split
        arrays.append(split)
    if config.tensor_overrides:
        rules = overrides.tensor_array(config.tensor_overrides)
        params.tensor_buft_overrides = ctypes.addressof(rules)
        arrays.append(rules)
    return arrays


def _uses_extra_bufts(config: EngineConfig) -> bool:
    return config.extra_bufts == "on" or (config.extra_bufts == "auto" and library.extra_bufts_safe())


def _use_devices(params: Any, chosen: tuple[devices.Device, ...]) -> Any:
    """Sets the devices of a load. Without this call, a load uses all GPUs. The returned array must live until the load
    is done."""
    array = devices.pointers(chosen)
    params.devices = ctypes.addressof(array)
    return array


def _string(read: Any) -> str:
    """Returns the text of a C function `read(buffer, size) -> length`, which writes the text to `buffer`."""
    size = 256
    for _ in range(2):
        buffer = ctypes.create_string_buffer(size)
        length = int(read(buffer, size))
        if length < 0:
            return ""
        if length < size:
            return buffer.raw[:length].decode("utf-8", errors="replace")
        size = length + 1
    return ""
