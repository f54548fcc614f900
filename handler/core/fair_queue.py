"""A queue that several API keys share, in which no key delays or displaces another."""

from __future__ import annotations

import functools
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_Flows = OrderedDict[Hashable, deque[T]]


class FairQueue(Generic[T]):
    """A queue whose owners take turns, and with them the flows of each owner. Each flow is first in, first out.
    Thread-safe.

    Args:
        capacity: maximum number of entries, or None for no limit. When it is exceeded, the owner with the most entries
            loses the newest entry of its longest flow.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._owners: OrderedDict[Hashable, _Flows[T]] = OrderedDict()  # owners and flows, in the order of their turns
        self._sizes = Counter[Hashable]()  # number of entries by owner
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return self._sizes.total()

    def has_room(self, limit: int, owner: Hashable) -> bool:
        """Return whether an owner may add an entry to a queue that should have at most `limit` entries. If the queue is
        full, an owner still has its equal share.
        """
        with self._changed:
            num_owners = len({*self._owners, owner})
            return len(self) < limit or self._sizes[owner] < limit // num_owners

    def put(self, flow: Hashable, item: T, owner: Hashable = "") -> T | None:
        """Add an entry.

        Returns:
            The entry that was removed because the queue was full (possibly the new entry), or None.
        """
        with self._changed:
            self._owners.setdefault(owner, OrderedDict()).setdefault(flow, deque()).append(item)
            self._sizes[owner] += 1
            if self._capacity is not None and len(self) > self._capacity:
                largest = max(reversed(self._owners), key=self._sizes.__getitem__)
                flows = self._owners[largest]
                longest = max(reversed(flows), key=lambda flow: len(flows[flow]))
                return self._take(largest, longest, deque.pop)
            self._changed.notify()
            return None

    def get(self, timeout: float | None = None) -> T | None:
        """Wait for an entry, remove it and return it. Return None after `timeout` seconds, and once the queue has been
        closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._owners or self._closed, timeout)
            if self._closed or not self._owners:
                return None
            owner = next(iter(self._owners))
            flow = next(iter(self._owners[owner]))
            item = self._take(owner, flow, deque.popleft)
            if owner in self._owners:
                self._owners.move_to_end(owner)
                if flow in self._owners[owner]:
                    self._owners[owner].move_to_end(flow)
            return item

    def drop(self, unwanted: Callable[[T], bool]) -> None:
        """Remove all entries for which `unwanted` returns true."""
        with self._changed:
            for owner, flow, item in list(self._entries()):
                if unwanted(item):
                    self._take(owner, flow, functools.partial(_removed, item=item))

    def close(self) -> None:
        """Make all current and future calls to `get` return None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _entries(self) -> Iterator[tuple[Hashable, Hashable, T]]:
        for owner, flows in self._owners.items():
            for flow, items in flows.items():
                yield from ((owner, flow, item) for item in items)

    def _take(self, owner: Hashable, flow: Hashable, pop: Callable[[deque[T]], T]) -> T:
        flows = self._owners[owner]
        item = pop(flows[flow])
        self._sizes[owner] -= 1
        if not flows[flow]:
            del flows[flow]
        if not flows:
            del self._owners[owner], self._sizes[owner]
        return item


def _removed(items: deque[T], item: T) -> T:
    items.remove(item)
    return item
