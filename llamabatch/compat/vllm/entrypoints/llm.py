"""LLM: vLLM's class for offline inference, over one LLM of llamabatch."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from llamabatch.compat.vllm.call_inputs import CallInputs, Loras, as_list, place_of, truncation, without_salts
from llamabatch.compat.vllm.lora.request import LoRARequest
from llamabatch.compat.vllm.options import HUB, Defaults, engine_options
from llamabatch.compat.vllm.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    request_output,
)
from llamabatch.compat.vllm.pooling_params import PoolingParams
from llamabatch.compat.vllm.sampling_params import SamplingParams
from llamabatch.compat.vllm.tokenizer import Tokenizer
from llamabatch.compat.vllm.v1.metrics.reader import Metric, metrics_of
from llamabatch.entrypoints import llm as native
from llamabatch.entrypoints.classification import classified, reranked
from llamabatch.entrypoints.input_processor import is_conversation
from llamabatch.entrypoints.submission import token_vectors, vectors
from llamabatch.errors import InputError, MemoryPlanError, PromptError
from llamabatch.gguf.resolve import fetch_reference
from llamabatch.request import outputs as engine
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams as EngineParams
from llamabatch.sampling.defaults import given_by
from llamabatch.utils.absent import absent
from llamabatch.utils.aliases import also_named
from llamabatch.utils.caller import caller_level
from llamabatch.utils.checks import counted, integer, show
from llamabatch.utils.closing import Closing
from llamabatch.utils.paths import HUB as HUB_PREFIX
from llamabatch.utils.paths import model_name

T = TypeVar("T")
Bar = bool | Callable[..., Any]

_ONE_PROCESS = "there is one engine, and there are no workers to call"
_QUEUE = "LLMEngine takes requests at any time; llm.llm.stream and llm.llm.as_completed give outputs as they come"
# Keys: names of vLLM's LLM that are missing here. Values: what to use in their place.
ABSENT = {
    "llm_engine": "llm.llm is the LLM behind it; LLMEngine has add_request and step",
    "model_config": "llm.llm.plan has the options in force, llm.llm.metadata the values of the file",
    "engine_class": "llm.llm is the LLM behind it",
    "renderer": "llm.get_tokenizer() has apply_chat_template",
    "io_processor": "plugins are not supported",
    "input_processor": "llm.get_tokenizer() tokenizes",
    "supported_tasks": "any engine generates and embeds; the file's head ranks or classifies",
    "request_counter": "requests have ids of their own",
    "default_sampling_params": "llm.get_default_sampling_params() has them",
    "set_tokenizer": "the GGUF file has its tokenizer; give prompts as token ids of another",
    "beam_search": "there is no beam search; llamabatch.SamplingParams(best_of=…) ranks several continuations",
    "reward": "llm.classify gives the scores of a classification head, llm.encode those of an embedding",
    "collective_rpc": _ONE_PROCESS,
    "apply_model": _ONE_PROCESS,
    "get_world_size": _ONE_PROCESS,
    "init_weight_transfer_engine": _ONE_PROCESS,
    "update_weights": "llm.llm.load_adapter changes a model while it is loaded",
    "start_profile": "llm.llm.stats() counts, and `llamabatch top` shows an engine",
    "stop_profile": "llm.llm.stats() counts, and `llamabatch top` shows an engine",
    "reset_mm_cache": "encoded pictures are dropped when the cache is full",
    "preprocess_chat": "llm.get_tokenizer().apply_chat_template gives the token ids of a chat",
    "preprocess_cmpl": "llm.get_tokenizer().encode gives the token ids of a text",
    "enqueue": _QUEUE,
    "enqueue_chat": _QUEUE,
    "wait_for_completion": _QUEUE,
    "from_engine_args": "give the options to LLM(...), as LLM(**dataclasses.asdict(args))",
}


class LLM(Closing):
    """A GGUF model with the names, defaults and meanings of vLLM's LLM; docs/vllm_names.md lists each name.

    Args:
        model: path of a .gguf file, "tiny", or a name on the hub such as "owner/repo:Q4_K_M".
        **options: options of vLLM and of EngineConfig. An option without meaning here is accepted with one warning. An
            unsupported option that would change an answer is refused.

    Attributes:
        llm: the LLM of llamabatch that does the work. It also has functions that do not exist in vLLM.

    Raises:
        ConfigError, ModelFileError (both ValueError): an option is refused, or the file is missing or damaged.
        UnknownOptionError (TypeError): there is no such option.
        MemoryPlanError, SetupError, EngineError: as LLM of llamabatch.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        found, defaults = engine_options(options)
        of_hub = {name: found.pop(name) for name in HUB if name in found}
        name = model_name(model)
        if of_hub and name.startswith(HUB_PREFIX):
            name = str(fetch_reference(name, of_hub.get("revision"), of_hub.get("download_dir")))
        self._open(_as_many_as_fit(name, found), defaults)

    def _open(self, llm: native.LLM, defaults: Defaults) -> None:
        self.llm = llm
        self._defaults = defaults
        self._numbers = itertools.count()
        self._inputs = CallInputs(llm)

    @classmethod
    def _over(cls, llm: native.LLM, **options: Any) -> LLM:
        """Makes an LLM over an existing LLM of llamabatch (a FakeLLM in tests)."""
        self = cls.__new__(cls)
        self._open(llm, engine_options(options)[1])
        return self

    # --- generation ---

    @also_named(place_of)
    def generate(
        self,
        prompts: Any = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Bar = True,
        lora_request: Loras = None,
        priority: list[int] | None = None,
        prompt_token_ids: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continues prompts.

        Args:
            prompts: a text, token ids, {"prompt": …} or {"prompt_token_ids": …}, or a list of these. A mapping may have
                cache_salt. Names of special tokens in a text are read as those tokens, as in vLLM.
            sampling_params: one for all prompts, or one for each; None: the file's parameters, else vLLM's defaults.
            use_tqdm: show a progress bar on a terminal; a function counts as True.
            lora_request: one for all prompts, or a list with a LoRARequest or None for each.
            priority: a number for each prompt; lower numbers run first.
            prompt_token_ids: the prompts as token ids, for programs of earlier vLLM versions. Replaces `prompts`.
            tokenization_kwargs: truncate_prompt_tokens; truncation and max_length are refused.

        Returns:
            One RequestOutput for each prompt, in order.

        Raises:
            PromptError, SamplingError, AdapterError (ValueError): a prompt or parameter is refused.
            EngineError: the engine failed. EngineClosedError: after close().
        """
        given = as_list(prompts if prompt_token_ids is None else prompt_token_ids)
        each = self._params(sampling_params, len(given))
        ready, params = self._ready(given, each, priority, tokenization_kwargs)
        adapters, loras = self._inputs.adapters(lora_request, len(given))
        outputs = self.llm.generate(ready, params, adapters=adapters, errors="raise", progress=bool(use_tqdm))
        return self._outputs(outputs, each, loras)

    def _request(
        self,
        prompt: Any,
        params: SamplingParams,
        lora_request: LoRARequest | None,
        priority: int,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> Request:
        """Returns a request that is ready to submit. Raises as generate."""
        ready, engine_params = self._ready([prompt], [params], [priority], tokenization_kwargs)
        adapters, _ = self._inputs.adapters(lora_request, 1)
        [request] = self.llm._prepared(lambda inputs: inputs.prompts(ready, engine_params, adapters, "raise")).requests
        return request

    def _ready(
        self,
        given: list[Any],
        each: list[SamplingParams],
        priority: list[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> tuple[list[Any], list[EngineParams]]:
        """Returns the prompts with their token ids, and the engine's parameters for each prompt."""
        plain, salts = without_salts(given)
        params = [
            one if salt is None else replace(one, cache_salt=salt)
            for one, salt in zip(self._to_engine(each, priority), salts, strict=True)
        ]
        return self._inputs.ready(plain, each, truncation(tokenization_kwargs)), params

    @also_named(place_of)
    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Bar = True,
        lora_request: Loras = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them. Thinking and tool calls stay in the text.

        Args:
            messages: a list of {"role": …, "content": …}, or a list of such lists.
            chat_template: a jinja2 template in place of the model's own.
            chat_template_content_format: changes nothing, because a template always gets a format that suits it.
            add_generation_prompt, continue_final_message, tools, chat_template_kwargs: as for LLM.chat of llamabatch.
            tokenization_kwargs, mm_processor_kwargs: refused unless empty.
            The other arguments are as for generate.

        Raises:
            As generate; ConfigError (ValueError): the model has no template, or the given template cannot be read.
        """
        for name, value in (("tokenization_kwargs", tokenization_kwargs), ("mm_processor_kwargs", mm_processor_kwargs)):
            if value:
                raise PromptError(f"{name} is {show(value)}, which is not supported in chat(); leave it out")
        if isinstance(messages, (str, bytes, Mapping)):
            raise PromptError(
                f"messages is {show(messages)}; give [{{'role': 'user', 'content': …}}], or a list of such lists"
            )
        given = [messages] if is_conversation(messages) else list(messages)
        each = self._params(sampling_params, len(given))
        adapters, loras = self._inputs.adapters(lora_request, len(given))
        outputs = self.llm.chat(
            given,
            self._to_engine(each, None),
            tools=tools,
            tool_choice="none" if tools else None,  # calls stay in the text, as in vLLM
            chat_template=self._defaults.chat_template if chat_template is None else chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            adapters=adapters,
            errors="raise",
            progress=bool(use_tqdm),
        )
        return self._outputs(outputs, each, loras)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters of calls without sampling_params: the file's (general.sampling), else vLLM's."""
        of_file = given_by(self.llm._client.model.metadata) if self._defaults.from_file else {}
        found = {name: of_file[name] for name in _OF_FILE if name in of_file} | dict(self._defaults.sampling)
        if "max_new_tokens" in found:
            found["max_tokens"] = found.pop("max_new_tokens")
        return SamplingParams.from_optional(**found)

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, n: int) -> list[SamplingParams]:
        """Returns one SamplingParams for each of n prompts. Raises InputError."""
        if given is None or isinstance(given, SamplingParams):
            return [given or self.get_default_sampling_params()] * n
        each = list(given) if isinstance(given, Sequence) else [given]
        for one in each:
            if not isinstance(one, SamplingParams):
                raise InputError(
                    f"sampling_params has {show(one)}; give SamplingParams of llamabatch.compat.vllm, or a list of them"
                )
        if len(each) != n:
            raise InputError(
                f"there are {len(each)} SamplingParams for {counted(n, 'prompt')}; give one, or one for each"
            )
        return each

    def _to_engine(self, each: list[SamplingParams], priority: list[int] | None) -> list[EngineParams]:
        if priority is not None and len(priority) != len(each):
            raise InputError(
                f"priority has {len(priority)} numbers for {counted(len(each), 'prompt')}; give one for each"
            )
        made: dict[tuple[int, int], EngineParams] = {}  # key: (id(params), priority); prompts often share params
        found = []
        for params, rank in zip(each, priority or [0] * len(each), strict=True):
            key = (id(params), integer(InputError, "priority", rank, -(2**31), 2**31 - 1))
            if key not in made:
                made[key] = params.to_engine(
                    priority=rank,
                    in_reasoning=self._defaults.in_reasoning,
                    post_sampling=self._defaults.post_sampling,
                )
            found.append(made[key])
        return found

    def _outputs(
        self, outputs: list[engine.RequestOutput], each: list[SamplingParams], loras: list[LoRARequest | None]
    ) -> list[RequestOutput]:
        return [
            request_output(self._number(), output, params, lora)
            for output, params, lora in zip(outputs, each, loras, strict=True)
        ]

    def _number(self) -> str:
        return str(next(self._numbers))

    # --- vectors, classes, scores ---

    def embed(
        self,
        prompts: Any,
        *,
        use_tqdm: Bar = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Loras = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Returns a vector for each text, scaled to length 1 unless its PoolingParams say otherwise.

        Raises:
            ConfigError, InputError (ValueError): the model gives no vectors, or gives a vector for each token. Other
                errors as for generate.
        """
        if token_vectors(self.llm._client.model) is not None:
            raise InputError("this engine gives a vector for each token (pooling 'none'); encode() returns them")
        found = self._embedded(
            prompts, use_tqdm, pooling_params, lora_request, truncation(tokenization_kwargs, truncate_prompt_tokens)
        )
        return [
            EmbeddingRequestOutput(self._number(), EmbeddingOutput(vector.tolist()), *_tokens_of(output))
            for output, vector in found
        ]

    def encode(
        self,
        prompts: Any,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: Bar = True,
        lora_request: Loras = None,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Returns the results of the model's pooling as arrays: vectors, or probabilities for pooling_task="classify".

        Args:
            pooling_task: "embed", "token_embed" or "classify"; None: "embed". An engine with pooling "none" returns a
                vector for each token, also for "embed".

        Raises:
            ConfigError (ValueError): the model gives no vectors, or has no classification head.
            InputError (ValueError): any other task, or "token_embed" without pooling "none".
            Other errors as for generate.
        """
        if pooling_task not in (None, "embed", "token_embed", "classify"):
            raise InputError(f"pooling_task is {show(pooling_task)}; give embed, token_embed or classify")
        truncate = truncation(tokenization_kwargs, truncate_prompt_tokens)
        if pooling_task == "classify":
            ranked = self._classified(prompts, use_tqdm, pooling_params, lora_request, truncate)
            arrays = [(output, np.array(probs, np.float32)) for output, probs in ranked]
        else:
            if (pooling_task == "token_embed") > (token_vectors(self.llm._client.model) is not None):
                raise InputError("this engine gives a vector for each text; load it with LLM(..., pooling='none')")
            arrays = self._embedded(prompts, use_tqdm, pooling_params, lora_request, truncate)
        return [
            PoolingRequestOutput(self._number(), PoolingOutput(array), *_tokens_of(output)) for output, array in arrays
        ]

    def classify(
        self,
        prompts: Any,
        *,
        use_tqdm: Bar = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Loras = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Returns the probabilities of each text's classes, in the order of the model's labels.

        Raises:
            ConfigError (ValueError): the model has no classification head. Other errors as for generate.
        """
        found = self._classified(prompts, use_tqdm, pooling_params, lora_request, truncation(tokenization_kwargs))
        return [
            ClassificationRequestOutput(self._number(), ClassificationOutput(probs), *_tokens_of(output))
            for output, probs in found
        ]

    def score(
        self,
        data_1: Any,
        data_2: Any,
        /,
        *,
        use_tqdm: Bar = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Loras = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Returns the score of each pair of texts.

        A model that ranks (a cross-encoder) gives the relevance, 0 to 1. For any other model, the score is the cosine
        of the texts' vectors.

        Args:
            data_1, data_2: the texts of the pairs: one and one, one and many, or n and n.
            lora_request: one adapter for all texts.
            chat_template: refused, because the GGUF's own "rerank" template is used.

        Raises:
            PromptError (ValueError): the numbers of texts in data_1 and data_2 do not match. Other errors as for embed.
        """
        if chat_template is not None:
            raise PromptError(
                "chat_template is not supported here, because the GGUF's own rerank template is used; leave it out"
            )
        left, right = as_list(data_1), as_list(data_2)
        if len(left) == 1:
            left *= len(right)
        if not left or len(left) != len(right):
            raise PromptError(f"there are {len(as_list(data_1))} and {len(right)} texts; give 1 and n, or n and n")
        truncate = truncation(tokenization_kwargs, truncate_prompt_tokens)
        if self.llm._client.model.pooling == "rank":
            if truncate is not None:
                raise PromptError("truncate_prompt_tokens is not supported for a pair of texts; give shorter texts")
            scores = self._relevance(left, right, use_tqdm, pooling_params, lora_request)
        else:
            scores = self._cosines(left, right, use_tqdm, lora_request, truncate)
        return [ScoringRequestOutput(self._number(), ScoringOutput(score), ids) for ids, score in scores]

    def _embedded(
        self, prompts: Any, use_tqdm: Bar, pooling_params: Any, lora_request: Loras, truncate: int | None
    ) -> list[tuple[engine.RequestOutput, Any]]:
        given = as_list(prompts)
        each = _pooling(pooling_params, len(given))
        wanted = [self._defaults.dimensions if one.dimensions is None else one.dimensions for one in each]
        ready = self._inputs.ready(given, each, truncate)
        adapters, _ = self._inputs.adapters(lora_request, len(given))
        most = max((n for n in wanted if n is not None), default=None)
        submission = self.llm._prepared(lambda inputs: inputs.texts(ready, adapters, "raise", dimensions=most))
        outputs = self.llm._run(submission, bool(use_tqdm))
        n_embd, found = token_vectors(self.llm._client.model), []
        for output, one, dimensions in zip(outputs, each, wanted, strict=True):
            normalize = self._defaults.normalize if one.normalize is None else one.normalize
            [vector] = vectors([output], normalize=normalize, errors="raise", dimensions=dimensions, n_embd=n_embd)
            found.append((output, vector))
        return found

    def _classified(
        self, prompts: Any, use_tqdm: Bar, pooling_params: Any, lora_request: Loras, truncate: int | None
    ) -> list[tuple[engine.RequestOutput, list[float]]]:
        given = as_list(prompts)
        each = _pooling(pooling_params, len(given))
        ready = self._inputs.ready(given, each, truncate)
        adapters, _ = self._inputs.adapters(lora_request, len(given))
        submission = self.llm._prepared(lambda inputs: inputs.texts_to_classify(ready, adapters, "raise"))
        outputs = self.llm._run(submission, bool(use_tqdm))
        found = []
        for output, one in zip(outputs, each, strict=True):
            activate = self._activate(one)
            [classes] = classified(self.llm._client.model, [output], use_activation=activate, errors="raise")
            found.append((output, list(classes.probs.values())))
        return found

    def _relevance(
        self, left: list[Any], right: list[Any], use_tqdm: Bar, pooling_params: Any, lora_request: Loras
    ) -> list[tuple[list[int], float]]:
        """Returns the tokens and the relevance of each pair. Adjacent pairs with the same query run as one batch."""
        adapters, _ = self._inputs.adapters(lora_request, 1)
        activate = self._activate((_pooling(pooling_params, 1))[0])
        found: list[tuple[list[int], float]] = []
        own = adapters[0] if isinstance(adapters, list) else None
        for query, group in itertools.groupby(zip(left, right, strict=True), key=lambda pair: pair[0]):
            documents = [document for _, document in group]
            texts, submission = self.llm._prepared(methodcaller("documents", query, documents, own))
            outputs = self.llm._run(submission, bool(use_tqdm))
            results = reranked(
                self.llm._client.model, texts, outputs, top_n=None, use_activation=activate, errors="raise"
            )
            scores = {each.index: each.relevance_score for each in results}
            found += [(list(output.prompt_token_ids), scores[i]) for i, output in enumerate(outputs)]
        return found

    def _cosines(
        self, left: list[Any], right: list[Any], use_tqdm: Bar, lora_request: Loras, truncate: int | None
    ) -> list[tuple[list[int], float]]:
        unit = PoolingParams(normalize=True)
        found = self._embedded([*left, *right], use_tqdm, unit, lora_request, truncate)
        pairs = zip(found[: len(left)], found[len(left) :], strict=True)
        return [
            ([*one.prompt_token_ids, *other.prompt_token_ids], float(np.dot(a, b))) for (one, a), (other, b) in pairs
        ]

    def _activate(self, params: PoolingParams) -> bool:
        return self._defaults.use_activation if params.use_activation is None else params.use_activation

    # --- the rest ---

    def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Tokenizer:
        """Returns the model's tokenizer, with the common names of transformers' tokenizers."""
        return Tokenizer(self.llm)

    def get_metrics(self) -> list[Metric]:
        """Returns the engine's metrics under vLLM's names, such as "vllm:num_requests_running"."""
        return metrics_of(self.llm.stats(), Path(self.llm.plan.config.model).name)

    def reset_prefix_cache(self, *args: Any, **options: Any) -> bool:
        """Drops kept KV cells, as LLM.reset_prefix_cache of llamabatch. vLLM's arguments change nothing."""
        return self.llm.reset_prefix_cache()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Frees the model until the next use or wake_up(). All calls must have ended; `mode` changes nothing.

        Levels 1 and 2 do the same: the weights are freed, and are later loaded from the file. Level 0 does nothing.
        """
        integer(InputError, "level", level, 0, 2)
        if level:  # at level 0 vLLM frees nothing and only delays new requests
            self.llm.sleep()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Loads the model again after sleep(). `tags` changes nothing."""
        self.llm.wake()

    def close(self) -> None:
        """Ends all calls and frees the model. May be called twice. An LLM without references closes by itself."""
        llm = self.__dict__.get("llm")  # None if the constructor raised
        if llm is not None:
            llm.close()

    def __getattr__(self, name: str) -> Any:
        raise absent(self, name, ABSENT)

    def __repr__(self) -> str:
        return f"LLM({self.__dict__.get('llm')!r})"


_OF_FILE = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def _as_many_as_fit(model: str, options: dict[str, Any]) -> native.LLM:
    """Makes the LLM. vLLM's max_num_seqs is an upper limit, so a number that does not fit in memory is reduced."""
    try:
        return native.LLM(model, **options)
    except MemoryPlanError:
        if "n_slots" not in options:
            raise
        llm = native.LLM(model, **{name: value for name, value in options.items() if name != "n_slots"})
    warnings.warn(
        f"max_num_seqs is {options['n_slots']}, which does not fit in memory; {llm.plan.config.n_slots} run at once",
        UserWarning,
        stacklevel=caller_level(),
    )
    return llm


def _pooling(given: Any, n: int) -> list[PoolingParams]:
    if given is None or isinstance(given, PoolingParams):
        return [given or PoolingParams()] * n
    each = list(given)
    if len(each) != n or not all(isinstance(one, PoolingParams) for one in each):
        raise InputError(f"pooling_params is {show(given)}; give PoolingParams, or a list with one for each of {n}")
    return each


def _tokens_of(output: engine.RequestOutput) -> tuple[list[int], int]:
    return list(output.prompt_token_ids), output.num_cached_tokens
