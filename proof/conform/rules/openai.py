"""Rules of OpenAI's routes for models, chats and completions."""

from __future__ import annotations

from functools import partial
from typing import Any

from proof.conform import sources
from proof.conform.dialects import piece_of, text_of
from proof.conform.exchange import Response
from proof.conform.rule import expect, expect_fields, expect_response, expect_status, rule, stop_word, succeeded
from proof.conform.server import PROMPT, Server

_rule = partial(rule, profiles=("openai",))
_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
_REASONS = ("stop", "length", "tool_calls", "content_filter")


async def _chunks(server: Server, **more: Any) -> tuple[Response, list[dict[str, Any]]]:
    response = await succeeded(server.generate(stream=True, more=more))
    expect(response.events, "events", response)
    return response, response.events


def _choice(event: dict[str, Any]) -> dict[str, Any]:
    choices = event.get("choices") or [{}]
    return choices[0] if isinstance(choices[0], dict) else {}


async def _complete(server: Server, **more: Any) -> Response:
    body = {"model": await server.model(), "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **more}
    return expect_response(await server.post(_COMPLETIONS, body))


def _expect_error(response: Response) -> None:
    error = response.object.get("error")
    expect(isinstance(error, dict) and isinstance(error.get("message"), str), '{"error": {"message": "…"}}', response)
    expect_fields(response, error, "message", "type", "param", "code")


@_rule("openai.models", "GET /v1/models lists models with id, object, created and owned_by.", sources.OPENAI_MODELS)
async def models(server: Server) -> None:
    response = expect_response(await server.get("/v1/models"))
    match response.value:
        case {"object": "list", "data": [{"id": str(), "object": "model", "created": int(), "owned_by": str()}, *more]}:
            if all(item["object"] == "model" for item in more):
                return
    expect(False, "a list of models with id, object, created, owned_by", response)


@_rule("openai.chat", "A chat's response has id, object, created, model, choices and usage.", sources.OPENAI_CHAT)
async def chat(server: Server) -> None:
    response = await succeeded(server.generate())
    expect_fields(response, response.object, "id", "object", "created", "model", "choices", "usage")
    expect(
        response.object["object"] == "chat.completion" and response.object["id"],
        "a chat.completion with an id",
        response,
    )
    expect(type(response.object["created"]) is int, "created in whole seconds", response)
    match _choice(response.object):
        case {"index": 0, "message": {"role": "assistant", "content": _}, "finish_reason": str()}:
            return
    expect(False, "a choice with index, message, finish_reason", response)


@_rule("openai.ids", "Each response, whole or streamed, has an id of its own.", sources.OPENAI_CHAT)
async def ids(server: Server) -> None:
    first = await succeeded(server.generate())
    second = await succeeded(server.generate())
    seen = {str(response.object.get("id")) for response in (first, second)}
    expect(len(seen) == 2, "another id than that of the response before", second)
    for _ in range(2):
        streamed, chunks = await _chunks(server)
        expect(str(chunks[0].get("id")) not in seen, "another id than those of the responses before", streamed)
        seen.add(str(chunks[0].get("id")))
    completed = [await _complete(server) for _ in range(2)]
    same = completed[0].object.get("id") == completed[1].object.get("id")
    expect(not same, "another id than that of the completion before", completed[1])


@_rule("openai.model", "A response, whole or streamed, names the model of its request.", sources.OPENAI_CHAT)
async def model(server: Server) -> None:
    name = await server.model()
    streamed, events = await _chunks(server)
    for response in (await succeeded(server.generate()), await _complete(server)):
        expect(response.object.get("model") == name, f"the model {name}", response)
    expect({event.get("model") for event in events} == {name}, f"the model {name} in all chunks", streamed)


@_rule("openai.usage", "total_tokens is prompt_tokens plus completion_tokens.", sources.OPENAI_CHAT)
async def usage(server: Server) -> None:
    response = await succeeded(server.generate())
    match response.object.get("usage"):
        case {"prompt_tokens": int(a), "completion_tokens": int(b), "total_tokens": int(c)} if (
            a > 0 and 0 < b <= 8 and a + b == c
        ):
            return
    expect(False, "prompt_tokens + completion_tokens = total_tokens, with at most 8 completion_tokens", response)


@_rule("openai.finish-reason", "A response that ends at max_tokens has the finish_reason length.", sources.OPENAI_CHAT)
async def finish_reason(server: Server) -> None:
    response = await succeeded(server.generate(tokens=2))
    expect(_choice(response.object).get("finish_reason") == "length", "the finish_reason length", response)


@_rule(
    "openai.max-completion-tokens",
    "max_completion_tokens limits a response in the same way as max_tokens.",
    sources.OPENAI_CHAT,
)
async def max_completion_tokens(server: Server) -> None:
    body = await server.body()
    del body["max_tokens"]
    response = expect_response(await server.post(_CHAT, {**body, "max_completion_tokens": 3}))
    count = (response.object.get("usage") or {}).get("completion_tokens")
    expect(isinstance(count, int) and count <= 3, "at most 3 completion_tokens", response)


@_rule(
    "openai.chunks",
    "Every chunk is a chat.completion.chunk with the same id, and with created, model and choices.",
    sources.OPENAI_STREAM,
)
async def chunks(server: Server) -> None:
    response, events = await _chunks(server)
    expect(all(event.get("object") == "chat.completion.chunk" for event in events), "chat.completion.chunk", response)
    expect(len({event.get("id") for event in events}) == 1 and events[0].get("id"), "one id in all chunks", response)
    for event in events:
        match event:
            case {"created": int(), "model": str(), "choices": [{"index": 0, "delta": dict()}] | []}:
                continue
        expect(False, "created, model, and choices with index and delta", response)


@_rule("openai.role", "The first chunk has the role assistant.", sources.OPENAI_STREAM)
async def role(server: Server) -> None:
    response, events = await _chunks(server)
    expect((_choice(events[0]).get("delta") or {}).get("role") == "assistant", "the role assistant", response)


@_rule("openai.done", "A stream ends with data: [DONE].", sources.OPENAI_STREAM)
async def done(server: Server) -> None:
    response, _ = await _chunks(server)
    expect(response.text.rstrip().endswith("data: [DONE]"), "data: [DONE] at the end", response)


@_rule("openai.last-chunk", "Only the last chunk with a choice has a finish_reason.", sources.OPENAI_STREAM)
async def last_chunk(server: Server) -> None:
    response, events = await _chunks(server)
    reasons = [_choice(event).get("finish_reason") for event in events if event.get("choices")]
    expect(reasons and reasons[-1] in _REASONS, "a finish_reason in the last chunk with a choice", response)
    expect(not any(reasons[:-1]), "null for finish_reason in earlier chunks", response)


@_rule("openai.stream-usage", "include_usage adds one chunk with usage and no choices.", sources.OPENAI_STREAM)
async def stream_usage(server: Server) -> None:
    response, events = await _chunks(server, stream_options={"include_usage": True})
    counted = [event for event in events if event.get("usage")]
    expect(len(counted) == 1 and counted[0] is events[-1], "usage in the last chunk only", response)
    expect(events[-1].get("choices") == [], "an empty list of choices in that chunk", response)
    match counted[0]["usage"]:
        case {"prompt_tokens": int(a), "completion_tokens": int(b), "total_tokens": int(c)} if a > 0 and a + b == c:
            return
    expect(False, "prompt_tokens + completion_tokens = total_tokens", response)


@_rule("openai.no-usage", "Without include_usage, no chunk has usage.", sources.OPENAI_STREAM)
async def no_usage(server: Server) -> None:
    response, events = await _chunks(server)
    expect(not any(event.get("usage") for event in events), "no usage", response)


@_rule("openai.error", "The body of a refusal has an error with message, type, param and code.", sources.OPENAI_ERRORS)
async def error(server: Server) -> None:
    response = await server.generate(more={"temperature": "hot"})
    expect(response.status in (400, 422), "status 400", response)
    _expect_error(response)


@_rule("openai.error-status", "Invalid values get status 400.", sources.OPENAI_ERRORS)
async def error_status(server: Server) -> None:
    for more in ({"temperature": -1}, {"max_tokens": "many"}, {"messages": 7}):
        expect_status(await server.generate(more=more), 400)


@_rule("openai.unknown-model", "An unknown model gets status 404.", sources.OPENAI_ERRORS)
async def unknown_model(server: Server) -> None:
    response = await server.generate(more={"model": "conform-has-no-such-model"})
    expect_status(response, 404)
    _expect_error(response)


@_rule("openai.stop", "A stop sequence ends the text, and is not part of the text.", sources.OPENAI_CHAT)
async def stop(server: Server) -> None:
    _, word = await stop_word(server)
    for value in (word, [word]):
        response = await succeeded(server.generate(tokens=16, more={"stop": value}))
        expect(word not in str(text_of(response.value)), f"text before {word!r}", response)
        expect(_choice(response.object).get("finish_reason") == "stop", "the finish_reason stop", response)


@_rule("openai.content-parts", "A message's content may be a list of parts.", sources.OPENAI_CHAT)
async def content_parts(server: Server) -> None:
    parts = [{"type": "text", "text": PROMPT}]
    await succeeded(server.generate(more={"messages": [{"role": "user", "content": parts}]}))


@_rule("openai.completion", "POST /v1/completions returns a text_completion.", sources.OPENAI_COMPLETIONS)
async def completion(server: Server) -> None:
    response = await _complete(server)
    match response.value:
        case {
            "id": str(),
            "object": "text_completion",
            "created": int(),
            "model": str(),
            "choices": [{"index": 0, "text": str(), "finish_reason": str()}],
            "usage": {"prompt_tokens": int(), "completion_tokens": int(), "total_tokens": int()},
        }:
            return
    expect(False, "a text_completion with id, created, model, choices and usage", response)


@_rule(
    "openai.completion-stream",
    "A completion's stream consists of events with text, followed by [DONE].",
    sources.OPENAI_COMPLETIONS,
)
async def completion_stream(server: Server) -> None:
    response = await _complete(server, stream=True)
    expect("".join(map(piece_of, response.events)), "events with text", response)
    kinds = {(event.get("object"), event.get("id")) for event in response.events}
    expect(len(kinds) == 1 and kinds.pop()[0] == "text_completion", "text_completion and one id in all", response)
    expect(response.text.rstrip().endswith("data: [DONE]"), "data: [DONE] at the end", response)


@_rule("openai.completion-echo", "echo puts the prompt before the text.", sources.OPENAI_COMPLETIONS)
async def completion_echo(server: Server) -> None:
    response = await _complete(server, echo=True)
    expect(str(text_of(response.value)).startswith(PROMPT), "the prompt, then the text", response)
