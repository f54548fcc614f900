"""Requests that come as messages of a WebSocket, and their responses as text frames."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from time import monotonic
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Scope

from handler.core.errors import ServingError
from handler.core.framing import KEEP_ALIVE, dumps, is_json, loads
from handler.http.exchange import COMPLETE, EXCHANGE, STARTED, WAITING, AnyExchange
from handler.http.sockets.base import Socket
from handler.protocols.kernel.errors import retry_headers
from handler.protocols.openai.api import ERRORS

_EVENT = b"data:"  # the bytes before the JSON of a server-sent event
_PLAIN_EVENT = b"data: "  # the same bytes, as this server writes them
_EVENT_END, _LINE_END = b"\n\n", b"\n"
_OBJECT = _PLAIN_EVENT + b"{"
_NAME = b"event: "
_NEWLINE = _LINE_END[0]
_DONE = b"[DONE]"
_RETRY_HEADERS = ("retry-after", "retry-after-ms")

log = logging.getLogger("handler.websocket")


def event_in(data: bytes) -> bytes:
    """Return the JSON object of a server-sent event with one line of data, or b"" for other data."""
    end, newline = len(data) - 2, data.find(_NEWLINE)
    if newline == end and data[-1] == _NEWLINE and data[:7] == _OBJECT:
        return data[6:end]
    if data[:7] == _NAME and data.find(_OBJECT) == newline + 1:  # as in Responses
        return event_in(data[newline + 1 :])
    return b""


def events_in(data: bytes) -> list[bytes]:
    """Return the JSON of each server-sent event in complete events, without comments and the final [DONE]."""
    if data[:6] == _PLAIN_EVENT and data[-2:] == _EVENT_END:
        events = data[6:-2].split(_EVENT_END + _PLAIN_EVENT)
        if data.count(_LINE_END) == 2 * len(events):  # each is one line
            return events if events[-1] != _DONE else events[:-1]
    values = [event[event.find(_EVENT) + len(_EVENT) :].strip() for event in data.split(_EVENT_END) if _EVENT in event]
    return [value for value in values if value != _DONE]


def line_in(data: bytes) -> bytes:
    """Return the JSON object of a line, or b"" for other data."""
    end = len(data) - 1
    if data.find(_NEWLINE) == end and data[:1] == b"{":
        return data[:end]
    return b""


def lines_in(data: bytes) -> list[bytes]:
    """Return the JSON of each line in complete lines."""
    return [line for line in data.split(_LINE_END) if line]


class Splitter(NamedTuple):
    """How the events of a stream are separated.

    Attributes:
        event: returns the JSON object of data that is exactly one event in its usual form, or b"" for other data.
        events: returns the JSON of each event in complete events.
        end: the bytes at the end of each event.
    """

    event: Callable[[bytes], bytes]
    events: Callable[[bytes], list[bytes]]
    end: bytes


_SPLITTERS = {
    "text/event-stream": Splitter(event_in, events_in, _EVENT_END),
    "application/jsonlines": Splitter(line_in, lines_in, _LINE_END),
}
"""Maps the content types of streams to their splitters."""


def _error_event(status: int, value: Any, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the event for an error response: the members of its value, its status, and when to retry.

    Codex reads the headers beside the error, and openai's SDK reads them in it.
    """
    if not isinstance(value, dict):  # a user's middleware may send any error
        value = {"message": value}
    event = {**value, "type": "error", "status": status}
    retries = {name: headers[name] for name in _RETRY_HEADERS if name in headers}
    if not retries:
        return event
    if isinstance(event.get("error"), dict):
        event["error"] = {**event["error"], "headers": retries}
    return {**event, "headers": retries}


def _json_or_text(body: bytes) -> Any:
    try:
        return loads(body)
    except ValueError:
        return body.decode(errors="replace")


def refusal_event(error: ServingError, **fields: Any) -> dict[str, Any]:
    """Return the event for an error in OpenAI's format.

    Args:
        fields: further fields of the error.
    """
    status, body = ERRORS.status(error), {**ERRORS.body(error)["error"], **fields}
    return _error_event(status, {"error": body}, dict(retry_headers(status)))


class EventSender:
    """Sends the events of a response to the client of a WebSocket.

    Args:
        stream_id: name of the lane, which each event repeats, or "" for the default lane.
    """

    def __init__(self, socket: Socket, stream_id: str = "") -> None:
        self._socket = socket
        self._exchange: MessageExchange | None = None
        self._before = b'{"stream_id":%b,' % dumps(stream_id) if stream_id else b""

    def event(self, event: bytes) -> None:
        """Send the JSON of an event, or of a complete response."""
        self._socket.send_text(self._with_lane(event) if self._before else event)

    def events(self, events: Sequence[bytes]) -> None:
        """Send the JSON of events that arrived together."""
        for event in events:
            self.event(event)

    def _with_lane(self, event: bytes) -> bytes:
        """Add the name of the lane to JSON, which custom code may have indented."""
        if event.startswith(b"{") and event[1:].lstrip().startswith(b'"'):
            return self._before + event[1:]
        return b'%b"response":%b}' % (self._before, event)

    def text(self, text: bytes) -> None:
        """Send a complete response that is not JSON. If it is not text, it is sent as a binary message."""
        if not self._before:
            self._socket.send_message(text)
        elif is_json(text.decode(errors="replace")):  # custom code may set no content type
            self.event(text.strip())
        else:
            self.event(dumps(text.decode(errors="replace")))

    def error(self, event: dict[str, Any]) -> None:
        """Send an error as the response."""
        self.event(dumps(event))

    def connect(self, exchange: MessageExchange) -> None:
        """Set the exchange whose response is sent."""
        self._exchange = exchange

    def event_sender(self) -> Callable[[bytes], None]:
        """Return a fast function that does the same as `event`."""
        return self.event

    def disconnect(self) -> None:
        """End the request as if its client had disconnected."""
        if self._exchange is not None:
            self._exchange.disconnect()

    def idle(self) -> None:
        """Show the client that a silent response is still being generated. Pings show this by default."""


class PlainEventSender(EventSender):
    """Sends several events with one write."""

    def events(self, events: Sequence[bytes]) -> None:
        if self._before:
            events = [self._with_lane(event) for event in events]
        if events:
            self._socket.send_texts(events)


class UnchangedEventSender(PlainEventSender):
    """Sends events as they are, except for the name of the lane."""

    def event_sender(self) -> Callable[[bytes], None]:
        return self.event if self._before else self._socket.send_text


class MessageExchange(AnyExchange):
    """The exchange of a request that is a message of a WebSocket (see `Exchange`).

    Args:
        body: body of the request.
        output: sends the response.
    """

    def __init__(self, socket: Socket, body: bytes, output: EventSender) -> None:
        super().__init__()
        # The attributes that `write_chunk` reads come first, so that they share a cache line.
        self._socket = socket
        self._event_in = _SPLITTERS["text/event-stream"].event
        self._send_event = output.event_sender()
        self._rest = b""  # the beginning of the next event
        self._body: bytes | None = body
        self._output = output
        self._start: Message = {}
        self._splitter: Splitter | None = None  # of a stream
        self._parts: list[bytes] = []  # of another response

    @property
    def has_body(self) -> bool:
        return True

    @property
    def num_unsent(self) -> int:
        """Return this request's part of the bytes that the socket has not accepted."""
        return self._socket.num_unsent // max(self._socket.num_running, 1)

    # -- the request ---------------------------------------------------------------------------------------------

    def take_body(self) -> bytes | None:
        body, self._body = self._body, None
        return body

    async def receive(self) -> Message:
        body = self.take_body()
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        while not self.is_over:
            await self.wait()
        return {"type": "http.disconnect"}

    # -- the response --------------------------------------------------------------------------------------------

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Call the application. If it fails, the response is status 500."""
        try:
            await app({**scope, "extensions": {EXCHANGE: self}}, self.receive, self.send)
        except Exception as error:
            log.error("Exception in ASGI application\n", exc_info=error)
        if self.phase < COMPLETE:
            self._output.error(_error_event(500, "Internal Server Error", {}))

    async def send(self, message: Message) -> None:
        if self._socket.flow.write_paused and not self.is_over:
            await self._socket.flow.drain()
        if self.is_over:
            return
        if self.phase == WAITING:
            self.phase = STARTED
            self._start = message
            if message["status"] == HTTPStatus.OK:
                self._splitter = _SPLITTERS.get(self._content_type())
            if self._splitter is not None:
                self._event_in = self._splitter.event
            return
        body, last = message.get("body", b""), not message.get("more_body", False)
        if self._splitter is not None:
            self._send_events(body)
        else:
            self._parts.append(body)
        if last:
            self._end()

    def _headers(self) -> dict[str, str]:
        headers = self._start.get("headers", ())
        return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}

    def _content_type(self) -> str:
        return self._headers().get("content-type", "").partition(";")[0].strip().lower()

    def _end(self) -> None:
        status = self._start["status"]
        whole = self._rest or b"".join(self._parts)
        if self._splitter is not None:
            self._output.events(self._splitter.events(whole))  # the last event has no separator
        elif status >= HTTPStatus.BAD_REQUEST:
            self._output.error(_error_event(status, _json_or_text(whole), self._headers()))
        elif self._content_type() == "application/json":
            self._output.event(whole.strip())
        else:
            self._output.text(whole)
        self.is_paused = True
        self.phase = COMPLETE
        self._event.set()

    def _send_events(self, data: bytes) -> None:
        self.written_at = monotonic()
        if data == KEEP_ALIVE:
            return self._output.idle()
        assert self._splitter is not None, "the response is a stream"
        end = self._splitter.end
        if self._rest or not data.endswith(end):
            data = self._whole_events(data, end)
        self._output.events(self._splitter.events(data))

    def _whole_events(self, data: bytes, end: bytes) -> bytes:
        """Return the events that `data` completes. Custom code may split its stream anywhere."""
        joined = (self._rest + data).replace(b"\r\n", b"\n")
        whole, _, self._rest = joined.rpartition(end)
        return whole

    # -- operations that ASGI lacks ------------------------------------------------------------------------------

    def drop(self) -> None:
        self.disconnect()
        self._socket.abort()

    def resume(self) -> None:
        can_write = self.phase == STARTED and self._splitter is not None
        self.is_paused = not can_write or self._socket.flow.write_paused

    async def read(self) -> None:
        if self._socket.flow.write_paused:
            await self._socket.flow.drain()

    def write_chunk(self, data: bytes) -> bool:
        """Send events of a stream. This is the hot path, called once per token."""
        if self.is_paused or self._socket.write_paused:
            return False
        event_in, send_event = self._event_in, self._send_event  # a call through `self` is slower in Python 3.11
        event = b"" if self._rest else event_in(data)
        if event:
            self.written_at = monotonic()
            send_event(event)
        else:
            self._send_events(data)
        return True
