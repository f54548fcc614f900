"""Requests that come as the messages of a WebSocket. Each runs the route of its path as an HTTP request would."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from time import monotonic
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from handler.core.errors import BadRequest, InvalidParameter, InvalidPayload, Overloaded, ServingError
from handler.core.framing import dumps, dumps_decoded, loads
from handler.http.exchange import COMPLETE, DISCONNECTED, EXCHANGE, STARTED, WAITING, Exchange, wait_for_event
from handler.http.inference import Handle, send_error
from handler.http.websocket import Limits, WebSocket, handshake
from handler.protocols.kernel.errors import ErrorFormat
from handler.serving.model import ServedModel

INVOKE_SOCKET = "/invocations-bidirectional-stream"
"""Path on which SageMaker opens a WebSocket, unless the caller of the endpoint names another one."""

MAX_RUNNING = 16  # maximum number of requests of a WebSocket that run at the same time, as in OpenAI's API
MAX_LANES = 32  # maximum number of named lanes of a WebSocket, as in OpenAI's API
MAX_MESSAGE = 1 << 24  # maximum size of a message, in bytes
MAX_SECONDS = 3600.0  # maximum life of a connection, as in OpenAI's API
_MAX_WAITING = 256  # maximum number of messages of a WebSocket that wait for earlier ones
_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_LANE = b'"stream_id"'
_EVENT = b"data: "  # what comes before the JSON of a server-sent event
_OF_HANDSHAKE = re.compile(rb"upgrade|connection|content-.*|transfer-encoding|expect|sec-websocket-.*")
_RETRY_HEADERS = (b"retry-after", b"retry-after-ms")

log = logging.getLogger("handler.websocket")


def events_in(data: bytes) -> Iterator[bytes]:
    """Return the JSON of each server-sent event in whole events, without comments and the final [DONE]."""
    for event in data.split(b"\n\n"):
        start = event.find(_EVENT)
        if start >= 0 and (value := event[start + len(_EVENT) :]) != b"[DONE]":
            yield value


def lines_in(data: bytes) -> Iterator[bytes]:
    """Return the JSON of each line in whole lines."""
    return filter(None, data.split(b"\n"))


_SPLITS: dict[str, Callable[[bytes], Iterator[bytes]]] = {
    "text/event-stream": events_in,
    "application/jsonlines": lines_in,
}
"""Maps the content types of streams to functions that return the JSON of their events."""


def error_event(status: int, body: bytes, headers: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Return the event for an error response: the members of its JSON, its status, and when to try again.

    Codex reads the headers beside the error, and openai's SDK reads them in it.
    """
    try:
        value = loads(body)
    except ValueError:
        value = {"message": body.decode(errors="replace")}
    event: dict[str, Any] = {**value, "type": "error", "status": status}
    retries = {name.decode(): headers[name].decode() for name in _RETRY_HEADERS if name in headers}
    if not retries:
        return event
    if isinstance(event.get("error"), dict):
        event["error"] = {**event["error"], "headers": retries}
    return {**event, "headers": retries}


class MessageExchange:
    """The exchange of a request that is a message of a WebSocket (see `Exchange`).

    Args:
        stream_id: name of the lane, which each event of the response repeats, or "" for the default lane.
    """

    has_body = True
    memo: dict[object, Any] | None = None

    def __init__(self, socket: WebSocket, body: bytes, stream_id: str = "") -> None:
        self._socket = socket
        self._body: bytes | None = body
        self._before = b'{"stream_id":%b,' % dumps(stream_id) if stream_id else b""
        self._event = asyncio.Event()
        self._start: Message = {}
        self._split: Callable[[bytes], Iterable[bytes]] | None = None  # of a stream
        self._whole: list[bytes] = []  # the parts of another response
        self.wake = self._event.set
        self.phase = WAITING
        self.is_paused = True
        self.written_at = 0.0

    @property
    def is_over(self) -> bool:
        return self.phase >= COMPLETE

    @property
    def num_unsent(self) -> int:
        """Return this request's part of the bytes that the socket has not accepted."""
        return self._socket.transport.get_write_buffer_size() // max(self._socket.num_running, 1)

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

    def disconnect(self) -> None:
        """Tell the application that the socket is closed."""
        self.is_paused = True
        self.phase = DISCONNECTED
        self._event.set()

    # -- the response --------------------------------------------------------------------------------------------

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Call the application. If it fails, the response is status 500."""
        try:
            await app({**scope, "extensions": {EXCHANGE: self}}, self.receive, self.send)
        except Exception as error:
            log.error("Exception in ASGI application\n", exc_info=error)
        if self.phase < COMPLETE:
            self._send_event(dumps(error_event(500, b"Internal Server Error", {})))

    async def send(self, message: Message) -> None:
        if self._socket.flow.write_paused and not self.is_over:
            await self._socket.flow.drain()
        if self.is_over:
            return
        if self.phase == WAITING:
            self.phase = STARTED
            self._start = message
            if message["status"] == HTTPStatus.OK:
                self._split = _SPLITS.get(self._headers().get(b"content-type", b"").decode().partition(";")[0])
            return
        body, last = message.get("body", b""), not message.get("more_body", False)
        if self._split is not None:
            self._send_events(self._split(body))
        else:
            self._whole.append(body)
        if last:
            self._end()

    def _headers(self) -> dict[bytes, bytes]:
        return {name.lower(): value for name, value in self._start.get("headers", ())}

    def _end(self) -> None:
        status = self._start["status"]
        whole = b"".join(self._whole)
        if self._split is None:
            is_error = status >= HTTPStatus.BAD_REQUEST
            self._send_event(dumps(error_event(status, whole, self._headers())) if is_error else whole)
        self.is_paused = True
        self.phase = COMPLETE
        self._event.set()

    def _send_events(self, events: Iterable[bytes]) -> None:
        self.written_at = monotonic()
        for event in events:
            self._send_event(event)

    def _send_event(self, event: bytes) -> None:
        if self._before:
            event = self._before + (event[1:] if event.startswith(b"{") else b'"response":%b}' % event)
        self._socket.send_text(event)

    # -- operations that ASGI lacks ------------------------------------------------------------------------------

    def send_whole(self) -> None:
        """Do nothing, because a client that closes its side of a WebSocket has disconnected."""

    def send_head(self) -> None:
        """Do nothing, because a message has no head."""

    def drop(self) -> None:
        """Close the connection immediately."""
        self.disconnect()
        self._socket.abort()

    def resume(self) -> None:
        can_write = self.phase == STARTED and self._split is not None
        self.is_paused = not can_write or self._socket.flow.write_paused

    async def wait(self, seconds: float | None = None) -> None:
        await wait_for_event(self._event, seconds)

    async def read(self) -> None:
        """Wait until the client has disconnected, or until the unread rest of the response fits into buffers."""
        if self._socket.flow.write_paused:
            await self._socket.flow.drain()

    def write_chunk(self, data: bytes) -> bool:
        if self.is_paused or self._split is None or self._socket.flow.write_paused:
            return False
        self._send_events(self._split(data))
        return True


class Lane:
    """The messages of a WebSocket that are answered one after another.

    Attributes:
        waiting: messages that have not begun.
        running: task that answers the messages, or None while there are none.
    """

    def __init__(self) -> None:
        self.waiting = deque[bytes]()
        self.running: asyncio.Task[None] | None = None


def lane_of(message: bytes) -> tuple[str, bytes]:
    """Return the name of the lane that a message chooses by `stream_id`, or "", and the message without that field.

    Raises:
        ServingError: the message is not JSON, or its `stream_id` is not a valid name.
    """
    if _LANE not in message:
        return "", message
    try:
        value = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise InvalidPayload(f"the message is not valid JSON: {error}") from None
    if not isinstance(value, dict) or "stream_id" not in value:
        return "", message
    name = value.pop("stream_id")
    if not isinstance(name, str) or not _STREAM_ID.fullmatch(name):
        raise InvalidParameter("stream_id: must have 1 to 256 characters of A-Z, a-z, 0-9, '_', '.' and '-'")
    return name, dumps_decoded(value)


def request_scope(scope: Scope, path: str) -> Scope:
    """Return the scope of the requests that come as messages, without the headers of the handshake.

    Args:
        scope: scope of the request that has opened the WebSocket, after the checks of its head.
        path: path of the route.
    """
    headers = [(name, value) for name, value in scope["headers"] if not _OF_HANDSHAKE.fullmatch(name)]
    by_name = scope["headers_by_name"].items()
    return {
        **scope,
        "method": "POST",
        "path": path,
        "headers": [*headers, (b"content-type", b"application/json")],
        "headers_by_name": {
            **{name: value for name, value in by_name if not _OF_HANDSHAKE.fullmatch(name.encode())},
            "content-type": "application/json",
        },
    }


class MessageSession:
    """A WebSocket whose messages are requests for one route. It implements `Receiver`.

    Args:
        app: application that has the route.
        scope: scope of the requests, without what each of them has of its own.
        errors: format of the errors in messages that reach no route.

    Attributes:
        socket: the connection, set when it is opened.
        closed: set when the connection is closed.
    """

    socket: WebSocket

    def __init__(self, app: ASGIApp, scope: Scope, errors: ErrorFormat) -> None:
        self._app = app
        self._scope = scope
        self._errors = errors
        self._lanes = {"": Lane()}
        self._running = asyncio.Semaphore(MAX_RUNNING)
        self._exchanges = set[MessageExchange]()
        self._num_requests = 0
        self._is_draining = False
        self.closed = asyncio.Event()

    # -- what the connection does --------------------------------------------------------------------------------

    def on_message(self, message: bytes) -> None:
        try:
            stream_id, body = lane_of(message)
            lane = self._lane(stream_id)
        except ServingError as error:
            return self._refuse(error)
        if sum(len(lane.waiting) for lane in self._lanes.values()) >= _MAX_WAITING:
            return self._refuse(Overloaded(f"too many messages of this connection wait: {_MAX_WAITING}"), stream_id)
        lane.waiting.append(body)
        if lane.running is None:
            lane.running = asyncio.ensure_future(self._run(lane, stream_id))

    def on_expiry(self) -> None:
        self.on_drain()

    def on_drain(self) -> None:
        self._is_draining = True
        self._close_if_idle()

    def on_close(self) -> None:
        self.closed.set()
        for lane in self._lanes.values():
            lane.waiting.clear()
        for exchange in self._exchanges:
            exchange.disconnect()

    # -- requests ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Wait until the connection is closed and its requests have ended."""
        await self.closed.wait()
        running = [lane.running for lane in self._lanes.values() if lane.running is not None]
        if running:
            await asyncio.wait(running)

    def _lane(self, stream_id: str) -> Lane:
        if stream_id not in self._lanes:
            if len(self._lanes) > MAX_LANES:
                raise InvalidParameter(f"stream_id: a connection may use at most {MAX_LANES} streams")
            self._lanes[stream_id] = Lane()
        return self._lanes[stream_id]

    def _refuse(self, error: ServingError, stream_id: str = "") -> None:
        response = self._errors.whole(error)
        event = error_event(response.status, response.body, {})
        self.socket.send_text(dumps({"stream_id": stream_id, **event} if stream_id else event))

    async def _run(self, lane: Lane, stream_id: str) -> None:
        """Answer the messages of a lane until none waits."""
        try:
            while lane.waiting:
                async with self._running:
                    if lane.waiting:  # the connection may have been closed
                        await self._respond(lane.waiting.popleft(), stream_id)
        finally:
            lane.running = None
            self._close_if_idle()

    async def _respond(self, body: bytes, stream_id: str) -> None:
        exchange = MessageExchange(self.socket, body, stream_id)
        self._exchanges.add(exchange)
        self.socket.num_running = len(self._exchanges)
        self._num_requests += 1
        id = f"{self._scope['request_id']}-{self._num_requests}"
        try:
            headers_by_name = self._scope["headers_by_name"].copy()
            await exchange.run(self._app, {**self._scope, "request_id": id, "headers_by_name": headers_by_name})
        finally:
            self._exchanges.discard(exchange)
            self.socket.num_running = len(self._exchanges)

    def _close_if_idle(self) -> None:
        if self._is_draining and not self._exchanges:
            self.socket.shutdown()


# -- the routes --------------------------------------------------------------------------------------------------------


class Sockets:
    """Opens the WebSockets of a served model.

    Args:
        app: application that has the routes of the requests.
    """

    def __init__(self, model: ServedModel, app: ASGIApp) -> None:
        self._model = model
        self._app = app

    def at(self, path: str, errors: ErrorFormat) -> Handle:
        """Return the handler of requests that open a WebSocket.

        Args:
            path: path of the route that the messages of the client are sent to.
            errors: error format of that route.
        """

        async def open_socket(scope: Scope, receive: Receive, send: Send) -> None:
            exchange = scope["extensions"][EXCHANGE]
            config = self._model.config
            limits = Limits(min(config.max_request_size, MAX_MESSAGE), MAX_SECONDS)
            response = handshake(scope)
            if response.status_code != HTTPStatus.SWITCHING_PROTOCOLS or not isinstance(exchange, Exchange):
                return await send_error(scope, send, BadRequest(response.body.decode().partition("\n")[0]))
            session = MessageSession(self._app, request_scope(scope, path), errors)
            turns, memory = exchange.turns, self._model.admission.memory
            session.socket = WebSocket(response, session, turns, memory, limits)
            exchange.switch(session.socket)
            await session.run()

        return open_socket
