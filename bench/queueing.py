"""Clients that ask again as soon as they have an answer, and note when each request was sent and began."""

from __future__ import annotations

import asyncio
import time
import urllib.parse
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

import uvloop
from throughput import Asker

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


class _Client(Asker):
    def __init__(self, request: bytes, turns: list[Turn]) -> None:
        super().__init__(request)
        self._turns = turns

    def _ask(self) -> None:
        self._begun = 0.0
        self._sent = time.monotonic()
        super()._ask()

    def on_body(self, body: bytes) -> None:
        self._begun = self._begun or time.monotonic()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._turns.append(Turn(self._sent, self._begun, time.monotonic()))
        super().on_message_complete()


def _run(pipe: Connection, url: str, request: bytes, clients: int, seconds: float) -> None:
    uvloop.run(_ask(pipe, url, request, clients, seconds))


async def _ask(pipe: Connection, url: str, request: bytes, clients: int, seconds: float) -> None:
    where = urllib.parse.urlsplit(url)
    host, port = where.hostname or "", where.port or 80
    turns: list[Turn] = []
    loop = asyncio.get_running_loop()
    connections = [loop.create_connection(lambda: _Client(request, turns), host, port) for _ in range(clients)]
    protocols = [protocol for _, protocol in await asyncio.gather(*connections)]
    await asyncio.sleep(seconds)
    failed = sum(protocol.failed for protocol in protocols)
    pipe.send(f"{failed} requests failed" if failed else list(turns))
    for protocol in protocols:
        protocol.transport.abort()
