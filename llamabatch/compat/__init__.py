"""llama_cpp's names: `from llamabatch.compat import Llama` replaces `from llama_cpp`. compat.vllm has vLLM's names."""

from typing import Any

from llamabatch.compat.callbacks import LogitsProcessorList, StoppingCriteriaList
from llamabatch.compat.grammar import LlamaGrammar
from llamabatch.compat.llama import Llama
from llamabatch.utils.absent import absent_from

__all__ = ["Llama", "LlamaGrammar", "LogitsProcessorList", "StoppingCriteriaList"]

_CACHE = "prompts that begin alike share their cells by themselves; cache_ram and cache_disk keep them for longer"
_TYPES = "requests and responses are plain dicts"
# Keys: public names of llama_cpp that are missing here. Values: what to use in their place.
ABSENT = {
    "BaseLlamaCache": _CACHE,
    "LlamaCache": _CACHE,
    "LlamaRAMCache": _CACHE,
    "LlamaDiskCache": _CACHE,
    "LlamaState": "llm.save_prefix(text, file) keeps a computed prefix",
    "LlamaTokenizer": "llm.tokenize and llm.detokenize are the model's",
    "LogitsProcessor": "any function of the token ids and the logits is one",
    "StoppingCriteria": "any function of the token ids and the logits is one",
    "ChatCompletionRequestMessage": _TYPES,
    "CreateChatCompletionResponse": _TYPES,
    "CreateCompletionResponse": _TYPES,
}


def __getattr__(name: str) -> Any:
    raise absent_from(__name__, name, ABSENT)
