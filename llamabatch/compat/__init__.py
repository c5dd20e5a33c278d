"""llama_cpp's names over one batched engine: `from llamabatch.compat import Llama` in place of `from llama_cpp`."""

from llamabatch.compat.callbacks import LogitsProcessorList, StoppingCriteriaList
from llamabatch.compat.grammar import LlamaGrammar
from llamabatch.compat.llama import Llama

__all__ = ["Llama", "LlamaGrammar", "LogitsProcessorList", "StoppingCriteriaList"]
