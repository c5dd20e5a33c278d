"""Tools of /v1/responses as functions of a chat. A tool is a function, a custom tool, or a namespace of tools."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from llamabatch.chat.tagged_values import LARK
from llamabatch.errors import PromptError
from llamabatch.server.request import optional
from llamabatch.server.request.body import BOOLEAN, OBJECT, TEXT, Body, Json, string
from llamabatch.server.request.namespaces import NAMESPACE, Namespaced, chosen_name, functions_in, offered
from llamabatch.utils.checks import choice, show

_OWN = ("function", "custom")


def _schema(kind: str, **properties: Json) -> Json:
    named: Json = {"type": {"const": kind}, "name": {"type": "string"}, "description": TEXT}
    return {"type": "object", "required": ["type", "name"], "properties": {**named, **properties}}


_TOOL = _schema("function", parameters=OBJECT, strict=BOOLEAN)
_CUSTOM = _schema("custom", format=OBJECT)
_NAMESPACE = _schema("namespace", tools={"type": ["array", "null"], "items": {"anyOf": [_TOOL, _CUSTOM]}})
TOOLS: Json = {"type": ["array", "null"], "items": {"anyOf": [_TOOL, _CUSTOM, _NAMESPACE]}}


def read_tools(given: Body, namespaced: Namespaced, custom: set[str]) -> Json:
    """Returns tools, tool_choice and parallel_tool_calls as fields of a chat.

    Args:
        namespaced: the dict to which the functions of namespaces are added.
        custom: the set to which the names of custom tools are added.
    """
    found: Json = {}
    tools, chosen = given.take("tools"), given.take("tool_choice")
    if tools is not None:
        if not isinstance(tools, list):
            raise PromptError(f"tools is {show(tools)}; give a list of tools")
        own = functools.partial(_function, custom=custom)
        found["tools"] = []
        for place, tool in optional.own_tools(given, tools, (*_OWN, NAMESPACE)):
            if isinstance(tool, Mapping) and tool.get("type") == NAMESPACE:
                found["tools"] += functions_in(place, tool, given, _OWN, own, namespaced)
            else:
                found["tools"].append({"type": "function", "function": own(place, tool, None)[1]})
    choice_of = functools.partial(_choice, tools=found.get("tools", ()), namespaced=namespaced)
    if isinstance(chosen, Mapping) and chosen.get("type") == "allowed_tools":
        allowed = chosen.get("tools")
        if not isinstance(allowed, list):
            raise PromptError(f"tool_choice.tools is {show(allowed)}; give a list of functions")
        places = ((f"tool_choice.tools[{number}]", each) for number, each in enumerate(allowed))
        inner = {"mode": chosen.get("mode"), "tools": [choice_of(place, each) for place, each in places]}
        chosen = {"type": "allowed_tools", "allowed_tools": inner}
    elif isinstance(chosen, Mapping):
        chosen = choice_of("tool_choice", chosen)
    if chosen is not None:
        found["tool_choice"] = chosen
    if (parallel := given.take("parallel_tool_calls")) is not None:
        found["parallel_tool_calls"] = parallel
    return found


def _choice(place: str, chosen: object, tools: Iterable[Json], namespaced: Namespaced) -> Json:
    """Returns a `tool_choice` that names a function, in the format of Chat Completions."""
    if not isinstance(chosen, Mapping) or chosen.get("type") not in _OWN:
        raise PromptError(f'{place} is {show(chosen)}; give {{"type": "function", "name": …}}')
    namespace, name = chosen.get("namespace"), string(f"{place}.name", chosen.get("name"))
    if namespace is None:
        name = chosen_name(place, name, tools, namespaced)
    else:
        name = offered(place, namespace, name)
    return {"type": "function", "function": {"name": name}}


def _function(where: str, tool: object, namespace: str | None, custom: set[str]) -> tuple[Any, Json]:
    """Returns the plain name of a tool, and the tool as a function with its full name.

    Args:
        namespace: the namespace of the tool; None: the tool has none.
        custom: the set to which the name of a custom tool is added.
    """
    if not isinstance(tool, Mapping) or tool.get("type") not in _OWN:
        raise PromptError(f"{where} is {show(tool)}; give an object of type function, custom or namespace")
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
    if namespace is not None:
        function["name"] = offered(where, namespace, string(f"{where}.name", tool.get("name")))
    if tool["type"] == "custom":
        function["name"] = name = string(f"{where}.name", function.get("name"))
        custom.add(name)
        text = _one_text(f"{where}.format", tool.get("format"))
        own = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
        function |= {"parameters": own, "strict": len(text) > 1 or None}  # strict if the text has a pattern or grammar
    return tool.get("name"), {k: v for k, v in function.items() if v is not None}


def _one_text(where: str, form: object) -> Json:
    """Returns the JSON schema of a custom tool's input text. `form` is the `format` of the tool."""
    if form is None:
        return {"type": "string"}
    if not isinstance(form, Mapping):
        raise PromptError(f"{where} is {show(form)}; give an object")
    if choice(PromptError, f"{where}.type", form.get("type"), ("text", "grammar")) == "text":
        return {"type": "string"}
    syntax = choice(PromptError, f"{where}.syntax", form.get("syntax"), ("lark", "regex"))
    definition = string(f"{where}.definition", form.get("definition"))
    if syntax == "regex":
        return {"type": "string", "pattern": f"^(?:{definition})$"}
    return {"type": "string", "description": f"follows {LARK}, a grammar in Lark's notation", LARK: definition}


def repeated_tools(tools: Iterable[Mapping[str, Any]]) -> list[Json]:
    """Returns the tools of a request, as the response repeats them, without ignored tools. A function gets all fields,
    even if the request left some out, because clients that check types expect all fields."""
    return [_repeated(tool) for tool in tools if tool["type"] in (*_OWN, NAMESPACE)]


def _repeated(tool: Mapping[str, Any]) -> Json:
    if tool["type"] == NAMESPACE:
        own = [_repeated(one) for one in tool.get("tools") or () if one["type"] in _OWN]
        return known(tool, ("type", "name", "description")) | {"tools": own}
    if tool["type"] == "custom":
        return known(tool, _CUSTOM["properties"])
    return {"description": None, "parameters": None, "strict": False} | known(tool, _TOOL["properties"])


def known(given: Mapping[str, Any], names: Iterable[str]) -> Json:
    """Returns the entries of `given` with these names, without other entries, which may be large. A stream sends the
    result several times."""
    return {name: given[name] for name in names if name in given}
