"""The API keys of a server: their names, their limits, and their numbers of requests and tokens."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import NamedTuple

from llamabatch.server.http.errors import ApiError
from llamabatch.server.options import ApiKey

WINDOW_S = 60.0
_GRAIN_S = 1.0
_NO_NAME = re.compile("key[0-9]+")  # options.py makes such names for keys without a name
SCOPE_KEY = "llamabatch.key"  # key in an ASGI scope; the value is a list with the name of the request's API key


class KeyCounts(NamedTuple):
    """Counts of one API key since the start of the server.

    Attributes:
        requests: admitted POST requests.
        refused: POST requests that exceeded a limit.
        tokens: tokens of prompts and outputs.
    """

    requests: int = 0
    refused: int = 0
    tokens: int = 0


class KeyUse:
    """Counts the requests and tokens of one key. Thread-safe."""

    def __init__(self, key: ApiKey, clock: Callable[[], float]) -> None:
        self.key = key
        self.counts = KeyCounts()
        self._clock = clock
        self._lock = threading.Lock()
        # Pairs of time and count from the last WINDOW_S seconds, for the limits rpm and tpm. A deque stays empty while
        # its limit is not set.
        self._requests: deque[tuple[float, int]] = deque()
        self._tokens: deque[tuple[float, int]] = deque()

    def enter(self) -> None:
        """Admits a request. Raises ApiError (429) above the limits of the key."""
        with self._lock:
            now, key = self._clock(), self.key
            waits = [
                _wait_s(used, now, limit, what)
                for used, limit, what in ((self._requests, key.rpm, "requests"), (self._tokens, key.tpm, "tokens"))
            ]
            wait_s, what = max(waits)
            if wait_s > 0:
                self.counts = self.counts._replace(refused=self.counts.refused + 1)
                limit = key.rpm if what == "requests" else key.tpm
                raise ApiError(
                    429,
                    f"the key {key.name!r} may use {limit:,} {what} a minute; try again in {math.ceil(wait_s)} s",
                    headers={"Retry-After": str(math.ceil(wait_s))},
                )
            if key.rpm is not None:
                _add(self._requests, now, 1)
            self.counts = self.counts._replace(requests=self.counts.requests + 1)

    def spend(self, n_tokens: int) -> None:
        """Counts tokens of an admitted request. Raises nothing: above the limit, `enter` refuses the next requests."""
        with self._lock:
            if self.key.tpm is not None:
                _add(self._tokens, self._clock(), n_tokens)
            self.counts = self.counts._replace(tokens=self.counts.tokens + n_tokens)


# The KeyUse of this task's request; None: the request has no key.
key_use: ContextVar[KeyUse | None] = ContextVar("llamabatch.key_use", default=None)


def _add(used: deque[tuple[float, int]], now: float, count: int) -> None:
    """Adds a count. All counts within _GRAIN_S become one entry, because many entries would be slow to sum."""
    if used and now - used[-1][0] < _GRAIN_S:
        used[-1] = (used[-1][0], used[-1][1] + count)
    else:
        used.append((now, count))
    while used[0][0] <= now - WINDOW_S:
        used.popleft()


def _wait_s(used: deque[tuple[float, int]], now: float, limit: int | None, what: str) -> tuple[float, str]:
    """Returns two values: the seconds until the counts of the last WINDOW_S seconds add up to less than `limit` (0: no
    wait), and `what`."""
    while used and used[0][0] <= now - WINDOW_S:
        used.popleft()
    if limit is None:
        return 0.0, what
    total = sum(count for _, count in used)
    for at, count in used:
        if total < limit:
            break
        total -= count
        wait_s = at + WINDOW_S - now
        if total < limit:
            return wait_s, what
    return 0.0, what


class KeyRing:
    """The valid API keys.

    Keys are compared by their digests, which are made with a random secret. The time of a look-up therefore reveals
    nothing about a key.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, keys: Iterable[ApiKey], clock: Callable[[], float] = time.monotonic) -> None:
        self._secret = secrets.token_bytes(32)
        self._clock = clock
        self._uses: dict[bytes, KeyUse] = {}
        self.replace(keys)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Replaces the keys. A key that was valid before keeps its usage. A key without a name also keeps its number,
        such as 3 in key3."""
        found: dict[bytes, KeyUse] = {}
        given = {self._digest(key.key.encode()): key for key in keys}
        taken = {use.key.name for digest, use in self._uses.items() if digest in given}
        for digest, key in given.items():
            use = self._uses.get(digest)
            if _NO_NAME.fullmatch(key.name):  # options.py made the name; another key may have the same name
                if use is not None and _NO_NAME.fullmatch(use.key.name):
                    key = key._replace(name=use.key.name)
                elif key.name in taken:
                    key = key._replace(name=next(n for i in itertools.count(1) if (n := f"key{i}") not in taken))
                taken.add(key.name)
            if use is None:
                use = KeyUse(key, self._clock)
            use.key = key
            found[digest] = use
        self._uses = found

    def find(self, given: Iterable[bytes]) -> KeyUse | None:
        """Returns the KeyUse of the first valid key in `given`; None: no key is valid."""
        uses = self._uses
        return next((use for each in given if (use := uses.get(self._digest(each))) is not None), None)

    def counts(self) -> dict[str, KeyCounts]:
        """Returns the counts by the name of the key. The counts of keys with the same name are added up."""
        found: dict[str, KeyCounts] = {}
        for use in list(self._uses.values()):
            before = found.get(use.key.name, KeyCounts())
            found[use.key.name] = KeyCounts(*(a + b for a, b in zip(before, use.counts, strict=True)))
        return found

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret).digest()
