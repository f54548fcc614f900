"""The scripted server's WebSockets: SageMaker's stream, OpenAI's Responses and realtime text, at their smallest.

Sources: the container contract in SageMaker's guide "Custom Inference Code with Hosting Services", and OpenAI's guides
"WebSocket mode" and "Realtime conversations".
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request as Handshake
from websockets.server import ServerProtocol

from tests.moving.conform.wire import Refused, Request, Value, read, write

STREAM, RESPONSES, REALTIME = "/invocations-bidirectional-stream", "/v1/responses", "/v1/realtime"
PATHS = (STREAM, RESPONSES, REALTIME)


def offers(request: Request) -> bool:
    return request.method == "GET" and request.headers.get("upgrade") == "websocket"


class Socket:
    """A WebSocket, whose messages come as requests with the method TEXT or BINARY."""

    def __init__(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._request, self._reader, self._writer = request, reader, writer
        self._protocol = ServerProtocol(max_size=None)

    async def accept(self) -> None:
        lines = [f"GET {self._request.path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in self._request.headers.items()]
        self._protocol.receive_data(("\r\n".join(lines) + "\r\n\r\n").encode())
        [handshake] = self._protocol.events_received()
        assert isinstance(handshake, Handshake)
        self._protocol.send_response(self._protocol.accept(handshake))
        await self._flush()

    async def messages(self) -> AsyncIterator[Request]:
        """Messages until the client closes; pings are answered as they come."""
        while data := await self._reader.read(1 << 16):
            self._protocol.receive_data(data)
            await self._flush()
            for event in self._protocol.events_received():
                assert isinstance(event, Frame)
                if event.opcode in (Opcode.TEXT, Opcode.BINARY):
                    yield Request(event.opcode.name, self._request.path, {}, bytes(event.data))
                elif event.opcode is Opcode.CLOSE:
                    return

    async def send(self, event: Value) -> None:
        self._protocol.send_text(json.dumps(event).encode())
        await self._flush()

    async def fail(self, code: CloseCode) -> None:
        self._protocol.fail(code)
        await self._flush()

    async def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            self._writer.write(data)
        await self._writer.drain()


class Kept(NamedTuple):
    """The newest response of a lane, and the words of its conversation."""

    id: str
    words: list[str]


class Session:
    """What the messages of a connection have left behind."""

    def __init__(self, profile: str) -> None:
        self._profile = profile
        self._kept: dict[str | None, Kept] = {}
        self._words: list[str] = []
        self._numbers = itertools.count(1)

    def begin(self, path: str) -> Iterator[Value]:
        if path == REALTIME:
            yield {"type": "session.created", "event_id": "event_0", "session": {"type": "realtime"}}

    def events(self, message: Request) -> Iterator[Value]:
        """The events for a message."""
        if message.path == STREAM:
            return self._stream(message.body)
        event = json.loads(message.body)
        return self._responses(event) if message.path == RESPONSES else self._realtime(event)

    def _stream(self, body: bytes) -> Iterator[Value]:
        try:
            reply = write("lmi", read("lmi", body, whole_path=False), self._profile, "/invocations")
        except Refused as error:
            yield {"type": "error", "status": 400, "error": str(error), "code": 400}
            return
        yield from reply.events or [reply.value]

    def _responses(self, event: Value) -> Iterator[Value]:
        lane = event.get("stream_id")
        named = {} if lane is None else {"stream_id": lane}
        previous = event.get("previous_response_id")
        parent = next((kept for kept in self._kept.values() if kept.id == previous), None)
        if previous is not None and parent is None:
            error = {"type": "invalid_request_error", "code": "previous_response_not_found", "message": "unknown"}
            yield {"type": "error", "status": 400, "error": error, **named}
            return
        words = [*(parent.words if parent else ()), *event["input"].split()]
        pieces = [f" {words[index % len(words)]}" for index in range(event["max_output_tokens"])]
        is_warm_up = event.get("generate") is False
        content = [{"type": "output_text", "text": "".join(pieces)}]
        output = [] if is_warm_up else [{"type": "message", "role": "assistant", "content": content}]
        id, status = f"resp_{next(self._numbers)}", "completed" if is_warm_up else "incomplete"
        usage = {"input_tokens": len(words), "output_tokens": 0 if is_warm_up else len(pieces)}
        head: Value = {"id": id, "previous_response_id": previous, "usage": None, "output": []}
        self._kept[lane] = Kept(id, words if is_warm_up else [*words, *(piece.strip() for piece in pieces)])
        numbers = itertools.count()
        begun = {**head, "status": "in_progress"}
        for kind in ("created", "in_progress"):
            yield {"type": f"response.{kind}", "sequence_number": next(numbers), "response": begun, **named}
        for piece in () if is_warm_up else pieces:
            kind = "response.output_text.delta"
            yield {"type": kind, "sequence_number": next(numbers), "delta": piece, **named}
        ended = {**head, "status": status, "output": output, "usage": usage}
        yield {"type": f"response.{status}", "sequence_number": next(numbers), "response": ended, **named}

    def _realtime(self, event: Value) -> Iterator[Value]:
        head = {"event_id": f"event_{next(self._numbers)}"}
        match event:
            case {"type": "session.update", "session": session}:
                yield {**head, "type": "session.updated", "session": session}
            case {"type": "conversation.item.create", "item": {"content": [{"text": text}]} as item}:
                self._words += text.split()
                yield {**head, "type": "conversation.item.added", "item": item}
            case {"type": "response.create"}:
                yield {**head, "type": "response.created", "response": {"id": "resp_1"}}
                for word in self._words:
                    yield {**head, "type": "response.output_text.delta", "delta": f" {word}"}
                text = "".join(f" {word}" for word in self._words)
                yield {**head, "type": "response.output_text.done", "text": text}
                yield {**head, "type": "response.done", "response": {"id": "resp_1", "status": "completed"}}
            case _:
                error = {"type": "invalid_request_error", "code": None, "message": "unknown", "param": None}
                yield {**head, "type": "error", "error": {**error, "event_id": event.get("event_id")}}
