"""llamabatch: continuous batching for GGUF models, in process, from Python."""

from __future__ import annotations

import sys

from llamabatch.utils.version import __version__

TYPE_CHECKING = False  # typing is not imported, because its import takes longer than all other imports here
if TYPE_CHECKING:
    from llamabatch.client.base import Heartbeat
    from llamabatch.config import EngineConfig
    from llamabatch.engine.engine import Engine
    from llamabatch.engine.stats import EngineStats
    from llamabatch.entrypoints.async_llm import AsyncLLM
    from llamabatch.entrypoints.classification import Classification, RerankResult
    from llamabatch.entrypoints.llm import LLM
    from llamabatch.entrypoints.prompts import TextPrompt, TokensPrompt
    from llamabatch.entrypoints.scoring import Score
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
        UnknownOptionError,
        UnknownParameterError,
    )
    from llamabatch.gguf.header import MetadataArray
    from llamabatch.monitor.monitor import Monitor
    from llamabatch.planning.plan import Plan
    from llamabatch.request.logprobs import Logprob
    from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput, Timings
    from llamabatch.request.request import Request
    from llamabatch.request.sampling_params import SamplingParams
    from llamabatch.request.tool_calls import ToolCall, ToolCallDelta
    from llamabatch.request.vocab import Vocab

__all__ = [
    "LLM",
    "AdapterError",
    "AsyncLLM",
    "Classification",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineError",
    "EngineStats",
    "FinishReason",
    "Heartbeat",
    "InputError",
    "LlamaBatchError",
    "Logprob",
    "MemoryPlanError",
    "MetadataArray",
    "ModelFileError",
    "Monitor",
    "OutputError",
    "Plan",
    "PromptError",
    "PromptWarning",
    "QueueFull",
    "Request",
    "RequestOutput",
    "RerankResult",
    "SamplingError",
    "SamplingParams",
    "Score",
    "SequenceOutput",
    "SetupError",
    "TextPrompt",
    "Timings",
    "TokensPrompt",
    "ToolCall",
    "ToolCallDelta",
    "UnknownOptionError",
    "UnknownParameterError",
    "Vocab",
    "__version__",
]

# Public names by module, imported on first use. So the command line can handle signals before slow imports, and a
# program imports only what it needs.
_NAMES = {
    "client.base": ("Heartbeat",),
    "config": ("EngineConfig",),
    "engine.engine": ("Engine",),
    "engine.stats": ("EngineStats",),
    "entrypoints.async_llm": ("AsyncLLM",),
    "entrypoints.classification": ("Classification", "RerankResult"),
    "entrypoints.llm": ("LLM",),
    "entrypoints.prompts": ("TextPrompt", "TokensPrompt"),
    "entrypoints.scoring": ("Score",),
    "errors": (
        "AdapterError",
        "ConfigError",
        "EngineClosedError",
        "EngineError",
        "InputError",
        "LlamaBatchError",
        "MemoryPlanError",
        "ModelFileError",
        "OutputError",
        "PromptError",
        "PromptWarning",
        "QueueFull",
        "SamplingError",
        "SetupError",
        "UnknownOptionError",
        "UnknownParameterError",
    ),
    "gguf.header": ("MetadataArray",),
    "monitor.monitor": ("Monitor",),
    "planning.plan": ("Plan",),
    "request.logprobs": ("Logprob",),
    "request.outputs": (
        "CompletionOutput",
        "FinishReason",
        "RequestOutput",
        "SequenceOutput",
        "Timings",
    ),
    "request.request": ("Request",),
    "request.sampling_params": ("SamplingParams",),
    "request.tool_calls": ("ToolCall", "ToolCallDelta"),
    "request.vocab": ("Vocab",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Imports a public name, or a module of the package, on first use."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    if name in _HOMES:
        value: object = getattr(importlib.import_module(f"llamabatch.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    module = f"llamabatch.{name}"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
    others = importlib.import_module("llamabatch.utils.other_names")
    absent = importlib.import_module("llamabatch.utils.absent")
    missing: Exception = absent.absent_from(__name__, name, others.OF_PACKAGE | others.MODULES)
    raise missing


class _OtherModules:
    """A module finder that Python asks last. If the module exists only in vLLM or llama_cpp, the error names the
    replacement."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Finds nothing. Raises ModuleNotFoundError for a module of vLLM or llama_cpp, if llamabatch has a
        replacement."""
        package, _, rest = name.partition(".")
        if package != __name__ or not rest:
            return
        import importlib

        modules = importlib.import_module("llamabatch.utils.other_names").MODULES
        if rest in modules:
            raise ModuleNotFoundError(f"there is no module {name}: {modules[rest]}", name=name)


sys.meta_path.append(_OtherModules)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
