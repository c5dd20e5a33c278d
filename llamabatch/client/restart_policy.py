"""The rules for replacing a dead child, and for when a running child counts as dead. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

ENGINE_ENDED = "the engine process ended"  # begins the error of waiting requests if no other process follows
_GAVE_UP = "times in a row without a result"
_NONE_CAN_START = f"{ENGINE_ENDED}, and no other one can start"


def gave_up(error: str | None) -> bool:
    """Returns True if a request ended because there was no engine, and not by its own fault. Another may follow."""
    return error is not None and (_GAVE_UP in error or _NONE_CAN_START in error)


def none_can_start(why: str) -> str:
    """Returns the error of all waiting requests if it is useless to start another process now."""
    return f"{_NONE_CAN_START}: {why}"


@dataclass(frozen=True)
class RestartPolicy:
    """Limits and waits for replacing a child.

    Attributes:
        most: number of restarts in a row, without a request that ended well in between; after one more death no child
            starts. 0: no child is replaced.
        first_s: delay before the second restart in a row, seconds. The first restart is immediate; each later delay is
            twice the one before.
        longest_s: the longest of these delays, seconds.
        retry_s: After that death, requests in flight end and calls raise. One more child starts this many seconds
            later. Each further death without a result doubles this delay, up to longest_s. Unused if `most` is 0.
        hang_s: seconds without a sign of life after which a child is killed and replaced.
        start_s: the same before its first sign of life, as programs and libraries may come from slow disks.
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
    """The count of deaths of one supervisor's children.

    Attributes:
        total: number of children that were replaced.
        in_a_row: number of deaths since a request last ended well.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self.total = 0
        self.in_a_row = 0
        self._policy = policy
        self._retry_at: float | None = None

    def worked(self) -> None:
        """Resets the count of deaths in a row, as a request has ended well."""
        self.in_a_row = 0

    def refused(self) -> None:
        """Counts a child that cannot start as one death more than allowed."""
        self.in_a_row = max(self.in_a_row, self._policy.most) + 1

    def given_up(self, now: float) -> None:
        """Sets the time of the next try. Requests have ended by now, and calls raise until then."""
        wait_s = self._policy.retry_s * 2.0 ** min(self.in_a_row - self._policy.most - 1, 32)
        self._retry_at = now + min(wait_s, self._policy.longest_s) if self._policy.most else None

    def retry_in(self, now: float) -> float | None:
        """Returns the seconds until the next try; None: there will be none."""
        return None if self._retry_at is None else max(0.0, self._retry_at - now)

    def retried(self) -> None:
        """Counts the child that a try starts."""
        self.total += 1

    def after_death(self) -> float | None:
        """Counts a death; returns the seconds to wait before the next child starts; None: none starts."""
        self.in_a_row += 1
        if self.in_a_row > self._policy.most:
            return None
        self.total += 1
        if self.in_a_row == 1:
            return 0.0
        wait_s: float = self._policy.first_s * 2 ** (self.in_a_row - 2)
        return min(wait_s, self._policy.longest_s)

    def too_often(self, exit_reason: str) -> str:
        """Returns the error of all requests that still wait, with the exit reason of the last child."""
        if self._policy.most == 0:
            return f"{ENGINE_ENDED}: {exit_reason}"
        return f"{ENGINE_ENDED} {self.in_a_row} {_GAVE_UP}, at last with {exit_reason}"


class Silence:
    """The seconds without a sign of life of a child, by a clock that stops while this process does. Each look counts
    for at most 1.5 s, so that a machine that was asleep does not look like a hanging child.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._seen = -1
        self._last_s: float | None = None

    def look(self, n_received: int, reader_is_busy: bool, now: float) -> float:
        """Returns the silence so far, seconds.

        Args:
            n_received: number of messages received so far.
            reader_is_busy: this process is not reading now, so the lack of messages does not prove a silent child.
        """
        passed = 0.0 if self._last_s is None else min(max(0.0, now - self._last_s), 1.5)
        self._last_s = now
        self.seconds = 0.0 if n_received != self._seen or reader_is_busy else self.seconds + passed
        self._seen = n_received
        return self.seconds
