"""Chooses the number of threads of a step: all, or fewer while fewer are faster. Pure Python.

The threads of a pass wait for each other some hundred times. If another process uses a core, one of the threads does
not run for a while, and the other threads wait for it. Fewer threads may then be faster. The measured times of steps
decide. Other numbers of threads are tried now and then, and sooner after steps have become slower: one thread fewer or
more, and half or twice as many. With several busy processes one thread fewer may be no faster, while half of them are.
"""

from __future__ import annotations

from llamabatch.scheduler.step_costs import stair

# Another number of threads must be at least this many times as fast in a trial, because times are noisy.
LEAST_GAIN = 1.05
# If steps have become this many times as long, fewer threads are tried.
SLOWER = 1.25
# The fewest steps and seconds of a trial: another process may use a core for some milliseconds at a time.
TRIAL_STEPS, TRIAL_S = 3, 0.03
# A trial that has cost this many seconds more than usual steps ends without gain: long steps need no repetition.
MOST_COST_S = 0.25
# The fewest steps and seconds between two trials. The wait doubles after each trial that brings no gain.
LEAST_STEPS, LEAST_S = 16, 0.25
MOST_S = 60.0  # the longest wait between two trials
MOST_BELOW_S = 10.0  # the longest wait while not all threads compute; shorter, as the other process may have ended
# The wait after a trial is at least this many times the seconds that the trial cost, also beyond the longest wait.
WAIT_BY_COST = 30
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
        self._other_s = 0.0  # seconds of steps of other kinds since the last trial
        self._n_failed = 0  # trials without gain: the next one tries the next number

    def threads_of(self, rows: int) -> int:
        """Returns the number of threads for a step of `rows` output rows.

        `rows` is 0 for a step of any other kind, such as a prompt. Such a step takes no part in a trial, because a long
        prompt would take twice as long with half of the threads.
        """
        return self.threads if rows or self._before is None else self._before

    def observe(self, rows: int, seconds: float) -> None:
        """Records the duration of a step of `rows` output rows, or of a step of another kind (0). May change `threads`.

        Steps of other kinds are no measure of a number of threads, since their lengths differ. After some seconds of
        them all threads compute again, because nothing else would tell that the other process has ended.
        """
        if not self._tries:
            return
        if not rows:
            self._other_s += seconds
            if self._other_s >= MOST_BELOW_S and self._before is None and self.threads < self._most:
                self.threads = self._most
                self._begin_again()
            return
        at = stair(rows)
        if self._before is not None:
            self._trial.append((at, seconds))
            is_long = len(self._trial) >= TRIAL_STEPS and sum(s for _, s in self._trial) >= TRIAL_S
            if is_long or self._cost(self._trial) > MOST_COST_S:
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
                self._wait_s = LEAST_S
                self._begin_trial(self._fewer())
            elif self._since_s >= self._wait_s:
                self._begin_trial(self._more() + self._fewer())

    def _fewer(self) -> list[int]:
        return [self.threads - 1, self.threads // 2] if self.threads > 1 else []

    def _more(self) -> list[int]:
        return [self.threads + 1, min(2 * self.threads, self._most)] if self.threads < self._most else []

    def _begin_trial(self, candidates: list[int]) -> None:
        self._before, self._trial = self.threads, []
        self.threads = candidates[self._n_failed % len(candidates)]

    def _cost(self, trial: list[tuple[int, float]]) -> float:
        """Returns by how many seconds the steps of a trial were longer than usual."""
        return sum(seconds - self._seconds[at] for at, seconds in trial if at in self._seconds)

    def _end_trial(self, before: int) -> None:
        known = [(self._seconds[at], seconds) for at, seconds in self._trial[1:] if at in self._seconds]
        tried, usual = sum(seconds for _, seconds in known), sum(average for average, _ in known)
        self._before, self._steps, self._since_s, self._other_s = None, 0, 0.0, 0.0
        if known and tried * LEAST_GAIN < usual:
            self._begin_again()
            return
        self.threads = before
        self._n_failed += 1
        self._usual = dict(self._seconds)
        longest = MOST_S if before == self._most else MOST_BELOW_S
        self._wait_s = max(min(2 * self._wait_s, longest), WAIT_BY_COST * self._cost(self._trial))

    def _begin_again(self) -> None:
        """Forgets the times of steps, which were those of another number of threads."""
        self._seconds, self._usual, self._wait_s = {}, {}, LEAST_S
        self._steps, self._since_s, self._other_s = 0, 0.0, 0.0
