"""Chooses the number of threads of a step: all, or fewer while fewer are faster. Pure Python.

The threads of a pass wait for each other some hundred times. If another process uses a core, one of the threads does
not run for a while, and the other threads wait for it. Fewer threads may then be faster. The measured times of steps
decide. One thread fewer or more is tried now and then, and sooner after steps have become slower.
"""

from __future__ import annotations

from llamabatch.scheduler.step_costs import stair

# Another number of threads must be at least this many times as fast in a trial, because times are noisy.
LEAST_GAIN = 1.05
# Steps that became this many times as long are a reason to try fewer threads.
SLOWER = 1.25
# The fewest steps and seconds of a trial: another process may use a core for some milliseconds at a time.
TRIAL_STEPS, TRIAL_S = 3, 0.03
# The fewest steps and seconds between two trials. The wait doubles after each trial that brings no gain.
LEAST_STEPS, LEAST_S = 16, 0.25
MOST_S = 60.0  # the longest wait between two trials
MOST_BELOW_S = 10.0  # the longest wait while not all threads compute; shorter, as the other process may have ended
_AVERAGED_STEPS, _AVERAGED_S = 8, 0.1


class ThreadChoice:
    """Chooses the number of threads of the next step.

    Args:
        most: threads that the engine may use.
        tries: True: fewer threads are tried. False: all threads compute each step.
    """

    def __init__(self, most: int, tries: bool = True) -> None:
        self.threads = most
        self._most = most
        self._tries = tries and most > 1
        # range of row counts -> average seconds of its steps with the current number of threads
        self._seconds: dict[int, float] = {}
        self._usual: dict[int, float] = {}  # the averages at the end of the last trial
        self._steps, self._since_s = 0, 0.0  # steps and seconds since the last trial
        self._wait_s = LEAST_S
        self._before: int | None = None  # the number of threads before the current trial; None: no trial runs
        self._trial: list[tuple[int, float]] = []
        self._went_up = False

    def threads_of(self, rows: int) -> int:
        """Returns the number of threads for a step of `rows` decoding sequences.

        `rows` is 0 for a step of any other kind. Such a step takes no part in a trial, because a long prompt would take
        twice as long with half of the threads.
        """
        return self.threads if rows or self._before is None else self._before

    def observe(self, rows: int, seconds: float) -> None:
        """Records the duration of a step of `rows` decoding sequences. May change `threads`."""
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
