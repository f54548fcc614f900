"""Queues that several API keys share, in which no key delays or displaces another."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sized
from typing import Generic, TypeVar

from handler.core.errors import Overloaded

T = TypeVar("T")
Owner = TypeVar("Owner", bound=Hashable)
Queue = TypeVar("Queue", bound=Sized)


class OwnerTurns(defaultdict[Owner, Queue]):
    """The queues of owners that take turns, in the order of the turns. A new owner gets a queue, and the last turn.

    After each change, call `end_turn` or `drop_empty`, so that every owner has a queue that is not empty.
    """

    def end_turn(self, owner: Owner) -> None:
        """Let all other owners have a turn before this owner. Remove the owner if its queue is empty."""
        queue = self.pop(owner)
        if queue:
            self[owner] = queue

    def drop_empty(self, owner: Owner) -> None:
        """Remove an owner if its queue is empty. The other owners keep their turns."""
        if not self[owner]:
            del self[owner]


class Shares(Counter[Owner]):
    """How much each owner has. Owners that have nothing are left out, because they take no share from the others."""

    def add(self, owner: Owner, change: int) -> None:
        self[owner] += change
        if not self[owner]:
            del self[owner]

    def has_room(self, limit: int, owner: Owner) -> bool:
        """Return whether all owners have less than `limit`, or the owner has less than its equal share of it."""
        return share_is_left(limit, self, owner, self.total(), self[owner])


def share_is_left(limit: int, owners: Iterable[Owner], owner: Owner, total: int, own: int) -> bool:
    """Return whether `total` is below `limit`, or the owner's usage, `own`, is below its equal share of `limit`.

    Args:
        owners: the owners whose usage makes up the total.
    """
    return total < limit or own < limit // len({*owners, owner})


class FairQueue(Generic[T]):
    """A queue whose owners take turns, and with them the flows of each owner. Each flow is first in, first out.
    Thread-safe.

    Args:
        capacity: maximum number of entries, or None for no limit. When it is exceeded, the owner with the most entries
            loses the newest entry of its longest flow.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._owners = OwnerTurns[Hashable, OwnerTurns[Hashable, deque[T]]](functools.partial(OwnerTurns, deque))
        self._sizes = Shares[Hashable]()  # number of entries by owner
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return self._sizes.total()

    def has_room(self, limit: int, owner: Hashable) -> bool:
        """Return whether an owner may add an entry to a queue that should have at most `limit` entries. If the queue is
        full, an owner still has its equal share.
        """
        with self._changed:
            return self._sizes.has_room(limit, owner)

    def put(self, flow: Hashable, item: T, owner: Hashable = "") -> T | None:
        """Add an entry.

        Returns:
            The entry that was removed because the queue was full (possibly the new entry), or None.
        """
        with self._changed:
            self._owners[owner][flow].append(item)
            self._sizes.add(owner, 1)
            if self._capacity is None or len(self) <= self._capacity:
                self._changed.notify()
                return None
            largest = max(reversed(self._owners), key=self._sizes.__getitem__)
            flows = self._owners[largest]
            longest = max(reversed(flows), key=lambda flow: len(flows[flow]))
            removed = flows[longest].pop()
            flows.drop_empty(longest)
            self._owners.drop_empty(largest)
            self._sizes.add(largest, -1)
            return removed

    def get(self, timeout: float | None = None, *, flow: Hashable = None) -> T | None:
        """Wait for an entry, remove it and return it. Return None after `timeout` seconds, and once the queue has been
        closed.

        Args:
            flow: flow of the next owner to take the entry from, or None. It is ignored if it has no entries.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._owners or self._closed, timeout)
            if self._closed or not self._owners:
                return None
            owner = next(iter(self._owners))
            flows = self._owners[owner]
            if flow not in flows:
                flow = next(iter(flows))
            item = flows[flow].popleft()
            flows.end_turn(flow)
            self._owners.end_turn(owner)
            self._sizes.add(owner, -1)
            return item

    def discard(self, flow: Hashable, owner: Hashable) -> None:
        """Remove the entries of an owner's flow, if there are any."""
        with self._changed:
            flows = self._owners[owner]
            self._sizes.add(owner, -len(flows.pop(flow, ())))
            self._owners.drop_empty(owner)

    def drop(self, unwanted: Callable[[T], bool]) -> None:
        """Remove all entries for which `unwanted` returns true."""
        with self._changed:
            for owner, flows in list(self._owners.items()):
                for flow, items in list(flows.items()):
                    flows[flow] = deque(item for item in items if not unwanted(item))
                    self._sizes.add(owner, len(flows[flow]) - len(items))
                    flows.drop_empty(flow)
                self._owners.drop_empty(owner)

    def close(self) -> None:
        """Make all current and future calls to `get` return None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class OwnerCounts:
    """Counts the running operations of each owner. If there are `limit`, an owner still has its equal share.

    Args:
        words: error message for an operation that must not begin.
    """

    def __init__(self, limit: int, words: str) -> None:
        self._limit, self._words = limit, words
        self._numbers = Shares[Hashable]()

    def hold(self, owner: Hashable) -> contextlib.ExitStack:
        """Count an operation of an owner until the returned context ends.

        Raises:
            Overloaded: the limit is reached, and the owner has its share.
        """
        if not self._numbers.has_room(self._limit, owner):
            raise Overloaded(self._words)
        self._numbers.add(owner, 1)
        running = contextlib.ExitStack()
        running.callback(self._numbers.add, owner, -1)
        return running
