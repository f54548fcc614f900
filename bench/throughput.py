"""Load generator that asks again as soon as it has an answer, and only counts answers."""

from __future__ import annotations

import asyncio
import time
import urllib.parse
from multiprocessing.connection import Connection
from typing import NamedTuple, cast

import httptools
import uvloop

from proof.bench.processes import Worker


class Answers(NamedTuple):
    """The answers of one process's clients.

    Attributes:
        at: the machine's monotonic clock.
        whole: answers with status 200 that had their full length.
        failed: other answers, and connections that the server closed.
    """

    at: float
    whole: int
    failed: int


class Asker(asyncio.Protocol):
    """A client that POSTs the same request over and over on one connection."""

    whole = 0
    failed = 0

    def __init__(self, request: bytes) -> None:
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self._ask()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.failed += 1

    def _ask(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._full = False
        self.transport.write(self._request)

    # -- what httptools calls ------------------------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        self._full = self._full or b'"length"' in body  # the finish reason; no read ends within it on loopback

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() == 200 and self._full:
            self.whole += 1
        else:
            self.failed += 1
        asyncio.get_running_loop().call_soon(self._ask)


class Askers:
    """`number` clients, spread over processes of their own."""

    def __init__(self, url: str, request: bytes, number: int, processes: int = 2) -> None:
        shares = [len(range(index, number, processes)) for index in range(min(processes, number))]
        self._workers = [Worker("a load process", _run, url, request, share) for share in shares]

    def answers(self) -> Answers:
        """Return the totals of all processes, at their mean time."""
        for worker in self._workers:
            worker.send("answers")
        each = [worker.receive() for worker in self._workers]
        at = sum(answers.at for answers in each) / len(each)
        return Answers(at, sum(answers.whole for answers in each), sum(answers.failed for answers in each))

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def _run(pipe: Connection, url: str, request: bytes, number: int) -> None:
    uvloop.run(_ask(pipe, url, request, number))


async def _ask(pipe: Connection, url: str, request: bytes, number: int) -> None:
    loop = asyncio.get_running_loop()
    where = urllib.parse.urlsplit(url)
    host, port = where.hostname or "", where.port or 80
    connections = [loop.create_connection(lambda: Asker(request), host, port) for _ in range(number)]
    askers = [asker for _, asker in await asyncio.gather(*connections)]
    over = loop.create_future()

    def answer() -> None:
        try:
            pipe.recv()
        except EOFError:  # the other end has closed the pipe
            loop.remove_reader(pipe.fileno())
            over.set_result(None)
        else:
            totals = sum(asker.whole for asker in askers), sum(asker.failed for asker in askers)
            pipe.send(Answers(time.monotonic(), *totals))

    loop.add_reader(pipe.fileno(), answer)
    await over
    for asker in askers:
        asker.transport.abort()
