"""Reads keep_alive of ollama's clients, a duration in the format of Go's time.ParseDuration."""

from __future__ import annotations

import math
import re

from llamabatch.server.request.body import Body

_PART = re.compile(r"(-?[0-9]*\.?[0-9]+)(ns|us|µs|ms|s|m|h)")
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_FOR_EVER_S = 365 * 86_400


def keep_seconds(keep_alive: object) -> float | None:
    """Returns the seconds of keep_alive, a number or a duration such as "5m".

    math.inf: the value is below 0 or over a year. None: the value is missing or is not a duration.
    """
    if isinstance(keep_alive, bool) or keep_alive is None:
        return None
    if isinstance(keep_alive, str):
        found = _PART.findall(keep_alive)
        if "".join(number + unit for number, unit in found) == keep_alive and found:
            keep_alive = sum(float(number) * _UNITS_S[unit] for number, unit in found)
        else:
            try:
                keep_alive = float(keep_alive)
            except ValueError:
                return None
    if not isinstance(keep_alive, (int, float)) or math.isnan(keep_alive):
        return None
    return math.inf if keep_alive < 0 or keep_alive > _FOR_EVER_S else float(keep_alive)


def take_keep_alive(given: Body) -> float | None:
    """Removes keep_alive from a body and returns its seconds. A value is ignored if it is not a duration.

    Only a server of several models unloads models. Such a server has already read the field before it passes the body
    to the application of the model.
    """
    keep_alive = given.take("keep_alive")
    seconds = keep_seconds(keep_alive)
    if seconds is None and keep_alive is not None:
        given.ignore("keep_alive", keep_alive, 'it is no duration, such as "5m", and no number of seconds')
    return seconds
