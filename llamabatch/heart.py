"""Signs of life of a child program, once a second, whatever its engine does meanwhile."""

from __future__ import annotations

import logging
import threading
import time

from llamabatch.client import EngineClient
from llamabatch.errors import EngineClosedError
from llamabatch.parent import Parent
from llamabatch.watch import Watch

logger = logging.getLogger(__name__)

BEAT_S = 1.0


class Heart:
    """Tells the parent how long ago the last token came, and what the engine has counted since it was last told, so
    that its figures outlive it. A thread of its own, which no step holds up.

    Args:
        watch: of the engine that is or will be here.
    """

    def __init__(self, parent: Parent, watch: Watch) -> None:
        self.client: EngineClient | None = None  # whose figures are told, once it is there
        self._parent = parent
        self._watch = watch
        self._telling = threading.Lock()  # figures go out in the order in which they were taken
        threading.Thread(target=self._beat, name="llamabatch-heart", daemon=True).start()

    def tell_stats(self) -> None:
        """Sends the engine's figures. Raises EngineClosedError."""
        if self.client is not None:
            with self._telling:
                self._parent.send("stats", self.client.stats().to_wire())

    def _beat(self) -> None:
        told = None
        while True:
            try:
                last = self._watch.last_token_s
                self._parent.send("beat", None if last is None else time.perf_counter() - last)
                if last != told:
                    self.tell_stats()
                    told = last
            except (OSError, EngineClosedError):
                return  # the parent is gone, or the engine
            except Exception:  # without a beat the parent takes a healthy engine for one that hangs
                logger.exception("a beat failed")
            time.sleep(BEAT_S)
