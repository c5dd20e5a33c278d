"""Names of other libraries that are not here: errors that say what there is in their place."""

from __future__ import annotations

import dis
import sys
from collections.abc import Mapping


def absent(owner: object, name: str, advice: Mapping[str, str]) -> AttributeError:
    """The error for a missing attribute of an object.

    Args:
        advice: for names of other libraries, what there is in their place.
    """
    kind = type(owner).__name__
    if name in advice:
        return AttributeError(f"{kind}.{name} is not there: {advice[name]}", name=name, obj=owner)
    return AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=owner)


def absent_from(module: str, name: str, advice: Mapping[str, str]) -> Exception:
    """The error that a module's __getattr__ raises for a missing name; __getattr__ itself makes the call.

    Python drops the message of an AttributeError in `from module import name`: there, a name with advice gets an
    ImportError.
    """
    if name not in advice:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    message = f"{module}.{name} is not there: {advice[name]}"
    caller = sys._getframe(2)
    code = caller.f_code.co_code
    imports = 0 <= caller.f_lasti < len(code) and dis.opname[code[caller.f_lasti]] == "IMPORT_FROM"
    return ImportError(message, name=module) if imports else AttributeError(message)
