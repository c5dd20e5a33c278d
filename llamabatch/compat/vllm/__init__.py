"""vLLM's names for offline inference: `from llamabatch.compat.vllm import LLM` replaces `from vllm import LLM`."""

from typing import Any

from llamabatch.compat.vllm.engine.arg_utils import EngineArgs
from llamabatch.compat.vllm.engine.llm_engine import LLMEngine
from llamabatch.compat.vllm.entrypoints.llm import LLM
from llamabatch.compat.vllm.inputs import PromptType, TextPrompt, TokensPrompt
from llamabatch.compat.vllm.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from llamabatch.compat.vllm.pooling_params import PoolingParams
from llamabatch.compat.vllm.sampling_params import SamplingParams
from llamabatch.utils.absent import absent_from

__all__ = [
    "LLM",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "TextPrompt",
    "TokensPrompt",
]

_ASYNC = "llamabatch.AsyncLLM is the asyncio class: `async for piece in llm.stream(prompt, params)`"
_OPTIONS = "give the options to LLM(...), as LLM(**options)"
# Keys: public names of vLLM that are missing here. Values: what to use in their place.
ABSENT = {
    "__version__": "llamabatch.__version__ is this package's",
    "AsyncLLMEngine": _ASYNC,
    "AsyncLLM": _ASYNC,
    "AsyncEngineArgs": _OPTIONS,
    "ModelRegistry": "llama.cpp has the models",
    "initialize_ray_cluster": "docs/ray.md has llamabatch on Ray",
    "DataPrompt": "a prompt is a text or token ids",
    "PromptStrictInputs": "PromptType has the forms of a prompt",
    "bc_linter_skip": "it is a tool of vLLM's repository",
    "bc_linter_include": "it is a tool of vLLM's repository",
}


def __getattr__(name: str) -> Any:
    raise absent_from(__name__, name, ABSENT)
