"""Send to a target that may be busy: less often, and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from handler.replay.answer import Answer
from handler.replay.request import Request
from handler.replay.targets.base import Target

_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 30.0
_FIRST_INTERVAL, _LONGEST_INTERVAL, _LEAST_INTERVAL = 0.02, 10.0, 0.002


class Paced:
    """A target with patience.

    When it is busy, the interval between any two sendings doubles, and the request waits before it is sent again; each
    answer shortens the interval again.

    Args:
        patience: seconds until a busy target's answer is taken as it is.
    """

    def __init__(self, target: Target, patience: float = 300.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._target = target
        self._patience = patience
        self._clock = clock
        self._interval = 0.0
        self._next = 0.0

    async def open(self) -> None:
        await self._target.open()

    async def ask(self, request: Request) -> Answer:
        """Send the request until the target takes it."""
        until, pause, throttled = self._clock() + self._patience, _FIRST_PAUSE, 0
        while True:
            if self._interval or self._next:
                await self._turn()
            attempt = await self._target.send(request)
            if not attempt.busy:
                self._interval = self._interval * 0.9 if self._interval > _LEAST_INTERVAL else 0.0
                return attempt.answer._replace(throttled=throttled) if throttled else attempt.answer
            self._interval = min(max(2 * self._interval, _FIRST_INTERVAL), _LONGEST_INTERVAL)
            wait = min(max(pause, attempt.after), _LONGEST_PAUSE)
            if self._clock() + wait > until:
                return attempt.answer._replace(throttled=throttled)
            throttled += 1
            await asyncio.sleep(wait)
            pause *= 2

    async def close(self) -> None:
        await self._target.close()

    async def _turn(self) -> None:
        """Wait until the interval since the last sending is over."""
        now = self._clock()
        at = max(now, self._next)
        self._next = at + self._interval if self._interval else 0.0
        if at > now:
            await asyncio.sleep(at - now)
