"""Responses that are kept for a while, in memory alone. A body names one by `previous_response_id`, and an item of one
by an `item_reference`, as the AI SDK does in each second step.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_PART = 8  # of the bytes of all that one response may have


@dataclass(frozen=True)
class Kept:
    """A response.

    Attributes:
        items: the items of its input, those of the responses before it included.
        document: the response object.
        n_bytes: in memory.
    """

    items: tuple[Any, ...]
    document: Json
    n_bytes: int

    @property
    def conversation(self) -> tuple[Any, ...]:
        """The items that a next response goes on from."""
        return (*self.items, *self.document["output"])

    def item(self, item_id: str) -> Json | None:
        """An item of its output."""
        return next((item for item in self.document["output"] if item["id"] == item_id), None)


class KeptResponses:
    """The responses of one server that were used last. Calls may come on any thread.

    Args:
        max_bytes: of memory, for all of them; 0: none is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.n_bytes = 0
        self._max = max_bytes
        self._kept: OrderedDict[tuple[str | None, str], Kept] = OrderedDict()
        self._lock = threading.Lock()

    def can_keep(self, items: Iterable[Any]) -> bool:
        """False: the input of a response is too large."""
        return self._max > 0 and size_of(items, self._max // _PART) <= self._max // _PART

    def keep(self, owner: str | None, items: tuple[Any, ...], document: Json) -> None:
        """Keeps a response that has ended, without its logprobs.

        Args:
            owner: the name of the key of its caller, who alone finds it; None: there are no keys.
        """
        document = document | {"output": [_without_logprobs(item) for item in document["output"]]}
        kept = Kept(items, document, size_of([*items, document], sys.maxsize))
        with self._lock:
            self._remove((owner, document["id"]))
            self._kept[owner, document["id"]] = kept
            self.n_bytes += kept.n_bytes
            while self.n_bytes > self._max:
                self._remove(next(iter(self._kept)))

    def find(self, owner: str | None, response_id: str) -> Kept | None:
        """A response by its id; None: it is not kept."""
        with self._lock:
            kept = self._kept.get((owner, response_id))
            if kept is not None:
                self._kept.move_to_end((owner, response_id))
            return kept

    def forget(self, owner: str | None, response_id: str) -> bool:
        """Drops a response; False: it was not kept."""
        with self._lock:
            return self._remove((owner, response_id))

    def _remove(self, key: tuple[str | None, str]) -> bool:
        kept = self._kept.pop(key, None)
        if kept is None:
            return False
        self.n_bytes -= kept.n_bytes
        return True


def response_id(number: str) -> str:
    """The id of a response."""
    return f"resp_{number}"


def item_id(kind: str, number: str, index: int) -> str:
    """The id of an item of a response: a prefix of its kind, the number of the response, its place."""
    return f"{kind}_{number}_{index}"


def response_of(item: str) -> str:
    """The id of the response that has an item, by the id of that."""
    return response_id(item.partition("_")[2].rpartition("_")[0])


def size_of(values: Iterable[Any], most: int) -> int:
    """Bytes of memory of JSON; the count ends above `most`."""
    size, left = 0, list(values)
    while left and size <= most:
        value = left.pop()
        size += sys.getsizeof(value)
        if isinstance(value, Mapping):
            left += (*value, *value.values())
        elif isinstance(value, (list, tuple)):
            left += value
    return size


def _without_logprobs(item: Json) -> Json:
    if item["type"] != "message":
        return item
    return item | {"content": [part | {"logprobs": []} for part in item["content"]]}
