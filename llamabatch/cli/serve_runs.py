"""Runs the server of `llamabatch serve` with one model or several. With several, each request names its model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from llamabatch.cli import echo_wrapped
from llamabatch.cli.serve_models import NamedModel
from llamabatch.config import EngineConfig
from llamabatch.errors import LlamaBatchError, MemoryPlanError, ModelFileError
from llamabatch.gguf.resolve import resolve
from llamabatch.planning.memory import mib
from llamabatch.server.options import ServerOptions
from llamabatch.utils.checks import show
from llamabatch.utils.paths import one_line

if TYPE_CHECKING:
    from llamabatch.server.pool.options import Found, ModelSpec

OneOfSeveral: TypeAlias = tuple[NamedModel, EngineConfig, ServerOptions]


def serve_one(config: EngineConfig, options: ServerOptions) -> None:
    from llamabatch.server.http.logs import configure  # imported late: needs the extra `server`
    from llamabatch.server.run import serve as run

    configure(options)
    try:
        plan = _planned(config)
    except MemoryPlanError as error:
        echo_wrapped(f"Error: {error}")
        click.get_current_context().exit(1)
    n_engines = plan.config.instances
    of_each = f" for each of {n_engines} engines" if n_engines > 1 else ""
    echo_wrapped(f"memory: {plan.memory.describe()}{of_each}; {mib(plan.total_bytes)} with the processes")

    def started(urls: list[str]) -> None:
        slots = f"{plan.config.n_slots} slots of {plan.config.n_ctx:,} tokens"
        name = one_line(Path(config.model).name)
        echo_wrapped(f"{name} is served at {', '.join(urls)}: {slots}, {_key(options)}; the model is being loaded")

    run(config, options, started, _say_ready)


def serve_several(
    models: list[NamedModel],
    read_one: Callable[[NamedModel], OneOfSeveral],
    options: ServerOptions,
    pool: dict[str, Any],
    look_again: Callable[[], list[NamedModel]] | None = None,
) -> None:
    """Serves several models. A request names a model, which is then loaded.

    Args:
        read_one: takes a model, and returns it with its engine options and server options.
        options: options of the server, for all models.
        pool: options of a ModelPool.
        look_again: a function that is called while the server runs. It returns the models that exist by then. None: the
            models never change.
    """
    from llamabatch.server.http.logs import configure  # imported late: needs the extra `server`
    from llamabatch.server.pool.options import Found, PoolOptions
    from llamabatch.server.pool.specs import free_bytes, spec_of
    from llamabatch.server.run import serve_several as run

    checked = PoolOptions((0,), **pool)
    context, told = click.get_current_context(), set[str]()

    def read_all(models: Iterable[NamedModel]) -> list[OneOfSeveral]:
        read = []
        for model in models:
            with _left_out(model, told, ModelFileError, MemoryPlanError):
                read.append(read_one(model))
        return read

    def planned(read: Iterable[OneOfSeveral]) -> list[ModelSpec]:
        specs = []
        for model, config, server in read:
            with _left_out(model, told, LlamaBatchError):
                found = spec_of(config, server, share, on_startup=model.on_startup, sleep_idle_s=model.sleep_idle_s)
                specs.append(found)
                slots = f"{found.plan.config.n_slots} slots of {found.plan.config.n_ctx:,} tokens"
                echo_wrapped(f"{_shown(found)}: {mib(found.plan.total_bytes)}, {slots}")
        return specs

    def looked_again(known: Collection[str]) -> Found:
        there = look_again() if look_again is not None else []
        with context.scope(cleanup=False):  # looked_again runs on another thread, which has no click context
            new = planned(read_all(model for model in there if model.name not in known))
        return Found(frozenset(model.name for model in there), tuple(new))

    read = read_all(models)
    configure(options)
    free = free_bytes(read[0][1]) if read else (0,)
    share = 1 / max(1, min(checked.max_loaded or len(read), len(read)))
    specs = planned(read)
    if not specs:
        echo_wrapped("Error: there is no model to serve")
        context.exit(1)
    together = sum(spec.bytes[0] for spec in specs)
    fit = together <= free[0] and not 0 < checked.max_loaded < len(specs)

    def started(urls: list[str]) -> None:
        where = f"served at {', '.join(urls)}"
        if len(specs) == 1:
            echo_wrapped(f"{_shown(specs[0])} is {where}, {_key(options)}")
            return
        memory = f"{mib(together)} of the {mib(free[0])} that are free, {'all at once' if fit else 'taking turns'}"
        echo_wrapped(f"{len(specs)} models are {where}: {memory}, {_key(options)}; requests load their model")

    run(specs, options, PoolOptions(free, **pool), started, None if look_again is None else looked_again)


@contextlib.contextmanager
def _left_out(model: NamedModel, told: set[str], *errors: type[LlamaBatchError]) -> Iterator[None]:
    """Suppresses exceptions of the types `errors` in the block, so that the other models can be served. Prints the
    error as one line, unless `told` already contains this line."""
    try:
        yield
    except errors as error:
        line = f"{show(model.name) if model.name else 'the model'} is left out: {error}"
        if line not in told:
            told.add(line)
            echo_wrapped(line)


def _planned(config: Any) -> Any:
    """Returns the plan of the engine without loading the model. Raises MemoryPlanError."""
    from llamabatch.engine.resolve_config import plan  # imported late: loads llama.cpp's library

    return plan(config, resolve(config.model))


def _shown(spec: ModelSpec) -> str:
    names = spec.options.served_model_names
    return one_line(names[0] if names else Path(spec.config.model).name)


def _key(options: ServerOptions) -> str:
    return "with a key" if options.api_keys else "without a key"


def _say_ready(seconds: float) -> None:
    echo_wrapped(f"ready after {seconds:.1f} s")
