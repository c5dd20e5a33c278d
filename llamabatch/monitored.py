"""What an LLM tells of its engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from llamabatch.counting_client import CountingClient
from llamabatch.heartbeat import Heartbeat
from llamabatch.stats import EngineStats

if TYPE_CHECKING:
    from llamabatch.monitor import Monitor, Snapshot


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
    from llamabatch.monitor import Monitor  # most programs watch nothing

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
