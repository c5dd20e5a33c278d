"""An engine of a server that a job shares with other requests."""

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
    """An engine that a job uses but neither starts nor closes.

    Args:
        client: the client of the engine.
        most_rows: the most rows of the job in the engine at once, 1 or more; None: twice the engine's slots, so that
            another row is ready when a row ends.
        background: rows use only slots that other requests leave free, until `promote`. The rows' own "background" and
            "priority" are ignored, so that no row overtakes the requests of other users.
        read_line: reads a line of OpenAI's batch format as the engine's service does; None: the job reads it itself.

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
        """Ends the background tier of all remaining rows. Safe to call in any thread, at any time.

        Rows in flight are aborted and start again. Otherwise they would stay in the background tier and end last.
        """
        self.background = False
