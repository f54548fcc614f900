"""Rules of Anthropic's Messages API."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from proof.conform import sources
from proof.conform.exchange import Response
from proof.conform.rule import (
    expect,
    expect_fields,
    expect_refused,
    expect_response,
    expect_status,
    rule,
    stop_word,
    succeeded,
)
from proof.conform.server import PROMPT, Server

_rule = partial(rule, profiles=("anthropic",))
_ORDER = re.compile(
    r"message_start (content_block_start (content_block_delta )*content_block_stop )+(message_delta )+message_stop "
)


async def _events(server: Server) -> tuple[Response, list[dict[str, Any]]]:
    response = await succeeded(server.generate(stream=True))
    expect(response.events, "events", response)
    return response, response.events


def _of(events: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next((event for event in events if event.get("type") == kind), {})


@_rule("anthropic.message", "A message has id, type, role, content, model, stop_reason and usage.", sources.ANTHROPIC)
async def message(server: Server) -> None:
    response = await succeeded(server.generate())
    body = response.object
    fields = ("id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "usage")
    expect_fields(response, body, *fields)
    expect((body["type"], body["role"]) == ("message", "assistant"), "type message and role assistant", response)
    match body["content"]:
        case [{"type": "text", "text": str()}, *_] | [{"type": "thinking"}, *_]:
            return
    expect(False, "content that is a list of blocks", response)


@_rule("anthropic.ids", "Each message has an id of its own.", sources.ANTHROPIC)
async def ids(server: Server) -> None:
    first = await succeeded(server.generate())
    second = await succeeded(server.generate())
    seen = {str(response.object.get("id")) for response in (first, second)}
    expect(len(seen) == 2, "another id than that of the message before", second)
    for _ in range(2):
        response, events = await _events(server)
        id = str((_of(events, "message_start").get("message") or {}).get("id"))
        expect(id not in seen, "another id than those of the messages before", response)
        seen.add(id)


@_rule("anthropic.model", "A message, whole or streamed, names the model of its request.", sources.ANTHROPIC)
async def model(server: Server) -> None:
    name = await server.model()
    whole = await succeeded(server.generate())
    expect(whole.object.get("model") == name, f"the model {name}", whole)
    response, events = await _events(server)
    streamed = (_of(events, "message_start").get("message") or {}).get("model")
    expect(streamed == name, f"the model {name}", response)


@_rule("anthropic.usage", "usage has input_tokens and output_tokens.", sources.ANTHROPIC)
async def usage(server: Server) -> None:
    response = await succeeded(server.generate())
    match response.object.get("usage"):
        case {"input_tokens": int(read), "output_tokens": int(written)} if read > 0 and 0 < written <= 8:
            return
    expect(False, "input_tokens, and output_tokens of at most 8", response)


@_rule("anthropic.stop-reason", "A message that ends at max_tokens has the stop_reason max_tokens.", sources.ANTHROPIC)
async def stop_reason(server: Server) -> None:
    response = await succeeded(server.generate(tokens=2))
    expect(response.object.get("stop_reason") == "max_tokens", "the stop_reason max_tokens", response)


@_rule("anthropic.max-tokens", "max_tokens is required.", sources.ANTHROPIC)
async def max_tokens(server: Server) -> None:
    body = await server.body()
    del body["max_tokens"]
    expect_refused(await server.post("/v1/messages", body))


@_rule(
    "anthropic.order",
    "A stream's events arrive in order, from message_start to message_stop, and number the blocks from 0.",
    sources.ANTHROPIC_STREAM,
)
async def order(server: Server) -> None:
    response, events = await _events(server)
    kinds = "".join(f"{event.get('type')} " for event in events if event.get("type") != "ping")  # anywhere
    expect(_ORDER.fullmatch(kinds), "message_start, blocks, message_delta, message_stop", response)
    block = -1
    for event in events:
        block += event.get("type") == "content_block_start"
        match event:
            case {"type": "content_block_start", "content_block": {"type": "text", "text": str()}} | {
                "type": "content_block_start",
                "content_block": {"type": "thinking"},
            }:
                expect(event.get("index") == block, f"index {block}", response)
            case {"type": "content_block_delta", "delta": {"type": str()}} | {"type": "content_block_stop"}:
                expect(event.get("index") == block, f"index {block}", response)
            case {"type": "content_block_start" | "content_block_delta"}:
                expect(False, "a content_block with text, and deltas with a type", response)


@_rule("anthropic.event-names", "Each event's name is the type in its data.", sources.ANTHROPIC_STREAM)
async def event_names(server: Server) -> None:
    response, events = await _events(server)
    names = re.findall(r"^event: ?(\S+)", response.text, re.MULTILINE)
    expect(names == [event.get("type") for event in events], "the line `event: TYPE` before each data line", response)


@_rule("anthropic.start", "message_start has an empty message with usage.", sources.ANTHROPIC_STREAM)
async def start(server: Server) -> None:
    response, events = await _events(server)
    match _of(events, "message_start"):
        case {
            "message": {
                "id": str(),
                "type": "message",
                "role": "assistant",
                "model": str(),
                "content": [],
                "usage": {"input_tokens": int(), "output_tokens": int()},
            }
        }:
            return
    expect(False, "a message with id, type, role, model, usage and empty content", response)


@_rule("anthropic.end", "message_delta has the stop_reason and output_tokens.", sources.ANTHROPIC_STREAM)
async def end(server: Server) -> None:
    response, events = await _events(server)
    match _of(events, "message_delta"):
        case {"delta": {"stop_reason": str()}, "usage": {"output_tokens": int(written)}} if 0 < written <= 8:
            return
    expect(False, "a delta with stop_reason, and usage with output_tokens of at most 8", response)


@_rule(
    "anthropic.error",
    "The body of a refusal has type=error, and an error object with a type and a message.",
    sources.ANTHROPIC_ERRORS,
)
async def error(server: Server) -> None:
    response = await server.generate(more={"temperature": "hot"})
    expect_status(response, 400)
    match response.value:
        case {"type": "error", "error": {"type": "invalid_request_error", "message": str()}}:
            return
    expect(False, "a body with type=error, and an error object with type=invalid_request_error and a message", response)


@_rule("anthropic.stop", "A stop sequence ends the text, and stop_sequence names it.", sources.ANTHROPIC)
async def stop(server: Server) -> None:
    _, word = await stop_word(server)
    response = await succeeded(server.generate(tokens=16, more={"stop_sequences": [word]}))
    stop_fields = (response.object.get("stop_reason"), response.object.get("stop_sequence"))
    expect(stop_fields == ("stop_sequence", word), f"stop_sequence {word!r}", response)


@_rule("anthropic.system", "system may be a string or blocks.", sources.ANTHROPIC)
async def system(server: Server) -> None:
    for value in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        await succeeded(server.generate(more={"system": value}))


@_rule("anthropic.blocks", "A message's content may be a list of blocks.", sources.ANTHROPIC)
async def blocks(server: Server) -> None:
    content = [{"type": "text", "text": PROMPT}]
    await succeeded(server.generate(more={"messages": [{"role": "user", "content": content}]}))


@_rule("anthropic.count", "POST /v1/messages/count_tokens returns input_tokens.", sources.ANTHROPIC_COUNT)
async def count(server: Server) -> None:
    body = await server.body()
    del body["max_tokens"], body["temperature"]
    response = expect_response(await server.post("/v1/messages/count_tokens", body))
    count = response.object.get("input_tokens")
    expect(type(count) is int and count > 0, "input_tokens above 0", response)


@_rule("anthropic.version", "The headers anthropic-version and x-api-key are accepted.", sources.ANTHROPIC)
async def version(server: Server) -> None:
    more = {"anthropic-version": "2023-06-01", "anthropic-beta": "conform-2026-01-01"}
    more |= {} if server.asking.key else {"x-api-key": "any"}
    await succeeded(server.generate(headers=more))
