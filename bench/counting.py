"""Load generator that only counts tokens: more work would slow the server under test on two cores."""

from __future__ import annotations

import asyncio
import time
import urllib.parse
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple, cast

import uvloop

from handler.bench.processes import Worker

_CONNECT_AT_ONCE = 64


class Count(NamedTuple):
    """State and totals of one process's clients.

    Attributes:
        at: the machine's monotonic clock.
        streaming: clients whose stream has begun and not ended.
        tokens: ends of JSON lines; chunk framing is not counted.
        received: bytes, framing included.
    """

    at: float
    streaming: int
    tokens: int
    received: int


class Counter(asyncio.Protocol):
    """A client that POSTs once and counts until it is closed."""

    streaming = 0
    tokens = 0
    received = 0
    _cut = False  # the last read ended between a line's brace and its newline

    def __init__(self, request: bytes) -> None:
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        self.tokens += data.count(b"}\n")
        if self._cut and data[0] == 10:
            self.tokens += 1
        self._cut = data[-1] == 125
        self.streaming = 1

    def connection_lost(self, error: Exception | None) -> None:
        self.streaming = 0


class Clients:
    """`number` streaming clients, spread over processes of their own."""

    def __init__(self, url: str, request: bytes, number: int, processes: int = 2) -> None:
        processes = min(processes, number)
        shares = [len(range(index, number, processes)) for index in range(processes)]
        self._workers = [Worker("a load process", _run, url, request, share) for share in shares]
        self._number = number

    def wait_streaming(self, timeout: float = 180.0) -> None:
        """Wait until every client's stream has begun."""
        deadline = time.monotonic() + timeout
        while sum(count.streaming for count in self.counts()) < self._number:
            if time.monotonic() > deadline:
                raise RuntimeError(f"not all of {self._number} streams began within {timeout:g} s: {self.counts()}")
            time.sleep(0.2)

    def counts(self) -> Sequence[Count]:
        for worker in self._workers:
            worker.send("count")
        return [worker.receive() for worker in self._workers]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def _run(pipe: Connection, url: str, request: bytes, number: int) -> None:
    uvloop.run(_count(pipe, url, request, number))


async def _count(pipe: Connection, url: str, request: bytes, number: int) -> None:
    loop = asyncio.get_running_loop()
    where = urllib.parse.urlsplit(url)
    host, port = where.hostname or "", where.port or 80
    clients: list[Counter] = []
    over = loop.create_future()

    def answer() -> None:
        try:
            pipe.recv()
            totals = [(client.streaming, client.tokens, client.received) for client in clients]
            pipe.send(Count(time.monotonic(), *(sum(column) for column in zip(*totals, strict=True))))
        except EOFError:  # the other end has closed the pipe
            loop.remove_reader(pipe.fileno())
            over.set_result(None)

    clients.append((await loop.create_connection(lambda: Counter(request), host, port))[1])
    loop.add_reader(pipe.fileno(), answer)
    while len(clients) < number:
        some = range(min(_CONNECT_AT_ONCE, number - len(clients)))
        connections = [loop.create_connection(lambda: Counter(request), host, port) for _ in some]
        clients += [protocol for _, protocol in await asyncio.gather(*connections)]
    await over
    for client in clients:
        client.transport.abort()
