"""The lanes of a WebSocket: work in a lane is done in order, and lanes run at the same time."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter
from handler.serving.quota import Share

MAX_RUNNING = 16  # maximum number of requests of a WebSocket that run at the same time, as in OpenAI's API
MAX_LANES = 32  # maximum number of named lanes of a WebSocket, as in OpenAI's API
_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")


class TooManyLanes(InvalidParameter):
    """A message would need more lanes than allowed."""

    def __init__(self) -> None:
        super().__init__(f"stream_id: a connection may use at most {MAX_LANES} streams")


class InvalidLane(InvalidParameter):
    """The name of the lane in a message is invalid."""

    def __init__(self) -> None:
        super().__init__("stream_id: must consist of 1 to 256 of the characters A-Z, a-z, 0-9, '_', '.' and '-'")


class LaneWork(NamedTuple):
    """Work that a message requests.

    Attributes:
        do: does the work.
        memory: memory that the work holds until its end.
    """

    do: Callable[[], Awaitable[None]]
    memory: Share


class _Lane:
    """Work that is done in order.

    Args:
        name: name of the lane, or "" for the default lane.

    Attributes:
        waiting: work that has not begun.
        running: task that does the work, or None while there is none.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.waiting = deque[LaneWork]()
        self.running: asyncio.Task[None] | None = None


class Lanes:
    """The lanes of a WebSocket. A named lane exists from its first work until the connection is closed.

    Args:
        on_error: called with the error that has ended some work, and the name of its lane.
        on_idle: called when a lane has no more work.
    """

    def __init__(self, on_error: Callable[[Exception, str], None], on_idle: Callable[[], None]) -> None:
        self._on_error = on_error
        self._on_idle = on_idle
        self._lanes = {"": _Lane()}
        self._running = asyncio.Semaphore(MAX_RUNNING)

    @property
    def num_waiting(self) -> int:
        """Return the number of pieces of work that have not begun."""
        return sum(len(lane.waiting) for lane in self._lanes.values())

    @property
    def running(self) -> list[asyncio.Task[None]]:
        """Return the tasks of the lanes that have work."""
        return [lane.running for lane in self._lanes.values() if lane.running is not None]

    def check(self, name: str) -> None:
        """Raise TooManyLanes if no lane is called `name`, and the limit on lanes has been reached."""
        if name not in self._lanes and len(self._lanes) > MAX_LANES:
            raise TooManyLanes

    def add(self, name: str, work: LaneWork) -> None:
        """Do work after the earlier work of its lane."""
        lane = self._lanes.setdefault(name, _Lane(name))
        lane.waiting.append(work)
        if lane.running is None:
            lane.running = asyncio.ensure_future(self._run(lane))

    def clear(self) -> None:
        """Remove the work that has not begun."""
        for lane in self._lanes.values():
            lane.waiting.clear()

    async def _run(self, lane: _Lane) -> None:
        """Run a lane's queued work until the queue is empty."""
        try:
            while lane.waiting:
                async with self._running:
                    if lane.waiting:  # the connection may have been closed
                        await self._do(lane, lane.waiting.popleft())
                await asyncio.sleep(0)  # give other connections a turn
        finally:
            lane.running = None
            self._on_idle()

    async def _do(self, lane: _Lane, work: LaneWork) -> None:
        try:
            await work.do()
        except Exception as error:
            self._on_error(error, lane.name)
        finally:
            work.memory.close()


def lane_name(value: dict[str, Any]) -> str:
    """Remove the name of a lane from a message, and return it. Return "" for the default lane.

    Raises:
        InvalidLane: the name is invalid.
    """
    if "stream_id" not in value:
        return ""
    name = value.pop("stream_id")
    if not isinstance(name, str) or not _STREAM_ID.fullmatch(name):
        raise InvalidLane
    return name
