"""Load generator of streams that only counts: more work would slow the server under test on two cores."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
import urllib.parse
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple, cast

import uvloop

from proof.bench.processes import Worker

_CONNECT_AT_ONCE = 64
_DATA_SEGMENTS_IN = slice(152, 156)  # tcpi_data_segs_in of Linux's tcp_info


class Count(NamedTuple):
    """State and totals of one process's clients.

    Attributes:
        at: the machine's monotonic clock.
        first: when the first client began to connect, on that clock.
        last: when the last stream so far began.
        streaming: clients whose stream has begun and not ended.
        tokens: ends of JSON lines or events; chunk framing is not counted.
        received: bytes, framing included.
        segments: TCP segments with data. On loopback a write is one, unless it is long.
    """

    at: float
    first: float
    last: float
    streaming: int
    tokens: int
    received: int
    segments: int


class Counter(asyncio.Protocol):
    """A client that POSTs once and counts until it is closed.

    Args:
        heads: events before the first token; the stream begins with the first token.
    """

    begun = 0.0
    lost = False
    tokens = 0
    received = 0
    _cut = False  # the last read ended between a line's brace and its newline

    def __init__(self, request: bytes, heads: int) -> None:
        self._request = request
        self.tokens = -heads

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        self.tokens += data.count(b"}\n")
        if self._cut and data[0] == 10:
            self.tokens += 1
        self._cut = data[-1] == 125
        if not self.begun and self.tokens > 0:
            self.begun = time.monotonic()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True

    @property
    def streaming(self) -> bool:
        return self.begun > 0 and not self.lost

    @property
    def segments(self) -> int:
        if self.lost:
            return 0
        info = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
        return int.from_bytes(info[_DATA_SEGMENTS_IN], sys.byteorder)


class Clients:
    """`number` streaming clients, spread over processes of their own.

    Args:
        request: sent by each.
        heads: see `Counter`.
    """

    def __init__(self, url: str, request: bytes, number: int, processes: int = 2, heads: int = 0) -> None:
        processes = min(processes, number)
        shares = [len(range(index, number, processes)) for index in range(processes)]
        self._workers = [Worker("a load process", _run, url, request, share, heads) for share in shares]
        self._number = number

    def wait_streaming(self, timeout: float = 180.0) -> None:
        """Wait until every client's stream has begun."""
        counts = self.wait(timeout)
        if sum(count.streaming for count in counts) < self._number:
            raise RuntimeError(f"not all of {self._number} streams began within {timeout:g} s: {counts}")

    def wait(self, timeout: float) -> Sequence[Count]:
        """Wait until every client's stream has begun, at most so many seconds."""
        deadline = time.monotonic() + timeout
        while True:
            counts = self.counts()
            if sum(count.streaming for count in counts) == self._number or time.monotonic() > deadline:
                return counts
            time.sleep(0.2)

    def counts(self) -> Sequence[Count]:
        for worker in self._workers:
            worker.send("count")
        return [worker.receive() for worker in self._workers]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def _run(pipe: Connection, url: str, request: bytes, number: int, heads: int) -> None:
    uvloop.run(_count(pipe, url, request, number, heads))


async def _count(pipe: Connection, url: str, request: bytes, number: int, heads: int) -> None:
    loop = asyncio.get_running_loop()
    where = urllib.parse.urlsplit(url)
    host, port = where.hostname or "", where.port or 80
    clients: list[Counter] = []
    over = loop.create_future()
    first = time.monotonic()

    def answer() -> None:
        try:
            pipe.recv()
            pipe.send(
                Count(
                    time.monotonic(),
                    first,
                    max(client.begun for client in clients),
                    sum(client.streaming for client in clients),
                    sum(client.tokens for client in clients if client.begun),
                    sum(client.received for client in clients),
                    sum(client.segments for client in clients),
                )
            )
        except EOFError:  # the other end has closed the pipe
            loop.remove_reader(pipe.fileno())
            over.set_result(None)

    clients.append((await loop.create_connection(lambda: Counter(request, heads), host, port))[1])
    loop.add_reader(pipe.fileno(), answer)
    while len(clients) < number:
        some = range(min(_CONNECT_AT_ONCE, number - len(clients)))
        connections = [loop.create_connection(lambda: Counter(request, heads), host, port) for _ in some]
        clients += [protocol for _, protocol in await asyncio.gather(*connections)]
    await over
    for client in clients:
        client.transport.abort()
