"""The sessions of WebSockets: their messages are requests, which run in lanes."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import urlencode

from starlette.types import ASGIApp, Scope

from handler.core.errors import InternalError, InvalidParameter, InvalidPayload, Overloaded, ServingError
from handler.core.framing import dumps, dumps_decoded
from handler.http.sockets.connection import Socket
from handler.http.sockets.exchange import MessageExchange, Output, refusal_event
from handler.protocols.kernel.body import decode
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

T = TypeVar("T")

log = logging.getLogger("handler.websocket")


class Work(NamedTuple):
    """Work that a message asks for.

    Attributes:
        do: does the work.
        memory: memory that the work holds until its end.
    """

    do: Callable[[], Awaitable[None]]
    memory: Share


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

    Args:
        name: name of the lane, or "" for the default lane.

    Attributes:
        waiting: work that has not begun, and the memory that its message needs, in bytes.
        running: task that does the work, or None while there is none.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
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


class Waiting:
    """Refuses the messages of a WebSocket while the model loads. It implements `Receiver`.

    Args:
        error: reason for the refusal.

    Attributes:
        over: set when the model has been loaded, or when the connection is closed.
    """

    def __init__(self, socket: Socket, error: ServingError) -> None:
        self._socket = socket
        self._error = error
        self.over = asyncio.Event()

    def on_message(self, message: bytes) -> None:
        refuse(self._socket, self._error)

    def on_expiry(self) -> None:
        self._socket.shutdown()

    def on_drain(self) -> None:
        self._socket.shutdown()

    def on_close(self) -> None:
        self.over.set()


class Session:
    """The requests of a WebSocket. It implements `Receiver`.

    Args:
        app: application that has the routes of the requests.
        scope: scope of the requests (see `request_scope`).
        reader: what the messages mean.

    Raises:
        BadRequest: the query string has too many parameters.

    Attributes:
        socket: the connection.
        scope: scope of the requests, without what each of them has of its own.
        closed: set when the connection is closed.
    """

    def __init__(self, model: ServedModel, app: ASGIApp, scope: Scope, reader: MessageReader, socket: Socket) -> None:
        self.model = model
        self.closed = asyncio.Event()
        self.reader = reader
        self.scope = scope
        self.socket = socket
        self._app = app
        self._messages = deque[tuple[bytes, Share]]()
        self._shares = weakref.WeakSet[Share]()
        self._arrived = asyncio.Event()
        self._lanes = {"": Lane()}
        self._running = asyncio.Semaphore(MAX_RUNNING)
        self._exchanges = set[MessageExchange]()
        self._num_requests = 0
        self._is_reading = False
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
            memory = self.hold(len(message))
        except ServingError as error:
            return refuse(self.socket, error)
        self._messages.append((message, memory))
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
        self.reader.begin(self)
        try:
            while not self.closed.is_set():
                await self._arrived.wait()
                self._arrived.clear()
                while self._messages:
                    await self._read(*self._messages.popleft())
                    self._close_if_idle()
            running = [lane.running for lane in self._lanes.values() if lane.running is not None]
            if running:
                await asyncio.wait(running)
        finally:
            for memory in [*self._shares]:
                memory.close()

    def hold(self, size: int) -> Share:
        """Return a share of the memory quota. It is closed with the session, or earlier by the caller.

        Each message and each value that a reader keeps has a share of its own, because a share may take any amount
        while others take little. Together they hold at most half of the quota, so that the rest is for neighbours.

        Raises:
            Overloaded: there is not enough memory.
        """
        memory, limit = Share(self.model.admission.memory), self.model.admission.memory.most // 2
        if size + sum(share.size for share in self._shares) > max(limit, size):
            raise Overloaded("the messages and items of this connection together need too much memory")
        memory.take(size)
        self._shares.add(memory)
        return memory

    async def _read(self, message: bytes, memory: Share) -> None:
        """Read a message, and wait until the client has read what was sent for it at once."""
        self._is_reading = True
        try:
            await self.reader.read(self, message)
        except Exception as error:
            self._fail(error)
        finally:
            if self.socket.flow.write_paused:
                await self.socket.flow.drain()
            self._is_reading = False
            memory.close()

    def _fail(self, error: Exception, lane: str = "") -> None:
        """Send an error that has ended the work of a message. It must not end that of others."""
        if not isinstance(error, ServingError):
            log.error("a bug in the server: a message could not be processed", exc_info=error)
            error = InternalError.of(error)
        Output(self.socket, lane).error(refusal_event(error))

    async def decode(self, message: bytes) -> dict[str, Any]:
        """Return the JSON object in a message.

        Raises:
            InvalidPayload: the message is not a JSON object.
        """
        return await self.call(len(message), functools.partial(_object_in, message))

    async def call(self, size: int, use: Callable[[], T]) -> T:
        """Call a function that processes `size` bytes, on a thread if they are many."""
        if size < PARSE_INLINE:
            return use()
        return await self.model.admission.run(size, use, self.owner)

    # -- requests ------------------------------------------------------------------------------------------------

    def start(self, name: str, size: int, do: Callable[[], Awaitable[None]]) -> None:
        """Do work after the earlier work of its lane, unless the connection is closed.

        Args:
            name: name of the lane.
            size: bytes of the memory quota that the work holds.

        Raises:
            InvalidParameter: there are too many lanes.
            Overloaded: there is not enough memory.
        """
        if self.closed.is_set():
            return
        lane = self._lanes.get(name)
        if lane is None and len(self._lanes) > MAX_LANES:
            raise TooManyLanes
        work = Work(do, self.hold(size))
        if lane is None:
            lane = self._lanes[name] = Lane(name)
        lane.waiting.append(work)
        if lane.running is None:
            lane.running = asyncio.ensure_future(self._run(lane))

    async def _run(self, lane: Lane) -> None:
        """Do the work of a lane until none waits."""
        try:
            while lane.waiting:
                async with self._running:
                    if lane.waiting:  # the connection may have been closed
                        await self._do(lane, lane.waiting.popleft())
        finally:
            lane.running = None
            self._close_if_idle()

    async def _do(self, lane: Lane, work: Work) -> None:
        try:
            await work.do()
        except Exception as error:
            self._fail(error, lane.name)
        finally:
            work.memory.close()

    async def respond(self, path: str, body: bytes, output: Output, content_type: str = _JSON) -> None:
        """Send a request to the route with a path, and the events of its response to an output.

        Nothing is sent if the connection is closed.
        """
        if self.closed.is_set():
            return
        exchange = MessageExchange(self.socket, body, output)
        output.connect(exchange)
        self._exchanges.add(exchange)
        self.socket.num_running = len(self._exchanges)
        self._num_requests += 1
        id = f"{self.scope['request_id']}-{self._num_requests}"
        try:
            scope = {**_with_type(self.scope, content_type), "path": path, "request_id": id}
            await exchange.run(self._app, scope)
        finally:
            self._exchanges.discard(exchange)
            self.socket.num_running = len(self._exchanges)

    def _close_if_idle(self) -> None:
        """Close the connection if the server is stopping, and each message has got its response."""
        if not self._is_draining or self._messages or self._is_reading:
            return
        if all(lane.running is None for lane in self._lanes.values()):
            self.socket.shutdown()


def refuse(socket: Socket, error: ServingError) -> None:
    """Refuse a message at once. A client that sends more without reading the refusals is disconnected."""
    if socket.flow.write_paused:
        socket.abort()
    else:
        socket.send_text(dumps(refusal_event(error)))


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
        output = Output(session.socket, name)
        session.start(name, len(message), functools.partial(session.respond, self._path, body, output))

    def expire(self, session: Session) -> None:
        """Do nothing, because the close frame says why the connection is closed."""


def _object_in(message: bytes) -> dict[str, Any]:
    value = decode(message, unique_keys=False)
    if not isinstance(value, dict):
        raise InvalidPayload("the message must be a JSON object")
    return value


def request_scope(scope: Scope, adapter: str | None) -> Scope:
    """Return the scope of the requests that come as messages, without the headers of the handshake.

    Args:
        scope: scope of the handshake, after the checks of its head.
        adapter: value of `adapter` in the query string, which is all that remains of it, because it may hold a key.
    """
    headers = [(name, value) for name, value in scope["headers"] if not _OF_HANDSHAKE.fullmatch(name.decode("latin-1"))]
    by_name = {name: value for name, value in scope["headers_by_name"].items() if not _OF_HANDSHAKE.fullmatch(name)}
    return {
        **scope,
        "method": "POST",
        "query_string": urlencode({"adapter": adapter}).encode() if adapter else b"",
        "headers": headers,
        "headers_by_name": by_name,
    }


def _with_type(scope: Scope, content_type: str) -> Scope:
    """Return the scope of a request whose body has a content type."""
    return {
        **scope,
        "headers": [*scope["headers"], (b"content-type", content_type.encode())],
        "headers_by_name": {**scope["headers_by_name"], "content-type": content_type},
    }
