"""Share what is scarce among requests: slots that they take in turn, and quotas that leave room for small requests."""

from __future__ import annotations

import asyncio
import bisect
import threading
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from handler.core.errors import Overloaded


class Quota:
    """An amount that all requests share. Thread-safe.

    Args:
        most: for all of them.
        spare: beyond `most`, for those that take no more than `small` each: large ones cannot shut them out.
        words: what to say to a request that finds too little left.
    """

    def __init__(self, most: int, spare: int, small: int, words: str) -> None:
        self.most = most
        self._spare, self._small, self._words = spare, small, words
        self._lock = threading.RLock()  # the collector may give something back while a thread takes some
        self.taken = 0

    def take(self, amount: int, before: int = 0) -> None:
        """Take an amount for a request that has taken some `before`.

        Raises:
            Overloaded: there is too little left.
        """
        with self._lock:
            if self.taken + amount > self.most + (self._spare if before + amount <= self._small else 0):
                raise Overloaded(self._words)
            self.taken += amount

    def give_back(self, amount: int) -> None:
        with self._lock:
            self.taken -= amount


class Flow:
    """What one request has asked for so far, in virtual time."""

    def __init__(self) -> None:
        self.finish = 0.0


class _Waiting(NamedTuple):
    finish: float
    number: int  # ties go by arrival
    start: float
    kind: str
    granted: asyncio.Future[None]


class Turns:
    """A number of slots. Requests take them in turn, by fair queueing: one that asks for little never waits for all of
    another's work. Belongs to one event loop.

    Args:
        slots: at a time.
        most: returns how many slots one kind of work may have at a time.
    """

    def __init__(self, slots: int, most: Callable[[str], int]) -> None:
        self._free, self._most = slots, most
        self._taken = Counter[str]()
        self._waiting: list[_Waiting] = []
        self._now, self._number = 0.0, 0

    async def enter(self, flow: Flow, cost: float, kind: str) -> None:
        """Wait for a slot, which `leave` gives back.

        Args:
            flow: of the request.
            cost: of the work, in any unit.
        """
        start = max(flow.finish, self._now)
        flow.finish = start + cost
        granted = asyncio.get_running_loop().create_future()
        self._number += 1
        waiting = _Waiting(flow.finish, self._number, start, kind, granted)
        bisect.insort(self._waiting, waiting)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.leave(kind)
            else:
                self._waiting.remove(waiting)
            raise

    def leave(self, kind: str) -> None:
        """Give a slot back."""
        self._free += 1
        self._taken[kind] -= 1
        if not self._taken[kind]:
            del self._taken[kind]
        self._grant()

    def _grant(self) -> None:
        for waiting in self._waiting.copy() if self._free else ():
            if self._taken[waiting.kind] < self._most(waiting.kind) and not waiting.granted.cancelled():
                self._waiting.remove(waiting)
                self._free -= 1
                self._taken[waiting.kind] += 1
                self._now = max(self._now, waiting.start)
                waiting.granted.set_result(None)
                if not self._free:
                    return
