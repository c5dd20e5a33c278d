"""Formats numbers for people: seconds, durations, three significant digits, ratios. Selects attributes for JSON."""

from __future__ import annotations

from typing import Any


def attributes(source: object, *names: str) -> dict[str, Any]:
    """Returns some attributes of an object by name, for a JSON document."""
    return {name: getattr(source, name) for name in names}


def seconds(value: float) -> str:
    """Formats seconds with three significant digits: 1.24 s. Values below one second are in milliseconds: 85.1 ms."""
    return f"{significant(value * 1000)} ms" if value < 1 else f"{significant(value)} s"


def duration(value: float) -> str:
    """Formats a duration in at most two units: 3.2 s, 4 min 10 s, 2 h 5 min, 3 d 4 h."""
    if value < 60:
        return f"{value:.1f} s"
    total = round(value)
    for larger, name, smaller, rest in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if total >= larger:
            return f"{total // larger} {name} {total % larger // smaller} {rest}"
    raise AssertionError(value)


def significant(value: float) -> str:
    """Formats a number with three significant digits and no exponent: 0.0123, 1.23, 12.3, 1,234."""
    if value == 0:
        return "0"
    digits = 2
    magnitude = abs(value)
    while magnitude >= 10 and digits > 0:
        magnitude /= 10
        digits -= 1
    while 0 < magnitude < 1 and digits < 6:
        magnitude *= 10
        digits += 1
    return f"{value:,.{digits}f}"


def times(value: float) -> str:
    """Formats a ratio: 4.1, 12."""
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def file_size(n_bytes: float) -> str:
    """Formats bytes of a file in powers of 1000, as for disks: 812 B, 1.2 kB, 397.8 MB, 4.68 GB."""
    for unit, digits in (("B", 0), ("kB", 1), ("MB", 1)):
        if n_bytes < 1000:
            return f"{n_bytes:.{digits}f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.2f} GB"
