"""SageMaker Runtime's API in front of a container, for unmodified boto3 and OpenAI clients.

The API reads the state of its `Endpoint` on each request, so changes take effect immediately.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import datetime, timezone
from typing import NamedTuple

import aiohttp
from aiohttp import HttpVersion11, web

from deploy.emulator.access import check_host, check_signed, check_token
from deploy.emulator.endpoint import ACCOUNT, MIB, CapturedRequest, Captures, Endpoint, EndpointComponent, Output
from deploy.emulator.protocol import (
    ASYNC,
    COMPONENT,
    CUSTOM_ATTRIBUTES,
    INVOKE,
    STREAM,
    TIMED_OUT,
    VARIANT,
    ApiError,
    Operation,
    model_error,
    name_request,
    to_client,
    to_container,
    validation_error,
)
from deploy.emulator.relay import CONTENT_TYPE, Relay, messages, raise_for_status, reset_when_closed

ROUTED = Operation("Content-Type", "Accept", False, (CUSTOM_ATTRIBUTES,))

_TARGET = "X-Amzn-SageMaker-Routing-Target-Name"
_CODES = {"ValidationError": "ValidationException", "ServiceUnavailable": "ServiceUnavailableException"}
log = logging.getLogger("deploy.emulator")

_OPENAI = "openai/v1/chat/completions"


class _Checked(NamedTuple):
    """A request that has passed the checks, with the container that serves it.

    Attributes:
        relay: relay of the container.
        log_stream: the ARN of the variant's log stream.
        headers: headers to pass to the container.
        variant: name of the production variant.
        seconds: timeout for the container's response.
        container: response header with the name of the container if it is shared.
    """

    relay: Relay
    log_stream: str
    headers: dict[str, str]
    variant: str
    seconds: float
    container: dict[str, str]


class RuntimeEmulator:
    """Emulator of SageMaker Runtime's API for one endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._relay = Relay(endpoint.container)
        self._captures = Captures(endpoint.name)

    def app(self) -> web.Application:
        # `_body` checks the limit itself, to report it in SageMaker's words.
        app = web.Application(middlewares=[_respond], client_max_size=self._endpoint.limits.body + 1)
        app.router.add_post("/endpoints/{endpoint}/invocations", self._invoke)
        app.router.add_post("/endpoints/{endpoint}/invocations-response-stream", self._stream)
        app.router.add_post("/endpoints/{endpoint}/async-invocations", self._invoke_async)
        app.router.add_post("/inference-routers/{endpoint}/invocations", self._route)
        app.router.add_post("/inference-routers/{endpoint}/async-invocations", self._route_async)
        app.router.add_post(f"/endpoints/{{endpoint}}/{_OPENAI}", self._openai)
        app.router.add_post(f"/endpoints/{{endpoint}}/inference-components/{{component}}/{_OPENAI}", self._openai)
        app.cleanup_ctx.append(self._open)
        app.on_response_prepare.append(name_request)
        return app

    async def _open(self, app: web.Application) -> AsyncIterator[None]:
        await self._relay.open()
        yield
        await self._captures.close()
        await self._relay.close()

    # -- operations ----------------------------------------------------------------------------------------------

    async def _invoke(self, request: web.Request) -> web.StreamResponse:
        checked = self._check_request(request, INVOKE)
        return await self._whole(checked, await self._body(request), INVOKE)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        checked = self._check_request(request, STREAM)
        body = await self._body(request)
        event, output = self._begin(checked, body), None
        try:
            async with checked.relay.post("/invocations", body, checked.headers, checked.seconds) as reply:
                await raise_for_status(reply, checked.log_stream)
                response = web.StreamResponse(
                    headers={**to_client(reply.headers, STREAM, checked.variant), **checked.container}
                )
                response.headers["X-Amzn-SageMaker-Content-Type"] = reply.headers.get("Content-Type", "")
                response.headers["Content-Type"] = CONTENT_TYPE
                await response.prepare(request)
                pieces: list[bytes] | None = None if event is None else []
                async for message in messages(reply, self._endpoint.part_bytes, pieces):
                    await response.write(message)
                if pieces is not None and reply.content.is_eof():
                    output = reply.headers.get("Content-Type", ""), b"".join(pieces)
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            # Only errors before the first byte get here: `messages` reports later errors of the container in the
            # stream. A client that disconnects also causes a ClientError, and does not see this response.
            raise model_error(0, TIMED_OUT, checked.log_stream) from error
        finally:
            self._captures.end(event, checked.variant, output)
        await response.write_eof()
        return response

    async def _invoke_async(self, request: web.Request) -> web.StreamResponse:
        self._check_request(request, ASYNC)
        raise validation_error("The endpoint has no AsyncInferenceConfig, which only lmi deploy local --aws emulates.")

    async def _route(self, request: web.Request) -> web.StreamResponse:
        """Respond to InvokeInferenceRouter. The router's only target is the endpoint."""
        endpoint = self._endpoint
        limit = endpoint.limits.small_body
        try:
            checked = self._check_request(request, ROUTED)
            if not request.headers.get(_TARGET):
                raise validation_error(f"Header {_TARGET} is required.")
            body = await self._body(request)
            if not body:
                raise validation_error("The request's body can't be empty.")
            if len(body) > limit:
                raise validation_error(f"Request body is larger than {limit} bytes, a router's maximum.", 413)
            response = await self._whole(checked, body, ROUTED)
        except ApiError as error:
            raise ApiError(error.status, _CODES.get(error.code, error.code), str(error), **error.members) from error
        arn = f"arn:aws:sagemaker:{checked.log_stream.split(':')[3]}:{ACCOUNT}:endpoint/{endpoint.name}"
        response.headers["X-Amzn-SageMaker-Invoked-Routed-Resource-Arn"] = arn
        response.headers["X-Amzn-SageMaker-Invoked-Routing-Reason"] = "local-preferred"
        return response

    async def _route_async(self, request: web.Request) -> web.StreamResponse:
        raise ApiError(400, "ValidationException", "The emulator's router has no asynchronous routing target.")

    async def _openai(self, request: web.Request) -> web.StreamResponse:
        """Relay a chat completion request and its response unchanged.

        If the container fails after the response has started, the client's connection is closed.
        """
        checked = self._check_openai(request)
        body = await self._body(request)
        seconds = self._endpoint.limits.stream if _streams(body) else checked.seconds
        response: web.StreamResponse | None = None
        try:
            async with checked.relay.post("/v1/chat/completions", body, checked.headers, seconds) as reply:
                if reply.status < 200:
                    raise model_error(reply.status, "", checked.log_stream)
                response = web.StreamResponse(status=reply.status, headers=_some(reply.headers, "Content-Type"))
                await response.prepare(request)
                while data := await reply.content.readany():
                    await response.write(data)
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            if response is None:
                raise model_error(0, TIMED_OUT, checked.log_stream) from error
            log.warning("the container's response is incomplete: %s", error or "timed out")
            if request.transport is not None:
                if request.version < HttpVersion11:  # closing the connection would mark a complete response
                    reset_when_closed(request.transport.get_extra_info("socket"))
                request.transport.abort()
            return response
        await response.write_eof()
        return response

    # -- data capture --------------------------------------------------------------------------------------------

    async def _whole(self, checked: _Checked, body: bytes, operation: Operation) -> web.Response:
        """Return the container's whole response, and capture it."""
        event, output = self._begin(checked, body), None
        try:
            reply, data = await checked.relay.whole(body, checked.headers, checked.seconds, checked.log_stream)
            output = reply.headers.get("Content-Type", ""), data
        finally:
            self._captures.end(event, checked.variant, output)
        headers = {**to_client(reply.headers, operation, checked.variant), **_some(reply.headers, "Content-Type")}
        return web.Response(body=data, headers={**headers, **checked.container})

    def _begin(self, checked: _Checked, body: bytes) -> CapturedRequest | None:
        """Return the capture event of a request, or None if it is not captured.

        The shadow variant's copy of the request is sent to the same container.
        """

        async def ask() -> Output:
            reply, data = await checked.relay.whole(body, checked.headers, checked.seconds, checked.log_stream)
            return reply.headers.get("Content-Type", ""), data

        event = self._captures.begin(self._endpoint.capture, checked.headers, body, checked.container)
        self._captures.copy(event, ask)
        return event

    # -- shared --------------------------------------------------------------------------------------------------

    def _check_request(self, request: web.Request, operation: Operation) -> _Checked:
        """Check a signed request, and choose the variant that serves it."""
        endpoint, headers = self._endpoint, request.headers
        now = datetime.now(timezone.utc)
        region = check_signed(headers.get("Authorization"), request.query, endpoint.region, now)
        variant = endpoint.admit(request.match_info["endpoint"], headers.get(VARIANT))
        name = headers.get(COMPONENT)
        component = endpoint.component(name) or EndpointComponent()
        return _Checked(
            self._relay.to(component.container),
            endpoint.log_stream(region, name, variant),
            to_container(headers, operation, component.adapter),
            variant,
            endpoint.limits.stream if operation is STREAM else endpoint.limits.invoke,
            endpoint.shared_container(component),
        )

    def _check_openai(self, request: web.Request) -> _Checked:
        """Check a chat completion request, which has a bearer token and cannot choose the variant."""
        endpoint, name = self._endpoint, request.match_info.get("component")
        region = check_token(request.headers.get("Authorization"), endpoint.region, datetime.now(timezone.utc))
        variant = endpoint.admit(request.match_info["endpoint"], None)
        component = endpoint.component(name) or EndpointComponent()
        headers = _some(request.headers, "Content-Type", "Accept")
        if component.adapter is not None:
            headers["X-Amzn-SageMaker-Adapter-Identifier"] = component.adapter
        log_stream = endpoint.log_stream(region, name, variant)
        relay, seconds = self._relay.to(component.container), endpoint.limits.invoke
        return _Checked(relay, log_stream, headers, variant, seconds, endpoint.shared_container(component))

    async def _body(self, request: web.Request) -> bytes:
        limits = self._endpoint.limits
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise _too_large(limits.body) from None
        except web.RequestPayloadError as error:
            raise validation_error(f"The request's body cannot be read: {error}") from None
        if len(body) > limits.body:  # some versions of aiohttp allow one byte more
            raise _too_large(limits.body)
        if len(body) > limits.small_body:
            text = "request body of %d bytes: some accounts and routers accept at most %d bytes"
            log.warning(text, len(body), limits.small_body)
        return body


def _too_large(limit: int) -> ApiError:
    return validation_error(f"Request body is larger than {limit} bytes ({limit / MIB:g} MB).", 413)


def _some(headers: Mapping[str, str], *names: str) -> dict[str, str]:
    """Return the headers whose names are in `names`."""
    return {name: headers[name] for name in names if name in headers}


def _streams(body: bytes) -> bool:
    """Return whether a chat completion request asks for a stream, or False if its body is not a JSON object."""
    try:
        return bool(json.loads(body).get("stream"))
    except (ValueError, AttributeError):
        return False


@web.middleware
async def _respond(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Convert errors to AWS's error responses, and log each request."""
    began = time.monotonic()
    response: web.StreamResponse | None = None
    try:
        address = request.transport.get_extra_info("sockname")[0] if request.transport else ""
        headers = request.headers
        check_host(request.host, headers.get("Origin"), address, headers.get("Sec-Fetch-Site"))
        response = await handler(request)
    except ApiError as error:
        response = error.response()
        log.info("%s: %s", error.code, error)
    except web.HTTPException:  # from the router: no such path or method
        text = f"No operation at {request.path}."
        if operation := request.headers.get("X-Amz-Target", "").rpartition(".")[2]:
            text = f"No operation {operation} here. lmi deploy local --aws emulates SageMaker's control plane."
        response = ApiError(404, "UnknownOperationException", text).response()
    except Exception:
        log.exception("%s failed", request.path)
        response = ApiError(500, "InternalFailure", "The request processing has failed.").response()
    finally:
        status = response.status if response is not None else "client disconnected"
        log.info("%s %s %.2f s", request.path, status, time.monotonic() - began)
    return response
