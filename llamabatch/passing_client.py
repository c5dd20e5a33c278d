"""A client that stands in front of another one, be it a thread, a child or a router, and passes everything on."""

from __future__ import annotations

import os
from collections.abc import Iterable

from llamabatch.client import EngineClient, Sink
from llamabatch.heartbeat import Heartbeat
from llamabatch.request import Request
from llamabatch.stats import EngineStats


class PassingClient:
    """An EngineClient; those made of it change a part."""

    def __init__(self, client: EngineClient) -> None:
        self.plan = client.plan
        self.model = client.model
        self.behind = client

    @property
    def pids(self) -> list[int]:
        return self.behind.pids

    @property
    def heartbeats(self) -> list[Heartbeat]:
        return self.behind.heartbeats

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        self.behind.submit(requests, sink, stream=stream)

    def abort(self, request_ids: Iterable[str]) -> None:
        self.behind.abort(request_ids)

    def stats(self) -> EngineStats:
        return self.behind.stats()

    @property
    def adapters(self) -> list[str]:
        return self.behind.adapters

    def save_prefix(self, token_ids: list[int], path: str) -> bool:
        return self.behind.save_prefix(token_ids, path)

    def load_prefix(self, path: str) -> int:
        return self.behind.load_prefix(path)

    def unload_prefix(self, path: str) -> None:
        self.behind.unload_prefix(path)

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        self.behind.load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        self.behind.unload_adapter(name)

    def close(self) -> None:
        self.behind.close()
