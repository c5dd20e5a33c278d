"""Names of vLLM and llama_cpp that are missing in llamabatch, with replacements, for error messages."""

from __future__ import annotations

_VLLM = "llamabatch.compat.vllm"
_LLAMA = "llamabatch.compat"
_ASYNC = "llamabatch.AsyncLLM is the asyncio class"
_OPTIONS = "give the options to LLM(...)"


def _has(module: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), f"{module} has it")


# Names that other libraries export, and llamabatch does not -> advice for the error message.
OF_PACKAGE = {
    **_has(
        _VLLM,
        "PoolingParams PromptType PoolingOutput PoolingRequestOutput EmbeddingOutput EmbeddingRequestOutput "
        "ClassificationOutput ClassificationRequestOutput ScoringOutput ScoringRequestOutput",
    ),
    **_has(f"{_VLLM}.sampling_params", "GuidedDecodingParams StructuredOutputsParams RequestOutputKind"),
    **_has(f"{_VLLM}.lora.request", "LoRARequest"),
    "BeamSearchParams": "there is no beam search; SamplingParams(best_of=…) ranks several continuations",
    "LLMEngine": "Engine is the loop; LLM runs it",
    "AsyncLLMEngine": _ASYNC,
    "EngineArgs": _OPTIONS,
    "AsyncEngineArgs": "give the options to AsyncLLM(...)",
    "ModelRegistry": "llama.cpp has the models",
    "initialize_ray_cluster": "docs/ray.md has llamabatch on Ray",
    **_has(_LLAMA, "Llama LlamaGrammar LogitsProcessorList StoppingCriteriaList"),
    **dict.fromkeys(
        ("LlamaCache", "LlamaRAMCache", "LlamaDiskCache"), "prefixes are kept without it; LLM.save_prefix keeps one"
    ),
    "LlamaState": "LLM.save_prefix and LLM.load_prefix keep a computed prefix",
    "LlamaTokenizer": "LLM.tokenize and LLM.detokenize are the tokenizer",
    "LogitsProcessor": "SamplingParams(logits_processors=[f]) takes any function",
}

# Attributes that such classes of other libraries have, and our LLM lacks -> advice for the error message.
OF_LLM = {
    "get_tokenizer": "llm.tokenize, llm.detokenize, llm.apply_chat_template and llm.vocab are the tokenizer; "
    f"{_VLLM}'s LLM has get_tokenizer()",
    "get_default_sampling_params": f"llm.generate(prompts) takes them by itself; {_VLLM}'s LLM has them",
    "get_metrics": f"llm.stats() has the figures; {_VLLM}'s LLM has them under vLLM's names",
    "encode": "llm.embed gives vectors, llm.classify classes, llm.tokenize token ids",
    "decode": "llm.detokenize gives the text of token ids",
    "beam_search": OF_PACKAGE["BeamSearchParams"],
    "reward": "llm.classify(texts, use_activation=False) gives the scores of a classification head",
    "llm_engine": "llm.plan has the options in force, llm.metadata the values of the file",
    "model_config": "llm.plan has the options in force, llm.metadata the values of the file",
    "wake_up": "llm.wake() is the call",
    "is_sleeping": "llm.is_asleep says so",
    "collective_rpc": "one engine computes, with no workers to call",
    "apply_model": "one engine computes, with no workers to call",
    "start_profile": "llm.stats() counts, and `llamabatch top` shows an engine",
    "stop_profile": "llm.stats() counts, and `llamabatch top` shows an engine",
    "from_engine_args": _OPTIONS,
    "create_completion": f"llm.generate is the call; {_LLAMA}'s Llama has create_completion",
    "create_chat_completion": f"llm.chat is the call; {_LLAMA}'s Llama has create_chat_completion",
    "create_embedding": f"llm.embed is the call; {_LLAMA}'s Llama has create_embedding",
    "set_cache": "prefixes are kept without it; cache_prefix=False turns that off",
    "set_seed": "LLM(..., seed=…) or SamplingParams(seed=…)",
    "reset": "each request is a sequence of its own; llm.reset_prefix_cache() gives up kept prefixes",
    "eval": "llm.generate and llm.score compute prompts",
    "sample": "llm.stream gives token by token",
    "scores": "logprobs, and llm.score, tell what the model thinks of tokens",
    "save_state": "llm.save_prefix(text, file) keeps a computed prefix",
    "load_state": "llm.load_prefix(file) takes up a computed prefix",
    "n_vocab": "llm.vocab.size",
    "n_embd": "llm.metadata has it, and a vector of llm.embed",
    "token_bos": "llm.vocab.bos_token_id",
    "token_eos": "llm.vocab.eos_token_id",
    "token_nl": "llm.vocab.special_ids",
    "tokenizer": "llm.tokenize and llm.detokenize are the tokenizer",
    "set_tokenizer": "the GGUF file has its tokenizer; give prompts as token ids of another",
}

# Attributes that outputs of other libraries have, and our RequestOutput lacks -> advice for the error message.
OF_OUTPUT = {
    "finished": "an output that is returned has ended; finish_reason says how, and error is None unless it failed",
    "metrics": "timings has the times",
    "lora_request": "the request names its adapters",
    "choices": "output.to_openai() has the shape of OpenAI's API",
}

# Submodules that other libraries have, and llamabatch lacks -> advice for the error message.
MODULES = {
    **{name: f"{_VLLM}.{name} has its names" for name in ("sampling_params", "outputs", "inputs", "pooling_params")},
    "lora": f"{_VLLM}.lora.request has its names",
    "engine.arg_utils": _OPTIONS,
    "engine.llm_engine": OF_PACKAGE["LLMEngine"],
    "engine.async_llm_engine": _ASYNC,
    "entrypoints.openai": "`llamabatch serve` is the server",
    "entrypoints.chat_utils": "LLM.chat takes conversations",
    "v1": "LLM.stats() has the figures, AsyncLLM is the asyncio class",
    "transformers_utils": "LLM.tokenize and LLM.apply_chat_template are the tokenizer",
    "distributed": "docs/ray.md and docs/clusters.md have several machines",
    "multimodal": "a picture is given as it is: a path, bytes, a PIL image, an array",
    "assets": "a picture is given as it is: a path, bytes, a PIL image, an array",
    **{
        f"compat.vllm.{name}": text
        for name, text in {
            "engine.async_llm_engine": _ASYNC,
            "entrypoints.openai": "`llamabatch serve` is the server",
            "entrypoints.chat_utils": "LLM.chat takes conversations",
            "v1.engine": f"{_VLLM}.engine has EngineArgs and LLMEngine",
            "transformers_utils": "LLM.get_tokenizer() is the tokenizer",
            "distributed": "one engine computes",
            "multimodal": "a picture is given as it is: a path, bytes, a PIL image, an array",
            "assets": "a picture is given as it is: a path, bytes, a PIL image, an array",
            "utils": "vLLM's command-line helpers are not here; argparse has ArgumentParser",
            "beam_search": OF_PACKAGE["BeamSearchParams"],
        }.items()
    },
    "compat.llama_cpp": f"{_LLAMA} has the names of llama_cpp",
    "llama_cpp": "llama_cpp itself has the functions of llama.cpp",
    "llama_grammar": f"{_LLAMA} has LlamaGrammar",
    "llama_chat_format": "LLM.chat(..., chat_template=…) takes a template",
    "llama_tokenizer": "LLM.tokenize and LLM.detokenize are the tokenizer",
    "llama_speculative": "LLM(..., speculate='lookup') guesses by lookup",
    "llama_cache": OF_PACKAGE["LlamaCache"],
}
