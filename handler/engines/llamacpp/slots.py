"""The slots of a llama-server."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from handler.engines.base import Silence


class Slots:
    """The slots of a server, each of which computes one response at a time.

    llama-server itself would queue further requests, but then a waiting request looks the same as a hanging one.
    Its slots may share a cache. If the cache is full, fewer requests run at once until all of them have ended.

    Only requests of the same group run at once. When all of them have ended, those that wait for the same group as the
    first request are next.

    Attributes:
        count: number of slots.
        limit: number of requests that may run at once.
    """

    def __init__(self, count: int) -> None:
        self.count = self.limit = count
        self._num_running = 0
        self._group = ""  # of the running requests
        self._turns: deque[tuple[asyncio.Future[None], str]] = deque()  # each with its group

    @contextlib.asynccontextmanager
    async def occupy(self, silence: Silence, group: str = "") -> AsyncIterator[None]:
        """Wait for a free slot, and occupy it. The time spent waiting does not count as silence of the server."""
        await self._enter(silence, group)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, silence: Silence, group: str) -> None:
        if not self._turns and self._admits(group):
            self._begin(group)
            return
        turn = asyncio.get_running_loop().create_future()
        self._turns.append((turn, group))
        try:
            with silence.hold():
                await asyncio.wait([turn])  # unlike `await turn`, this does not cancel it
        except asyncio.CancelledError:
            if turn.done():
                self._leave()
            else:
                self._turns.remove((turn, group))
                self._admit()
            raise

    def _leave(self) -> None:
        self._num_running -= 1
        if not self._num_running and not self._turns:
            self.limit = self.count
        self._admit()

    def _admits(self, group: str) -> bool:
        return self._num_running < self.limit and (not self._num_running or group == self._group)

    def _begin(self, group: str) -> None:
        self._num_running += 1
        self._group = group

    def _admit(self) -> None:
        """Let as many requests begin as possible."""
        if not self._num_running and self._turns:
            first = self._turns[0][1]
            self._turns = deque(sorted(self._turns, key=lambda turn: turn[1] != first))
        while self._turns and self._admits(self._turns[0][1]):
            turn, group = self._turns.popleft()
            self._begin(group)
            turn.set_result(None)
