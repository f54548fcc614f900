"""The sessions of WebSockets: their messages are requests, which run in lanes."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol
from urllib.parse import urlencode

from starlette.types import ASGIApp, Scope

from handler.core.errors import InvalidParameter, InvalidPayload, Overloaded, ServingError
from handler.core.framing import dumps, dumps_decoded, is_too_deep
from handler.http.sockets.connection import WebSocket
from handler.http.sockets.exchange import MessageExchange, Output, refusal_event
from handler.http.urls import query_of
from handler.serving.head import owner_of
from handler.serving.model import ServedModel
from handler.serving.quota import Share
from handler.serving.request.stages import PARSE_INLINE

MAX_RUNNING = 16  # maximum number of requests of a WebSocket that run at the same time, as in OpenAI's API
MAX_LANES = 32  # maximum number of named lanes of a WebSocket, as in OpenAI's API
_MAX_WAITING = 256  # maximum number of messages of a WebSocket that wait for earlier ones
_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_LANE = b'"stream_id"'
_OF_HANDSHAKE = re.compile(r"upgrade|connection|content-.*|transfer-encoding|expect|sec-websocket-.*")
_JSON = "application/json"

Work = Callable[[], Awaitable[None]]


class TooManyLanes(InvalidParameter):
    """A message uses one lane too many."""

    def __init__(self) -> None:
        super().__init__(f"stream_id: a connection may use at most {MAX_LANES} streams")


class InvalidLane(InvalidParameter):
    """A message has an invalid name of a lane."""

    def __init__(self) -> None:
        super().__init__("stream_id: must have 1 to 256 characters of A-Z, a-z, 0-9, '_', '.' and '-'")


class Lane:
    """The work of a WebSocket that is done in order.

    Attributes:
        waiting: work that has not begun.
        running: task that does the work, or None while there is none.
    """

    def __init__(self) -> None:
        self.waiting = deque[Work]()
        self.running: asyncio.Task[None] | None = None


class MessageReader(Protocol):
    """What the messages of a WebSocket mean."""

    def begin(self, session: Session) -> None:
        """The connection is open."""

    async def read(self, session: Session, message: bytes) -> None:
        """Read a message, and start what it asks for.

        Raises:
            ServingError: the message is invalid.
        """

    def expire(self, session: Session) -> None:
        """Tell the client that the connection has reached its maximum lifetime."""


class Session:
    """The requests of a WebSocket. It implements `Receiver`.

    Args:
        app: application that has the routes of the requests.
        scope: scope of the request that has opened the WebSocket, after the checks of its head.
        reader: what the messages mean.

    Raises:
        BadRequest: the query string has too many parameters.

    Attributes:
        socket: the connection, set when it is opened.
        intent: value of `intent` in the query string, with which realtime clients choose the kind of session.
        scope: scope of the requests, without what each of them has of its own.
        memory: share of the memory quota for messages that wait, and for what the reader keeps.
        closed: set when the connection is closed.
    """

    socket: WebSocket

    def __init__(self, model: ServedModel, app: ASGIApp, scope: Scope, reader: MessageReader) -> None:
        self.model = model
        self.memory = Share(model.admission.memory)
        self.closed = asyncio.Event()
        self.reader = reader
        self._app = app
        query = dict(query_of(scope))
        self.intent = query.get("intent", "")
        self.scope = request_scope(scope, query.get("adapter", ""))
        self._messages = deque[bytes]()
        self._arrived = asyncio.Event()
        self._lanes = {"": Lane()}
        self._running = asyncio.Semaphore(MAX_RUNNING)
        self._exchanges = set[MessageExchange]()
        self._num_requests = 0
        self._is_draining = False

    @property
    def owner(self) -> str:
        """Return the owner of the key with which the WebSocket was opened, or "" without a key."""
        return owner_of(self.scope["headers_by_name"])

    # -- what the connection does --------------------------------------------------------------------------------

    def on_message(self, message: bytes) -> None:
        num_waiting = len(self._messages) + sum(len(lane.waiting) for lane in self._lanes.values())
        try:
            if num_waiting >= _MAX_WAITING:
                raise Overloaded(f"{num_waiting} messages of this connection are waiting; send more after responses")
            self.memory.take(len(message))
        except ServingError as error:
            return self.socket.send_text(dumps(refusal_event(error)))
        self._messages.append(message)
        self._arrived.set()

    def on_expiry(self) -> None:
        self.reader.expire(self)
        self.on_drain()

    def on_drain(self) -> None:
        self._is_draining = True
        self._close_if_idle()

    def on_close(self) -> None:
        self.closed.set()
        self._arrived.set()
        self._messages.clear()
        for lane in self._lanes.values():
            lane.waiting.clear()
        for exchange in self._exchanges:
            exchange.disconnect()

    # -- messages ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read the messages in order, until the connection is closed and its requests have ended."""
        try:
            while not self.closed.is_set():
                await self._arrived.wait()
                self._arrived.clear()
                while self._messages:
                    await self._read(self._messages.popleft())
            running = [lane.running for lane in self._lanes.values() if lane.running is not None]
            if running:
                await asyncio.wait(running)
        finally:
            self.memory.close()

    async def _read(self, message: bytes) -> None:
        try:
            await self.reader.read(self, message)
        except ServingError as error:
            self.socket.send_text(dumps(refusal_event(error)))
        finally:
            self.memory.give_back(len(message))

    async def decode(self, message: bytes) -> dict[str, Any]:
        """Return the JSON object in a message.

        Raises:
            InvalidPayload: the message is not a JSON object.
        """
        if len(message) < PARSE_INLINE:
            return _object_in(message)
        return await self.model.admission.run(len(message), functools.partial(_object_in, message), self.owner)

    # -- requests ------------------------------------------------------------------------------------------------

    def start(self, name: str, work: Work) -> None:
        """Do work after the earlier work of its lane.

        Raises:
            InvalidParameter: there are too many lanes.
        """
        lane = self._lanes.get(name)
        if lane is None:
            if len(self._lanes) > MAX_LANES:
                raise TooManyLanes
            lane = self._lanes[name] = Lane()
        lane.waiting.append(work)
        if lane.running is None:
            lane.running = asyncio.ensure_future(self._run(lane))

    async def _run(self, lane: Lane) -> None:
        """Do the work of a lane until none waits."""
        try:
            while lane.waiting:
                async with self._running:
                    if lane.waiting:  # the connection may have been closed
                        await lane.waiting.popleft()()
        finally:
            lane.running = None
            self._close_if_idle()

    async def respond(self, path: str, body: bytes, output: Output) -> None:
        """Send a request to the route with a path, and the events of its response to an output."""
        exchange = MessageExchange(self.socket, body, output)
        output.connect(exchange)
        self._exchanges.add(exchange)
        self.socket.num_running = len(self._exchanges)
        self._num_requests += 1
        id = f"{self.scope['request_id']}-{self._num_requests}"
        try:
            headers_by_name = self.scope["headers_by_name"].copy()
            scope = {**self.scope, "path": path, "request_id": id, "headers_by_name": headers_by_name}
            await exchange.run(self._app, scope)
        finally:
            self._exchanges.discard(exchange)
            self.socket.num_running = len(self._exchanges)

    def _close_if_idle(self) -> None:
        if self._is_draining and not self._messages and all(lane.running is None for lane in self._lanes.values()):
            self.socket.shutdown()


def lane_name(value: dict[str, Any]) -> str:
    """Remove the name of a lane from a message, and return it. Return "" for the default lane.

    Raises:
        InvalidLane: the name is invalid.
    """
    if "stream_id" not in value:
        return ""
    name = value.pop("stream_id")
    if not isinstance(name, str) or not _STREAM_ID.fullmatch(name):
        raise InvalidLane
    return name


class RouteReader:
    """Reads messages that are bodies of requests for one route. A message may name its lane.

    Args:
        path: path of the route.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def begin(self, session: Session) -> None:
        """Do nothing, because the client speaks first."""

    async def read(self, session: Session, message: bytes) -> None:
        name, body = "", message
        if _LANE in message:
            value = await session.decode(message)
            name = lane_name(value)
            body = dumps_decoded(value) if name else message
        session.start(name, functools.partial(session.respond, self._path, body, Output(session.socket, name)))

    def expire(self, session: Session) -> None:
        """Do nothing, because the close frame says why the connection is closed."""


def _object_in(message: bytes) -> dict[str, Any]:
    try:
        value = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise InvalidPayload(f"the message is not valid JSON: {error}") from None
    if not isinstance(value, dict) or is_too_deep(value, message):
        raise InvalidPayload("the message must be a JSON object of at most 200 levels")
    return value


def request_scope(scope: Scope, adapter: str) -> Scope:
    """Return the scope of the requests that come as messages, without the headers of the handshake.

    Args:
        adapter: the adapter in the query string, or "". The other parameters are dropped, because one may hold a key.
    """
    headers = [(name, value) for name, value in scope["headers"] if not _OF_HANDSHAKE.fullmatch(name.decode("latin-1"))]
    by_name = {name: value for name, value in scope["headers_by_name"].items() if not _OF_HANDSHAKE.fullmatch(name)}
    return {
        **scope,
        "method": "POST",
        "query_string": urlencode({"adapter": adapter}).encode() if adapter else b"",
        "headers": [*headers, (b"content-type", _JSON.encode())],
        "headers_by_name": {**by_name, "content-type": _JSON},
    }
