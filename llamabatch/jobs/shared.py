"""The engine of a server, which a job shares with other requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llamabatch.client.base import EngineClient
from llamabatch.client.front_client import slots_of
from llamabatch.errors import ConfigError
from llamabatch.jobs.input.lines import ParsedLine
from llamabatch.utils.checks import integer

_MOST_ROWS = 1_000_000


class SharedEngine:
    """An engine that runs before, beside and behind a job: the job neither starts nor closes it.

    Args:
        client: of the engine.
        most_rows: rows of the job that the engine has at once, 1 or more; None: twice its slots, so that one is there
            when another ends.
        background: rows take only what other requests leave free, until `promote`. Their own "background" and
            "priority" are overruled, so that no row of a job overtakes other people's requests.
        read_line: reads lines of OpenAI's batch format in the way of the engine's service; None: as a job does.

    Raises:
        ConfigError: most_rows is out of range.
    """

    def __init__(
        self,
        client: EngineClient,
        most_rows: int | None = None,
        *,
        background: bool = True,
        read_line: Callable[[Mapping[str, Any]], ParsedLine] | None = None,
    ) -> None:
        self.client = client
        self.read_line = read_line
        self.background = background
        most = 2 * slots_of(client.plan.config) if most_rows is None else most_rows
        self.most_rows = integer(ConfigError, "most_rows", most, 1, _MOST_ROWS)

    def promote(self) -> None:
        """Lifts all rows that are left out of the background. Safe from any thread, at any time.

        Rows in flight are aborted and begin again: beside those that are promoted they would be the last ones.
        """
        self.background = False
