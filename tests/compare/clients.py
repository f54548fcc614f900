"""Health checks, and load generators that do little more than count.

More work would slow down the server under test on a machine with two cores. The load generators and health checks
run in separate processes on uvloop.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import sys
import time
import urllib.parse
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Generic, NamedTuple, TypeVar, cast

import httptools
import uvloop

from proof.bench.processes import Worker

PINGS = 20  # per second
_CONNECT_AT_ONCE = 64
_PROCESSES = 2
_DATA_SEGMENTS_IN = slice(152, 156)  # tcpi_data_segs_in of Linux's tcp_info
_PING = "GET {} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
_PONG = b"HTTP/1.1 200 "


class Client(asyncio.Protocol):
    """A client with one connection. Each subclass has a tuple of totals, whose first item is the time."""

    lost = False

    def __init__(self, request: bytes, heads: int = 0) -> None:
        self.request, self.heads = request, heads

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit from it
        self.ask()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True

    def ask(self) -> None:
        self.transport.write(self.request)

    @staticmethod
    def totals(clients: Sequence[Any], first: float) -> Any:
        """Return the totals for the clients of one process, the first of which began to connect at the time `first`."""
        raise NotImplementedError


class Streams(NamedTuple):
    """The totals of streaming clients. Times are read from the machine's monotonic clock.

    Attributes:
        at: when the totals were computed.
        first: when the first client began to connect.
        last: when the last stream so far began.
        streaming: number of clients whose stream has begun but not ended.
        tokens: number of JSON lines or events.
        segments: number of TCP segments with data. On loopback, each write is one segment unless it is long.
    """

    at: float
    first: float
    last: float
    streaming: int
    tokens: int
    segments: int


class Streaming(Client):
    """A client that sends one request and counts tokens. A stream begins with the first token after `heads` events."""

    begun = 0.0
    _cut = False  # whether the last read ended between a line's brace and its newline

    def __init__(self, request: bytes, heads: int = 0) -> None:
        super().__init__(request, heads)
        self.tokens = -heads

    def data_received(self, data: bytes) -> None:
        self.tokens += data.count(b"}\n")
        if self._cut and data[0] == 10:
            self.tokens += 1
        self._cut = data[-1] == 125
        if not self.begun and self.tokens > 0:
            self.begun = time.monotonic()

    @property
    def streaming(self) -> bool:
        return self.begun > 0 and not self.lost

    @property
    def segments(self) -> int:
        if self.lost:
            return 0
        info = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
        return int.from_bytes(info[_DATA_SEGMENTS_IN], sys.byteorder)

    @staticmethod
    def totals(clients: Sequence[Streaming], first: float) -> Streams:
        return Streams(
            time.monotonic(),
            first,
            max(client.begun for client in clients),
            sum(client.streaming for client in clients),
            sum(client.tokens for client in clients if client.begun),
            sum(client.segments for client in clients),
        )


class Answers(NamedTuple):
    """The totals of clients that repeat a request.

    Attributes:
        at: when the totals were computed.
        whole: number of responses with status 200 and full length.
        failed: number of other responses, and of connections that the server closed.
    """

    at: float
    whole: int
    failed: int


class Asking(Client):
    """A client that sends the same request repeatedly."""

    whole = 0
    failed = 0

    def ask(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._full = False
        super().ask()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._full = self._full or b'"length"' in body  # the finish reason, which loopback never splits

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() == 200 and self._full:
            self.whole += 1
        else:
            self.failed += 1
        asyncio.get_running_loop().call_soon(self.ask)

    @staticmethod
    def totals(clients: Sequence[Asking], first: float) -> Answers:
        failed = sum(client.failed + client.lost for client in clients)
        return Answers(time.monotonic(), sum(client.whole for client in clients), failed)


T = TypeVar("T", Streams, Answers)


class Clients(Generic[T]):
    """A group of clients in several processes.

    Args:
        request: the HTTP request that each client sends.
        number: number of clients.
        heads: number of events before the first token of a response.
    """

    def __init__(self, kind: type[Client], url: str, request: bytes, number: int, heads: int = 0) -> None:
        shares = [len(range(index, number, _PROCESSES)) for index in range(min(_PROCESSES, number))]
        self._workers = [Worker("a load process", _run, kind, url, request, share, heads) for share in shares]

    def totals(self) -> list[T]:
        """Return the totals of each process."""
        for worker in self._workers:
            worker.send("totals")
        return [worker.receive() for worker in self._workers]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def span(before: Sequence[T], after: Sequence[T]) -> float:
    """Return the seconds between two calls of `Clients.totals`."""
    return statistics.mean(later.at - earlier.at for earlier, later in zip(before, after, strict=True))


def _run(pipe: Connection, kind: type[Client], url: str, request: bytes, number: int, heads: int) -> None:
    uvloop.run(_clients(pipe, kind, url, request, number, heads))


async def _clients(pipe: Connection, kind: type[Client], url: str, request: bytes, number: int, heads: int) -> None:
    loop = asyncio.get_running_loop()
    host, port, _ = _where(url)
    clients: list[Client] = []
    over = loop.create_future()
    first = time.monotonic()

    def answer() -> None:
        try:
            pipe.recv()
            pipe.send(kind.totals(clients, first))
        except EOFError:  # the other end has closed the pipe
            loop.remove_reader(pipe.fileno())
            over.set_result(None)

    clients.append((await loop.create_connection(lambda: kind(request, heads), host, port))[1])
    loop.add_reader(pipe.fileno(), answer)
    while len(clients) < number:
        some = range(min(_CONNECT_AT_ONCE, number - len(clients)))
        connections = [loop.create_connection(lambda: kind(request, heads), host, port) for _ in some]
        clients += [protocol for _, protocol in await asyncio.gather(*connections)]
    await over
    for client in clients:
        client.transport.abort()


def _where(url: str) -> tuple[str, int, str]:
    where = urllib.parse.urlsplit(url)
    return where.hostname or "", where.port or 80, where.path


# -- health checks -----------------------------------------------------------------------------------------------------


class Pings:
    """A process that sends health checks at a fixed rate, each on a new connection.

    Args:
        url: the URL of the health check.
        seconds: duration of the process.
        limit: seconds to wait for a response. A missing response counts as a response that took this long.
    """

    def __init__(self, url: str, seconds: float, limit: float) -> None:
        self._worker = Worker("the process for health checks", _ping, url, round(seconds * PINGS), limit)

    def result(self) -> list[float]:
        """Wait for the last response, and return the duration of each health check in seconds, in order."""
        try:
            return list(self._worker.receive())
        finally:
            self._worker.close()


def _ping(pipe: Connection, url: str, number: int, limit: float) -> None:
    pipe.send(uvloop.run(_pings(url, number, limit)))


async def _pings(url: str, number: int, limit: float) -> list[float]:
    begin = time.monotonic()
    tasks = []
    for index in range(number):
        await asyncio.sleep(begin + index / PINGS - time.monotonic())
        tasks.append(asyncio.ensure_future(_seconds(url, limit)))
    return await asyncio.gather(*tasks)


async def _seconds(url: str, limit: float) -> float:
    begin = time.monotonic()
    try:
        if await asyncio.wait_for(_answers(*_where(url)), limit):
            return time.monotonic() - begin
    except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
        pass
    return limit


async def _answers(host: str, port: int, path: str) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(_PING.format(path).encode())
        return await reader.readexactly(len(_PONG)) == _PONG
    finally:
        writer.close()
