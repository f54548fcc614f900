"""Fair scheduling of work that needs CPU time."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

from handler.core.fair_queue import Shares
from handler.core.loop import settle

T = TypeVar("T")

_SWEEP = 64  # number of waiting jobs up to which cancelled jobs may stay in the queues


class Flow:
    """The state of a request in fair queueing.

    Args:
        owner: owner of the request, or "" without an owner.

    Attributes:
        finish: virtual time at which the latest work of the request ends.
    """

    def __init__(self, owner: Hashable = "") -> None:
        self.owner = owner
        self.finish = 0.0


class _Waiting(NamedTuple):
    finish: float
    number: int  # order of arrival, which decides ties
    start: float
    cost: float
    kind: str
    future: Future[Any]
    begin: Callable[[], None]


class _Account:
    """The state of an owner in fair queueing, as long as the owner has waiting or running work.

    Attributes:
        used: cost of all work of the owner, including work that is running.
        claimed: the part of `used` that is the expected cost of running work.
        now: virtual time among the owner's requests.
        num_begun: number of running jobs.
        queues: heaps of waiting jobs, by kind.
    """

    def __init__(self) -> None:
        self.used = self.claimed = self.now = 0.0
        self.num_begun = 0
        self.queues: dict[str, list[_Waiting]] = {}


class Turns:
    """Slots for concurrent work, which are assigned fairly (start-time fair queueing). Thread-safe.

    The next slot goes to the owner whose work has cost the least, including the next job. Among the requests of an
    owner, the request whose work has cost the least comes first. The small jobs of an owner therefore come before its
    large jobs.

    Args:
        slots: number of slots.
        most: function that returns the maximum number of slots for a kind of work.
    """

    def __init__(self, slots: int, most: Callable[[str], int]) -> None:
        self._free, self._most = slots, most
        self._lock = threading.Lock()
        self._taken = Shares[str]()
        self._accounts: dict[Hashable, _Account] = {}
        self._num_waiting, self._sweep_at = 0, _SWEEP
        self._now, self._number = 0.0, 0
        self._closed = False

    def enter(self, flow: Flow, cost: float, kind: str, future: Future[Any], begin: Callable[[], None]) -> None:
        """Queue work, and call `begin` on any thread when it gets a slot. The caller must return the slot with `leave`.

        Args:
            flow: state of the request.
            cost: expected cost of the work, in any unit. `charge` corrects it.
            kind: kind of work.
            future: if this future is cancelled before the work gets a slot, the work is dropped.
            begin: function that starts the work.
        """
        with self._lock:
            closed = self._closed
            if not closed:
                account = self._accounts.setdefault(flow.owner, _Account())
                if not account.queues:  # an idle owner gets no credit for the time without work
                    account.used = max(account.used, self._now)
                start = max(flow.finish, account.now)
                flow.finish = start + cost
                self._number += 1
                waiting = _Waiting(flow.finish, self._number, start, cost, kind, future, begin)
                heapq.heappush(account.queues.setdefault(kind, []), waiting)
                self._num_waiting += 1
                if self._num_waiting > self._sweep_at:
                    self._sweep()
        if closed:
            future.cancel()
        self._grant()

    def charge(self, flow: Flow, cost: float) -> None:
        """Charge a request and its owner for running work, in addition to its expected cost."""
        with self._lock:
            self._accounts[flow.owner].used += cost
            flow.finish += cost

    def leave(self, flow: Flow, cost: float, kind: str) -> None:
        """Release the slot of work whose expected cost was `cost`."""
        with self._lock:
            self._free += 1
            self._taken.add(kind, -1)
            account = self._accounts[flow.owner]
            account.num_begun -= 1
            account.claimed -= cost
            self._forget(flow.owner)
        self._grant()

    def close(self) -> None:
        """Cancel all waiting work, and all work that is queued later."""
        with self._lock:
            self._closed = True
            waiting = []
            for owner, account in list(self._accounts.items()):
                waiting += [job for queue in account.queues.values() for job in queue]
                account.queues.clear()
                self._forget(owner)
            self._num_waiting = 0
        for job in waiting:
            job.future.cancel()

    @contextlib.asynccontextmanager
    async def turn(self, flow: Flow, cost: float, kind: str) -> AsyncIterator[None]:
        """Wait for a slot, and use it during the block."""
        turn: Future[None] = Future()

        def begin() -> None:
            if turn.set_running_or_notify_cancel():
                turn.set_result(None)
            else:
                self.leave(flow, cost, kind)

        self.enter(flow, cost, kind, turn, begin)
        try:
            await asyncio.wrap_future(turn)
            yield
        finally:
            if not turn.cancel():  # the slot was assigned
                self.leave(flow, cost, kind)

    def _grant(self) -> None:
        while (waiting := self._next()) is not None:
            waiting.begin()  # not within the lock

    def _next(self) -> _Waiting | None:
        """Assign a free slot to the next job, and remove the job from its queue. Return None if no job can start."""
        with self._lock:
            if not self._free:
                return None
            firsts = [(account.used + job.cost, job.number, job, account) for account, job in self._firsts()]
            if not firsts:
                return None
            *_, waiting, account = min(firsts)
            self._pop(account, waiting.kind)
            self._free -= 1
            self._taken.add(waiting.kind, 1)
            self._now = max(self._now, account.used - account.claimed)  # not with claims, which may be corrected later
            account.now = max(account.now, waiting.start)
            account.used += waiting.cost
            account.claimed += waiting.cost
            account.num_begun += 1
            return waiting

    def _firsts(self) -> Iterator[tuple[_Account, _Waiting]]:
        """Yield the account of each owner, with the first job whose kind may use another slot."""
        for owner, account in list(self._accounts.items()):
            for kind in list(account.queues):
                while (queue := account.queues.get(kind)) and queue[0].future.cancelled():
                    self._pop(account, kind)
            self._forget(owner)
            allowed = [queue[0] for kind, queue in account.queues.items() if self._taken[kind] < self._most(kind)]
            if allowed:
                yield account, min(allowed)

    def _pop(self, account: _Account, kind: str) -> None:
        queue = account.queues[kind]
        heapq.heappop(queue)
        self._num_waiting -= 1
        if not queue:
            del account.queues[kind]

    def _forget(self, owner: Hashable) -> None:
        """Delete the account of an owner that has no work left."""
        account = self._accounts[owner]
        if not account.queues and not account.num_begun:
            del self._accounts[owner]

    def _sweep(self) -> None:
        """Remove cancelled work from the queues. This runs when the number of waiting jobs has doubled, so its
        amortized cost is small.
        """
        self._num_waiting = 0
        for owner, account in list(self._accounts.items()):
            for kind, queue in list(account.queues.items()):
                remaining = [waiting for waiting in queue if not waiting.future.cancelled()]
                heapq.heapify(remaining)
                if remaining:
                    account.queues[kind] = remaining
                else:
                    del account.queues[kind]
                self._num_waiting += len(remaining)
            self._forget(owner)
        self._sweep_at = max(_SWEEP, 2 * self._num_waiting)


_QUICK, _SLOW = "quick", "slow"


class TurnThreads:
    """A thread pool that schedules calls fairly.

    Args:
        slots: number of threads.
        slow_slots: maximum number of threads for slow calls.
        name: prefix of the thread names.
    """

    def __init__(self, slots: int, slow_slots: int, name: str) -> None:
        self._turns = Turns(slots, lambda kind: slow_slots if kind == _SLOW else slots)
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix=name)

    def submit(self, call: Callable[[], T], cost: float, *, slow: bool = False, flow: Flow | None = None) -> Future[T]:
        """Make a call on a thread. The returned future can be cancelled until the call starts.

        Args:
            call: function to call.
            cost: expected cost of the call, in any unit.
            slow: whether the call may take a long time.
            flow: state of the request, required if the request has an owner or makes several calls.
        """
        future: Future[T] = Future()
        kind, flow = _SLOW if slow else _QUICK, flow or Flow()
        self._turns.enter(flow, cost, kind, future, partial(self._begin, future, call, flow, cost, kind))
        return future

    def charge(self, flow: Flow, cost: float) -> None:
        """Charge a request and its owner for a running call, in addition to its expected cost."""
        self._turns.charge(flow, cost)

    def shutdown(self) -> None:
        """Cancel all calls that have not started."""
        self._turns.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, future: Future[T], call: Callable[[], T], flow: Flow, cost: float, kind: str) -> None:
        def work() -> None:
            try:
                if future.set_running_or_notify_cancel():
                    settle(future, call)
            finally:
                self._turns.leave(flow, cost, kind)

        try:
            self._threads.submit(work).add_done_callback(lambda done: done.cancelled() and future.cancel())
        except RuntimeError:  # the pool has been shut down
            future.cancel()
            self._turns.leave(flow, cost, kind)
