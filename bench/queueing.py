"""Clients that ask again as soon as they have an answer, and note when each request was sent and began."""

from __future__ import annotations

import asyncio
import time
import urllib.parse
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple, cast

import httptools
import uvloop

from handler.bench.processes import Worker


class Turn(NamedTuple):
    """One request, on the machine's monotonic clock: its last byte sent, its first token, its last token."""

    sent: float
    begun: float
    ended: float

    @property
    def wait(self) -> float:
        return self.begun - self.sent


def overtaken(turns: Sequence[Turn], margin: float) -> int:
    """Count requests that began `margin` seconds or more after one that was sent `margin` seconds or more later."""
    count = 0
    earliest = float("inf")  # begin among the requests that were sent later than the margin
    later = iter(sorted(turns, reverse=True))
    candidate = next(later, None)
    for turn in sorted(turns, reverse=True):
        while candidate is not None and candidate.sent >= turn.sent + margin:
            earliest = min(earliest, candidate.begun)
            candidate = next(later, None)
        count += turn.begun >= earliest + margin
    return count


def ask_in_turns(url: str, request: bytes, clients: int, seconds: float) -> list[Turn]:
    """Return the answered requests of `clients` that ask for `seconds`; raise ConnectionError if one failed."""
    worker = Worker("the clients' process", _run, url, request, clients, seconds)
    try:
        turns = worker.receive()
    finally:
        worker.close()
    if isinstance(turns, str):
        raise ConnectionError(turns)
    return list(turns)


class _Client(asyncio.Protocol):
    def __init__(self, request: bytes, turns: list[Turn], failures: list[str]) -> None:
        self._request, self._turns, self._failures = request, turns, failures

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self._ask()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._failures.append(f"connection lost: {error}")

    def _ask(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._begun = 0.0
        self._sent = time.monotonic()
        self.transport.write(self._request)

    # -- what httptools calls ------------------------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        self._begun = self._begun or time.monotonic()

    def on_message_complete(self) -> None:
        if (status := self._parser.get_status_code()) != 200:
            self._failures.append(f"status {status}")
        self._turns.append(Turn(self._sent, self._begun, time.monotonic()))
        asyncio.get_running_loop().call_soon(self._ask)


def _run(pipe: Connection, url: str, request: bytes, clients: int, seconds: float) -> None:
    uvloop.run(_ask(pipe, url, request, clients, seconds))


async def _ask(pipe: Connection, url: str, request: bytes, clients: int, seconds: float) -> None:
    where = urllib.parse.urlsplit(url)
    host, port = where.hostname or "", where.port or 80
    turns: list[Turn] = []
    failures: list[str] = []
    loop = asyncio.get_running_loop()
    connections = [
        loop.create_connection(lambda: _Client(request, turns, failures), host, port) for _ in range(clients)
    ]
    protocols = [protocol for _, protocol in await asyncio.gather(*connections)]
    await asyncio.sleep(seconds)
    pipe.send(failures[0] if failures else list(turns))
    for protocol in protocols:
        protocol.transport.abort()
