"""Prepares the inputs of calls: prompts in vLLM's forms, the cut of long prompts, and adapters."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from llamabatch.compat.vllm.lora.request import LoRARequest
from llamabatch.compat.vllm.pooling_params import PoolingParams
from llamabatch.compat.vllm.sampling_params import SamplingParams
from llamabatch.entrypoints import llm as native
from llamabatch.entrypoints.input_processor import Adapters
from llamabatch.entrypoints.input_processor import place_of as native_place_of
from llamabatch.entrypoints.prompts import is_prompt_mapping, is_token_ids
from llamabatch.errors import AdapterError, InputError
from llamabatch.request.sampling_params import PARAMETERS
from llamabatch.utils.checks import counted, integer, show

Loras = LoRARequest | Sequence[LoRARequest | None] | None


def place_of(name: str) -> str:
    """Returns advice on the right place for a keyword of SamplingParams, of an adapter or of the engine; else ""."""
    if name in PARAMETERS:
        return f"a parameter of sampling: give SamplingParams({name}=…)"
    if name in ("adapters", "lora", "loras"):
        return "an adapter: give lora_request=LoRARequest(name, id, path)"
    return native_place_of(name)


class CallInputs:
    """The prompts and adapters of all calls to one LLM of llamabatch."""

    def __init__(self, llm: native.LLM) -> None:
        self._llm = llm
        self._lock = threading.Lock()
        self._loras: dict[str, str] = {}

    def ready(
        self, given: list[Any], each: Sequence[SamplingParams | PoolingParams], truncate: int | None
    ) -> list[Any]:
        """Returns prompts with token ids. The parameters' truncate_prompt_tokens, or else `truncate`, cuts them."""
        return [
            self._prompt(one, truncate if params.truncate_prompt_tokens is None else params.truncate_prompt_tokens)
            for one, params in zip(given, each, strict=True)
        ]

    def _prompt(self, prompt: Any, truncate: int | None) -> Any:
        """Returns a prompt with token ids, shortened by _cut. Tokenizes a text. A prompt that has neither a text nor
        token ids stays as it is."""
        text = prompt["prompt"] if is_prompt_mapping(prompt) and set(prompt) == {"prompt"} else prompt
        if isinstance(text, str) and text:
            model = self._llm._client.model
            ids = model.tokenize(text, parse_special=True)
            if ids[:2] == [model.vocabulary.bos] * 2:
                ids = ids[1:]  # the text already began with BOS, which chat templates write
            return {"prompt": text, "prompt_token_ids": self._cut(ids, truncate)}
        if truncate is None:
            return prompt
        if is_token_ids(prompt):
            return self._cut(list(prompt), truncate)
        if is_prompt_mapping(prompt) and is_token_ids(prompt.get("prompt_token_ids")):
            return {**prompt, "prompt_token_ids": self._cut(list(prompt["prompt_token_ids"]), truncate)}
        return prompt

    def _cut(self, ids: list[int], truncate: int | None) -> list[int]:
        """Returns the last `truncate` tokens. -1 means the last n_ctx - 1 tokens, None all tokens."""
        if truncate is None:
            return ids
        most = self._llm.n_ctx - 1 if truncate == -1 else truncate
        return ids[-most:] if most else []

    def adapters(self, given: Loras, n: int) -> tuple[Adapters, list[LoRARequest | None]]:
        """Loads the missing adapters of n prompts. Returns each prompt's adapter and LoRARequest."""
        each = [given] * n if given is None or isinstance(given, LoRARequest) else list(given)
        if len(each) != n:
            raise AdapterError(
                f"lora_request has {len(each)} items for {counted(n, 'prompt')}; give one, or one for each"
            )
        names: list[Any] = [None if lora is None else self._load(lora) for lora in each]
        return names, each

    def _load(self, lora: Any) -> str:
        if not isinstance(lora, LoRARequest):
            raise AdapterError(f"lora_request is {show(lora)}; give LoRARequest(name, number, path), or a list of them")
        path = lora.file()
        with self._lock:
            loaded = self._loras.get(lora.lora_name)
            if loaded is None:
                self._llm.load_adapter(lora.lora_name, path)
                self._loras[lora.lora_name] = path
            elif loaded != path:
                raise AdapterError(f"the adapter {show(lora.lora_name)} is loaded from {loaded}; give another name")
        return lora.lora_name


def as_list(prompts: Any) -> list[Any]:
    """Returns the prompts of a call as a list, also for a single prompt."""
    if isinstance(prompts, (str, bytes, Mapping)) or prompts is None or is_token_ids(prompts):
        return [prompts]
    return list(prompts)


def without_salts(prompts: list[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the prompts without their cache_salt, and the cache_salt of each prompt (None if it has none)."""
    plain, salts = [], []
    for prompt in prompts:
        salt = prompt.get("cache_salt") if is_prompt_mapping(prompt) else None
        salts.append(salt)
        plain.append(prompt if salt is None else {name: each for name, each in prompt.items() if name != "cache_salt"})
    return plain, salts


def truncation(options: Mapping[str, Any] | None, truncate: int | None = None) -> int | None:
    """Returns truncate_prompt_tokens of tokenization_kwargs, or `truncate`. Raises InputError for other options."""
    found = dict(options or {})
    cut = found.pop("truncate_prompt_tokens", None)
    if found.pop("truncation", False):
        raise InputError("truncation keeps the first tokens; give truncate_prompt_tokens, which keeps the last ones")
    for name in ("max_length", "add_special_tokens"):
        if found.get(name) in (None, True):
            found.pop(name, None)
    if found:
        raise InputError(f"tokenization_kwargs has {', '.join(found)}; give truncate_prompt_tokens alone")
    cut = truncate if cut is None else cut
    return cut if cut is None else integer(InputError, "truncate_prompt_tokens", cut, -1, 2**31 - 1, ", or None")
