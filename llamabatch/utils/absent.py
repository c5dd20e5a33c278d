"""Errors for names that other libraries have and llamabatch lacks. The messages name the replacement."""

from __future__ import annotations

import dis
import sys
from collections.abc import Mapping


def absent(owner: object, name: str, advice: Mapping[str, str], kind: str = "") -> AttributeError:
    """Returns the error for a missing attribute of an object.

    Args:
        advice: maps names of other libraries to llamabatch's replacements.
        kind: what the message calls the object; "": the name of the object's class.
    """
    kind = kind or type(owner).__name__
    if name in advice:
        return AttributeError(f"{kind}.{name} is not there: {advice[name]}", name=name, obj=owner)
    return AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=owner)


def absent_from(module: str, name: str, advice: Mapping[str, str]) -> Exception:
    """Returns the error for a missing name of a module. Only the module's __getattr__ may call this function.

    A name with advice gives an ImportError in `from module import name`, because Python drops the message of an
    AttributeError there.
    """
    if name not in advice:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    message = f"{module}.{name} is not there: {advice[name]}"
    caller = sys._getframe(2)
    code = caller.f_code.co_code
    imports = 0 <= caller.f_lasti < len(code) and dis.opname[code[caller.f_lasti]] == "IMPORT_FROM"
    return ImportError(message, name=module) if imports else AttributeError(message)
