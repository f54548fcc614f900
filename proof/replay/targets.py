"""Servers to which requests are sent. While a server is busy, requests are sent more slowly and retried."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import ssl
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from handler.core.errors import ConfigError
from handler.core.numbers import is_digits
from handler.core.package import install
from proof.bench.client import BodyReader, Pool, address
from proof.bench.processes import lmi_serve
from proof.replay.exchange import BUSY, Request, Response, lost, times_of


class Attempt(NamedTuple):
    """The result of one attempt to send a request.

    Attributes:
        busy: whether a retry may succeed, because the target is throttling requests, full, or not ready.
        after: the seconds in the response's Retry-After header, or 0.
    """

    response: Response
    busy: bool = False
    after: float = 0.0


class Target(Protocol):
    """A server that receives requests. Its methods run on the event loop."""

    async def open(self) -> None:
        """Connect if the target has a connection. Raise ConfigError if this fails."""

    async def send(self, request: Request) -> Attempt:
        """Send the request once, and wait for the complete response. A failure is returned as a lost response."""

    async def close(self) -> None: ...


# -- retries and a slower pace for a busy target -----------------------------------------------------------------------


_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 30.0
_FIRST_INTERVAL, _LONGEST_INTERVAL, _LEAST_INTERVAL = 0.02, 10.0, 0.002


class Paced:
    """A target to which requests are sent again while it is busy.

    Each refusal from a busy target doubles the interval between requests, and every other response shortens it.

    Args:
        patience: the number of seconds after which a refusal from a busy target is returned.
    """

    def __init__(self, target: Target, patience: float = 300.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._target = target
        self._patience = patience
        self._clock = clock
        self._interval = 0.0
        self._next = 0.0

    async def open(self) -> None:
        await self._target.open()

    async def ask(self, request: Request) -> Response:
        """Send the request until the target accepts it, or `patience` has passed."""
        until, pause, throttled = self._clock() + self._patience, _FIRST_PAUSE, 0
        while True:
            if self._interval or self._next:
                await self._turn()
            attempt = await self._target.send(request)
            if not attempt.busy:
                self._interval = self._interval * 0.9 if self._interval > _LEAST_INTERVAL else 0.0
                return attempt.response._replace(throttled=throttled) if throttled else attempt.response
            self._interval = min(max(2 * self._interval, _FIRST_INTERVAL), _LONGEST_INTERVAL)
            wait = min(max(pause, attempt.after), _LONGEST_PAUSE)
            if self._clock() + wait > until:
                return attempt.response._replace(throttled=throttled)
            throttled += 1
            await asyncio.sleep(wait)
            pause *= 2

    async def close(self) -> None:
        await self._target.close()

    async def _turn(self) -> None:
        """Wait until the interval since the previous request has passed."""
        now = self._clock()
        at = max(now, self._next)
        self._next = at + self._interval if self._interval else 0.0
        if at > now:
            await asyncio.sleep(at - now)


# -- servers by URL ----------------------------------------------------------------------------------------------------


_PAUSE = 0.05  # seconds to wait after a failed connection
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
"""Recorded headers that are not sent: headers of the connection, credentials, and accept-encoding, because bodies are
compared.
"""
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_PATH = re.compile(r"/[\x21-\x7e]*")


class ResponseReader(BodyReader):
    @property
    def retry_after(self) -> float:
        """The number of seconds to wait before a retry, or 0 if the header is missing or contains a date."""
        text = self.headers.get("retry-after", "")
        return float(text) if is_digits(text) else 0.0


class HttpTarget:
    """A server that is reached over HTTP.

    Args:
        url: the URL. Its path is prefixed to the path of each request.
        key: the API key, which is sent as a bearer token, or "".
        timeout: the number of seconds after which a response is treated as lost.
    """

    def __init__(self, url: str, key: str = "", timeout: float = 600.0) -> None:
        self._url = url
        where = urllib.parse.urlsplit(url)
        self._host, self._prefix = where.netloc.rpartition("@")[2], where.path.rstrip("/")
        self._authorization = f"authorization: Bearer {key}\r\n" if key else ""
        self._timeout = timeout
        self._pool = Pool(ResponseReader, address(url), timeout)

    async def open(self) -> None:
        """Open the first connection, so that a wrong URL or certificate is reported early."""
        try:
            await self._pool.open()
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
        try:
            reader, error = await self._pool.exchange(data, self._timeout)
        except (OSError, asyncio.TimeoutError):
            await asyncio.sleep(_PAUSE)
            return Attempt(lost("cannot connect"))
        return _attempt(reader, error, start)

    async def close(self) -> None:
        self._pool.close()

    def _encode(self, request: Request) -> bytes:
        path = self._prefix + request.path
        if not _PATH.fullmatch(path) or not _TOKEN.fullmatch(request.method):
            raise _Unsendable("the request's method or path is not valid in HTTP")
        head = "".join([f"{request.method} {path} HTTP/1.1\r\nhost: {self._host}\r\n", *_header_lines(request)])
        length = f"content-length: {len(request.body)}\r\n" if request.body or request.method != "GET" else ""
        return f"{head}{length}{self._authorization}\r\n".encode("latin-1") + request.body


class _Unsendable(ValueError): ...


def _header_lines(request: Request) -> Iterator[str]:
    for name, value in request.headers.items():
        if name.lower() in _OURS:
            continue
        if not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise _Unsendable("one of the request's headers is not valid in HTTP")
        yield f"{name}: {value}\r\n"


def _attempt(reader: ResponseReader, error: str, start: float) -> Attempt:
    if error:
        return Attempt(lost(error))
    times = times_of(start, reader.pieces, time.monotonic())
    by = f"server {name[:80]}" if (name := reader.headers.get("server", "")) else ""
    response = Response(reader.status, reader.headers.get("content-type", ""), bytes(reader.body), times=times, by=by)
    return Attempt(response, response.status in BUSY, reader.retry_after)


# -- targets by their names on the command line ------------------------------------------------------------------------


RECORDED = "recorded"
FORMS = "http://HOST:PORT, sagemaker:NAME[/COMPONENT], serve:ARGUMENTS or recorded"


def check_name(name: str) -> str:
    """Return `name` if it is a valid target, or raise ValueError."""
    scheme, colon, address = name.partition(":")
    if scheme in ("http", "https") and re.search(r"[@?#]", address):
        raise ValueError("a URL must have no user or query, because reports show it: give the key with --key-to")
    if name == RECORDED or (colon and address and scheme in ("http", "https", "sagemaker", "serve")):
        return name
    raise ValueError(f"{name}: must be {FORMS}")


def open_target(
    name: str, key_variable: str | None, timeout: float, patience: float, concurrency: int, stack: contextlib.ExitStack
) -> Paced | None:
    """Return a target, or None for the recording.

    Args:
        key_variable: the environment variable that contains the API key, or None.
        stack: the exit stack that stops the server of a `serve:` target.

    Raises:
        ConfigError: the target cannot be used, or does not accept a key.
    """
    if key_variable is not None and (name == RECORDED or name.startswith("sagemaker:")):
        raise ConfigError(f"lmi replay: {name} does not accept a key; omit {key_variable}")
    if name == RECORDED:
        return None
    return Paced(_target(name, _key(key_variable), timeout, concurrency, stack), patience)


def _target(name: str, key: str, timeout: float, concurrency: int, stack: contextlib.ExitStack) -> Target:
    scheme, _, address = name.partition(":")
    if scheme == "serve":
        try:
            arguments = shlex.split(address)
        except ValueError as error:
            raise ConfigError(f"lmi replay: {name}: {error}") from None
        return HttpTarget(stack.enter_context(lmi_serve(arguments)).url, key, timeout)
    if scheme == "sagemaker":
        try:
            from proof.replay.sagemaker import SageMakerTarget
        except ModuleNotFoundError as error:
            how = install("lmi-handler[deploy]")
            raise ConfigError(f"lmi replay: {name}: {error.name} is not installed; to install it: {how}") from None
        return SageMakerTarget(address, timeout, concurrency)
    return HttpTarget(name, key, timeout)


def _key(variable: str | None) -> str:
    if variable is None:
        return ""
    if not (key := os.environ.get(variable, "").strip()):
        raise ConfigError(f"lmi replay: the environment variable {variable} for the key is not set")
    return key
