"""Rules of TGI's own routes, version 3."""

from __future__ import annotations

from functools import partial
from typing import Any

from proof.conform import sources
from proof.conform.dialects import piece_of
from proof.conform.exchange import Response
from proof.conform.rule import (
    expect,
    expect_details,
    expect_fields,
    expect_logprob,
    expect_response,
    expect_status,
    rule,
    stop_word,
    succeeded,
)
from proof.conform.rules.hosting import samples
from proof.conform.server import PROMPT, Server

_rule = partial(rule, profiles=("tgi",))
_TOKEN = {"id", "text", "logprob", "special"}
_REASONS = ("length", "eos_token", "stop_sequence")
_CHAT = {"model": "tgi", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}


async def _events(server: Server, **parameters: Any) -> tuple[Response, list[dict[str, Any]]]:
    response = await succeeded(server.generate(stream=True, more={"parameters": parameters}))
    expect(response.events and all("token" in event for event in response.events), "events with a token", response)
    return response, response.events


@_rule("tgi.generate", "POST /generate returns an object with only generated_text.", sources.TGI)
async def generate(server: Server) -> None:
    response = await succeeded(server.generate())
    expect(set(response.object) == {"generated_text"}, '{"generated_text": "…"}', response)


@_rule("tgi.root", "POST / and /invocations return an array of one object.", sources.TGI_ROUTER)
async def root(server: Server) -> None:
    for path in ("/", "/invocations"):
        response = expect_response(await server.post(path, await server.body()))
        match response.value:
            case [{"generated_text": str()}]:
                continue
        expect(False, '[{"generated_text": "…"}]', response)


@_rule("tgi.root-stream", "POST / streams if the body sets stream.", sources.TGI_ROUTER)
async def root_stream(server: Server) -> None:
    response = expect_response(await server.post("/", {**await server.body(), "stream": True}))
    expect(response.content_type == "text/event-stream" and response.events, "server-sent events", response)


@_rule(
    "tgi.invocations", "At /invocations, the prompt precedes the text, and details are on request.", sources.TGI_ROUTER
)
async def invocations(server: Server) -> None:
    response = expect_response(await server.post("/invocations", await server.body()))
    match response.value:
        case [{"generated_text": str(text), **others}] if text.startswith(PROMPT) and not others:
            return
    expect(False, f"only generated_text, which begins with {PROMPT!r}", response)


@_rule("tgi.invocations-refusal", "/invocations refuses with 422, error and error_type.", sources.TGI_SAGEMAKER)
async def invocations_refusal(server: Server) -> None:
    for body in (await server.body(more={"parameters": {"temperature": -1}}), {"messages": 5}):
        response = await server.post("/invocations", body)
        expect_status(response, 422)
        expect_fields(response, response.object, "error", "error_type")


@_rule("tgi.invocations-chat", "A chat at /invocations streams events that end with [DONE].", sources.TGI_SAGEMAKER)
async def invocations_chat(server: Server) -> None:
    response = expect_response(await server.post("/invocations", {**_CHAT, "stream": True}))
    ends = response.body.rstrip().endswith(b"data: [DONE]")
    expect(response.content_type == "text/event-stream" and ends, "server-sent events and [DONE]", response)


@_rule("tgi.chat-model", "A chat for `tgi` names the model_id of /info.", sources.TGI_SAGEMAKER)
async def chat_model(server: Server) -> None:
    name = expect_response(await server.get("/info")).object.get("model_id")
    response = expect_response(await server.post("/invocations", _CHAT))
    expect(response.object.get("model") == name, f"the model {name!r}", response)


@_rule("tgi.details", "details has finish_reason, generated_tokens, seed, prefill and tokens.", sources.TGI_TYPES)
async def details(server: Server) -> None:
    response, fields = await expect_details(server)
    expect_fields(response, fields, "finish_reason", "generated_tokens", "seed", "prefill", "tokens")
    expect(
        fields["generated_tokens"] == len(fields["tokens"]), "generated_tokens equal to the number of tokens", response
    )


@_rule("tgi.tokens", "Every token has id, text, logprob and special.", sources.TGI_TYPES)
async def tokens(server: Server) -> None:
    response, fields = await expect_details(server)
    for token in fields.get("tokens") or [{}]:
        expect(set(token) == _TOKEN and type(token["special"]) is bool, "id, text, logprob, special", response)
        expect_logprob(response, token["logprob"])


@_rule("tgi.finish-reason", "finish_reason is length, eos_token or stop_sequence.", sources.TGI_TYPES)
async def finish_reason(server: Server) -> None:
    response, fields = await expect_details(server)
    expect(fields.get("finish_reason") in _REASONS, " or ".join(_REASONS), response)


@_rule("tgi.seed", "seed is null for a greedy response, and the request's seed otherwise.", sources.TGI_TYPES)
async def seed(server: Server) -> None:
    response, fields = await expect_details(server)
    expect(fields.get("seed", 0) is None, "null for seed", response)
    response, fields = await expect_details(server, do_sample=True, seed=7)
    expect(fields.get("seed") == 7, "seed 7", response)


@_rule("tgi.events", "An event has index, token, generated_text and details.", sources.TGI_TYPES)
async def events(server: Server) -> None:
    response, stream_events = await _events(server)
    for event in stream_events:
        expect_fields(response, event, "index", "token", "generated_text", "details")
        expect(set(event["token"]) == _TOKEN, "token: id, text, logprob, special", response)
        expect_logprob(response, event["token"]["logprob"])


@_rule("tgi.index", "index numbers a stream's tokens from 1.", sources.TGI_TYPES)
async def index(server: Server) -> None:
    response, stream_events = await _events(server)
    expect(
        [event.get("index") for event in stream_events] == list(range(1, len(stream_events) + 1)),
        "1, 2, 3, …",
        response,
    )


@_rule("tgi.nulls", "generated_text and details are null before the last event.", sources.TGI_TYPES)
async def nulls(server: Server) -> None:
    response, stream_events = await _events(server, details=True)
    for event in stream_events[:-1]:
        values = [event.get(name, 0) for name in ("generated_text", "details")]
        expect(values == [None, None], "null for generated_text and details", response)


@_rule("tgi.last-event", "The last event has the whole generated_text, and details if requested.", sources.TGI_TYPES)
async def last_event(server: Server) -> None:
    response, stream_events = await _events(server, details=True)
    last = stream_events[-1]
    text = "".join(map(piece_of, stream_events))
    expect(last.get("generated_text") == text, f"generated_text {text!r}", response)
    expect_fields(response, last.get("details"), "finish_reason", "generated_tokens", "seed", "input_length")


@_rule("tgi.no-done", "A stream of TGI's own routes has no [DONE].", sources.TGI_ROUTER)
async def no_done(server: Server) -> None:
    response, _ = await _events(server)
    expect(b"[DONE]" not in response.body, "no [DONE]", response)


@_rule(
    "tgi.validation", "A parameter out of range gets 422 with error and the error_type validation.", sources.TGI_ROUTER
)
async def validation(server: Server) -> None:
    response = await server.generate(more={"parameters": {"temperature": -1}})
    expect_status(response, 422)
    body = response.object
    expect(body.get("error_type") == "validation" and isinstance(body.get("error"), str), "error, error_type", response)


@_rule("tgi.stream-validation", "In a stream, an out-of-range parameter results in an error event.", sources.TGI_ROUTER)
async def stream_validation(server: Server) -> None:
    response = await server.generate(stream=True, more={"parameters": {"temperature": -1}})
    expect(response.ok and response.content_type == "text/event-stream", "status 200 and an event stream", response)
    expect(
        {"error", "error_type"} <= set((response.events or [{}])[-1]), "an event with error and error_type", response
    )


@_rule("tgi.stop", "A stop sequence ends the text, and is part of the text.", sources.TGI)
async def stop(server: Server) -> None:
    _, word = await stop_word(server)
    response, fields = await expect_details(server, stop=[word], max_new_tokens=16)
    expect(str(response.object.get("generated_text")).endswith(word), f"text that ends with {word!r}", response)
    expect(fields.get("finish_reason") == "stop_sequence", "the finish_reason stop_sequence", response)


@_rule("tgi.full-text", "return_full_text puts the prompt before the text.", sources.TGI)
async def full_text(server: Server) -> None:
    response = await succeeded(server.generate(more={"parameters": {"return_full_text": True}}))
    expect(str(response.object.get("generated_text")).startswith(PROMPT), "the prompt, then the text", response)


@_rule("tgi.info", "GET /info returns model_id, the limits, version and sha.", sources.TGI)
async def info(server: Server) -> None:
    response = expect_response(await server.get("/info"))
    limits = ("max_concurrent_requests", "max_input_tokens", "max_total_tokens")
    expect_fields(response, response.object, "model_id", *limits, "version", "sha")


@_rule("tgi.health", "GET /health answers 200 when the model can serve.", sources.TGI)
async def health(server: Server) -> None:
    response = await server.get("/health")
    expect(response.ok, "status 200", response)


@_rule("tgi.tokenize", "POST /tokenize returns tokens with id, text, start and stop.", sources.TGI)
async def tokenize(server: Server) -> None:
    response = expect_response(await server.post("/tokenize", {"inputs": PROMPT}))
    token_list = response.value
    expect(isinstance(token_list, list) and token_list, "a list", response)
    for token in token_list:
        expect_fields(response, token, "id", "text", "start", "stop")
        expect(0 <= token["start"] <= token["stop"] <= len(PROMPT), "start and stop within the text", response)


@_rule(
    "tgi.headers",
    "A non-streaming response has the headers x-compute-characters, x-generated-tokens and x-total-time.",
    sources.TGI_ROUTER,
)
async def headers(server: Server) -> None:
    response = await succeeded(server.generate())
    header_names = ("x-compute-characters", "x-generated-tokens", "x-total-time")
    missing = [name for name in header_names if name not in response.headers]
    expect(not missing, f"the headers {', '.join(header_names)}; {', '.join(missing)} are missing", response)


@_rule(
    "tgi.metrics",
    "GET /metrics returns tgi_request_count, tgi_queue_size and tgi_batch_current_size.",
    sources.TGI_METRICS,
)
async def metrics(server: Server) -> None:
    await succeeded(server.generate())
    response = expect_response(await server.get("/metrics"))
    names = {name.partition("{")[0] for name in samples(response)}
    expected_names = {"tgi_request_count", "tgi_queue_size", "tgi_batch_current_size"}
    expect(expected_names <= names, f"the names {', '.join(sorted(expected_names - names))}", response)


@_rule("tgi.chat", "POST /v1/chat/completions answers requests for the model `tgi`.", sources.TGI)
async def chat(server: Server) -> None:
    response = expect_response(await server.post("/v1/chat/completions", _CHAT))
    expect(response.object.get("object") == "chat.completion", "a chat.completion", response)
