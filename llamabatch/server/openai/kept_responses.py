"""Responses that are stored for a while, in memory only. A request names a stored response by `previous_response_id`,
and an item of a stored response by `item_reference`. The AI SDK sends item references from its second request on.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Json = dict[str, Any]

_PART = 8  # an input of more than max_bytes / _PART bytes is not stored


class InputItem(NamedTuple):
    """An input item with its id."""

    id: str
    document: Json

    def to_openai(self) -> Json:
        return self.document


@dataclass(frozen=True)
class Kept:
    """A stored response.

    Attributes:
        items: the items of earlier responses, then the input items of this response.
        document: the response object.
        n_bytes: the bytes of items and document in memory.
    """

    items: tuple[Any, ...]
    document: Json
    n_bytes: int

    @property
    def conversation(self) -> tuple[Any, ...]:
        """The items that come before the input of the next response."""
        return (*self.items, *self.document["output"])

    @property
    def inputs(self) -> list[InputItem]:
        """The entries of `items`, each with an id and a type. The text of a message becomes a content part."""
        found = []
        for index, item in enumerate(self.items):
            usual = {"id": f"in_{self.document['id']}_{index}", "type": "message"}
            whole = {**item, **{name: item.get(name) or value for name, value in usual.items()}}
            if whole["type"] == "message" and isinstance(whole.get("content"), str):
                kind = "output_text" if whole.get("role") == "assistant" else "input_text"
                whole["content"] = [{"type": kind, "text": whole["content"]}]
            found.append(InputItem(whole["id"], whole))
        return found

    def item(self, item_id: str) -> Json | None:
        """Returns the output item with this id; None: the response has no such item."""
        return next((item for item in self.document["output"] if item["id"] == item_id), None)


class KeptResponses:
    """The most recently used responses of one server. Thread-safe.

    Args:
        max_bytes: the memory limit of all responses together; 0: no response is stored.
    """

    def __init__(self, max_bytes: int) -> None:
        self.n_bytes = 0
        self._max = max_bytes
        self._kept: OrderedDict[tuple[str | None, str], Kept] = OrderedDict()
        self._lock = threading.Lock()

    def can_keep(self, items: Iterable[Any]) -> bool:
        """Returns False if the input of a response is too large to be stored, or if max_bytes is 0."""
        return self._max > 0 and size_of(items, self._max // _PART) <= self._max // _PART

    def keep(self, owner: str | None, items: tuple[Any, ...], document: Json) -> None:
        """Stores a finished response without its logprobs. Above max_bytes, drops the least recently used responses.

        Args:
            owner: the name of the caller's API key; other keys do not find the response. None: there are no keys.
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
        """Returns a response by its id, and marks the response as just used; None: no such response is stored."""
        with self._lock:
            kept = self._kept.get((owner, response_id))
            if kept is not None:
                self._kept.move_to_end((owner, response_id))
            return kept

    def forget(self, owner: str | None, response_id: str) -> bool:
        """Drops a response. Returns False if no such response was stored."""
        with self._lock:
            return self._remove((owner, response_id))

    def _remove(self, key: tuple[str | None, str]) -> bool:
        kept = self._kept.pop(key, None)
        if kept is None:
            return False
        self.n_bytes -= kept.n_bytes
        return True


def response_id(number: str) -> str:
    """Returns the id of a response."""
    return f"resp_{number}"


def item_id(kind: str, number: str, index: int) -> str:
    """Returns the id of an output item, made of its kind, the number of the response, and the index of the item."""
    return f"{kind}_{number}_{index}"


def response_of(item: str) -> str:
    """Returns the id of the response that contains the item with this id."""
    return response_id(item.partition("_")[2].rpartition("_")[0])


def size_of(values: Iterable[Any], most: int) -> int:
    """Returns the size of JSON values in memory, in bytes. Stops counting above `most`."""
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
