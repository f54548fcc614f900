"""Rules of WebSockets: SageMaker's bidirectional stream, OpenAI's Responses, and text in OpenAI's realtime sessions."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from proof.conform import sources
from proof.conform.dialects import piece_of, text_of
from proof.conform.exchange import Response
from proof.conform.rule import expect, expect_fields, expect_status, rule, skip
from proof.conform.server import PROMPT, Server
from proof.conform.websocket import WebSocket, open_websocket

_rule = partial(rule, profiles=("websockets",))
_STREAM = "/invocations-bidirectional-stream"
_RESPONSES = "/v1/responses"
_REALTIME = "/v1/realtime"
_TOKENS = 8
_UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


def _expect_open(response: Response) -> Response:
    """Return the events of a response, or raise `Failed` if the connection was closed before its end."""
    expect(not response.failure, "a response on a connection that stays open", response)
    return response


# -- SageMaker's bidirectional stream ----------------------------------------------------------------------------------


def _is_last(event: Any) -> bool:
    """Return whether an event of a stream or a whole response in a dialect of /invocations is the last one."""
    if isinstance(event, list) or "error" in event or isinstance(event.get("generated_text"), str):
        return True
    choices = event.get("choices")
    return isinstance(choices, list) and any(choice.get("finish_reason") for choice in choices)


def _texts(response: Response) -> list[str | None]:
    """Return the texts of whole responses, which are arrays if the server is compatible with TGI."""
    return [text_of(json.loads(line)) for line in response.text.split("\n")]


def _streamed(response: Response) -> str:
    return "".join(map(piece_of, response.events))


async def _stream_is_that_of_http(server: Server, *, binary: bool) -> None:
    body = await server.body(tokens=_TOKENS, stream=True)
    by_http = await server.post(await server.path(stream=True), body)
    async with open_websocket(server, _STREAM) as websocket:
        message = json.dumps(body).encode() if binary else body
        response = _expect_open(await websocket.ask(message, ends=_is_last))
    expect(len(response.events) > 1, "an event for each token", response)
    expect(_streamed(response) == _streamed(by_http), f"the text {_streamed(by_http)!r} of POST", response)


@_rule(
    "bidirectional.stream",
    "A text frame with a body for /invocations gets the events of its stream as text frames.",
    sources.BIDIRECTIONAL,
)
async def stream(server: Server) -> None:
    await _stream_is_that_of_http(server, binary=False)


@_rule(
    "bidirectional.binary",
    "A body in a binary frame is read too, because clients that set no DataType send one.",
    sources.BIDIRECTIONAL,
)
async def binary(server: Server) -> None:
    await _stream_is_that_of_http(server, binary=True)


@_rule(
    "bidirectional.next",
    "A connection serves one request after another, also if they arrive at once.",
    sources.BIDIRECTIONAL,
)
async def next_request(server: Server) -> None:
    bodies = [await server.body(prompt, _TOKENS) for prompt in (PROMPT, "nine ten eleven")]
    by_http = [text_of((await server.post(await server.path(), body)).value) for body in bodies]
    async with open_websocket(server, _STREAM) as websocket:
        response = _expect_open(await websocket.ask(*bodies, ends=_is_last, times=2))
    expect(_texts(response) == by_http, f"the texts {by_http} of POST", response)


async def _expect_served(server: Server, websocket: WebSocket) -> None:
    response = _expect_open(await websocket.ask(await server.body(tokens=2), ends=_is_last))
    expect(_texts(response)[-1] is not None, "a response to the next request", response)


@_rule(
    "bidirectional.error",
    "An invalid request gets an event with an error, and the connection serves the next request.",
    sources.OURS,
)
async def error(server: Server) -> None:
    async with open_websocket(server, _STREAM) as websocket:
        response = _expect_open(await websocket.ask(b"not JSON", ends=bool))
        expect(response.events and "error" in response.events[-1], "an event with an error", response)
        await _expect_served(server, websocket)


@_rule(
    "bidirectional.ping",
    "A ping gets its pong within 2 s while a response is generated.",
    sources.BIDIRECTIONAL,
)
async def ping(server: Server) -> None:
    body, _ = await server.long_stream(max(1.0, 2 * server.limits.ping))
    async with open_websocket(server, _STREAM) as websocket:
        response = _expect_open(await websocket.ask(body, ends=bool))
        expect(await websocket.ping(server.limits.ping), f"a pong within {server.limits.ping:g} s", response)


@_rule("bidirectional.utf-8", "A text frame that is not UTF-8 closes the connection with code 1007.", sources.WEBSOCKET)
async def utf_8(server: Server) -> None:
    async with open_websocket(server, _STREAM) as websocket:
        response = await websocket.send_text(b'{"inputs": "\xff\xfe"}')
        expect(websocket.close_code == 1007, "the close code 1007", response)


@_rule(
    "upgrade.refused",
    "A handshake on a route without a WebSocket gets status 426, which clients do not repeat.",
    sources.OURS,
)
async def upgrade(server: Server) -> None:
    response = await server.get("/invocations", headers=_UPGRADE, timeout=server.limits.response)
    if response.status == 101:
        skip("the server opens a WebSocket at /invocations")
    expect_status(response, 426)


# -- OpenAI's Responses ------------------------------------------------------------------------------------------------

_ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


def _has_ended(event: dict[str, Any]) -> bool:
    return event.get("type") in _ENDS


async def _create(server: Server, input: str, **fields: Any) -> dict[str, Any]:
    """Return an event that creates a response."""
    request = {"model": await server.model(), "input": input, "store": False, "temperature": 0}
    return {"type": "response.create", **request, "max_output_tokens": 16, **fields}


async def _created(websocket: WebSocket, *events: dict[str, Any]) -> tuple[Response, list[dict[str, Any]]]:
    """Send events that create responses, and return what arrives, and the responses."""
    response = _expect_open(await websocket.ask(*events, ends=_has_ended, times=len(events)))
    ended = [event for event in response.events if _has_ended(event)]
    for event in ended:
        expect(event["type"] in _ENDS[:2], f"the event {' or '.join(_ENDS[:2])}", response)
        expect_fields(response, event.get("response"), "id", "status", "output", "usage")
    return response, [event["response"] for event in ended]


@_rule(
    "responses.create",
    "response.create gets the events of a response, numbered from 0, whose deltas are its text.",
    sources.OPENAI_WEBSOCKET,
)
async def create(server: Server) -> None:
    async with open_websocket(server, _RESPONSES) as websocket:
        response, [value] = await _created(websocket, await _create(server, PROMPT))
    events = response.events
    expect(events[0]["type"] == "response.created", "response.created first", response)
    expect([event.get("sequence_number") for event in events] == [*range(len(events))], "numbers from 0", response)
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    texts = [part["text"] for item in value["output"] if item["type"] == "message" for part in item["content"]]
    expect("".join(deltas) == "".join(texts), "the text of the response in its deltas", response)


@_rule(
    "responses.chain",
    "previous_response_id continues the newest response of the connection, although store is false.",
    sources.OPENAI_WEBSOCKET,
)
async def chain(server: Server) -> None:
    async with open_websocket(server, _RESPONSES) as websocket:
        _, [first] = await _created(websocket, await _create(server, PROMPT))
        event = await _create(server, "nine", previous_response_id=first["id"])
        response, [second] = await _created(websocket, event)
    expect(second.get("previous_response_id") == first["id"], f"the previous response {first['id']}", response)
    read = first["usage"]["input_tokens"]
    expect(second["usage"]["input_tokens"] > read, f"a prompt longer than {read} tokens", response)


@_rule(
    "responses.fork",
    "Another lane can continue the newest response of a lane, which then continues it too.",
    sources.OPENAI_WEBSOCKET,
)
async def fork(server: Server) -> None:
    async with open_websocket(server, _RESPONSES) as websocket:
        _, [first] = await _created(websocket, await _create(server, PROMPT, stream_id="main"))
        for lane in ("critic", "main"):
            event = await _create(server, "nine", stream_id=lane, previous_response_id=first["id"])
            response, [value] = await _created(websocket, event)
            expect(value["usage"]["input_tokens"] > first["usage"]["input_tokens"], "a longer prompt", response)


@_rule(
    "responses.lanes",
    "The events of requests in two lanes name their lane, and are numbered in it.",
    sources.OPENAI_WEBSOCKET,
)
async def lanes(server: Server) -> None:
    async with open_websocket(server, _RESPONSES) as websocket:
        events = [await _create(server, PROMPT, stream_id=lane) for lane in ("main", "critic")]
        response, _ = await _created(websocket, *events)
    for lane in ("main", "critic"):
        numbers = [event["sequence_number"] for event in response.events if event.get("stream_id") == lane]
        expect(numbers and numbers == [*range(len(numbers))], f"numbered events of the lane {lane}", response)
    expect(all("stream_id" in event for event in response.events), "a stream_id in each event", response)


@_rule(
    "responses.warm-up",
    "generate: false gets a response without output, which can be continued.",
    sources.OPENAI_WEBSOCKET,
)
async def warm_up(server: Server) -> None:
    async with open_websocket(server, _RESPONSES) as websocket:
        response, [first] = await _created(websocket, await _create(server, PROMPT, generate=False))
        expect(first["status"] == "completed" and first["output"] == [], "a completed response, output []", response)
        event = await _create(server, "nine", previous_response_id=first["id"])
        response, [second] = await _created(websocket, event)
    expect(second["usage"]["input_tokens"] > first["usage"]["input_tokens"], "a longer prompt", response)


@_rule(
    "responses.unknown",
    "An unknown previous_response_id gets an error with status 400 and code previous_response_not_found.",
    sources.OPENAI_WEBSOCKET,
)
async def unknown(server: Server) -> None:
    async with open_websocket(server, _RESPONSES) as websocket:
        event = await _create(server, PROMPT, previous_response_id="resp_conform_has_no_such_response")
        response = _expect_open(await websocket.ask(event, ends=_has_ended))
        last = response.events[-1]
        expect(last["type"] == "error", "an error", response)
        expect_fields(response, last.get("error"), "message", "code")
        expect(last["error"]["code"] == "previous_response_not_found", "previous_response_not_found", response)
        # Codex 0.171 waits for 300 s if the event has no status.
        expect(type(last.get("status")) is int and last["status"] == 400, "the number 400 as status", response)
        await _created(websocket, await _create(server, PROMPT))


# -- OpenAI's realtime sessions ----------------------------------------------------------------------------------------


def _is(*kinds: str) -> Any:
    return lambda event: event.get("type") in (*kinds, "error")


async def _expect_event(websocket: WebSocket, kind: str, *events: dict[str, Any]) -> Response:
    """Send events, and return what arrives up to an event of a type."""
    response = _expect_open(await websocket.ask(*events, ends=_is(kind)))
    expect(response.events[-1]["type"] == kind, f"the event {kind}", response)
    return response


@_rule("realtime.created", "A session begins with session.created, before the client sends.", sources.OPENAI_REALTIME)
async def created(server: Server) -> None:
    async with open_websocket(server, _REALTIME) as websocket:
        response = await _expect_event(websocket, "session.created")
    expect_fields(response, response.events[-1].get("session"), "type")


@_rule(
    "realtime.text",
    "A session with the modality text gets the text of a response as deltas, and response.done.",
    sources.OPENAI_REALTIME,
)
async def text(server: Server) -> None:
    session = {"type": "realtime", "output_modalities": ["text"]}
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": PROMPT}]}
    async with open_websocket(server, _REALTIME) as websocket:
        await _expect_event(websocket, "session.created")
        await _expect_event(websocket, "session.updated", {"type": "session.update", "session": session})
        adds = {"type": "conversation.item.create", "item": item}
        options = {"output_modalities": ["text"], "max_output_tokens": 16}
        response = await _expect_event(
            websocket, "response.done", adds, {"type": "response.create", "response": options}
        )
    deltas = [event["delta"] for event in response.events if event["type"] == "response.output_text.delta"]
    done = [event["text"] for event in response.events if event["type"] == "response.output_text.done"]
    expect(done and "".join(deltas) == "".join(done), "the text in deltas and in response.output_text.done", response)


@_rule(
    "realtime.error",
    "An unknown event gets an error that names its event_id, and the session continues.",
    sources.OPENAI_REALTIME,
)
async def realtime_error(server: Server) -> None:
    async with open_websocket(server, _REALTIME) as websocket:
        await _expect_event(websocket, "session.created")
        response = await _expect_event(websocket, "error", {"type": "conform.unknown", "event_id": "event_7"})
        expect_fields(response, response.events[-1].get("error"), "type", "message")
        expect(response.events[-1]["error"].get("event_id") == "event_7", "the event_id event_7", response)
        update = {"type": "session.update", "session": {"type": "realtime", "output_modalities": ["text"]}}
        await _expect_event(websocket, "session.updated", update)
