"""One connection to an ASGI application through our HTTP protocol, for tests that decide where its bytes are cut."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from handler.http.protocol import LoopTurns, Protocol

DEADLINE = 30.0  # seconds; a test that waits longer has failed


class Clock:
    """An event loop whose time passes only in the test."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._now = 0.0
        self._timers: list[asyncio.TimerHandle] = []

    def time(self) -> float:
        return self._now

    def call_later(self, seconds: float, call: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(self._now + seconds, call, arguments, self._loop)
        self._timers.append(timer)
        return timer

    def advance(self, seconds: float) -> None:
        """Let time pass, and run the timers that are due in the meantime."""
        end = self._now + seconds
        while due := [timer for timer in self._timers if timer.when() <= end and not timer.cancelled()]:
            timer = min(due, key=asyncio.TimerHandle.when)
            self._timers.remove(timer)
            self._now = timer.when()
            timer._run()  # as the loop does
        self._now = end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


class Connection:
    """The server's end is `protocol`, the client's `reader` and `writer`."""

    def __init__(self, protocol: Protocol, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.protocol = protocol
        self.reader = reader
        self.writer = writer

    def receive(self, *parts: bytes) -> None:
        """Have the server receive these parts, each by itself."""
        for part in parts:
            self.protocol.data_received(part)

    async def read(self, count: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(count), DEADLINE)

    async def read_until(self, end: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(end), DEADLINE)

    async def read_all(self) -> bytes:
        """Up to the server's end of the connection."""
        return await asyncio.wait_for(self.reader.read(), DEADLINE)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection that can be reset, as a pair of Unix's cannot."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        return listener.accept()[0], theirs


@contextlib.asynccontextmanager
async def connected(
    app: Any,
    pair: tuple[socket.socket, socket.socket] | None = None,
    turns: LoopTurns | None = None,
    clock: Clock | None = None,
    state: ServerState | None = None,
) -> AsyncIterator[Connection]:
    ours, theirs = pair or socket.socketpair()
    loop = asyncio.get_running_loop()
    config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None)
    config.load()
    timed: Any = clock or loop
    make = functools.partial(Protocol, config, state or ServerState(), {}, timed, turns=turns)
    transport, protocol = await loop.connect_accepted_socket(make, ours)
    reader, writer = await asyncio.open_connection(sock=theirs, limit=1 << 26)
    try:
        yield Connection(protocol, reader, writer)
    finally:
        writer.close()
        transport.abort()
        await asyncio.sleep(0)


async def settle() -> None:
    """Let all tasks run until each of them waits for something."""
    for _ in range(50):
        await asyncio.sleep(0)


async def exchange(app: Any, parts: Iterable[bytes], end: bytes | None = None) -> bytes:
    """What the server sends for these parts, up to `end`, or up to its end of the connection."""
    async with connected(app) as connection:
        connection.receive(*parts)
        return await (connection.read_all() if end is None else connection.read_until(end))


async def answer(send: Callable[[Any], Any], body: bytes, status: int = 200) -> None:
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def mirror(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the method, the path, the names of the headers and the body."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    names = b",".join(sorted(name for name, _ in scope["headers"]))
    await answer(send, b" ".join([scope["method"].encode(), scope["path"].encode(), names, body]))
