"""Prefixes in files: what LLM does with them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any

from llamabatch.checks import counted
from llamabatch.client import EngineClient
from llamabatch.errors import EngineError, InputError
from llamabatch.front import Prompt
from llamabatch.paths import absolute
from llamabatch.prefix import MIN_SHARED
from llamabatch.request import RequestOutput
from llamabatch.sampling_params import SamplingParams

TRIES = 3
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)  # computes the prompt, whose cells then stay for a while
CROWDED = "others needed the cells of the prefix before they could be saved; try again at a calm time"


def tokens_to_save(output: RequestOutput) -> list[int]:
    """The tokens of a prompt that has just been computed. Raises InputError for one that is too short."""
    if len(output.prompt_token_ids) < MIN_SHARED:
        count = len(output.prompt_token_ids)
        raise InputError(f"the prefix has {counted(count, 'token')}; at least {MIN_SHARED} are worth saving")
    return list(output.prompt_token_ids)


class SavedPrefixes(ABC):
    """The part of LLM that saves and loads prefixes."""

    _client: EngineClient

    @abstractmethod
    def generate(self, prompts: Any, params: Any = None) -> list[RequestOutput]:
        """As LLM.generate."""

    def save_prefix(self, prompt: Prompt, path: str | os.PathLike[str]) -> int:
        """Computes a prompt and saves its KV cells to a file, for load_prefix in another process.

        Args:
            prompt: a text or token ids, at least 32 tokens; where a text goes on, its last token may become another, so
                end it where words end.

        Returns:
            How many tokens were saved.

        Raises:
            PromptError: the prompt cannot be run. InputError: it is too short, or the file cannot be written.
            ConfigError: this engine keeps no prefixes.
            EngineError: others needed the cells before they could be saved.
        """
        target = absolute(path)
        for _ in range(TRIES):
            [output] = self.generate(prompt, ONE_TOKEN)
            token_ids = tokens_to_save(output)
            if self._client.save_prefix(token_ids, target):
                return len(token_ids)
        raise EngineError(CROWDED)

    def load_prefix(self, path: str | os.PathLike[str]) -> int:
        """Holds a saved prefix in memory, in each engine: requests that begin so need not compute it, until
        unload_prefix. Returns its length in tokens.

        Raises:
            InputError: the file is damaged, or was saved with another model, llama.cpp or kind of KV cache.
            ConfigError: the model's state cannot be shared.
        """
        return self._client.load_prefix(absolute(path))

    def unload_prefix(self, path: str | os.PathLike[str]) -> None:
        """Frees a loaded prefix. Raises InputError if it is not loaded."""
        self._client.unload_prefix(absolute(path))
