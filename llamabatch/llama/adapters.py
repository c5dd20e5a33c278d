"""The adapters of a model. Each adapter is loaded once and set on a context when a call needs it."""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from llamabatch.errors import AdapterError, EngineError, ModelFileError
from llamabatch.gguf.adapter import read_adapter
from llamabatch.llama import log
from llamabatch.request.adapters import AdapterSet, adapter_path, check_known, check_name
from llamabatch.utils.paths import one_line


class Adapters:
    """LoRAs and control vectors by name.

    Adapters that are still loaded are freed with the model. No thread may compute with the model during a load or
    unload of an adapter, because llama.cpp reads its list of adapters whenever it builds a graph.
    """

    def __init__(self, lib: ModuleType, model: Any, metadata: Mapping[str, str]) -> None:
        self._lib = lib
        self._model = model
        self._n_embd = int(lib.llama_model_n_embd(model))
        self._n_layer = int(lib.llama_model_n_layer(model))
        self._n_expert = int(metadata.get(f"{metadata.get('general.architecture')}.expert_count", 0))
        # A LoRA for NVFP4 feed-forward weights makes llama.cpp abort the process (llama-graph.cpp, build_ffn).
        self._is_nvfp4 = metadata.get("general.file_type") == str(lib.LLAMA_FTYPE_MOSTLY_NVFP4)
        self._loras: dict[str, Any] = {}
        self._vectors: dict[str, Mapping[int, array[float]]] = {}

    @property
    def names(self) -> list[str]:
        return sorted([*self._loras, *self._vectors])

    def load(self, name: str, path: str | os.PathLike[str]) -> None:
        """Reads an adapter file.

        Raises:
            AdapterError: the name is taken or not allowed.
            ModelFileError: the file is not an adapter, or it is for another model.
        """
        check_name(name)
        if name in self.names:
            raise AdapterError(f"an adapter {name!r} is loaded already; unload it, or choose another name")
        path = adapter_path(name, path)
        file = read_adapter(Path(path), n_embd=self._n_embd, n_layer=self._n_layer, n_expert=self._n_expert)
        if file.kind == "control vector":
            self._vectors[name] = file.directions
            return
        if self._is_nvfp4:
            raise ModelFileError(f"adapter {one_line(path)}: llama.cpp cannot apply a LoRA to NVFP4 weights")
        log.recent_complaints()
        handle = self._lib.llama_adapter_lora_init(self._model, os.fsencode(path))
        if not handle:
            reason = log.reason()
            raise ModelFileError(f"adapter {one_line(path)} cannot be loaded: {reason}")
        self._loras[name] = handle

    def unload(self, name: str) -> None:
        """Frees an adapter. No context may still use it. Raises AdapterError for an unknown name."""
        check_known(((name, 1.0),), self.names)
        self._vectors.pop(name, None)
        lora = self._loras.pop(name, None)
        if lora is not None:
            self._lib.llama_adapter_lora_free(lora)

    def apply(self, context: Any, before: AdapterSet, wanted: AdapterSet) -> None:
        """Sets a context's adapters.

        Args:
            before: the adapters that are set now.

        Raises:
            EngineError: llama.cpp refuses the adapters.
        """
        loras = [(self._loras[name], scale) for name, scale in wanted if name in self._loras]
        handles = (self._lib.llama_adapter_lora_p_ctypes * max(1, len(loras)))(*[handle for handle, _ in loras])
        scales = (ctypes.c_float * max(1, len(loras)))(*[scale for _, scale in loras])
        code = self._lib.llama_set_adapters_lora(context, handles, len(loras), scales)  # does nothing if already set
        if code == 0 and self._only_vectors(before) != self._only_vectors(wanted):
            code = self._set_vectors(context, self._only_vectors(wanted))
        if code != 0:
            raise EngineError(f"llama.cpp could not set the adapters {wanted}: {code}")

    def _only_vectors(self, adapters: AdapterSet) -> AdapterSet:
        return tuple((name, scale) for name, scale in adapters if name in self._vectors)

    def _set_vectors(self, context: Any, vectors: AdapterSet) -> int:
        """Sets the sum of the control vectors, because llama.cpp has room for only one. Writes all layers, because a
        layer that is left out would keep its old values."""
        if not vectors:
            return int(self._lib.llama_set_adapter_cvec(context, None, 0, self._n_embd, 0, 0))
        total = np.zeros((self._n_layer, self._n_embd), np.float32)
        for name, scale in vectors:
            for layer, values in self._vectors[name].items():
                total[layer - 1] += np.float32(scale) * np.asarray(values, np.float32)
        data = total.ctypes.data_as(ctypes.POINTER(ctypes.c_float))  # copied by the call
        return int(self._lib.llama_set_adapter_cvec(context, data, total.size, self._n_embd, 1, self._n_layer))
