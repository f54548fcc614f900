"""Rules of Triton's generate extension, and of the KServe protocol's health and metadata routes."""

from __future__ import annotations

from functools import partial

from proof.conform import sources
from proof.conform.exchange import Answer
from proof.conform.rule import expect, expect_answer, expect_fields, rule
from proof.conform.server import PROMPT, Server

_rule = partial(rule, profiles=("triton",))


@_rule("triton.live", "GET /v2/health/live and /ready answer 200.", sources.KSERVE)
async def live(server: Server) -> None:
    for path in ("/v2/health/live", "/v2/health/ready"):
        answer = await server.get(path)
        expect(answer.ok, "status 200", answer)


@_rule("triton.ready", "GET /v2/models/NAME/ready answers 200, or an error for an unknown model.", sources.KSERVE)
async def ready(server: Server) -> None:
    answer = await server.get(await server.filled("/v2/models/{model}/ready"))
    expect(answer.ok, "status 200", answer)
    answer = await server.get("/v2/models/conform-has-no-such-model/ready")
    expect(answer.refused, "a status of 400 to 499", answer)


@_rule("triton.metadata", "GET /v2/models/NAME returns name, versions, platform, inputs and outputs.", sources.KSERVE)
async def metadata(server: Server) -> None:
    answer = expect_answer(await server.get(await server.filled("/v2/models/{model}")))
    expect_fields(answer, answer.object, "name", "versions", "platform", "inputs", "outputs")


@_rule("triton.server", "GET /v2 returns name, version and extensions.", sources.KSERVE)
async def server_metadata(server: Server) -> None:
    answer = expect_answer(await server.get("/v2"))
    expect_fields(answer, answer.object, "name", "version", "extensions")


@_rule("triton.generate", "An answer has the strings model_name, model_version and text_output.", sources.TRITON)
async def generate(server: Server) -> None:
    answer = expect_answer(await server.generate())
    match answer.value:
        case {"model_name": str(), "model_version": str(), "text_output": str()}:
            return
    expect(False, "the strings model_name, model_version and text_output", answer)


@_rule("triton.id", "An answer has the id of its request, and no id if the request has none.", sources.TRITON)
async def id_(server: Server) -> None:
    answer = expect_answer(await server.generate(more={"id": "42"}))
    expect(answer.object.get("id") == "42", 'id "42"', answer)
    answer = expect_answer(await server.generate())
    expect("id" not in answer.object, "no id", answer)


@_rule("triton.stream", "Each event of a stream has model_name, model_version and text_output.", sources.TRITON)
async def stream(server: Server) -> None:
    answer = expect_answer(await server.generate(stream=True))
    expect(answer.events and b"[DONE]" not in answer.body, "events without [DONE]", answer)
    for event in answer.events:
        expect_fields(answer, event, "model_name", "model_version", "text_output")


@_rule("triton.parameters", "Inputs may also be fields of parameters.", sources.TRITON)
async def parameters(server: Server) -> None:
    body = {"text_input": PROMPT, "parameters": {"max_tokens": 2}}
    expect_answer(await server.post(await server.path(), body))


@_rule("triton.nested", "An unknown field whose value is an object is refused.", sources.TRITON)
async def nested(server: Server) -> None:
    answer = await server.generate(more={"conform": {"a": 1}})
    expect(answer.status == 400, "status 400", answer)


def _expect_error(answer: Answer) -> None:
    expect(isinstance(answer.object.get("error"), str), '{"error": "…"}', answer)


@_rule("triton.error", 'An error is {"error": "…"} with a status of 400 or more.', sources.TRITON)
async def error(server: Server) -> None:
    answer = await server.post(await server.path(), {})
    expect(answer.status >= 400, "a status of 400 or more", answer)
    _expect_error(answer)


@_rule("triton.unknown-model", "An unknown model gets status 400 or 404, and an error.", sources.TRITON)
async def unknown_model(server: Server) -> None:
    answer = await server.post("/v2/models/conform-has-no-such-model/generate", await server.body())
    expect(answer.status in (400, 404), "status 404", answer)
    _expect_error(answer)


@_rule("triton.method", "GET of a generate route gets status 405.", sources.TRITON)
async def method(server: Server) -> None:
    answer = await server.get(await server.path())
    expect(answer.status == 405, "status 405", answer)
