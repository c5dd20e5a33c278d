"""Makes the client for a config: connect() in the user's program, connect_here() in a child process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from llamabatch.client.base import EngineClient
from llamabatch.client.thread_client import ThreadClient
from llamabatch.config import EngineConfig
from llamabatch.engine.hooks import EngineHooks
from llamabatch.gguf.mmproj import resolve_mmproj
from llamabatch.gguf.resolve import local
from llamabatch.utils.late_import import late_import
from llamabatch.utils.lifetime import reap_collected

if TYPE_CHECKING:
    from llamabatch.client.front_client import FrontClient


def connect(config: EngineConfig) -> FrontClient:
    """Starts the engines of a config, in this process or in children, and returns the client of all of them."""
    return with_front_client(_connect(config), config.max_queue, _connect)


def with_front_client(
    client: EngineClient, max_queue: int | None, connect: Callable[[EngineConfig], EngineClient] | None = None
) -> FrontClient:
    """Returns a FrontClient around `client`. Entry points use only such clients.

    Args:
        connect: makes the engines again after a sleep; None: the engines cannot sleep.
    """
    with late_import("the code of the client"):  # child processes do not need it
        from llamabatch.client.front_client import FrontClient

    return FrontClient(client, max_queue, connect)


def _connect(config: EngineConfig) -> EngineClient:
    reap_collected()
    draft = config.draft_model and local(config.draft_model)
    mmproj = config.mmproj and str(resolve_mmproj(config.mmproj, config.model))
    config = replace(config, model=local(config.model), draft_model=draft, mmproj=mmproj)
    if config.strategy != "multi-instance" and not config.isolate:
        return connect_here(config)
    with late_import("the code of child processes"):  # most users do not need it
        from llamabatch.client.process_client import ChildClient, RouterClient

    return RouterClient(config) if config.strategy == "multi-instance" else ChildClient(config)


def connect_here(config: EngineConfig, hooks: EngineHooks | None = None) -> EngineClient:
    """Starts the engines of a config in this process. Several engines share the weights."""
    with late_import("the code of the engine"):
        from llamabatch.client.multi_engine_client import MultiEngineClient

    first = ThreadClient(config, alone=False, hooks=hooks)
    return first if first.plan.config.instances == 1 else MultiEngineClient(first, hooks)
