"""Options of a pool, and those of each model in it."""

from __future__ import annotations

from dataclasses import dataclass

from llamabatch.config import EngineConfig
from llamabatch.errors import ConfigError
from llamabatch.planning.capacity import Plan
from llamabatch.server.options import ServerOptions
from llamabatch.utils.checks import boolean, integer, number

_MOST_MODELS = 4096
_LONGEST_IDLE_S = 10 * 365 * 86_400


@dataclass(frozen=True)
class PoolOptions:
    """Options of a pool. Raises ConfigError.

    Attributes:
        free_bytes: what all loaded models together may take, of main memory and then of each GPU.
        max_loaded: models that are loaded at once at most; 0: as many as fit.
        sleep_idle_s: seconds without a request after which a model is unloaded; None: never.
        in_order: a busy model takes no further requests as soon as one waits for another model. Otherwise it goes on
            for as long as that model's last load took, so that requests for both are gathered.
        autoload: a request loads its model. Otherwise it is refused, and POST /models/load loads.
    """

    free_bytes: tuple[int, ...]
    max_loaded: int = 0
    sleep_idle_s: float | None = None
    in_order: bool = False
    autoload: bool = True

    def __post_init__(self) -> None:
        integer(ConfigError, "models_max", self.max_loaded, 0, _MOST_MODELS)
        if self.sleep_idle_s is not None:
            number(ConfigError, "sleep_idle_seconds", self.sleep_idle_s, 0, _LONGEST_IDLE_S)
        boolean(ConfigError, "in_order", self.in_order)
        boolean(ConfigError, "autoload", self.autoload)


@dataclass(frozen=True)
class ModelSpec:
    """A model of a pool, which may not be loaded.

    Attributes:
        config: of its engine. options: of the server, with the names of the model.
        plan: of its engine on this machine.
        bytes: memory that it takes: main memory, then that of each GPU, as many as PoolOptions.free_bytes has.
        is_encoder: it has no next token.
        on_startup: it is loaded when the server starts.
    """

    config: EngineConfig
    options: ServerOptions
    plan: Plan
    bytes: tuple[int, ...]
    is_encoder: bool = False
    on_startup: bool = False
