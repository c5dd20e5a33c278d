"""The stack level of a caller outside the package, for warnings."""

from __future__ import annotations

import sys


def caller_level() -> int:
    """Returns the stacklevel with which warnings.warn in the calling function points at code outside llamabatch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "llamabatch":
        level, frame = level + 1, frame.f_back
    return level
