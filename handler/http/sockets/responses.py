"""OpenAI's Responses over a WebSocket: lanes, and the newest response of each lane in the connection's memory.

See https://developers.openai.com/api/docs/guides/websocket-mode.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter, InvalidPayload, Overloaded
from handler.core.framing import dumps, dumps_decoded, loads
from handler.http.sockets.base import Socket
from handler.http.sockets.exchange import EventSender, PlainEventSender, refusal_event
from handler.http.sockets.lanes import InvalidLane, TooManyLanes, lane_name
from handler.http.sockets.session import MessageReader, SocketSession
from handler.protocols.kernel.readers import INT32, show
from handler.serving.quota import Share

_ENDS = tuple(b'{"type":"response.%b"' % kind for kind in (b"completed", b"incomplete", b"failed"))
_STATES = (b'{"type":"response.created"', b'{"type":"response.in_progress"', *_ENDS)
_UNUSED = ("type", "stream", "generate", "client_metadata")
_PATH = "/v1/responses"
_PREVIOUS = "previous_response_id"
_NO_PREVIOUS = "previous_response_not_found"


class NewestResponse(NamedTuple):
    """The newest response of a lane.

    Attributes:
        items: the items of its conversation as JSON, with a comma after each: the input, then the output.
        memory: memory that the items hold.
    """

    id: str
    items: bytes
    memory: Share


class ResponsesReader(MessageReader):
    """Reads OpenAI's events. `response.create` creates a response in a lane."""

    def __init__(self, session: SocketSession) -> None:
        self._session = session
        self._newest: dict[str, NewestResponse] = {}  # by the name of the lane, the least recently written first

    async def read(self, message: bytes) -> None:
        event = await self._session.decode(message)
        kind = event.get("type")
        if kind == "response.create":
            self._start(event, len(message))
        elif kind == "response.steer":
            encode = functools.partial(dumps_decoded, _not_steered(event))
            self._session.socket.send_text(await self._session.call(len(message), encode))
        elif kind != "response.processed":  # Codex reports the responses that it has processed
            raise InvalidParameter(f"type={show(kind)}: must be response.create")

    def expire(self) -> None:
        error = InvalidPayload("the connection has reached its maximum lifetime; open a new one")
        self._session.socket.send_text(dumps(refusal_event(error, code="websocket_connection_limit_reached")))

    def _start(self, event: dict[str, Any], size: int) -> None:
        output = EventSender(self._session.socket)
        try:
            name = lane_name(event)
            output = EventSender(self._session.socket, name)
            self._session.start(name, None, functools.partial(self._create, name, event, size))
        except (InvalidLane, TooManyLanes) as error:
            code = "invalid_stream_id" if isinstance(error, InvalidLane) else "websocket_stream_limit_reached"
            output.error(refusal_event(error, code=code, param="stream_id"))
        except Overloaded as error:
            output.error(refusal_event(error))

    async def _create(self, name: str, event: dict[str, Any], size: int) -> None:
        """Create a response, which continues a response of this connection if there is one."""
        previous, in_conversation = event.get(_PREVIOUS), event.get("conversation") is not None
        if in_conversation and not _generates(event):
            return EventSender(self._session.socket, name).error(refusal_event(_not_warmed_up()))
        parent = None if in_conversation else self._find(previous)
        if parent is None and isinstance(previous, str) and not self._session.model.config.stores_responses:
            return self._refuse_previous(name, previous)
        history = b"" if parent is None else self._newest[parent].items
        prepare = functools.partial(_prepared, event, history, continues=parent is not None)
        items, body = await self._session.call(size + len(history), prepare)
        stream = _Stream(self._session.socket, name, previous=None if parent is None else previous)
        if _generates(event):
            await self._session.respond(_PATH, body, stream)
        else:
            await self._warm_up(name, body, event.get("max_output_tokens"), stream)
        if in_conversation:
            return  # the conversation has the items
        if stream.response is not None and stream.response["status"] != "failed":
            self._keep(name, stream.response, items)
        elif parent == name:
            self._forget(name)

    def _refuse_previous(self, name: str, previous: str) -> None:
        error = InvalidParameter(f"previous_response_id={show(previous)}: no such response on this connection")
        event = refusal_event(error, code=_NO_PREVIOUS, param=_PREVIOUS)
        EventSender(self._session.socket, name).error(event)

    async def _warm_up(self, name: str, body: bytes, limit: object, stream: _Stream) -> None:
        """Have the engine read a prompt, and send a response without output.

        Args:
            limit: the client's `max_output_tokens`.
        """
        whole = _Whole(self._session.socket, stream)
        await self._session.respond(_PATH, body, whole)
        if whole.response is not None:
            for event in _events_without_output(whole.response, limit):
                stream.event(dumps(event))

    def _find(self, id: object) -> str | None:
        """Return the lane whose newest response has an id, or None."""
        return next((name for name, newest in self._newest.items() if newest.id == id), None)

    def _keep(self, name: str, response: Mapping[str, Any], items: bytes) -> None:
        """Keep the newest response of a lane. If memory is short, drop the responses of other lanes first."""
        self._forget(name)
        items += b"".join(dumps(item) + b"," for item in response["output"])
        while True:
            try:
                memory = self._session.hold(len(items))
                break
            except Overloaded:
                if not self._newest:
                    return
                self._forget(next(iter(self._newest)))
        self._newest[name] = NewestResponse(response["id"], items, memory)

    def _forget(self, name: str) -> None:
        forgotten = self._newest.pop(name, None)
        if forgotten is not None:
            forgotten.memory.close()


class _Stream(PlainEventSender):
    """The events of a response.

    Args:
        previous: id of the response that is continued from the connection's memory, or None.

    Attributes:
        response: the response, once it has ended.
    """

    def __init__(self, socket: Socket, stream_id: str, *, previous: str | None = None) -> None:
        super().__init__(socket, stream_id)
        self._previous = previous
        self._in_progress = b""
        self.response: Mapping[str, Any] | None = None

    def event(self, event: bytes) -> None:
        super().event(self._noted(event) if event.startswith(_STATES) else event)

    def events(self, events: Sequence[bytes]) -> None:
        super().events([self._noted(event) if event.startswith(_STATES) else event for event in events])

    def _noted(self, event: bytes) -> bytes:
        """Keep the state of the response, and return the event with the id of the previous response."""
        value = loads(event)
        if self._previous is not None:
            value["response"][_PREVIOUS] = self._previous
            event = dumps(value)
        if event.startswith(_ENDS):
            self.response = value["response"]
        else:
            self._in_progress = event
        return event

    def error(self, event: dict[str, Any]) -> None:
        error = event.get("error")
        if event["status"] == HTTPStatus.NOT_FOUND and isinstance(error, dict) and error.get("param") == _PREVIOUS:
            event = {**event, "status": 400, "error": {**error, "code": _NO_PREVIOUS}}
        super().error(event)

    def idle(self) -> None:
        """Send the last state of the response again, because pings do not reset Codex's idle timeout."""
        if self._in_progress:
            super().event(self._in_progress)


class _Whole(EventSender):
    """Keeps a response instead of sending it. Errors are sent.

    Args:
        stream: sends the errors.

    Attributes:
        response: the response, or None if it is an error.
    """

    def __init__(self, socket: Socket, stream: _Stream) -> None:
        super().__init__(socket)
        self._stream = stream
        self.response: dict[str, Any] | None = None

    def event(self, event: bytes) -> None:
        self.response = loads(event)

    def error(self, event: dict[str, Any]) -> None:
        self._stream.error(event)


def _not_steered(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response to `response.steer`, which no engine supports."""
    steer = {name: event[name] for name in (_PREVIOUS, "input") if name in event}
    message = "the model cannot be steered while it generates a response"
    error = {"type": "invalid_request_error", "code": "steering_not_supported", "message": message}
    return {"type": "response.steer.failed", "sequence_number": 0, "steer": steer, "error": error}


def _not_warmed_up() -> InvalidParameter:
    return InvalidParameter("generate=false: is not supported with conversation, to which each response is appended")


def _generates(event: Mapping[str, Any]) -> bool:
    return event.get("generate") is not False


def _prepared(event: Mapping[str, Any], history: bytes, *, continues: bool) -> tuple[bytes, bytes]:
    """Return the items of a conversation, and the body of the request for the next response.

    Args:
        history: items before the input of the event.
        continues: whether the event continues a response of this connection.
    """
    generates = _generates(event)
    body = {field: value for field, value in event.items() if field not in _UNUSED}
    body["stream"] = generates
    limit = event.get("max_output_tokens")
    if not generates and (limit is None or (isinstance(limit, int) and 0 < limit <= INT32)):  # the route refuses others
        body["max_output_tokens"] = 1
    if continues:
        del body[_PREVIOUS]
    new = _items_of(body.get("input"))
    items = history + (new or b"")
    if new is None or not history:
        return items, dumps_decoded(body)
    body.pop("input", None)
    others = dumps_decoded(body)  # they are never empty, and may have integers of more than 64 bits
    return items, b'{"input":[%b],%b' % (items.removesuffix(b","), others[1:])


def _events_without_output(response: Mapping[str, Any], limit: object) -> Iterator[dict[str, Any]]:
    """Yield the events of a response whose output is removed."""
    usage = {**response["usage"], "output_tokens": 0, "total_tokens": response["usage"]["input_tokens"]}
    empty = {**response, "output": [], "incomplete_details": None, "max_output_tokens": limit}
    begun = {**empty, "status": "in_progress", "completed_at": None, "usage": None}
    ended = {**empty, "status": "completed", "completed_at": int(time.time()), "usage": usage}
    for number, (kind, state) in enumerate((("created", begun), ("in_progress", begun), ("completed", ended))):
        yield {"type": f"response.{kind}", "sequence_number": number, "response": state}


def _items_of(input: object) -> bytes | None:
    """Return the items of a request's input as JSON, with a comma after each, or None if the input is invalid."""
    if isinstance(input, str):
        input = [{"type": "message", "role": "user", "content": input}]
    if input is not None and not isinstance(input, list):
        return None
    return b"".join(dumps_decoded(item) + b"," for item in input or ())
