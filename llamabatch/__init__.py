"""llamabatch: continuous batching for GGUF models, in process, from Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llamabatch.config import EngineConfig
from llamabatch.engine import Engine
from llamabatch.errors import (
    AdapterError,
    ConfigError,
    EngineClosedError,
    EngineError,
    InputError,
    LlamaBatchError,
    MemoryPlanError,
    ModelFileError,
    OutputError,
    PromptError,
    PromptWarning,
    QueueFull,
    SamplingError,
    SetupError,
)
from llamabatch.llm import LLM
from llamabatch.logprobs import Logprob
from llamabatch.request import CompletionOutput, FinishReason, Request, RequestOutput, SequenceOutput, Timings
from llamabatch.sampling_params import SamplingParams
from llamabatch.scoring import Score

if TYPE_CHECKING:
    from llamabatch.async_llm import AsyncLLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AdapterError",
    "AsyncLLM",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineError",
    "FinishReason",
    "InputError",
    "LlamaBatchError",
    "Logprob",
    "MemoryPlanError",
    "ModelFileError",
    "OutputError",
    "PromptError",
    "PromptWarning",
    "QueueFull",
    "Request",
    "RequestOutput",
    "SamplingError",
    "SamplingParams",
    "Score",
    "SequenceOutput",
    "SetupError",
    "Timings",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """AsyncLLM when it is asked for: asyncio is a sixth of what there is to import."""
    if name == "AsyncLLM":
        from llamabatch.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
