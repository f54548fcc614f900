"""Queue of the requests that wait for the engine: by priority, then bodies in turn, by arrival; no request starves."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")

MAX_OVERTAKES = 10
"""Requests in a row that may be taken before the one that has waited longest."""


class _Place(NamedTuple):
    priority: int
    turn: int
    id: int  # rises with arrival


class RequestQueue(Generic[Item]):
    """The lowest priority comes first, and of equal ones the first that arrived.

    Bodies with several requests take turns: the second request of one comes after the first of all others that wait.

    After MAX_OVERTAKES requests in a row that did not wait longest comes the one that did, whatever its priority. So
    the request at place k in order of arrival, from 1, is among the next k * (MAX_OVERTAKES + 1) that are taken.
    """

    def __init__(self) -> None:
        self._items: dict[int, tuple[_Place, Item]] = {}  # by id, in order of arrival
        self._order: list[_Place] = []  # sorted
        self._last_turn = 0  # of what was added last
        self._overtakes = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        """Iterate in order of arrival."""
        return (item for _, item in self._items.values())

    def add(self, id: int, priority: int, item: Item, *, follows: bool = False) -> None:
        """Append an item; `id` is above all earlier ones.

        Args:
            follows: it is of the same body as the item that was added before.
        """
        self._last_turn = self._last_turn + 1 if follows else self._next_turn(priority)
        place = _Place(priority, self._last_turn, id)
        self._items[id] = place, item
        bisect.insort(self._order, place)

    def _next_turn(self, priority: int) -> int:
        """Return the least turn of those that wait with a priority."""
        index = bisect.bisect_left(self._order, (priority,))
        next_one = self._order[index] if index < len(self._order) else None
        return 0 if next_one is None or next_one.priority != priority else next_one.turn

    def first(self) -> Item:
        """Return the item that `take` takes."""
        return self._items[self._first_id()][1]

    def take(self) -> Item:
        """Remove the next item."""
        id = self._first_id()
        self._overtakes = 0 if id == next(iter(self._items)) else self._overtakes + 1
        place, item = self._items[id]
        self._remove(place)
        return item

    def discard(self, id: int) -> None:
        """Remove an item; unknown ids are ignored."""
        if id in self._items:
            self._remove(self._items[id][0])

    def _first_id(self) -> int:
        return next(iter(self._items)) if self._overtakes >= MAX_OVERTAKES else self._order[0].id

    def _remove(self, place: _Place) -> None:
        del self._items[place.id]
        del self._order[bisect.bisect_left(self._order, place)]
