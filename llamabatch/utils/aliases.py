"""Decorators that change or check a caller's keywords: other libraries' names, or the keys of a TypedDict."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from llamabatch.errors import InputError

G = TypeVar("G", bound=Callable[..., Any])
_Read = Callable[[dict[str, Any]], Mapping[str, Any]]  # keywords of a caller -> keywords of the function

# Other libraries' names for the path of a model, such as the argument model_path of llama_cpp.Llama.
MODEL_NAMES = ("model_path", "model_name_or_path", "model_id")


def takes_names(named: _Read, aliases: Mapping[str, str] | None = None) -> Callable[[G], G]:
    """Returns a decorator for __init__ that passes the caller's keywords through `named`.

    Type checkers, help() and inspect.signature see the undecorated function.

    Args:
        named: converts the caller's keywords to the function's keywords.
        aliases: other name -> the function's own keyword. An error about a keyword also names the alias that was given.
    """

    def decorate(made: G) -> G:
        @functools.wraps(made)
        def call(self: object, *args: Any, **options: Any) -> None:
            try:
                made(self, *args, **named(options))
            except InputError as error:
                own, is_, rest = str(error).partition(" is ")
                given = next((name for name in options if (aliases or {}).get(name) == own), None)
                if given is not None and own not in options:
                    error.args = (f"{given} (here {own}){is_}{rest}",)
                raise

        return cast("G", call)

    return decorate


def also_named(place: Callable[[str], str], **others: str) -> Callable[[G], G]:
    """Returns a decorator for a method that also accepts keywords under other names.

    The method raises TypeError if a keyword is given under both of its names.

    Args:
        place: returns the advice for an unknown keyword, as the last clause of the error message; "": no advice.
        others: another name -> the method's own keyword.
    """

    def decorate(made: G) -> G:
        parameters = frozenset(inspect.signature(made).parameters)

        def own(options: dict[str, Any]) -> dict[str, Any]:
            for given in others.keys() & options.keys():
                if others[given] in options:
                    raise TypeError(f"{others[given]} is given twice, once as {given!r}; give it once")
                options[others[given]] = options.pop(given)
            for name in () if options.keys() <= parameters else options:
                if name not in parameters and (advice := place(name)):
                    raise TypeError(f"{made.__qualname__}() got an unexpected keyword argument {name!r}, {advice}")
            return options

        return _reading(made, own)

    return decorate


def takes_keywords(keywords: Any, function: Callable[..., object]) -> Callable[[G], G]:
    """Returns a decorator for a method that passes `**options: Unpack[keywords]` on to `function`.

    The method raises TypeError for other keywords. Its signature shows the TypedDict's keywords, with their defaults,
    before the method's own keywords.

    Args:
        keywords: a TypedDict.
        function: a function with these keywords and their defaults.
    """
    taken = [p for p in inspect.signature(function).parameters.values() if p.name in keywords.__optional_keys__]

    def decorate(made: G) -> G:
        signature = inspect.signature(made)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        known = {p.name for p in (*taken, *own)}

        def checked(options: dict[str, Any]) -> dict[str, Any]:
            if unknown := [name for name in options if name not in known]:
                raise TypeError(f"{made.__qualname__}() got an unexpected keyword argument {unknown[0]!r}")
            return options

        method = _reading(made, checked)
        shown = sorted((*taken, *own), key=lambda p: p.kind)
        setattr(method, "__signature__", signature.replace(parameters=shown))  # noqa: B010
        return method

    return decorate


def _reading(made: G, read: _Read) -> G:
    """Wraps a function. `read` converts the caller's keywords before each call."""

    @functools.wraps(made)
    def call(*args: Any, **options: Any) -> Any:
        return made(*args, **read(options))

    @functools.wraps(made)
    async def call_later(*args: Any, **options: Any) -> Any:
        return await made(*args, **read(options))

    return cast("G", call_later if inspect.iscoroutinefunction(made) else call)


def model_named(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Renames the first of MODEL_NAMES in a caller's keywords to "model".

    If the caller gives a second name, this name stays in the keywords, and the called function refuses it.
    """
    if "model" not in options:
        for name in MODEL_NAMES:
            if name in options:
                return {"model": options[name], **{key: value for key, value in options.items() if key != name}}
    return options
