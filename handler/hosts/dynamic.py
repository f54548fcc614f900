"""Dynamic batching as DJL does it: requests wait for a full batch or a short while, then run together to the end."""

from __future__ import annotations

import asyncio
from collections import deque

from handler.errors import Unavailable


class BatchGate:
    """Lets requests in a batch at a time.

    Args:
        size: requests in a batch (`batch_size`).
        delay: seconds that the first of a batch waits for the others (`max_batch_delay`).
        max_queued: requests that may wait (`job_queue_size`).
    """

    def __init__(self, size: int, delay: float, max_queued: int) -> None:
        self._size = size
        self._delay = delay
        self._max_queued = max_queued
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._running = 0
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        if len(self._waiting) >= self._max_queued:
            raise Unavailable(f"the queue is full: {self._max_queued} requests wait (job_queue_size)")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._consider()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its batch had begun
                await self.__aexit__()
            else:
                self._waiting.remove(turn)
            raise

    async def __aexit__(self, *error: object) -> None:
        self._running -= 1
        self._consider()

    def _consider(self) -> None:
        """Start a batch if the last one has ended and this one is full; else give it `delay` to fill."""
        if self._running or not self._waiting:
            return
        if len(self._waiting) >= self._size:
            self._start()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._delay, self._start)

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and self._running < self._size:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._running += 1
