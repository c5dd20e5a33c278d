"""Keywords under the names of other libraries: a class of ours understands them, and its signature stays."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

G = TypeVar("G", bound=Callable[..., Any])
F = TypeVar("F", bound=Callable[..., None])

# Other libraries' names for the path of a model: llama_cpp.Llama's, and what repr and configs of others show.
MODEL_NAMES = ("model_path", "model_name_or_path", "model_id")


def takes_names(named: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Callable[[F], F]:
    """A decorator of __init__: `named` turns the keywords of a caller into those of the function.

    Type checkers, help() and inspect.signature see the function as it is written.

    Args:
        named: keywords -> keywords; it raises what the caller shall see for an unknown one.
    """

    def decorate(made: F) -> F:
        @functools.wraps(made)
        def init(self: Any, *args: Any, **options: Any) -> None:
            made(self, *args, **named(options))

        return init  # type: ignore[return-value]  # the same parameters

    return decorate


def also_named(**others: str) -> Callable[[G], G]:
    """A decorator of a method: keywords under other names -> its own. One that is given twice raises TypeError."""

    def decorate(made: G) -> G:
        def own(options: dict[str, Any]) -> dict[str, Any]:
            for given in others.keys() & options.keys():
                if others[given] in options:
                    raise TypeError(f"{others[given]} is given twice, once as {given!r}; give it once")
                options[others[given]] = options.pop(given)
            return options

        @functools.wraps(made)
        def call(*args: Any, **options: Any) -> Any:
            return made(*args, **own(options))

        @functools.wraps(made)
        async def call_later(*args: Any, **options: Any) -> Any:
            return await made(*args, **own(options))

        return cast("G", call_later if inspect.iscoroutinefunction(made) else call)

    return decorate


def model_named(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options with "model" in place of another of its names; two of them are left for the function to refuse."""
    if "model" not in options:
        for name in MODEL_NAMES:
            if name in options:
                return {"model": options[name], **{key: value for key, value in options.items() if key != name}}
    return options
