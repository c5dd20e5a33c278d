"""The completion window of a batch. Near the end of the window the batch leaves the background. Pure Python."""

from __future__ import annotations

import re
from collections import deque

from llamabatch.errors import InputError
from llamabatch.utils.checks import show
from llamabatch.utils.format import duration

LEAST_S, MOST_S = 1, 30 * 86400
SAFETY = 2.0  # safety factor: the remaining rows may take up to twice the predicted time
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_FORM = re.compile(r"(\d{1,9})([smhd])")
_SPAN_S = 600.0  # seconds over which the rate is measured
_LEAST_SPAN_S = 1.0
_MOST_POINTS = 64


def seconds_of(window: object) -> int:
    """Returns the seconds of a completion_window, such as "24h", "90m", "30s" or "7d". Raises InputError."""
    match = _FORM.fullmatch(window) if isinstance(window, str) else None
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not LEAST_S <= seconds <= MOST_S:
        raise InputError(
            f'completion_window is {show(window)}; give a number with s, m, h or d behind, as "24h" or "10m", from '
            f"1s to {MOST_S // 86400}d"
        )
    return seconds


class Window:
    """Decides when a batch must leave the background, from the number of finished rows per second.

    The rate is measured over the last ten minutes. In the background, a batch gets only rows that other requests leave
    free. Outside the background, the batch is at least as fast as in the background. A batch whose rate is not known
    leaves the background in the middle of its window.

    Args:
        begins, ends: the limits of the window in seconds, by the same clock as the times for `observe` and `is_near`.
    """

    def __init__(self, begins: float, ends: float) -> None:
        self._begins, self._ends = begins, ends
        self._points: deque[tuple[float, int]] = deque()

    def observe(self, now: float, n_done: int) -> None:
        """Stores the number of finished rows and the time."""
        points = self._points
        if len(points) >= 2 and now - points[-2][0] < _SPAN_S / _MOST_POINTS:
            points[-1] = now, n_done  # replaces the newest point, which is too close to the second newest
        else:
            points.append((now, n_done))
        while len(points) > 2 and now - points[1][0] > _SPAN_S:
            points.popleft()

    @property
    def rate(self) -> float | None:
        """Finished rows per second; None: the rate is not known yet, or no row has finished."""
        if len(self._points) < 2:
            return None
        (start, before), (now, done) = self._points[0], self._points[-1]
        return (done - before) / (now - start) if now - start >= _LEAST_SPAN_S and done > before else None

    def is_near(self, now: float, n_left: int) -> bool:
        """Returns True if the remaining rows would not finish well before the end of the window."""
        left_s, rate = self._ends - now, self.rate
        if rate is None:
            return left_s < (self._ends - self._begins) / 2
        return n_left / rate * SAFETY > left_s

    def is_over(self, now: float) -> bool:
        return now >= self._ends

    def describe(self, now: float, n_left: int) -> str:
        """Returns the reason why a batch no longer runs in the background."""
        left = duration(max(0.0, self._ends - now))
        if self.rate is None:
            return f"{n_left:,} rows are left and {left}; no row has finished for a while"
        return (
            f"{n_left:,} rows are left and {left}; at {self.rate:.3g} rows/s they take {duration(n_left / self.rate)}"
        )
