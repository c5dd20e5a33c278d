"""vLLM's output classes, made from llamabatch's outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from llamabatch.compat.vllm.lora.request import LoRARequest
from llamabatch.compat.vllm.sampling_params import SamplingParams
from llamabatch.request import outputs as engine
from llamabatch.request.logprobs import Logprob

Pooled = TypeVar("Pooled")
TokenLogprobs = dict[int, Logprob]


@dataclass
class CompletionOutput:
    """One continuation.

    Attributes:
        index: number of the continuation among those of its prompt, from 0.
        text: the text, including thinking. Stop strings and special tokens are left out unless the parameters keep
            them.
        token_ids: the sampled tokens, including the token that ends the text.
        cumulative_logprob: the sum of the tokens' logprobs; None unless logprobs were requested.
        logprobs: for each token a dictionary from id to Logprob (logprob, rank, decoded_token); None unless requested.
        finish_reason: "stop", "length" or "abort"; None while the continuation runs (LLMEngine.step).
        stop_reason: the stop string, or the id in stop_token_ids, at the end of the text; None if neither ended it.
        lora_request: the adapter of the request.
        routed_experts, kv_transfer_params: always None.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[TokenLogprobs] | None
    routed_experts: None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None
    kv_transfer_params: None = None

    def finished(self) -> bool:
        """Returns True if the continuation has ended. Outputs of LLM have always ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The continuations of one prompt.

    Attributes:
        request_id: "0" for the first request of the LLM, "1" for the second, and so on; for LLMEngine the caller's id.
        prompt: the prompt's text; None if token ids were given.
        prompt_token_ids: the prompt's tokens.
        prompt_logprobs: like CompletionOutput.logprobs, for the prompt's tokens; the first token has None.
        outputs: the continuations.
        finished: True if the request has ended. Only LLMEngine.step returns outputs with False.
        metrics: always None, as with vLLM's disable_log_stats. For times, use llm.llm.stats(), or llm.llm.generate and
            the `timings` of its outputs.
        lora_request: the adapter of the request.
        encoder_prompt, encoder_prompt_token_ids, kv_transfer_params: always None.
        num_cached_tokens: the number of prompt tokens that came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: None = None
    lora_request: LoRARequest | None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: None = None


def request_output(
    request_id: str, output: engine.RequestOutput, params: SamplingParams, lora: LoRARequest | None
) -> RequestOutput:
    """Returns an output in vLLM's shape. The text is empty if `params` has detokenize=False."""
    prompt_logprobs = output.prompt_logprobs
    return RequestOutput(
        request_id=request_id,
        prompt=output.prompt,
        prompt_token_ids=list(output.prompt_token_ids),
        prompt_logprobs=None if prompt_logprobs is None else list(prompt_logprobs),
        outputs=[_completion(each, params, lora) for each in output.outputs],
        finished=True,
        lora_request=lora,
        num_cached_tokens=output.num_cached_tokens,
    )


def _completion(each: engine.CompletionOutput, params: SamplingParams, lora: LoRARequest | None) -> CompletionOutput:
    reason = each.stop_reason
    if not isinstance(reason, str) and reason not in (params.stop_token_ids or ()):
        reason = None  # vLLM gives no stop_reason for the model's own end-of-generation token
    return CompletionOutput(
        index=each.index,
        text=each.text if params.detokenize else "",
        token_ids=list(each.token_ids),
        cumulative_logprob=each.cumulative_logprob if each.logprobs is not None else None,
        logprobs=None if each.logprobs is None else list(each.logprobs),
        finish_reason=each.finish_reason.value,
        stop_reason=reason,
        lora_request=lora,
    )


@dataclass
class PoolingOutput:
    """The result of LLM.encode for one text.

    Attributes:
        data: a float32 array; torch.from_numpy turns it into a tensor.
    """

    data: npt.NDArray[np.float32]


@dataclass
class EmbeddingOutput:
    """The vector of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The length of the vector."""
        return len(self.embedding)

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"


@dataclass
class ClassificationOutput:
    """The probabilities of a text's classes."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.probs)


@dataclass
class ScoringOutput:
    """The similarity of two texts, or the relevance of one to the other."""

    score: float


@dataclass
class PoolingRequestOutput(Generic[Pooled]):
    """The result for a text that was pooled, not continued.

    Attributes:
        request_id, prompt_token_ids, num_cached_tokens, finished: as in RequestOutput.
        outputs: the text's vector, probabilities or score.
    """

    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The result of LLM.embed for one text; the vector is in outputs.embedding."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The result of LLM.classify for one text; the probabilities are in outputs.probs."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The result of LLM.score for one pair of texts; the score is in outputs.score."""
