"""When a child that died is replaced, and when one that still runs counts as dead. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RestartPolicy:
    """How often a child is replaced.

    Attributes:
        most: deaths in a row, without a request that came to a good end between them, after which there is no other
            child. 0: the first death is the last.
        first_s: delay before the second restart in a row, seconds. The first restart is immediate; each later delay is
            twice the one before.
        longest_s: the longest of these delays, seconds.
        retry_s: after the last of them, a call may start one more child, but only so many seconds later. Each further
            death without a result doubles this delay, up to longest_s. Unused if `most` is 0.
        hang_s: a child that gives no sign of life for so long is killed and replaced.
        start_s: the same, before its first sign of life: programs and libraries come from slow disks, too.
    """

    most: int = 8
    first_s: float = 0.25
    longest_s: float = 30.0
    retry_s: float = 1.0
    hang_s: float = 30.0
    start_s: float = 300.0


RESTARTS = RestartPolicy()
NO_RESTART = RestartPolicy(most=0)


class Restarts:
    """Counts deaths.

    Attributes:
        total: children that were replaced.
        in_a_row: deaths since a request last came to a good end.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self.total = 0
        self.in_a_row = 0
        self._policy = policy
        self._retry_at: float | None = None

    def worked(self) -> None:
        """A request has come to a good end."""
        self.in_a_row = 0

    def given_up(self, now: float) -> None:
        """There is no child until a call asks for one."""
        wait_s = self._policy.retry_s * 2.0 ** min(self.in_a_row - self._policy.most - 1, 32)
        self._retry_at = now + min(wait_s, self._policy.longest_s) if self._policy.most else None

    def retry_in(self, now: float) -> float | None:
        """Seconds until a call may have another child tried; None: never."""
        return None if self._retry_at is None else max(0.0, self._retry_at - now)

    def retried(self) -> None:
        """A call has asked for another child."""
        self.total += 1

    def after_death(self) -> float | None:
        """How long to wait before the next child starts, seconds; None: there is none."""
        self.in_a_row += 1
        if self.in_a_row > self._policy.most:
            return None
        self.total += 1
        if self.in_a_row == 1:
            return 0.0
        wait_s: float = self._policy.first_s * 2 ** (self.in_a_row - 2)
        return min(wait_s, self._policy.longest_s)

    def too_often(self, how: str) -> str:
        """What everybody is told who still waits; `how` the last child ended."""
        if self._policy.most == 0:
            return f"the engine process ended: {how}"
        return f"the engine process ended {self.in_a_row} times in a row without a result, at last with {how}"


class Silence:
    """How long a child has given no sign of life, by a clock that stands still where this process does.

    Each look counts for a second and a half at most, so that a machine that was asleep does not look like a child that
    hangs.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._seen = -1
        self._last_s: float | None = None

    def look(self, heard: int, is_busy: bool, now: float) -> float:
        """The silence so far, seconds.

        Args:
            heard: messages that came in all.
            is_busy: this process has not come to read; then what is silent is not the child.
        """
        passed = 0.0 if self._last_s is None else min(max(0.0, now - self._last_s), 1.5)
        self._last_s = now
        self.seconds = 0.0 if heard != self._seen or is_busy else self.seconds + passed
        self._seen = heard
        return self.seconds
