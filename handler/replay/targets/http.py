"""A server by its URL: the load generator's connections, which keep the whole answer."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
import urllib.parse
from collections.abc import Iterator

from handler.bench.client import BodyReader, Connection, address, opened
from handler.core.errors import ConfigError
from handler.replay.answer import BUSY, Answer, lost, times_of
from handler.replay.request import Request
from handler.replay.targets.base import Attempt

_PAUSE = 0.05  # seconds after a failed connection, so that a dead server is not asked as fast as the loop turns
_OURS = {
    "accept-encoding",
    "authorization",
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-authorization",
    "proxy-connection",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
"""Headers of the recorded connection, which are not sent; no encoding is asked for, as bodies are compared."""
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_PATH = re.compile(r"/[\x21-\x7e]*")


class _Reader(BodyReader):
    @property
    def retry_after(self) -> float:
        """Seconds; 0: none, or a date."""
        text = self.headers.get("retry-after", "")
        return float(text) if text.isdecimal() else 0.0


class HttpTarget:
    """A server.

    Args:
        url: with a path, that goes before each request's.
        key: sent as a bearer token; empty: none.
        timeout: seconds until an answer counts as lost.
    """

    def __init__(self, url: str, key: str = "", timeout: float = 600.0) -> None:
        self._url, self._address = url, address(url)
        where = urllib.parse.urlsplit(url)
        self._host, self._prefix = where.netloc.rpartition("@")[2], where.path.rstrip("/")
        self._authorization = f"authorization: Bearer {key}\r\n" if key else ""
        self._timeout = timeout
        self._idle: list[Connection[_Reader]] = []

    async def open(self) -> None:
        """Connect for the first request, so that a wrong URL or certificate is told at once."""
        try:
            self._idle.append(await self._connect())
        except ssl.SSLCertVerificationError as error:
            advice = "SSL_CERT_FILE names a file of certificates to trust"
            raise ConfigError(f"lmi replay: {self._url}: {error.verify_message}: {advice}") from None
        except (OSError, asyncio.TimeoutError) as error:
            raise ConfigError(f"lmi replay: cannot connect to {self._url}: {error or 'timeout'}") from None

    async def send(self, request: Request) -> Attempt:
        try:
            data = self._encode(request)
        except _Unsendable as unsendable:
            return Attempt(lost(str(unsendable)))
        start = time.monotonic()
        connection = self._idle.pop() if self._idle else None
        while True:
            kept = connection is not None and not connection.closed
            if connection is None or connection.closed:
                try:
                    connection = await self._connect()
                except (OSError, asyncio.TimeoutError):
                    await asyncio.sleep(_PAUSE)
                    return Attempt(lost("cannot connect"))
            error = await connection.exchange(data, self._timeout)
            if not (kept and connection.was_closed_before(error)):
                break
        if not connection.closed:
            self._idle.append(connection)
        return _attempt(connection.reader, error, start)

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> Connection[_Reader]:
        return await opened(lambda: Connection(_Reader), self._address, self._timeout)

    def _encode(self, request: Request) -> bytes:
        path = self._prefix + request.path
        if not _PATH.fullmatch(path) or not _TOKEN.fullmatch(request.method):
            raise _Unsendable("its method or path cannot be sent by HTTP")
        head = "".join([f"{request.method} {path} HTTP/1.1\r\nhost: {self._host}\r\n", *_header_lines(request)])
        length = f"content-length: {len(request.body)}\r\n" if request.body or request.method != "GET" else ""
        return f"{head}{length}{self._authorization}\r\n".encode("latin-1") + request.body


class _Unsendable(ValueError): ...


def _header_lines(request: Request) -> Iterator[str]:
    for name, value in request.headers.items():
        if name.lower() in _OURS:
            continue
        if not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise _Unsendable("one of its headers cannot be sent by HTTP")
        yield f"{name}: {value}\r\n"


def _attempt(reader: _Reader, error: str, start: float) -> Attempt:
    if error:
        return Attempt(lost(error))
    times = times_of(start, reader.pieces, time.monotonic())
    answer = Answer(reader.status, reader.headers.get("content-type", ""), bytes(reader.body), times=times)
    return Attempt(answer, answer.status in BUSY, reader.retry_after)
