"""A queue in which likes wait for each other: many costly texts of one sort delay another text by one of them."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from handler.core.values import StructuredOutput

T = TypeVar("T")

_COSTLY = re.compile(r'"(?:pattern|format)|\d{3}')  # expressions, and large counts as of repetitions


def sort(subject: StructuredOutput) -> Hashable:
    """Return what texts of one client have in common, and what distinguishes costly ones from others.

    A client has no other mark here: behind SageMaker all requests come from one address.
    """
    text = subject.value
    size = len(text).bit_length() // 2  # to a factor of four
    return subject.kind, subject.allows_text, size, '"$ref"' in text, _COSTLY.search(text) is not None


class FairQueue(Generic[T]):
    """Flows that take turns, each first in, first out. Thread-safe.

    Args:
        capacity: of all flows; None for any. Beyond it the longest flow loses its newest entry.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._flows: OrderedDict[Hashable, deque[T]] = OrderedDict()  # the next one comes first
        self._num_waiting = 0
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return self._num_waiting

    def put(self, flow: Hashable, item: T) -> T | None:
        """Add an entry; return the one that finds no room, perhaps this one."""
        with self._changed:
            self._flows.setdefault(flow, deque()).append(item)
            self._num_waiting += 1
            if self._capacity is not None and self._num_waiting > self._capacity:
                longest = max(reversed(self._flows), key=lambda flow: len(self._flows[flow]))
                return self._take(longest, deque.pop)
            self._changed.notify()
            return None

    def first(self) -> T | None:
        """Return the entry that `get` would take now; None where none waits."""
        with self._changed:
            return next(iter(self._flows.values()))[0] if self._flows else None

    def get(self) -> T | None:
        """Wait for an entry and take it out; None once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._flows or self._closed)
            if self._closed:
                return None
            flow = next(iter(self._flows))
            item = self._take(flow, deque.popleft)
            if flow in self._flows:
                self._flows.move_to_end(flow)
            return item

    def drop(self, unwanted: Callable[[T], bool]) -> None:
        """Forget entries."""
        with self._changed:
            for flow, items in list(self._flows.items()):
                kept = deque(item for item in items if not unwanted(item))
                self._num_waiting -= len(items) - len(kept)
                if kept:
                    self._flows[flow] = kept
                else:
                    del self._flows[flow]

    def close(self) -> None:
        """Let those that wait in `get` go, and whoever comes later."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _take(self, flow: Hashable, pop: Callable[[deque[T]], T]) -> T:
        items = self._flows[flow]
        item = pop(items)
        self._num_waiting -= 1
        if not items:
            del self._flows[flow]
        return item
