"""Threads of a step: all, or fewer while that is faster. Pure Python.

The threads of a pass meet some hundred times. Beside a process that wants a core one of them does not run for a while,
and the others wait: fewer threads may then be faster. As with guesses (spec_decode.py), the times of steps decide,
which are measured while the engine runs; one thread fewer or more is tried now and then, and sooner where steps have
become slower.
"""

from __future__ import annotations

from llamabatch.scheduler.step_costs import stair

# Fewer or more threads must promise so many times the speed: times are noisy.
LEAST_GAIN = 1.05
# Steps that became so many times as long are a reason to try fewer.
SLOWER = 1.25
# A trial has so many steps, and takes so long: a process gets a core for some milliseconds at once.
TRIAL_STEPS, TRIAL_S = 3, 0.03
# Between two trials; the time doubles with each one that brings nothing.
LEAST_STEPS, LEAST_S = 16, 0.25
MOST_S = 60.0
MOST_BELOW_S = 10.0  # while not all threads compute: the other process may have ended
_AVERAGED_STEPS, _AVERAGED_S = 8, 0.1


class ThreadChoice:
    """Chooses the number of threads of the next step.

    Args:
        most: threads that the engine may use.
        tries: try fewer; otherwise all compute each step.
    """

    def __init__(self, most: int, tries: bool = True) -> None:
        self.threads = most
        self._most = most
        self._tries = tries and most > 1
        self._seconds: dict[int, float] = {}  # stair of rows -> average of its steps with this number of threads
        self._usual: dict[int, float] = {}  # the same at the end of the last trial
        self._steps, self._since_s = 0, 0.0  # since the last trial
        self._wait_s = LEAST_S
        self._before: int | None = None  # the number of threads before the trial under way
        self._trial: list[tuple[int, float]] = []
        self._went_up = False

    def observe(self, rows: int, seconds: float) -> None:
        """Learns from a step of `rows` decoding sequences; `threads` may change."""
        if not self._tries:
            return
        at = stair(rows)
        if self._before is not None:
            self._trial.append((at, seconds))
            if len(self._trial) >= TRIAL_STEPS and sum(s for _, s in self._trial) >= TRIAL_S:
                self._end_trial(self._before)
            return
        self._steps += 1
        self._since_s += seconds
        average = self._seconds.get(at, seconds)
        weight = min(1 / _AVERAGED_STEPS, average / _AVERAGED_S)
        self._seconds[at] = average + weight * (seconds - average)
        if self._steps >= LEAST_STEPS and self._since_s >= LEAST_S:
            usual = self._usual.setdefault(at, self._seconds[at])
            if self.threads > 1 and self._seconds[at] > SLOWER * usual:
                self._begin_trial(up=False)
            elif self._since_s >= self._wait_s:
                self._begin_trial(up=self.threads == 1 or (self.threads < self._most and not self._went_up))

    def _begin_trial(self, up: bool) -> None:
        self._before, self._trial, self._went_up = self.threads, [], up
        self.threads += 1 if up else -1

    def _end_trial(self, before: int) -> None:
        known = [(self._seconds[at], seconds) for at, seconds in self._trial[1:] if at in self._seconds]
        tried, usual = sum(seconds for _, seconds in known), sum(average for average, _ in known)
        self._before, self._steps, self._since_s = None, 0, 0.0
        if known and tried * LEAST_GAIN < usual:
            self._seconds, self._usual, self._wait_s = {}, {}, LEAST_S
            return
        self.threads = before
        self._usual = dict(self._seconds)
        self._wait_s = min(2 * self._wait_s, MOST_S if before == self._most else MOST_BELOW_S)
