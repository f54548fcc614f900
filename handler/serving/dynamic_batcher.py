"""Dynamic batching as DJL does it: requests wait for a full batch or a short while, then run together to the end."""

from __future__ import annotations

import asyncio

from handler.core.errors import Overloaded


class DynamicBatcher:
    """Lets requests in a batch at a time.

    Args:
        size: requests in a batch (`batch_size`).
        delay: seconds that the first of a batch waits for the others (`max_batch_delay`).
        max_queued: requests that may wait (`job_queue_size`).
        timeout: seconds that a request may wait (`option.predict_timeout`).
    """

    def __init__(self, size: int, delay: float, max_queued: int, timeout: float = 120.0) -> None:
        self._size = size
        self._delay = delay
        self._max_queued = max_queued
        self._timeout = timeout
        self._waiting: dict[asyncio.Future[None], None] = {}  # in order of arrival
        self._num_running = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def check_room(self) -> None:
        """Raise `Overloaded` when one more request could not even wait."""
        if len(self._waiting) >= self._max_queued:
            raise Overloaded(f"the queue is full: {self._max_queued} requests wait (job_queue_size)")

    async def join(self) -> None:
        """Return when the request's batch begins; `leave` must follow.

        Raises:
            Overloaded: the queue is full, or it has waited too long.
        """
        self.check_room()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = None
        self._consider()
        try:
            done, _ = await asyncio.wait({turn}, timeout=self._timeout)
        except asyncio.CancelledError:
            if turn not in self._waiting:  # its batch had begun
                self.leave()
            self._forget(turn)
            raise
        if not done:
            self._forget(turn)
            raise Overloaded(f"waited {self._timeout:g} s for a batch (option.predict_timeout)")

    def leave(self) -> None:
        """The request has ended: the next batch may begin when all of this one have."""
        self._num_running -= 1
        self._consider()

    def _forget(self, turn: asyncio.Future[None]) -> None:
        self._waiting.pop(turn, None)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _consider(self) -> None:
        """Start a batch if the last one has ended and this one is full; else give it `delay` to fill."""
        if self._num_running or not self._waiting:
            return
        if len(self._waiting) >= self._size:
            self._start()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._delay, self._start)

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for turn in list(self._waiting)[: self._size]:
            del self._waiting[turn]
            turn.set_result(None)
            self._num_running += 1
