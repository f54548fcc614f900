"""Health checks at a fixed rate, each on a new connection, from a process of its own."""

from __future__ import annotations

import asyncio
import time
import urllib.parse
from multiprocessing.connection import Connection

import uvloop

from proof.bench.processes import Worker

RATE = 20  # a second
_REQUEST = "GET {} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
_ANSWER = b"HTTP/1.1 200 "


class Pings:
    """Pings for `seconds`.

    Args:
        url: with the health check's path.
        limit: seconds until a ping has no answer; it counts as one that took so long.
    """

    def __init__(self, url: str, seconds: float, limit: float) -> None:
        self._worker = Worker("the pings' process", _run, url, round(seconds * RATE), limit)

    def result(self) -> list[float]:
        """Wait for the last answer; return the seconds of each ping, in order."""
        try:
            return list(self._worker.receive())
        finally:
            self._worker.close()


def _run(pipe: Connection, url: str, number: int, limit: float) -> None:
    pipe.send(uvloop.run(_pings(url, number, limit)))


async def _pings(url: str, number: int, limit: float) -> list[float]:
    where = urllib.parse.urlsplit(url)
    request = _REQUEST.format(where.path).encode()
    begin = time.monotonic()
    tasks = []
    for index in range(number):
        await asyncio.sleep(begin + index / RATE - time.monotonic())
        tasks.append(asyncio.ensure_future(_ping(where.hostname or "", where.port or 80, request, limit)))
    return await asyncio.gather(*tasks)


async def _ping(host: str, port: int, request: bytes, limit: float) -> float:
    begin = time.monotonic()
    try:
        if await asyncio.wait_for(_answers(host, port, request), limit):
            return time.monotonic() - begin
    except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
        pass
    return limit


async def _answers(host: str, port: int, request: bytes) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        return await reader.readexactly(len(_ANSWER)) == _ANSWER
    finally:
        writer.close()
