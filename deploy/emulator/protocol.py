"""SageMaker Runtime's error responses, and the headers that its operations pass to and from the container."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

TIMED_OUT = "Your invocation timed out while waiting for a response from container primary"
_MESSAGE_LIMIT = 2048  # characters; maximum length of the shape Message in the API model


class ApiError(Exception):
    """An error response of the API.

    Args:
        status: the HTTP status.
        code: name of the error, from which boto3 derives the exception class.
        members: additional fields of the JSON body.
    """

    def __init__(self, status: int, code: str, message: str, **members: str | int) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.members = members

    def response(self) -> web.Response:
        headers = {"x-amzn-ErrorType": self.code}
        return web.json_response({"Message": str(self), **self.members}, status=self.status, headers=headers)


async def name_request(request: web.Request, response: web.StreamResponse) -> None:
    """Add a request ID to the response headers, as AWS does."""
    response.headers.setdefault("x-amzn-RequestId", str(uuid.uuid4()))


def validation_error(message: str, status: int = 400) -> ApiError:
    return ApiError(status, "ValidationError", message)


def model_error(original: int, message: str, log_stream: str) -> ApiError:
    """Return the ModelError for a container's response whose status is not 2xx.

    Args:
        original: the HTTP status of the container's response, or 0 if it sent no complete response.
        message: body of the container's response, or SageMaker's own message if `original` is 0.
        log_stream: the ARN of the container log stream.
    """
    side, code = (
        ("client", "CLIENT_ERROR_FROM_MODEL")
        if 0 < original < 500
        else ("server", "SERVER_ERROR_FROM_MODEL" if original else "INTERNAL_FAILURE_FROM_MODEL")
    )
    message = message[:_MESSAGE_LIMIT]
    return ApiError(
        424,
        "ModelError",
        f'Received {side} error ({original}) from primary with message "{message}".',
        ErrorCode=code,
        OriginalStatusCode=original,
        OriginalMessage=message,
        LogStreamArn=log_stream,
    )


# -- headers that SageMaker passes from the client to the container and back -------------------------------------------
# SageMaker drops all other headers. The emulator rejects the headers of endpoint kinds that it does not emulate:
# multi-model endpoints, multi-container endpoints, and endpoints with an explainer.

EMULATED = "x-lmi-emulated-container"
"""Response header, and field of captured data, with the name of a container that serves several endpoints.

AWS has no such header. `lmi replay` reads it.
"""
_AMZN = "X-Amzn-SageMaker-"
CUSTOM_ATTRIBUTES = _AMZN + "Custom-Attributes"
SESSION_ID = _AMZN + "Session-Id"
COMPONENT = _AMZN + "Inference-Component"
ADAPTER = _AMZN + "Adapter-Identifier"
VARIANT = _AMZN + "Target-Variant"
INFERENCE_ID = _AMZN + "Inference-Id"
NEW_SESSION = "NEW_SESSION"

_PASSED = (CUSTOM_ATTRIBUTES, SESSION_ID, INFERENCE_ID, VARIANT, _AMZN + "Prefix-Aware-Id")
_REFUSED = {
    _AMZN + "Target-Model": "TargetModel is for multi-model endpoints",
    _AMZN + "Target-Container-Hostname": "TargetContainerHostname is for multi-container endpoints",
    _AMZN + "Enable-Explanations": "EnableExplanations is for endpoints with an explainer",
}
_PATTERNS = {
    CUSTOM_ATTRIBUTES: re.compile(r"[\x20-\x7e]{0,1024}"),
    SESSION_ID: re.compile(r"(?=.{1,256}$)(NEW_SESSION|[a-zA-Z0-9](-*[a-zA-Z0-9])*)"),
    INFERENCE_ID: re.compile(r"\S[\x20-\x7e]{0,63}"),
    _AMZN + "Prefix-Aware-Id": re.compile(r"\S[\x20-\x7e]{0,63}"),
}


@dataclass(frozen=True)
class Operation:
    """The headers that differ between the invoke operations.

    Args:
        content_type: name of the request header with the content type of the body.
        accept: name of the request header with the accepted content types. The container receives it as Accept.
        may_open_session: whether SessionId may be NEW_SESSION.
        returned: names of the container's response headers that the client receives.
    """

    content_type: str
    accept: str
    may_open_session: bool
    returned: tuple[str, ...]


INVOKE = Operation(
    "Content-Type", "Accept", True, (CUSTOM_ATTRIBUTES, _AMZN + "New-Session-Id", _AMZN + "Closed-Session-Id")
)
STREAM = Operation("Content-Type", _AMZN + "Accept", False, (CUSTOM_ATTRIBUTES,))
ASYNC = Operation(_AMZN + "Content-Type", _AMZN + "Accept", False, ())


def to_container(headers: Mapping[str, str], operation: Operation, adapter: str | None) -> dict[str, str]:
    """Return the request headers for the container.

    Args:
        headers: the client's request headers, with case-insensitive names.
        adapter: name of the adapter that the requested inference component serves, or None if it is not an adapter.

    Raises:
        ApiError: this endpoint does not support a header, or a header value is invalid.
    """
    for name, reason in _REFUSED.items():
        if name in headers:
            raise validation_error(f"{reason}, but this endpoint is of another kind.")
    passed = {name: headers[name] for name in _PASSED if name in headers}
    for name, pattern in _PATTERNS.items():
        if name in passed and not pattern.fullmatch(passed[name]):
            raise validation_error(f"Header {name} must match {pattern.pattern}.")
    if passed.get(SESSION_ID) == NEW_SESSION and not operation.may_open_session:
        raise validation_error("SessionId cannot be NEW_SESSION here, as only InvokeEndpoint opens sessions.")
    for name, source in (("Content-Type", operation.content_type), ("Accept", operation.accept)):
        if source in headers:
            passed[name] = headers[source]
    if adapter is not None:
        passed[ADAPTER] = adapter
    return passed


def to_client(headers: Mapping[str, str], operation: Operation, variant: str) -> dict[str, str]:
    """Return the response headers for the client, except for the content type."""
    returned = {name: headers[name] for name in operation.returned if name in headers}
    return {**returned, "x-Amzn-Invoked-Production-Variant": variant}
