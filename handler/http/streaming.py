"""Write a streamed response's chunks in the callback that made them, without waking a task for each."""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from typing import Any, Protocol, cast

from handler.core.errors import Overloaded
from handler.scheduler.active import Channel

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_MAX_BACKLOG = 16 << 20
"""Bytes that are kept for a client that reads too slowly; one that lets more gather is dropped."""


class Source(Protocol):
    """A request's answer (`serving.request_task.RequestTask`)."""

    finished: bool

    def take(self) -> bytes: ...


class StreamChannel(Channel, Protocol):
    """A way to the socket that is shorter than `send` (`http/protocol.Exchange`).

    Attributes:
        is_held: closed, since bytes that come before wait elsewhere.
        written_at: time of the last chunk, by time.monotonic().
        num_unread: bytes that were written, and that the socket has not taken yet.
    """

    is_held: bool
    written_at: float

    @property
    def num_unread(self) -> int: ...

    @property
    def wake(self) -> Callable[[], object]:
        """Tells whoever waits for the stream's end to look at the writer."""

    def open(self) -> None: ...


class BodyWriter:
    """Sends chunks in order: at once while the socket takes them, from a task while the client reads too slowly.

    ASGI's `send` is a coroutine, but it only waits when the socket is full. So it is stepped by hand, which costs a
    fraction of waking a task; the first time that it does wait, a task goes on with it, and what comes meanwhile is
    joined and sent after it. A client that stops reading is ended by the kernel (`http/server.py`).

    Args:
        channel: takes chunks while nothing waits here.
        hold: told how many bytes are kept for the client now; raises Overloaded where all clients keep too many.

    Attributes:
        ended: the last chunk has been handed in.
        overflowed: the client read too slowly.
        broken: the client cannot be written to any more.
    """

    def __init__(self, send: Send, channel: StreamChannel, hold: Callable[[int], object] = bool) -> None:
        self._send = send
        self._channel = channel
        self._hold = hold
        self._backlog: list[bytes] = []
        self._size = 0
        self._task: asyncio.Task[None] | None = None
        self.ended = self.overflowed = self.broken = False

    def pull(self, source: Source) -> None:
        """Write what a request has to send."""
        data, last = source.take(), source.finished
        try:
            if not last and self._channel.write_chunk(data):
                return
        except Exception:  # the connection is closed, though nobody has said so
            return self._break()
        self.write(data, last=last)

    def write(self, data: bytes, *, last: bool = False) -> None:
        self.ended, self._channel.written_at = last, time.monotonic()
        if self.broken:
            return
        if self._task is not None:
            self._backlog.append(data)
            self._size += len(data)
            return self._count()
        try:
            message = {"type": "http.response.body", "body": data, "more_body": not last}
            sending = cast(Coroutine[Any, Any, None], self._send(message))
            waiting = sending.send(None)
        except StopIteration:
            self._channel.is_held = True
            if not last:
                self._channel.open()
            return self._count()
        except (OSError, RuntimeError):  # the connection is closed, though nobody has said so
            self._break()
            return
        self._channel.is_held = True
        self._size = len(data)
        self._task = asyncio.ensure_future(self._catch_up(sending, waiting, len(data)))
        self._count()

    def _note_sent(self, size: int) -> None:
        self._size -= size
        if not self.broken:
            self._count()

    def _count(self) -> None:
        """Count what is kept for the client, and give the client up where that is too much."""
        try:
            self._hold(self._size + self._channel.num_unread)
        except Overloaded:
            self.overflowed = True
        if self.overflowed or self._size > _MAX_BACKLOG:
            self.overflowed = True
            self._break()

    def _break(self) -> None:
        self._channel.is_held = True
        self._backlog.clear()
        if not self.broken:
            self.broken = True
            self._channel.wake()

    async def _catch_up(self, sending: Coroutine[Any, Any, None], waiting: Any, size: int) -> None:
        try:
            await _go_on(sending, waiting)
            self._note_sent(size)
            while self._backlog:
                data = b"".join(self._backlog)
                self._backlog.clear()
                await self._send({"type": "http.response.body", "body": data, "more_body": not self.ended})
                self._note_sent(len(data))
        except (OSError, RuntimeError):  # the connection was closed meanwhile
            self._break()
        finally:
            self._task = None
            if not (self.ended or self.broken):
                self._channel.open()


@types.coroutine
def _go_on(coroutine: Coroutine[Any, Any, None], waiting: Any) -> Generator[Any, Any, None]:
    """Await a coroutine that was already stepped up to its first wait, `waiting`."""
    yield waiting
    yield from coroutine
