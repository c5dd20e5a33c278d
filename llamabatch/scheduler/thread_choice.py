"""Chooses the number of threads of a step: all threads, or fewer threads while fewer are faster. Pure Python.

The threads of a pass wait for each other some hundred times. If another process uses a core, one of the threads does
not run for a while, and the other threads wait for it. Fewer threads may then be faster. The measured times of steps
decide. Other numbers of threads are tried now and then, and sooner if steps have become slower. The trials use one
thread fewer, one thread more, half as many threads, or twice as many. If several other processes are busy, half as many
threads may help where one thread fewer does not.
"""

from __future__ import annotations

from llamabatch.scheduler.step_costs import stair

# Another number of threads must be faster by at least this factor in a trial. Smaller gains may be noise.
LEAST_GAIN = 1.05
# Fewer threads are tried as soon as a step takes this many times as long as after the last trial.
SLOWER = 1.25
# The minimum numbers of steps and seconds in a trial. A shorter trial may be wrong, because another process may use a
# core for some milliseconds at a time.
TRIAL_STEPS, TRIAL_S = 3, 0.03
# A trial ends without gain as soon as its steps together have taken this many seconds longer than usual. A trial with
# long steps therefore ends early.
MOST_COST_S = 0.25
# The minimum numbers of steps and seconds between two trials. The wait doubles after each trial without gain.
LEAST_STEPS, LEAST_S = 16, 0.25
MOST_S = 60.0  # the longest wait between two trials
MOST_BELOW_S = 10.0  # the longest wait while fewer threads compute: the busy process may have ended
# A trial may delay steps. The wait after it is at least this many times the delay, even if it then exceeds the longest
# wait.
WAIT_BY_COST = 30
_AVERAGED_STEPS, _AVERAGED_S = 8, 0.1


class ThreadChoice:
    """Chooses the number of threads of the next step.

    Args:
        most: maximum number of threads of the engine.
        tries: True: fewer threads are tried. False: all threads compute each step.
    """

    def __init__(self, most: int, tries: bool = True) -> None:
        self.threads = most
        self._most = most
        self._tries = tries and most > 1
        # stair of row counts -> average seconds of a step on this stair with the current number of threads
        self._seconds: dict[int, float] = {}
        self._usual: dict[int, float] = {}  # a copy of `_seconds` from the end of the last trial
        self._steps, self._since_s = 0, 0.0  # steps and seconds since the last trial
        self._wait_s = LEAST_S
        self._before: int | None = None  # the number of threads before the current trial; None: no trial runs
        self._trial: list[tuple[int, float]] = []
        self._other_s = 0.0  # seconds of steps of other kinds since the last trial
        self._n_failed = 0  # number of trials without gain; it decides which number of threads the next trial tries

    def threads_of(self, rows: int) -> int:
        """Returns the number of threads for a step of `rows` output rows.

        `rows` is 0 for a step of any other kind, such as a prompt. Such a step does not take part in a trial, because a
        long prompt would take twice as long with half of the threads.
        """
        return self.threads if rows or self._before is None else self._before

    def observe(self, rows: int, seconds: float) -> None:
        """Records the duration of a step of `rows` output rows, or of a step of another kind (0). May change `threads`.

        Steps of other kinds have different lengths, so they cannot show which number of threads is best. After some
        seconds of such steps, all threads compute again, because the process that used a core may have ended.
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
        """Returns the additional seconds of the steps of a trial, compared with usual steps."""
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
        """Forgets the times of steps, because they belong to another number of threads."""
        self._seconds, self._usual, self._wait_s = {}, {}, LEAST_S
        self._steps, self._since_s, self._other_s = 0, 0.0, 0.0
