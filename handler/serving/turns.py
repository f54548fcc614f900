"""Share what is scarce among requests: slots that they take in turn, and quotas that leave room for small requests."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

from handler.core.errors import Overloaded

T = TypeVar("T")

_SWEEP = 64  # waiting, up to which those that nobody wants any more may stay


class Quota:
    """An amount that all requests share. Thread-safe.

    Args:
        most: for all of them.
        spare: beyond `most`, for those that take no more than `small` each: large ones cannot shut them out.
        words: what to say to a request that finds too little left.
        beside: a request may take any amount while all others have taken no more than this; by default never.
    """

    def __init__(self, most: int, spare: int, small: int, words: str, beside: int = -1) -> None:
        self.most, self._beside = most, beside
        self._spare, self._small, self._words = spare, small, words
        self.lock = threading.RLock()  # the collector may give something back while a thread takes some
        self.taken = 0

    def take(self, amount: int, before: int = 0) -> None:
        """Take an amount for a request that has taken some `before`.

        Raises:
            Overloaded: there is too little left.
        """
        with self.lock:
            if self.taken + amount > self.most and not self._has_room(amount, before):
                raise Overloaded(self._words)
            self.taken += amount

    def give_back(self, amount: int) -> None:
        with self.lock:
            self.taken -= amount

    def _has_room(self, amount: int, before: int) -> bool:
        """Return whether there is room beyond `most` for a request that is small, or is all but alone."""
        if before + amount <= self._small and self.taken + amount <= self.most + self._spare:
            return True
        return self.taken - before <= self._beside


class Share:
    """One request's part of a quota, until it is given back or nothing refers to it. Thread-safe."""

    def __init__(self, quota: Quota) -> None:
        self._quota, self.size = quota, 0

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *error: object) -> None:
        self.give_back()

    def take(self, amount: int) -> None:
        """Raise Overloaded where too little is left."""
        with self._quota.lock:
            self._quota.take(amount, self.size)
            self.size += amount

    def set(self, size: int) -> None:
        """Take what is missing to a size, or give the rest back.

        Raises:
            Overloaded: as `take`.
        """
        with self._quota.lock:
            if size > self.size:
                self.take(size - self.size)
            else:
                self.give_back(self.size - size)

    def give_back(self, amount: int | None = None) -> None:
        """Give a part back, or all."""
        with self._quota.lock:
            amount = self.size if amount is None else amount
            self.size -= amount
            self._quota.give_back(amount)

    __del__ = give_back


class Flow:
    """What one request has asked for so far, in virtual time."""

    def __init__(self) -> None:
        self.finish = 0.0


class _Waiting(NamedTuple):
    finish: float
    number: int  # ties go by arrival
    start: float
    kind: str
    wanted: Future[Any]
    begin: Callable[[], None]


class Turns:
    """A number of slots. Requests take them in turn, by fair queueing: little work never waits for much. Thread-safe.

    Args:
        slots: at a time.
        most: returns how many slots one kind of work may have at a time.
    """

    def __init__(self, slots: int, most: Callable[[str], int]) -> None:
        self._free, self._most = slots, most
        self._lock = threading.Lock()
        self._taken = Counter[str]()
        self._queues: dict[str, list[_Waiting]] = {}  # heaps, by kind
        self._num_waiting, self._sweep_at = 0, _SWEEP
        self._now, self._number = 0.0, 0
        self._closed = False

    def enter(self, flow: Flow, cost: float, kind: str, wanted: Future[Any], begin: Callable[[], None]) -> None:
        """Have `begin` called when there is a slot, on any thread. `leave` gives the slot back.

        Args:
            flow: of the request.
            cost: of the work, in any unit.
            wanted: the work is given up where this is cancelled before.
        """
        with self._lock:
            closed = self._closed
            if not closed:
                start = max(flow.finish, self._now)
                flow.finish = start + cost
                self._number += 1
                waiting = _Waiting(flow.finish, self._number, start, kind, wanted, begin)
                heapq.heappush(self._queues.setdefault(kind, []), waiting)
                self._num_waiting += 1
                if self._num_waiting > self._sweep_at:
                    self._sweep()
        if closed:
            wanted.cancel()
        self._grant()

    def leave(self, kind: str) -> None:
        """Release a slot."""
        with self._lock:
            self._free += 1
            self._taken[kind] -= 1
            if not self._taken[kind]:
                del self._taken[kind]
        self._grant()

    def close(self) -> None:
        """Cancel all waiting work, and any that enters later."""
        with self._lock:
            self._closed = True
            waiting = [one for queue in self._queues.values() for one in queue]
            self._queues.clear()
            self._num_waiting = 0
        for one in waiting:
            one.wanted.cancel()

    @contextlib.asynccontextmanager
    async def turn(self, flow: Flow, cost: float, kind: str) -> AsyncIterator[None]:
        """Wait for a slot and hold it."""
        turn: Future[None] = Future()

        def begin() -> None:
            if turn.set_running_or_notify_cancel():
                turn.set_result(None)
            else:
                self.leave(kind)

        self.enter(flow, cost, kind, turn, begin)
        try:
            await asyncio.wrap_future(turn)
            yield
        finally:
            if not turn.cancel():  # it has been granted
                self.leave(kind)

    def _grant(self) -> None:
        while (waiting := self._next()) is not None:
            waiting.begin()  # without the lock

    def _next(self) -> _Waiting | None:
        """Take the first that may have a slot out of the queues."""
        with self._lock:
            if not self._free:
                return None
            for kind in list(self._queues):
                self._drop_cancelled(kind)
            open_kinds = [kind for kind in self._queues if self._taken[kind] < self._most(kind)]
            if not open_kinds:
                return None
            kind = min(open_kinds, key=lambda kind: self._queues[kind][0][:2])
            waiting = self._pop(kind)
            self._free -= 1
            self._taken[kind] += 1
            self._now = max(self._now, waiting.start)
            return waiting

    def _drop_cancelled(self, kind: str) -> None:
        """Drop those at a queue's head that are no longer wanted."""
        while (queue := self._queues.get(kind)) and queue[0].wanted.cancelled():
            self._pop(kind)

    def _pop(self, kind: str) -> _Waiting:
        queue = self._queues[kind]
        waiting = heapq.heappop(queue)
        self._num_waiting -= 1
        if not queue:
            del self._queues[kind]
        return waiting

    def _sweep(self) -> None:
        """Let go of all that is no longer wanted: at twice as many as the last time, so it costs little each."""
        for kind, queue in list(self._queues.items()):
            wanted = [waiting for waiting in queue if not waiting.wanted.cancelled()]
            heapq.heapify(wanted)
            if wanted:
                self._queues[kind] = wanted
            else:
                del self._queues[kind]
        self._num_waiting = sum(map(len, self._queues.values()))
        self._sweep_at = max(_SWEEP, 2 * self._num_waiting)


_QUICK, _SLOW = "quick", "slow"


class TurnThreads:
    """Threads that take requests' work in turn.

    Args:
        slots: at a time.
        slow_slots: those of them that may have slow work.
    """

    def __init__(self, slots: int, slow_slots: int, name: str) -> None:
        self._turns = Turns(slots, lambda kind: slow_slots if kind == _SLOW else slots)
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix=name)

    def submit(self, call: Callable[[], T], cost: float, *, slow: bool = False, flow: Flow | None = None) -> Future[T]:
        """Have a call made. Until it begins, it can be cancelled.

        Args:
            cost: of the call, in any unit.
            slow: it may take long.
            flow: of a request with several calls.
        """
        future: Future[T] = Future()
        kind = _SLOW if slow else _QUICK
        self._turns.enter(flow or Flow(), cost, kind, future, partial(self._begin, future, call, kind))
        return future

    def shutdown(self) -> None:
        """Cancel what has not begun."""
        self._turns.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, future: Future[T], call: Callable[[], T], kind: str) -> None:
        def work() -> None:
            try:
                if future.set_running_or_notify_cancel():
                    _settle(future, call)
            finally:
                self._turns.leave(kind)

        try:
            self._threads.submit(work).add_done_callback(lambda done: done.cancelled() and future.cancel())
        except RuntimeError:  # it has been shut down
            future.cancel()
            self._turns.leave(kind)


def _settle(future: Future[T], call: Callable[[], T]) -> None:
    try:
        result = call()
    except BaseException as error:  # as ThreadPoolExecutor does
        future.set_exception(error)
    else:
        future.set_result(result)
