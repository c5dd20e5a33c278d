"""The options of a pool, and of each model in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from llamabatch.config import EngineConfig
from llamabatch.errors import ConfigError
from llamabatch.planning.plan import Plan
from llamabatch.server.options import ServerOptions
from llamabatch.utils.checks import boolean, integer, number, show

_MOST_MODELS = 4096
_LONGEST_IDLE_S = 10 * 365 * 86_400


@dataclass(frozen=True)
class PoolOptions:
    """Options of a pool. Raises ConfigError.

    Attributes:
        free_bytes: the memory for all loaded models together in bytes: first in main memory, then in each GPU.
        max_loaded: the maximum number of models that are loaded at once; 0: as many as fit.
        sleep_idle_s: seconds without a request after which a model is unloaded; None: never.
        in_order: True: a busy model accepts no more requests as soon as a request waits for another model. False: the
            busy model first continues for the duration of the other model's last load.
        autoload: True: a request loads its model. False: the request is refused; POST /models/load loads models.
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
    """A model of a pool, loaded or not.

    Attributes:
        config: the options of the engine.
        options: the options of the server, with the names of the model.
        plan: the plan of the engine on this machine.
        bytes: the memory of the model in bytes: first in main memory, then in each GPU, as in PoolOptions.free_bytes.
        is_encoder: the model is an encoder, which generates no tokens.
        on_startup: the model is loaded when the server starts.
        sleep_idle_s: replaces PoolOptions.sleep_idle_s; None: PoolOptions.sleep_idle_s applies.
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
    """The result of a new search for models.

    Attributes:
        names: the names of all models found.
        new: the models whose names were not known.
    """

    names: frozenset[str]
    new: tuple[ModelSpec, ...]


LookAgain = Callable[[Collection[str]], Found]
"""Searches for models again, given the known names. Runs on a thread."""


def check_idle(seconds: float | None) -> None:
    """Checks sleep_idle_seconds. Raises ConfigError."""
    if seconds is not None:
        number(ConfigError, "sleep_idle_seconds", seconds, 0, _LONGEST_IDLE_S)


def check_names(specs: Sequence[ModelSpec]) -> None:
    """Checks that no two models share a name. Raises ConfigError."""
    known: dict[str, str] = {}
    for spec in specs:
        names = spec.options.served_model_names
        for name in names:
            if name in known:
                raise ConfigError(
                    f"{show(name)} is a name of {show(known[name])} and of {show(names[0])}; give one of them another"
                )
            known[name] = names[0]
