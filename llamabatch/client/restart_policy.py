"""The rules that decide when a dead child is replaced and when a running child counts as dead. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

ENGINE_ENDED = "the engine process ended"  # first words of the error of waiting requests when no child follows
_GAVE_UP = "times in a row without a result"
_NONE_CAN_START = f"{ENGINE_ENDED}, and no other one can start"


def gave_up(error: str | None) -> bool:
    """Returns True if a request ended because no engine ran. The request is not at fault. Another engine may start."""
    return error is not None and (_GAVE_UP in error or _NONE_CAN_START in error)


def none_can_start(why: str) -> str:
    """Returns the error of all waiting requests when no other process can start now."""
    return f"{_NONE_CAN_START}: {why}"


@dataclass(frozen=True)
class RestartPolicy:
    """The limits and delays of restarts after a child has died.

    Attributes:
        most: maximum number of restarts in a row; a request that ends well resets the count. After one more death there
            is a pause of retry_s. With 0, no child is replaced.
        first_s: delay before the second restart in a row, seconds. The first restart is immediate; each later delay is
            twice the previous one.
        longest_s: the longest of these delays, seconds.
        retry_s: pause in seconds once a child has died after `most` restarts in a row. Then one more child starts.
            During the pause requests end with an error and calls raise. Each further death without a result doubles
            the pause, up to longest_s. Unused if `most` is 0.
        hang_s: seconds without a sign of life after which a child is killed and replaced.
        start_s: the same before the child's first sign of life. It is longer than hang_s, because a slow disk may delay
            the start.
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
        """Resets the count of deaths in a row, because a request has ended well."""
        self.in_a_row = 0

    def refused(self) -> None:
        """Puts the count of deaths in a row above the limit, because a child cannot start."""
        self.in_a_row = max(self.in_a_row, self._policy.most) + 1

    def given_up(self, now: float) -> None:
        """Sets the time at which the next child is tried. Calls raise until then."""
        wait_s = self._policy.retry_s * 2.0 ** min(self.in_a_row - self._policy.most - 1, 32)
        self._retry_at = now + min(wait_s, self._policy.longest_s) if self._policy.most else None

    def retry_in(self, now: float) -> float | None:
        """Returns the seconds until the next child is tried; None: no child will start."""
        return None if self._retry_at is None else max(0.0, self._retry_at - now)

    def retried(self) -> None:
        """Counts the start of a child after the wait of retry_in()."""
        self.total += 1

    def after_death(self) -> float | None:
        """Counts a death. Returns the seconds to wait before the next child starts; None: no child starts."""
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
    """The seconds without a sign of life from a child. Each call of `look` adds at most 1.5 s. So a child does not
    count as hanging after a sleep of the machine or a stop of this process.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._seen = -1
        self._last_s: float | None = None

    def look(self, n_received: int, reader_is_busy: bool, now: float) -> float:
        """Updates and returns the length of the silence, in seconds.

        Args:
            n_received: number of messages received so far.
            reader_is_busy: this process is not reading now, so missing messages do not prove a silent child.
        """
        passed = 0.0 if self._last_s is None else min(max(0.0, now - self._last_s), 1.5)
        self._last_s = now
        self.seconds = 0.0 if n_received != self._seen or reader_is_busy else self.seconds + passed
        self._seen = n_received
        return self.seconds
