"""Drives InvokeEndpointWithBidirectionalStream by AWS's SDK, in its versions of 2025 and of 2026.

The URL is the emulator's HTTP/2 port. Options: `certificate` (file), `secret` (the secret key), `path` and `query` of
the container, `streams` (for each of several concurrent streams its parts, with `data` as base64 and the SDK's other
members), `events` (number of parts after which the client ends its stream; without it, the client reads to the end),
`vanishes` (whether the client's process ends at the first event).
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncIterator
from typing import Any

from aws_sdk_sagemaker_runtime_http2 import client, config, models
from common import main
from smithy_aws_core.identity import EnvironmentCredentialsResolver
from smithy_http.aio.crt import AWSCRTHTTPClient


class Bidirectional:
    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        """Return the parts of each stream."""
        runtime = await _runtime(url, options)
        return await asyncio.gather(*(_talk(runtime, options, parts) for parts in options["streams"]))


async def _runtime(url: str, options: dict[str, Any]) -> Any:
    os.environ["SSL_CERT_FILE"] = options["certificate"]
    os.environ["AWS_ACCESS_KEY_ID"] = "AKIDEXAMPLE"
    os.environ["AWS_SECRET_ACCESS_KEY"] = options.get("secret", "secret")
    values = {
        "endpoint_uri": url,
        "region": "us-east-1",
        "aws_credentials_identity_resolver": EnvironmentCredentialsResolver(),
        "transport": AWSCRTHTTPClient(),
    }
    if hasattr(client, "SageMakerRuntimeHTTP2Client"):
        return client.SageMakerRuntimeHTTP2Client(config=config.Config(**values))
    resolved = await config.AsyncSageMakerRuntimeHTTP2Config.resolve(**values)
    return client.AsyncSageMakerRuntimeHTTP2Client(config=resolved)


async def _open(runtime: Any, options: dict[str, Any], parts: list[dict[str, Any]]) -> Any:
    target = {"model_invocation_path": options.get("path"), "model_query_string": options.get("query")}
    request = models.InvokeEndpointWithBidirectionalStreamInput(endpoint_name="local", **target)
    stream = await runtime.invoke_endpoint_with_bidirectional_stream(request)
    await stream.await_output()
    for part in parts:
        members = {name: value for name, value in part.items() if name != "data"}
        members["bytes_"] = base64.b64decode(part["data"])
        value = models.RequestPayloadPart(**members)
        await stream.input_stream.send(models.RequestStreamEventPayloadPart(value=value))
    return stream


async def _talk(runtime: Any, options: dict[str, Any], parts: list[dict[str, Any]]) -> list[Any]:
    stream = await _open(runtime, options, parts)
    return [part async for part in _parts(stream, options)]


async def _parts(stream: Any, options: dict[str, Any]) -> AsyncIterator[Any]:
    """Yield the parts, and read on after the client has ended its stream."""
    _, output = await stream.await_output()
    count = 0
    while (event := await output.receive()) is not None:
        if options.get("vanishes"):
            os._exit(3)
        part = event.value
        yield [part.data_type, part.completion_state, part.bytes_.decode()]
        count += 1
        if count == options.get("events"):
            await stream.input_stream.close()


main(Bidirectional())
