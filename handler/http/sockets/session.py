"""The sessions of WebSockets, which read messages in order and run the requests in them."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from starlette.types import ASGIApp, Scope
from websockets.frames import CloseCode

from handler.core.errors import InternalError, InvalidPayload, Overloaded, ServingError
from handler.core.framing import dumps
from handler.http.sockets.base import EXPIRED, STOPPING, Socket
from handler.http.sockets.exchange import EventSender, refusal_event
from handler.http.sockets.lanes import Lanes, LaneWork
from handler.http.sockets.requests import JSON, SocketMemory, SocketRequests
from handler.serving.head import owner_of
from handler.serving.model import ServedModel
from handler.serving.quota import Quota, Share

_NOTHING = Share(Quota(0, 0, 0, ""))  # of a WebSocket without messages, of which there may be thousands
_MAX_WAITING = 256  # maximum number of messages of a WebSocket that wait for earlier ones

T = TypeVar("T")

log = logging.getLogger("handler.websocket")


class MessageReader(Protocol):
    """Interprets the messages of a WebSocket.

    By default, the client sends the first message, and at the maximum lifetime it gets only the close frame.
    """

    def begin(self) -> None:
        """Send the server's messages before the first message of the client."""
        return

    async def read(self, message: bytes) -> None:
        """Read a message, and start the requested work.

        Raises:
            ServingError: the message is invalid.
        """

    def expire(self) -> None:
        """Tell the client that the connection has reached its maximum lifetime."""
        return


ReaderFactory = Callable[["SocketSession"], MessageReader]
"""Creates the reader for a session."""


class LoadingReceiver:
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
        self._socket.close(CloseCode.GOING_AWAY, EXPIRED)

    def on_drain(self) -> None:
        self._socket.shutdown()

    def on_close(self) -> None:
        self.over.set()


class SocketSession:
    """The requests of a WebSocket. It implements `Receiver`.

    Args:
        app: application that has the routes of the requests.
        scope: scope of the requests (see `request_scope`).
        read_with: creates the reader of the messages.

    Attributes:
        reader: reader of the messages. A reader may replace itself.
        socket: the connection.
        owner: owner of the key with which the WebSocket was opened, or "" without a key.
        closed: set when the connection is closed.
    """

    def __init__(
        self, model: ServedModel, app: ASGIApp, scope: Scope, read_with: ReaderFactory, socket: Socket
    ) -> None:
        self.model = model
        self.closed = asyncio.Event()
        self.owner = owner_of(scope["headers_by_name"])
        self.socket = socket
        self._memory = SocketMemory(model.admission.memory.of(self.owner))
        self._requests = SocketRequests(app, scope, socket)
        self._lanes = Lanes(self._fail, self._close_if_idle)
        self._messages = deque[tuple[bytes, Share]]()
        self._read_share = _NOTHING  # of the message that is being read, and of its value
        self._arrived = asyncio.Event()
        self._is_reading = False
        self._end_reason = ""  # why the connection is closed as soon as it is idle
        self.reader = read_with(self)

    # -- what the connection does --------------------------------------------------------------------------------

    def on_message(self, message: bytes) -> None:
        num_waiting = len(self._messages) + self._lanes.num_waiting
        try:
            if num_waiting >= _MAX_WAITING:
                raise Overloaded(
                    f"{num_waiting} messages on this connection are waiting; wait for responses before you send more"
                )
            memory = self.hold(len(message))
        except ServingError as error:
            return refuse(self.socket, error)
        self._messages.append((message, memory))
        self._arrived.set()

    def on_expiry(self) -> None:
        self.reader.expire()
        self._close_when_idle(EXPIRED)

    def on_drain(self) -> None:
        self._close_when_idle(STOPPING)

    def _close_when_idle(self, reason: str) -> None:
        self._end_reason = self._end_reason or reason
        self._close_if_idle()

    def on_close(self) -> None:
        self.closed.set()
        self._arrived.set()
        self._messages.clear()
        self._lanes.clear()
        self._requests.disconnect()

    # -- messages ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read the messages in order, until the connection is closed and its requests have ended."""
        self.reader.begin()
        try:
            while not self.closed.is_set():
                await self._arrived.wait()
                self._arrived.clear()
                while self._messages:
                    await self._read(*self._messages.popleft())
                    self._close_if_idle()
                    await asyncio.sleep(0)  # give other connections a turn
            running = self._lanes.running
            if running:
                await asyncio.wait(running)
        finally:
            self._memory.close()

    async def _read(self, message: bytes, memory: Share) -> None:
        """Read a message, and wait until the client has read the immediate responses to it."""
        self._is_reading, self._read_share = True, memory
        try:
            await self.reader.read(message)
        except Exception as error:
            self._fail(error)
        finally:
            if self.socket.flow.write_paused:
                await self.socket.flow.drain()
            self._is_reading = False
            self._read_share.close()

    def _fail(self, error: Exception, lane: str = "") -> None:
        """Send the error that ended a message's work. It must not end the work of other messages."""
        if not isinstance(error, ServingError):
            log.error("a bug in the server: a message could not be processed", exc_info=error)
            error = InternalError.of(error)
        EventSender(self.socket, lane).error(refusal_event(error))

    async def decode(self, message: bytes) -> dict[str, Any]:
        """Return the JSON object in the message that is being read.

        Raises:
            InvalidPayload: the message is not a JSON object.
            Overloaded: there is not enough memory for the object.
        """
        hold = functools.partial(self._memory.set, self._read_share)
        value = await self.model.admission.decode(message, hold, self.owner, unique_keys=False)
        if not isinstance(value, dict):
            raise InvalidPayload("the message must be a JSON object")
        return value

    async def call(self, size: int, use: Callable[[], T]) -> T:
        """Call a function that processes `size` bytes. Large inputs are processed on a thread, in turns."""
        return await self.model.admission.process(size, use, self.owner, apart=False)

    # -- requests ------------------------------------------------------------------------------------------------

    def hold(self, size: int) -> Share:
        """Return a share of the memory quota (see `SocketMemory`).

        Raises:
            Overloaded: there is not enough memory.
        """
        return self._memory.hold(size)

    def start(self, lane: str, size: int | None, do: Callable[[], Awaitable[None]]) -> None:
        """Do work after the earlier work of its lane, unless the connection is closed.

        Args:
            lane: name of the lane.
            size: bytes of the memory quota that the work holds. With None, it holds what the message that is being read
                and its value hold.

        Raises:
            InvalidParameter: there are too many lanes.
            Overloaded: there is not enough memory.
        """
        if self.closed.is_set():
            return
        self._lanes.check(lane)
        if size is None:
            memory, self._read_share = self._read_share, self.hold(0)
        else:
            memory = self.hold(size)
        self._lanes.add(lane, LaneWork(do, memory))

    async def respond(self, path: str, body: bytes, output: EventSender, content_type: str = JSON) -> None:
        """Send a request to the route with a path, and the events of its response to an output.

        Nothing is sent if the connection is closed.
        """
        if not self.closed.is_set():
            await self._requests.respond(path, body, output, content_type)

    def _close_if_idle(self) -> None:
        """Close the connection if there is a reason, and every message has its response."""
        if self._end_reason and not (self._messages or self._is_reading or self._lanes.running):
            self.socket.close(CloseCode.GOING_AWAY, self._end_reason)


def refuse(socket: Socket, error: ServingError) -> None:
    """Refuse a message at once. A client that sends more without reading the refusals is disconnected."""
    if socket.flow.write_paused:
        socket.abort()
    else:
        socket.send_text(dumps(refusal_event(error)))
