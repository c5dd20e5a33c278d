"""Options of a pool, and those of each model in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from llamabatch.config import EngineConfig
from llamabatch.errors import ConfigError
from llamabatch.planning.capacity import Plan
from llamabatch.server.options import ServerOptions
from llamabatch.utils.checks import boolean, integer, number, show

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
        check_idle(self.sleep_idle_s)
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
        sleep_idle_s: in place of that of PoolOptions.
    """

    config: EngineConfig
    options: ServerOptions
    plan: Plan
    bytes: tuple[int, ...]
    is_encoder: bool = False
    on_startup: bool = False
    sleep_idle_s: float | None = None

    def __post_init__(self) -> None:
        check_idle(self.sleep_idle_s)


@dataclass(frozen=True)
class Found:
    """The result of a second look for models.

    Attributes:
        names: of all models that are there.
        new: those whose name was not known.
    """

    names: frozenset[str]
    new: tuple[ModelSpec, ...]


LookAgain = Callable[[Collection[str]], Found]
"""Finds the models that have come, given the names of those that are known; runs on a thread."""


def check_idle(seconds: float | None) -> None:
    """Raises ConfigError."""
    if seconds is not None:
        number(ConfigError, "sleep_idle_seconds", seconds, 0, _LONGEST_IDLE_S)


def check_names(specs: Sequence[ModelSpec]) -> None:
    """Raises ConfigError where two models have one name."""
    known: dict[str, str] = {}
    for spec in specs:
        names = spec.options.served_model_names
        for name in names:
            if name in known:
                raise ConfigError(
                    f"{show(name)} is a name of {show(known[name])} and of {show(names[0])}; give one of them another"
                )
            known[name] = names[0]
