"""HttpCounts: responses and durations by route, method and status, in a bounded number of series."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.routing import BaseRoute, Route

from llamabatch.server.http.errors import CLIENT_CLOSED
from llamabatch.server.http.security import own_path
from llamabatch.utils.histogram import Histogram, Tally

NO_ROUTE = "none"  # value of the label `handler` for paths without a route, and for requests with an unreadable head
OTHER_METHOD = "other"
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_CONVERTOR = re.compile(r":\w+}")


class HttpCounts:
    """Counts and durations of requests since the start of the server. Thread-safe.

    Args:
        routes: routes of the application. Their path templates are the values of the label `handler`.
        prefix: removed from paths that begin with the prefix.
    """

    def __init__(self, routes: Iterable[BaseRoute] = (), prefix: str = "") -> None:
        self._plain: dict[str, str] = {}
        self._patterns: list[tuple[re.Pattern[str], str]] = []
        self._prefix = prefix
        for route in routes:
            if isinstance(route, Route):
                template = _CONVERTOR.sub("}", route.path)
                if "{" in template:
                    self._patterns.append((route.path_regex, template))
                else:
                    self._plain[template] = template
        self._responses: dict[tuple[str, str, int], int] = {}
        self._durations: dict[tuple[str, str], Tally] = {}
        self._lock = threading.Lock()

    def add(self, scope: Mapping[str, Any], status: int, seconds: float) -> None:
        """Counts a request that has ended.

        Args:
            status: status of the response; 0: the client left before the response began.
        """
        handler, method = self._handler(scope), str(scope["method"])
        method = method if method in _METHODS else OTHER_METHOD
        with self._lock:
            self._count(handler, method, status or CLIENT_CLOSED)
            durations = self._durations.get((handler, method))
            if durations is None:
                durations = self._durations[handler, method] = Tally()
            durations.add(seconds)

    def add_unread(self, status: int) -> None:
        """Counts the refusal of a request whose head was not read completely."""
        with self._lock:
            self._count(NO_ROUTE, OTHER_METHOD, status)

    def responses(self) -> dict[tuple[str, str, int], int]:
        """Returns the number of responses by handler, method and status."""
        with self._lock:
            return dict(self._responses)

    def durations(self) -> dict[tuple[str, str], Histogram]:
        """Returns the seconds from a request's head to the last byte of its response, by handler and method."""
        with self._lock:
            return {labels: tally.histogram() for labels, tally in self._durations.items()}

    def _count(self, handler: str, method: str, status: int) -> None:
        key = handler, method, status
        self._responses[key] = self._responses.get(key, 0) + 1

    def _handler(self, scope: Mapping[str, Any]) -> str:
        path = own_path(scope, self._prefix)
        found = self._plain.get(path)
        if found is None:
            found = next((template for pattern, template in self._patterns if pattern.match(path)), NO_ROUTE)
        return found
