"""Configuration classes of vLLM. Programs pass them to LLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llamabatch.utils.absent import absent_from


@dataclass
class PoolerConfig:
    """The pooling and its defaults, for LLM(pooler_config=…).

    Attributes:
        pooling_type, seq_pooling_type, tok_pooling_type: "CLS", "LAST", "MEAN" or "ALL".
        normalize, dimensions, use_activation: as in PoolingParams.
    """

    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    use_activation: bool | None = None


ABSENT = dict.fromkeys(
    ("CompilationConfig", "CUDAGraphMode", "KVTransferConfig", "AttentionConfig", "StructuredOutputsConfig"),
    "LLM takes a mapping, or nothing, in its place; docs/vllm_names.md has all options",
)


def __getattr__(name: str) -> Any:
    raise absent_from(__name__, name, ABSENT)
