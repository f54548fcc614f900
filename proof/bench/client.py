"""The load generator. Its HTTP connections send requests and read streamed responses, in a closed or open loop.

In a closed loop, each client sends its next request when the previous response is complete. In an open loop, requests
are sent when they are due, regardless of how slow the responses are, like requests from users of a service.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import ssl
import statistics
import time
import urllib.parse
from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar, cast

import httptools

from handler.config import environment
from handler.config.options.names import KEYS
from handler.core.errors import ConfigError
from handler.core.event_stream import EventReader, LineReader
from handler.core.loop import has_unread

PERCENTILES = (50, 90, 99)

_PAUSE = 0.05  # seconds between a failure and the client's next request


class Result(NamedTuple):
    """The result of one request. Times are read from the monotonic clock of the machine, which all processes share.

    Attributes:
        start: when the request was sent or, in an open loop, when it was due, so that a late generator does not hide
            delays.
        arrivals: one time per token (or chunk of text), in order. Tokens that arrive in one read have the same time.
        end: when the last byte of the response arrived, or the request failed.
        error: the kind of failure, or "" if the request succeeded.
        counted: number of tokens that the server reported, or None to count the arrivals.
    """

    start: float
    arrivals: Sequence[float]
    end: float
    error: str = ""
    counted: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.arrivals) if self.counted is None else self.counted


Ask: TypeAlias = Callable[[int], Awaitable[Result]]
"""A function that takes the index of a request, sends the request, and waits for the complete response. Failures are
not raised, but returned as results with an error.
"""


@dataclass(frozen=True)
class Closed:
    """A load of `clients` clients. Each sends `requests` requests or, if `seconds` is set, requests for that time."""

    clients: int
    requests: int = 2
    seconds: float | None = None

    def numbers(self, client: int, begin: float) -> Iterator[int]:
        """Yield the index of each request that a client sends. The load starts at `begin` on the monotonic clock."""
        for turn in itertools.count():
            if turn >= self.requests if self.seconds is None else time.monotonic() >= begin + self.seconds:
                return
            yield client + turn * self.clients


@dataclass(frozen=True)
class Open:
    """A load of `rate` requests per second for `seconds`, at random times (a Poisson process) or even intervals."""

    rate: float
    seconds: float = 10.0
    poisson: bool = True
    seed: int = 0

    def due(self) -> list[float]:
        """Return the times at which requests are due, in seconds after the load begins."""
        if not self.poisson:
            return [number / self.rate for number in range(1, int(self.seconds * self.rate) + 1)]
        return list(itertools.takewhile(lambda at: at <= self.seconds, poisson_times(self.rate, self.seed)))


Load: TypeAlias = Closed | Open


def poisson_times(rate: float, seed: int) -> Iterator[float]:
    """Yield the times of an endless Poisson process, in seconds. They depend only on the rate and the seed."""
    gap = random.Random(seed).expovariate
    at = 0.0
    while True:
        at += gap(rate)
        yield at


async def closed_loop(ask: Ask, clients: Iterable[Iterator[int]]) -> list[Result]:
    """Let each client send the requests from its iterator, one after another. Clients may share an iterator."""

    async def client(numbers: Iterator[int]) -> list[Result]:
        results = []
        for number in numbers:
            result = await ask(number)
            results.append(result)
            if result.error:
                await asyncio.sleep(_PAUSE)
        return results

    return [result for results in await asyncio.gather(*map(client, clients)) for result in results]


async def open_loop(ask: Ask, arrivals: Iterable[tuple[int, float]], begin: float) -> list[Result]:
    """Send each request when it is due.

    Args:
        arrivals: the index of each request and its due time in seconds after `begin`, in chronological order.
        begin: when the load begins, on the monotonic clock.
    """

    async def request(number: int, due: float) -> Result:
        return (await ask(number))._replace(start=due)

    tasks = []
    for number, after in arrivals:
        await asyncio.sleep(begin + after - time.monotonic())
        tasks.append(asyncio.ensure_future(request(number, begin + after)))
    return await asyncio.gather(*tasks)


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Return the linearly interpolated percentiles p50, p90 and p99, or None for each if there are no values."""
    if len(values) < 2:
        return {f"p{percent}": next(iter(values), None) for percent in PERCENTILES}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"p{percent}": cuts[percent - 1] for percent in PERCENTILES}


R = TypeVar("R", bound="HttpReader")
C = TypeVar("C", bound=asyncio.Protocol)


MAX_HEAD = 1 << 18
"""Maximum size of a response outside its body, in bytes: headers, trailers and informational responses."""

_CUT = "connection cut"
"""The error for a request whose connection the server closed before the end of the response."""

_MAX_BODY = 64 << 20  # bytes of a body that is kept, and of one line of a stream
_MAX_PIECES = 1 << 17  # number of pieces whose times are kept, in 1 MiB

_INFORMATIONAL = range(100, 200)
"""Statuses of informational responses, such as 103 Early Hints (RFC 9110, section 15.2)."""


class Stage(IntEnum):
    """The received part of a response: nothing, a part of its head, its head, or all of it."""

    NOTHING = 0
    HEAD = 1
    BODY = 2
    COMPLETE = 3


class HttpReader:
    """Reads one HTTP response, which may arrive in pieces of any size. Subclasses process the headers and body.

    Attributes:
        stage: the received part of the response.
        keep_alive: whether the connection can be reused.
        refused: the reason why the rest of the response is not read, or "" if it is read.
    """

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._unread = 0  # bytes since the last part of the body
        self.stage = Stage.NOTHING
        self.keep_alive = True
        self.refused = ""

    @property
    def complete(self) -> bool:
        return self.stage is Stage.COMPLETE

    def feed(self, data: bytes, now: float) -> None:
        """Read bytes that arrived at the time `now`.

        Raises:
            httptools.HttpParserError: the bytes are not HTTP.
        """
        self._now = now
        self.stage = self.stage or Stage.HEAD
        self._unread += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if not self.complete:
                raise
            self.keep_alive = False  # the server sent more than the response
        if self._unread > MAX_HEAD and not self.complete:
            self.refused = f"more than {MAX_HEAD >> 10} KiB of headers"

    def closed(self) -> None:
        """Record that the server closed the connection cleanly."""

    # -- callbacks of httptools ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("the server sent more than the response")

    def on_header(self, name: bytes, value: bytes) -> None: ...

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() not in _INFORMATIONAL:
            self.stage = max(self.stage, Stage.BODY)

    def on_body(self, body: bytes) -> None:
        self._unread = 0

    def on_message_complete(self) -> None:
        if self.stage < Stage.BODY:
            return
        self.stage = Stage.COMPLETE
        self.keep_alive = self._parser.should_keep_alive()


class StreamLines:
    """The lines of a JSON Lines stream, or the data of server-sent events, with their arrival times.

    Attributes:
        arrivals: the arrival times of the lines and events except `[DONE]`.
        last: the last line or event except `[DONE]`.
    """

    def __init__(self) -> None:
        self.arrivals = array("d")
        self.last = b""
        self._lines = LineReader(_MAX_BODY)
        self._events = EventReader(_MAX_BODY)

    @property
    def remainder(self) -> bytes:
        """The beginning of a line whose end has not arrived."""
        return bytes(self._lines.partial)

    def feed(self, data: bytes, now: float, *, events: bool) -> None:
        """Read bytes that arrived at the time `now`.

        Raises:
            ValueError: a line or an event is too large.
        """
        lines = [event.data.strip() for event in self._events.feed(data)] if events else self._lines.feed(data)
        for line in lines:
            if line and line != b"[DONE]":
                self.last = line
                self.arrivals.append(now)


class ResponseReader(HttpReader):
    """A reader that counts the tokens in a response with one token per line. Only the last line is parsed."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = StreamLines()
        self.arrivals = self.lines.arrivals
        self._events = False

    def verdict(self, expected_tokens: int) -> str:
        """Return the kind of failure, or "" if the response succeeded and has the expected number of tokens."""
        status = self._parser.get_status_code()
        if status != 200:
            return f"status {status}"
        try:
            last = json.loads(self.lines.last or self.lines.remainder)
        except ValueError:
            return "not JSON"
        if not isinstance(last, dict) or "error" in last:
            return "failed in the stream"
        if len(self.arrivals) != expected_tokens:
            return "wrong number of tokens"
        return ""

    # -- callbacks of httptools ----------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._events = value.startswith(b"text/event-stream")

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self._parser.get_status_code() == 200:  # lines of an error message do not count as tokens
            try:
                self.lines.feed(body, self._now, events=self._events)
            except ValueError as error:
                self.refused = str(error)


class BodyReader(HttpReader):
    """A reader that stores the status, headers and body of a response, and the arrival times of its pieces.

    Attributes:
        headers: headers with names in lower case. Values of repeated headers are joined with commas.
        body: the body so far.
        pieces: the arrival times of the first pieces of the body. Their number is limited.
    """

    max_bytes: ClassVar[int] = _MAX_BODY
    """The maximum size of a body."""

    def __init__(self) -> None:
        super().__init__()
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.pieces = array("d")

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    def closed(self) -> None:
        """Complete a response of undeclared length, as in HTTP/1.0, even if its body is empty."""
        if self.stage is Stage.BODY and not tells_its_end(self.headers):
            self.stage = Stage.COMPLETE

    # -- callbacks of httptools ----------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.stage < Stage.BODY:
            self.headers.clear()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if len(self.pieces) < _MAX_PIECES:
            self.pieces.append(self._now)
        self.body += body
        if len(self.body) > self.max_bytes:
            self.refused = f"over {self.max_bytes >> 20} MiB"


def tells_its_end(headers: Mapping[str, str]) -> bool:
    """Return whether headers declare where the body ends, so that a truncated response is noticed.

    RFC 9112, section 6.3. The names of headers are in lower case.
    """
    return "content-length" in headers or "transfer-encoding" in headers


Address: TypeAlias = tuple[str, int, ssl.SSLContext | None]
"""A host, a port, and the TLS settings, which are None for plain HTTP."""


def address(url: str) -> Address:
    """Return the address of a server from its URL.

    Raises:
        ConfigError: the URL is invalid.
    """
    try:
        where = urllib.parse.urlsplit(url)
        explicit_port = where.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is not the URL of a server: {error}") from None
    if where.scheme not in ("http", "https") or not where.hostname:
        raise ConfigError(f"{url!r} is not the URL of a server; use http://host:port")
    secure = where.scheme == "https"
    port = explicit_port or (443 if secure else 80)
    return where.hostname, port, ssl.create_default_context() if secure else None


@dataclass(frozen=True)
class Target:
    """A server and the requests to send to it, which use LMI's schema. Subclasses use other schemas.

    Attributes:
        url: scheme, host and port, with a path if it differs from the default of the schema.
        tokens: number of tokens in each response.
        prompt_words: number of words in each prompt.
        timeout: number of seconds after which a request is treated as failed.
        first: index of the prompt for the first request (see `prompt`).
    """

    url: str
    tokens: int
    prompt_words: int = 48
    timeout: float = 120.0
    first: int = 0

    path: ClassVar[str] = "/invocations"
    reader: ClassVar[type[ResponseReader]] = ResponseReader

    @property
    def address(self) -> Address:
        return address(self.url)

    def request(self, number: int, tokens: int | None = None) -> bytes:
        """Return an HTTP request with the prompt at index `first + number`, for a fixed-length response."""
        data = json.dumps(self.body(prompt(self.first + number, self.prompt_words), tokens or self.tokens)).encode()
        where = urllib.parse.urlsplit(self.url)
        path = where.path if where.path not in ("", "/") else self.path
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n{_authorization()}\r\n"
        )
        return head.encode() + data

    def body(self, prompt: str, tokens: int) -> dict[str, Any]:
        """Return the JSON body of a greedy, streaming request for exactly `tokens` tokens."""
        parameters = {"max_new_tokens": tokens, "ignore_eos_token": True, "details": True}
        return {"inputs": prompt, "stream": True, "parameters": parameters}


UNAUTHORIZED = "status 401"
"""The error of a request whose key the server refuses."""


def refused_key(url: str, key: str) -> ConfigError:
    """Return an error for a server that responded with status 401.

    Args:
        key: the key that was sent, or "" if none was.
    """
    reason = f"it refuses the key in {KEYS}" if key else "it requires a key"
    return ConfigError(
        f"{url} responds with status 401: {reason}; set {KEYS}=KEY in the environment to a key of the server"
    )


def _authorization() -> str:
    key = environment.api_key()
    return f"authorization: Bearer {key}\r\n" if key else ""


_STORY = """the river runs past an old mill where a miller once told travellers how long the winter had been and why
bread costs more in spring than after harvest while his daughter counted sacks of flour by candle light and wrote the
numbers into a book"""
_WORDS = _STORY.split()


def prompt(number: int, words: int) -> str:
    """Return the prompt at an index. All prompts begin with different words, so that prefix caches have no effect."""
    return " ".join([str(number + 1), *(_WORDS[(number + index) % len(_WORDS)] for index in range(words - 1))])


class Connection(asyncio.Protocol, Generic[R]):
    """A connection for one request at a time. It is closed after an error."""

    def __init__(self, reader: type[R]) -> None:
        self._loop = asyncio.get_running_loop()
        self._new_reader = reader
        self.reader = reader()
        self._done: asyncio.Future[str] | None = None
        self.closed = False

    async def exchange(self, request: bytes, timeout: float) -> str:
        """Send a request, and read the response with a new `reader`. Return the kind of failure, or "" on success."""
        self.reader = self._new_reader()
        if self.closed:
            return _CUT
        self._done = self._loop.create_future()
        self._transport.write(request)
        # A timer is cheaper than asyncio.wait_for, which creates a task.
        timer = self._loop.call_later(timeout, self._fail, "timeout")
        error = await self._done
        timer.cancel()
        if error and not self.reader.complete:
            self.close()
        return error

    def was_closed_before(self, error: str) -> bool:
        """Return whether the server closed the idle connection before it received the request.

        Such a request may be sent again (RFC 9112, section 9.3.1).
        """
        return error == _CUT and self.reader.stage is Stage.NOTHING

    def is_clean(self) -> bool:
        """Return whether a request may be sent. If bytes have arrived without a request, close the connection."""
        if not self.closed and has_unread(self._transport):
            self.close()
        return not self.closed

    def close(self) -> None:
        self.closed = True
        self._transport.abort()

    def _fail(self, error: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(error)

    # -- callbacks of the event loop -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit from it

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():  # no request waits for these bytes
            self.close()
            return
        try:
            self.reader.feed(data, time.monotonic())
        except httptools.HttpParserError:
            self._fail("not HTTP")
            return
        if self.reader.complete:
            if not self.reader.keep_alive:
                self.close()
            self._fail("")
        elif self.reader.refused:
            self._fail(self.reader.refused)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if error is None:
            self.reader.closed()
        self._fail("" if self.reader.complete else _CUT)


async def opened(make: Callable[[], C], where: Address, timeout: float | None = None) -> C:
    """Open a connection.

    Args:
        make: a function that returns the protocol of the connection.
        timeout: number of seconds within which the connection must be accepted, or None for the system limit.

    Raises:
        OSError: the connection was refused.
        asyncio.TimeoutError: the connection was not accepted in time.
    """
    host, port, secure = where
    opening = asyncio.get_running_loop().create_connection(make, host, port, ssl=secure)
    return (await asyncio.wait_for(opening, timeout))[1]


class Pool(Generic[R]):
    """A pool of connections to one server. An exchange uses an idle connection, or opens a new one.

    Args:
        reader: class of the response readers.
        where: the address of the server.
        timeout: number of seconds within which a connection must be accepted, or None for the system limit.
    """

    def __init__(self, reader: type[R], where: Address, timeout: float | None = None) -> None:
        self._reader, self._where, self._timeout = reader, where, timeout
        self._idle: list[Connection[R]] = []

    async def open(self) -> None:
        """Open a connection for a later exchange. For errors, see `opened`."""
        self._idle.append(await self._opened())

    async def exchange(self, request: bytes, timeout: float) -> tuple[R, str]:
        """Send a request, and send it again if an idle connection turns out to be closed. For errors, see `opened`.

        Returns:
            The reader of the response, and the kind of failure, or "" on success.
        """
        if self._idle and (connection := self._idle.pop()).is_clean():
            error = await self._exchange(connection, request, timeout)
            if not connection.was_closed_before(error):
                return connection.reader, error
        connection = await self._opened()
        error = await self._exchange(connection, request, timeout)
        return connection.reader, error

    async def _opened(self) -> Connection[R]:
        return await opened(lambda: Connection(self._reader), self._where, self._timeout)

    async def _exchange(self, connection: Connection[R], request: bytes, timeout: float) -> str:
        error = await connection.exchange(request, timeout)
        if not connection.closed:
            self._idle.append(connection)
        return error

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class Connections(Pool[ResponseReader]):
    """A pool of connections to a target, whose requests are measured."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.reader, target.address)
        self._target = target

    async def ask(self, number: int, tokens: int | None = None) -> Result:
        """Send a request and measure it. `tokens` overrides the response length of the target."""
        start = time.monotonic()
        tokens = tokens or self._target.tokens
        try:
            reader, error = await self.exchange(self._target.request(number, tokens), self._target.timeout)
        except OSError:
            return Result(start, array("d"), time.monotonic(), "cannot connect")
        return Result(start, reader.arrivals, time.monotonic(), error or reader.verdict(tokens))
