"""Tools of the type `namespace`: groups of functions. Two namespaces may have functions of the same name."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

from llamabatch.errors import PromptError
from llamabatch.server.request import optional
from llamabatch.server.request.body import Body, Json, string
from llamabatch.utils.checks import show

NAMESPACE = "namespace"
Namespaced = dict[str, tuple[str, str]]  # keys: full names; values: (namespace, plain name)
Read = Callable[[str, Any, str], tuple[str, Json]]  # takes (place, tool, namespace), returns (plain name, function)


def offered(place: str, namespace: object, name: str) -> str:
    """Returns the full name of a function, as the model knows it: the namespace, then the plain name.

    Args:
        namespace: None: the function is in no namespace.
    """
    return name if namespace is None else f"{string(f'{place}.namespace', namespace)}__{name}"


def functions_in(
    place: str, namespace: Mapping[str, Any], given: Body, kinds: Container[str], read: Read, namespaced: Namespaced
) -> Iterator[Json]:
    """Yields the functions of a namespace as tools of a chat. The first function also gets the namespace's description.

    Args:
        kinds: types of the caller's own tools. NAMESPACE is not among them, because OpenAI's API does not nest
            namespaces.
        namespaced: the dict to which the names of the functions are added.
    """
    of, tools = string(f"{place}.name", namespace.get("name")), namespace.get("tools")
    if tools is None:
        return
    if not isinstance(tools, list):
        raise PromptError(f"{place}.tools is {show(tools)}; give a list of functions")
    about = namespace.get("description")
    for where, each in optional.own_tools(given, tools, kinds, f"{place}.tools"):
        plain, function = read(where, each, of)
        namespaced[function["name"]] = (of, plain)
        if about is not None:
            own = string(f"{where}.description", function.get("description", ""))
            texts = (string(f"{place}.description", about), own)
            function["description"] = "\n\n".join(text for text in texts if text)
            about = None
        yield {"type": "function", "function": function}


def chosen_name(place: str, name: str, tools: Iterable[Any], namespaced: Namespaced) -> str:
    """Returns the full name of a function. The caller has chosen the function by its plain name.

    Raises:
        PromptError: several namespaces have a function of this name, and no tool outside of namespaces has this name.
    """
    found = [each for each, (_, plain) in namespaced.items() if plain == name]
    if not found or any(_name_of(tool) == name for tool in tools):
        return name
    if len(found) > 1:
        several = ", ".join(namespaced[each][0] for each in found)
        raise PromptError(
            f"{place} names {show(name)}, which is in several namespaces, {several}; give one of {', '.join(found)}"
        )
    return found[0]


def _name_of(tool: object) -> object:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None
