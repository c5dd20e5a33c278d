"""A server's engine. A job shares this engine with other requests."""

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
        most_rows: maximum number of the job's rows in the engine at once, 1 or more; None: twice the number of the
            engine's slots, so that another row is ready when a row ends.
        background: until `promote`, rows use only slots that no other request needs. The rows' own "background" and
            "priority" are ignored, so that no row overtakes the requests of other users.
        read_line: reads a line of OpenAI's batch format for a service; None: the job reads such lines itself.

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

        Rows in flight are aborted and start again. Otherwise these rows would stay in the background tier and end last.
        """
        self.background = False
