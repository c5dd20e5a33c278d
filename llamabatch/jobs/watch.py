"""What the engine says of itself, asked by a thread of its own: the loop of a job waits for nobody's answer."""

from __future__ import annotations

import threading

from llamabatch.client import EngineClient
from llamabatch.errors import EngineClosedError
from llamabatch.stats import EngineStats

_FIRST_S, _EVERY_S = 0.02, 0.5  # soon at first: a job may be short


class Watch:
    """A context manager.

    Attributes:
        stats: the last that the engine has said.
    """

    def __init__(self, client: EngineClient) -> None:
        self.stats = EngineStats()
        self._client = client
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="llamabatch-watch", daemon=True)

    def look(self) -> EngineStats:
        """Asks at once; what was last known, if the engine is gone."""
        try:
            self.stats = self._client.stats()
        except EngineClosedError:
            self._ended.set()
        return self.stats

    def _look(self) -> None:
        wait_s = _FIRST_S
        while not self._ended.wait(wait_s):
            self.look()
            wait_s = min(2 * wait_s, _EVERY_S)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
