"""SharedEngine: one engine for calls of threads and of coroutines. The first call loads the model."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from llamabatch.config import EngineConfig, with_paths
from llamabatch.entrypoints.async_llm import AsyncLLM
from llamabatch.entrypoints.llm import LLM
from llamabatch.errors import ConfigError, EngineClosedError

_CHAT = ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "adapters")  # arguments of LLM.chat


class SharedEngine:
    """One engine that serves an LLM and an AsyncLLM.

    Args:
        model: as for LLM; or an LLM, which close() leaves open.
        options: options of the engine, as for LLM.

    Raises:
        ConfigError: an option is invalid, or options are given together with an LLM.
    """

    def __init__(self, model: str | os.PathLike[str] | LLM, options: Mapping[str, Any] | None = None) -> None:
        given = dict(options or {})
        if isinstance(model, LLM):
            if given:
                raise ConfigError(f"{', '.join(given)}: the model is an LLM already; give its options when it is made")
            self._llm: LLM | None = model
        else:
            EngineConfig.from_options(model, given)
            self._path = with_paths({**given, "model": model})  # absolute, as os.chdir may come before the load
            self._llm = None
        self._is_ours = not isinstance(model, LLM)
        self._lock = threading.Lock()
        self._closed = False
        self._async: AsyncLLM | None = None

    @property
    def llm(self) -> LLM:
        """The LLM. The first use loads the model. Raises the errors of LLM, and EngineClosedError after close()."""
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is closed")
            if self._llm is None:
                self._llm = LLM(**self._path)
            return self._llm

    @property
    def async_llm(self) -> AsyncLLM:
        """The AsyncLLM of the same engine. Its first awaited call loads the model on a thread."""
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is closed")
            if self._async is None:
                self._async = _AsyncOver(self)
            return self._async

    @property
    def name(self) -> str:
        """The model's name for reports: the file's name without folder and ending. Does not load the model."""
        path = self._llm._client.model.path if self._llm is not None else self._path["model"]
        return os.path.basename(os.fspath(path)).removesuffix(".gguf")

    def close(self) -> None:
        """Closes the engine, unless it belongs to an LLM passed in. Later calls raise EngineClosedError. May be called
        twice."""
        with self._lock:
            llm, over, self._llm, self._async, self._closed = self._llm, self._async, None, None, True
        if over is not None:
            over.close()
        if llm is not None and self._is_ours:
            llm.close()


class _AsyncOver(AsyncLLM):
    """An AsyncLLM over the engine of an LLM. Closing it leaves the LLM open."""

    def __init__(self, shared: SharedEngine) -> None:
        super().__init__("tiny")  # never loaded, because `connect` below replaces the load
        self._load.connect = lambda *_: shared.llm._client

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._workers.shutdown()
        self._aborting.shutdown()


def chat_arguments(named: dict[str, Any]) -> dict[str, Any]:
    """Removes the arguments of LLM.chat from `named` and returns them. Only sampling parameters stay in `named`."""
    return {name: value for name in _CHAT if (value := named.pop(name, None)) is not None}
