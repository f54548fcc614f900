"""Requests to the server under test, and its responses with arrival times."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from proof.bench import client
from proof.bench.client import BodyReader, StreamLines

_STREAMS = ("text/event-stream", "application/jsonlines", "application/x-ndjson")
_MAX_EXCERPT = 240
"""Maximum characters of a body in a report."""


class Recorder(BodyReader):
    """A reader that records a response, and the arrival times of the lines or events in a stream."""

    max_bytes: ClassVar[int] = 8 << 20

    def __init__(self) -> None:
        super().__init__()
        self._lines = StreamLines()
        self.arrivals = self._lines.arrivals

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        content_type = self.headers.get("content-type", "")
        if self.status == 200 and content_type.startswith(_STREAMS):  # others may be long and without line breaks
            self._lines.feed(body, self._now, events=content_type.startswith(_STREAMS[0]))


@dataclass(frozen=True)
class Response:
    """The response to one request.

    Attributes:
        request: the request on one line for a report, without API keys.
        failure: the reason why the response is incomplete: `timeout`, `connection cut`, `not HTTP`, `over 8 MiB` or
            `refused`; "" if it is complete.
        pieces: the seconds from the start of the request to each piece of the body.
        arrivals: the seconds from the start of the request to each line or event of a stream.
        late: whether the response was ended by the time limit `--timeout` instead of a time limit in the contract.
    """

    request: str
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    failure: str = ""
    seconds: float = 0.0
    pieces: tuple[float, ...] = ()
    arrivals: tuple[float, ...] = ()
    late: bool = False

    @property
    def ok(self) -> bool:
        return self.status == 200 and not self.failure

    @property
    def is_uncut(self) -> bool:
        """Return whether the response is known to be complete, because its headers declare where its body ends."""
        return not self.failure and client.tells_its_end(self.headers)

    @property
    def refused(self) -> bool:
        """Return whether the server refused the request as invalid, with a status of 400 to 499."""
        return 400 <= self.status < 500 and not self.failure

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    @property
    def value(self) -> Any:
        """The body as JSON, or None if it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    @property
    def object(self) -> dict[str, Any]:
        """The body as a JSON object, or {} if it is not a JSON object."""
        return self.value if isinstance(self.value, dict) else {}

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON objects in the lines or events of a stream, without other lines such as `[DONE]`."""
        events = []
        for line in self.text.split("\n"):
            try:
                value = json.loads(line[5:] if line.startswith("data:") else line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                events.append(value)
        return events

    @property
    def got(self) -> str:
        """The response on one line, for a report."""
        if self.failure and not self.status:
            return f"{self.failure} after {self.seconds:.1f} s"
        end = f"; then {self.failure} after {self.seconds:.1f} s" if self.failure else ""
        return f"{self.status} {self.content_type or 'without a content type'} {excerpt(self.body)}{end}"


class RawConnection(client.Connection[Recorder]):
    """A connection that is used for a single request."""

    def __init__(self) -> None:
        super().__init__(Recorder)
        self._news = asyncio.Event()

    async def send(self, request: bytes, label: str, timeout: float) -> Response:
        """Send the request, and return its response. If the exchange fails, the response has a `failure`."""
        start = time.monotonic()
        failure = await self.exchange(request, timeout)
        end, reader = time.monotonic(), self.reader
        return Response(
            request=label,
            status=reader.status,
            headers=reader.headers,
            body=bytes(reader.body),
            failure=failure,
            seconds=end - start,
            pieces=tuple(at - start for at in reader.pieces),
            arrivals=tuple(at - start for at in reader.arrivals),
        )

    async def begun(self, events: int, timeout: float) -> bool:
        """Wait up to `timeout` seconds until `events` events have arrived, and return whether they have arrived."""
        deadline = time.monotonic() + timeout
        while len(self.reader.arrivals) < events and not self.closed:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), deadline - time.monotonic())
            except asyncio.TimeoutError:
                break
        return len(self.reader.arrivals) >= events

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._news.set()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._news.set()


async def connect(url: str, timeout: float) -> RawConnection:
    """Open a connection.

    Raises:
        OSError, asyncio.TimeoutError: the connection failed.
    """
    return await client.opened(RawConnection, client.address(url), timeout)


def excerpt(data: bytes | str) -> str:
    """Return the first characters of a body on one line, for a report."""
    text = data.decode("utf-8", "replace") if isinstance(data, bytes) else data
    text = text.replace("\r", "\\r").replace("\n", "\\n")
    return text if len(text) <= _MAX_EXCERPT else f"{text[:_MAX_EXCERPT]}… ({len(data)} in all)"
