"""AsleepClient: the client behind a FrontClient while the engines sleep."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from llamabatch.client.base import CLOSED, EngineMethod, Outage
from llamabatch.client.loaded_resources import LoadedResources
from llamabatch.client.thread_client import LocalClient
from llamabatch.engine.engine_state import EngineState
from llamabatch.engine.hooks import Sink
from llamabatch.engine.stats import EngineStats
from llamabatch.errors import EngineClosedError
from llamabatch.llama.model import Model
from llamabatch.planning.plan import Plan
from llamabatch.request.request import Request


class AsleepClient(LocalClient):
    """An EngineClient without engines.

    Args:
        loaded: the adapters and prefixes that were loaded in the engines.
        model: the closed model of the engines.
    """

    def __init__(self, plan: Plan, model: Model, loaded: LoadedResources) -> None:
        self.plan = plan
        self.model = model
        self._loaded = loaded
        self._is_closed = False

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> NoReturn:
        raise EngineClosedError(CLOSED)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Does nothing, because engines sleep only without requests."""

    def stats(self) -> EngineStats:
        self._check_open()
        return EngineStats()

    def states(self) -> list[EngineState]:
        self._check_open()
        return []

    def call(self, method: EngineMethod, *arguments: Any) -> NoReturn:
        raise EngineClosedError(CLOSED)

    @property
    def outage(self) -> Outage | None:
        return Outage(CLOSED) if self._is_closed else None

    @property
    def adapters(self) -> list[str]:
        return sorted(self._loaded.adapters)

    def close(self) -> None:
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError(CLOSED)
