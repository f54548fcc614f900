"""Rules of the KServe protocol, with Triton's extensions for binary data and generated text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from proof import tensors
from proof.conform import sources
from proof.conform.exchange import Response
from proof.conform.rule import (
    expect,
    expect_fields,
    expect_refused,
    expect_response,
    expect_status,
    rule,
    skip,
    succeeded,
)
from proof.conform.server import PROMPT, Server

_rule = partial(rule, profiles=("triton",))


@_rule("triton.live", "GET /v2/health/live and /ready return 200.", sources.KSERVE)
async def live(server: Server) -> None:
    for path in ("/v2/health/live", "/v2/health/ready"):
        response = await server.get(path)
        expect(response.ok, "status 200", response)


@_rule("triton.ready", "GET /v2/models/NAME/ready answers 200, or an error for an unknown model.", sources.KSERVE)
async def ready(server: Server) -> None:
    response = await server.get(await server.filled("/v2/models/{model}/ready"))
    expect(response.ok, "status 200", response)
    expect_refused(await server.get("/v2/models/conform-has-no-such-model/ready"))


@_rule("triton.metadata", "GET /v2/models/NAME returns name, versions, platform, inputs and outputs.", sources.KSERVE)
async def metadata(server: Server) -> None:
    response = expect_response(await server.get(await server.filled("/v2/models/{model}")))
    expect_fields(response, response.object, "name", "versions", "platform", "inputs", "outputs")


@_rule("triton.server", "GET /v2 returns name, version and extensions.", sources.KSERVE)
async def server_metadata(server: Server) -> None:
    response = expect_response(await server.get("/v2"))
    expect_fields(response, response.object, "name", "version", "extensions")


@_rule("triton.generate", "A response has the strings model_name, model_version and text_output.", sources.TRITON)
async def generate(server: Server) -> None:
    response = await succeeded(server.generate())
    name = await server.model()
    match response.value:
        case {"model_name": str(own), "model_version": str(), "text_output": str()} if own == name:
            return
    expect(False, f"the model_name {name}, and the strings model_version and text_output", response)


@_rule("triton.id", "A response has the id of its request, and no id if the request has none.", sources.TRITON)
async def id_(server: Server) -> None:
    response = await succeeded(server.generate(more={"id": "42"}))
    expect(response.object.get("id") == "42", 'id "42"', response)
    response = await succeeded(server.generate())
    expect("id" not in response.object, "no id", response)


@_rule("triton.stream", "Each event of a stream has model_name, model_version and text_output.", sources.TRITON)
async def stream(server: Server) -> None:
    response = await succeeded(server.generate(stream=True))
    expect(response.events and b"[DONE]" not in response.body, "events without [DONE]", response)
    for event in response.events:
        expect_fields(response, event, "model_name", "model_version", "text_output")
        expect(event["model_name"] == await server.model(), "the model_name of the request", response)


@_rule("triton.parameters", "Inputs may also be fields of parameters.", sources.TRITON)
async def parameters(server: Server) -> None:
    body = {"text_input": PROMPT, "parameters": {"max_tokens": 2}}
    expect_response(await server.post(await server.path(), body))


@_rule("triton.nested", "An unknown field whose value is an object is refused.", sources.TRITON)
async def nested(server: Server) -> None:
    expect_status(await server.generate(more={"conform": {"a": 1}}), 400)


def _expect_error(response: Response, status: Sequence[int] = (400,)) -> None:
    expect(response.status in status, f"a status of {status[0]}", response)
    expect(isinstance(response.object.get("error"), str), '{"error": "…"}', response)


@_rule("triton.error", 'An error is {"error": "…"} with a status of 400 or more.', sources.TRITON)
async def error(server: Server) -> None:
    _expect_error(await server.post(await server.path(), {}), range(400, 600))


@_rule("triton.unknown-model", "An unknown model gets status 400 or 404, and an error.", sources.TRITON)
async def unknown_model(server: Server) -> None:
    _expect_error(await server.post("/v2/models/conform-has-no-such-model/generate", await server.body()), (404, 400))


@_rule("triton.method", "GET on a generate route gets status 405.", sources.TRITON)
async def method(server: Server) -> None:
    expect_status(await server.get(await server.path()), 405)


# -- infer: tensors as JSON or binary data -----------------------------------------------------------------------------


_TEXT = {"data": [PROMPT]}


async def _inputs(server: Server, text: Mapping[str, Any] = _TEXT) -> list[dict[str, Any]]:
    """Return the prompt and the token limit as tensors, with the metadata's datatypes and number of dimensions.

    Args:
        text: the field that contains the prompt.
    """
    metadata = expect_response(await server.get(await server.filled("/v2/models/{model}"))).object
    values = {"text_input": text, "max_tokens": {"data": [8]}}
    return [
        {"name": row["name"], "datatype": row["datatype"], "shape": [1] * len(row["shape"]), **values[row["name"]]}
        for row in metadata["inputs"]
        if row["name"] in values
    ]


async def _infer(server: Server, body: dict[str, Any] | bytes, headers: Mapping[str, str] | None = None) -> Response:
    response = await server.post(await server.filled("/v2/models/{model}/infer"), body, headers=headers)
    if b"decoupled transaction policy" in response.body:
        skip("infer does not work for decoupled models")
    return response


@_rule("triton.datatypes", "Tensors of the metadata have a datatype of the protocol, and a shape.", sources.KSERVE)
async def datatypes(server: Server) -> None:
    response = expect_response(await server.get(await server.filled("/v2/models/{model}")))
    for tensor in (*response.object["inputs"], *response.object["outputs"]):
        fits = tensor["datatype"] in tensors.DATATYPES and all(type(size) is int for size in tensor["shape"])
        expect(fits, "tensors with a datatype and a shape of integers", response)


@_rule("triton.infer", "infer returns model_name and outputs, whose data fits their shape.", sources.KSERVE)
async def infer(server: Server) -> None:
    response = expect_response(await _infer(server, {"inputs": await _inputs(server)}))
    expect_fields(response, response.object, "model_name", "outputs")
    expect(response.object["model_name"] == await server.model(), "the model_name of the request", response)
    for tensor in response.object["outputs"]:
        expect_fields(response, tensor, "name", "datatype", "shape", "data")
        expect(math.prod(tensor["shape"]) == len(tensor["data"]), "as many items as the shape says", response)


@_rule("triton.infer-id", "A response of infer has the id of its request.", sources.KSERVE)
async def infer_id(server: Server) -> None:
    response = expect_response(await _infer(server, {"id": "42", "inputs": await _inputs(server)}))
    expect(response.object.get("id") == "42", 'id "42"', response)


@_rule("triton.infer-outputs", "An infer response contains only the outputs that its request names.", sources.KSERVE)
async def infer_outputs(server: Server) -> None:
    response = await _infer(server, {"inputs": await _inputs(server), "outputs": [{"name": "text_output"}]})
    names = [tensor["name"] for tensor in expect_response(response).object["outputs"]]
    expect(names == ["text_output"], "the output text_output", response)


@_rule("triton.binary", "Binary data follows the JSON document, whose size is in a header.", sources.BINARY)
async def binary(server: Server) -> None:
    data = tensors.binary(PROMPT)
    inputs = await _inputs(server, {"parameters": {"binary_data_size": len(data)}})
    outputs = [{"name": "text_output", "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    response = expect_response(await _infer(server, head + data, {tensors.HEADER: str(len(head))}))
    document, tail = tensors.read(response.body)
    size = len(tensors.binary(document["outputs"][0]["data"][0]))
    expect(not tail and document["outputs"][0]["parameters"] == {"binary_data_size": size}, "a whole tensor", response)
    expect(response.headers.get(tensors.HEADER) == str(len(response.body) - size), "the size of the document", response)


@_rule("triton.binary-header", "A document size above the body's gets status 400 and an error.", sources.BINARY)
async def binary_header(server: Server) -> None:
    _expect_error(await _infer(server, {"inputs": await _inputs(server)}, {tensors.HEADER: "99999"}))


@_rule("triton.unknown-input", "An unknown input of infer gets status 400, and an error.", sources.KSERVE)
async def unknown_input(server: Server) -> None:
    tensor = {"name": "conform", "datatype": "INT32", "shape": [1], "data": [1]}
    _expect_error(await _infer(server, {"inputs": [*await _inputs(server), tensor]}))


@_rule("triton.wrong-datatype", "An input with a wrong datatype gets status 400, and an error.", sources.KSERVE)
async def wrong_datatype(server: Server) -> None:
    inputs = [{**tensor, "datatype": "FP64", "data": [0.5]} for tensor in await _inputs(server)]
    _expect_error(await _infer(server, {"inputs": inputs}))
