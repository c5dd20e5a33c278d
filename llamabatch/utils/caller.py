"""Finds the caller outside the package, as a stack level for warnings."""

from __future__ import annotations

import sys


def caller_level() -> int:
    """Returns a stacklevel for warnings.warn. The warning then points at the code that called llamabatch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "llamabatch":
        level, frame = level + 1, frame.f_back
    return level
