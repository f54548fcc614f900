"""Queue of the requests that wait for the engine: by priority, then by arrival; no request starves."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")

MAX_OVERTAKES = 10
"""Requests in a row that may be taken before the one that has waited longest."""


class RequestQueue(Generic[Item]):
    """The lowest priority comes first, and of equal ones the first that arrived.

    After MAX_OVERTAKES requests in a row that did not wait longest comes the one that did, whatever its priority. So
    the request at place k in order of arrival, from 1, is among the next k * (MAX_OVERTAKES + 1) that are taken.
    """

    def __init__(self) -> None:
        self._items: dict[int, tuple[int, Item]] = {}  # id -> priority and item, in order of arrival
        self._order: list[tuple[int, int]] = []  # priority and id, sorted; ids rise with arrival
        self._overtakes = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        """Iterate in order of arrival."""
        return (item for _, item in self._items.values())

    def add(self, id: int, priority: int, item: Item) -> None:
        """Append an item; `id` is above all earlier ones."""
        self._items[id] = priority, item
        bisect.insort(self._order, (priority, id))

    def first(self) -> Item:
        """Return the item that `take` takes."""
        return self._items[self._first_id()][1]

    def take(self) -> Item:
        """Remove the next item."""
        id = self._first_id()
        self._overtakes = 0 if id == next(iter(self._items)) else self._overtakes + 1
        priority, item = self._items[id]
        self._remove(id, priority)
        return item

    def discard(self, id: int) -> None:
        """Remove an item; unknown ids are ignored."""
        if id in self._items:
            self._remove(id, self._items[id][0])

    def _first_id(self) -> int:
        return next(iter(self._items)) if self._overtakes >= MAX_OVERTAKES else self._order[0][1]

    def _remove(self, id: int, priority: int) -> None:
        del self._items[id]
        del self._order[bisect.bisect_left(self._order, (priority, id))]
