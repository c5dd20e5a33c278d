"""vLLM's forms of a prompt."""

from llamabatch.entrypoints.prompts import Prompt as PromptType
from llamabatch.entrypoints.prompts import TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
