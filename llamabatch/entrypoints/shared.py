"""Prefixes in files: what LLM does with them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llamabatch.client.base import EngineClient, Heartbeat
from llamabatch.client.middleware import CountingClient
from llamabatch.engine.stats import EngineStats
from llamabatch.entrypoints.input_processor import Prompt
from llamabatch.errors import EngineError, InputError
from llamabatch.request.outputs import RequestOutput
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.scheduler.common_prefix import MIN_SHARED
from llamabatch.utils.checks import counted
from llamabatch.utils.paths import absolute

if TYPE_CHECKING:
    from llamabatch.monitor.monitor import Monitor
    from llamabatch.monitor.snapshot import Snapshot

# ----------------------------------------------------------------------------------------------------
# What an LLM tells of its engine.


class Monitored:
    """A part of LLM."""

    _client: CountingClient

    def stats(self) -> EngineStats:
        """What the engine has done since it started, and what it does now. Waits for no step.

        Raises:
            EngineClosedError: after close(), or when the engine has died.
        """
        return self._client.stats()

    @property
    def heartbeats(self) -> list[Heartbeat]:
        """How each child process is that has an engine; none where engines are in this process."""
        return self._client.heartbeats

    def monitor(
        self,
        callback: Callable[[Snapshot], object] | None = None,
        *,
        every_s: float = 1.0,
        metrics_file: str | os.PathLike[str] | None = None,
        publish: bool = False,
    ) -> Monitor:
        """Looks at the engine and the machine every so often, on a thread of its own::

            with llm.monitor(lambda now: print(now.generated_tokens_per_s, now.stats.slot_use)):
                llm.generate(prompts)

        Args:
            callback: is called with a Snapshot; what it raises is logged.
            every_s: seconds, 0.01 to 3600.
            metrics_file: where Prometheus finds the figures; needs `llamabatch[metrics]`.
            publish: show it in `llamabatch top`.

        Raises:
            ConfigError: every_s is out of range; the metrics file cannot be written.
            SetupError: a metrics file without prometheus_client.
        """
        return monitor(self._client, callback, every_s=every_s, metrics_file=metrics_file, publish=publish)


def monitor(
    client: CountingClient,
    callback: Callable[[Snapshot], object] | None,
    *,
    every_s: float,
    metrics_file: str | os.PathLike[str] | None,
    publish: bool,
) -> Monitor:
    """A Monitor that ends with its client, named after the model."""
    from llamabatch.monitor.monitor import Monitor  # most programs watch nothing

    made = Monitor(
        client,
        callback,
        every_s=every_s,
        metrics_file=metrics_file,
        publish=publish,
        title=client.model.path.name,
    )
    client.at_close(made.stop)
    return made


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
            if self._client.call("save_prefix", token_ids, target):
                return len(token_ids)
        raise EngineError(CROWDED)

    def load_prefix(self, path: str | os.PathLike[str]) -> int:
        """Holds a saved prefix in memory, in each engine: requests that begin so need not compute it, until
        unload_prefix. Returns its length in tokens.

        Raises:
            InputError: the file is damaged, or was saved with another model, llama.cpp or kind of KV cache.
            ConfigError: the model's state cannot be shared.
        """
        n_tokens: int = self._client.call("load_prefix", absolute(path))
        return n_tokens

    def unload_prefix(self, path: str | os.PathLike[str]) -> None:
        """Frees a loaded prefix. Raises InputError if it is not loaded."""
        self._client.call("unload_prefix", absolute(path))
