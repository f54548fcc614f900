"""Errors of requests, grouped by what the caller can do about them.

    RequestFailed                any of the errors below; all are `DeployError`s, which the command line prints
    ├── NotStarted               nothing was computed, so the request may be retried (`runtime.py` does)
    │   ├── NoCapacity           no copy is running: scaled to zero, or still starting
    │   ├── Throttled            too many requests for the account or endpoint
    │   ├── NotReady             the model is loading, or SageMaker has no healthy instance
    │   └── Unreachable          no connection to SageMaker
    ├── NotSent                  the request is rejected: too large, an invalid parameter, an unknown endpoint
    │   ├── NoSuchEndpoint
    │   └── ComponentFailed      the inference component has failed, and will not get a copy
    ├── Forbidden                AWS denies the call
    ├── ModelRefused             the container responded 4xx: the request is invalid (LMI: 424, also for failures)
    ├── ModelFailed              the container responded 5xx, its engine failed, or a stream ended with an error
    │   └── ModelBusy            429 or 503: the queue is full, or the container is stopping
    ├── ServiceFailed            SageMaker itself failed; the model may have run
    └── Broken                   the response is incomplete; the model may still be running
        ├── TimedOut             SageMaker's timeout (60 s, or 8 min for a stream), or the client's
        └── StreamBroken         the connection was lost, or the stream ended early

The attribute `arrived` of each error contains the events that arrived before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from botocore.eventstream import ParserError
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    EventStreamError,
    NoCredentialsError,
    ParamValidationError,
    ProxyConnectionError,
    ReadTimeoutError,
)
from urllib3.exceptions import HTTPError
from urllib3.exceptions import ReadTimeoutError as StreamStalled

from deploy.credentials import NOT_SIGNED_IN, NOT_VALID, SIGN_IN, SIGN_IN_AGAIN
from deploy.errors import DeployError, Failed, NotAllowed, NotThere

if TYPE_CHECKING:
    from deploy.client.streaming import Event


class RequestFailed(DeployError):
    """A failed request.

    Attributes:
        original_status: status that the container sent, None if it is unknown, or 0 if the container sent none.
        log_stream: the ARN of the container log stream, or None if it is unknown.
        request_id: the ID of the request, which AWS support asks for, or None if it is unknown.
        arrived: events of the stream before the failure, in order.
    """

    def __init__(
        self,
        message: str,
        advice: str = "",
        *,
        original_status: int | None = None,
        log_stream: str | None = None,
        request_id: str | None = None,
        arrived: Sequence[Event] = (),
    ) -> None:
        super().__init__(message, advice)
        self.original_status = original_status
        self.log_stream = log_stream
        self.request_id = request_id
        self.arrived = tuple(arrived)


class NotStarted(RequestFailed): ...


class NoCapacity(NotStarted): ...


class Throttled(NotStarted): ...


class NotReady(NotStarted): ...


class Unreachable(NotStarted): ...


class NotSent(RequestFailed): ...


class NoSuchEndpoint(NotSent, NotThere): ...


class ComponentFailed(NotSent, Failed): ...


class Forbidden(RequestFailed, NotAllowed): ...


class ModelRefused(RequestFailed): ...


class ModelFailed(RequestFailed): ...


class ModelBusy(ModelFailed): ...


class ServiceFailed(RequestFailed): ...


class Broken(RequestFailed): ...


class TimedOut(Broken): ...


class StreamBroken(Broken): ...


# -- convert errors of boto3 and urllib3 into the client's errors ------------------------------------------------------
# An error inside a stream arrives as an `EventStreamError`, which has only a code and a message. If the connection is
# lost or stalls during a stream, urllib3's own error is raised, which botocore does not wrap.

FROM_AWS = (BotoCoreError, ClientError, HTTPError, ParserError)
"""Exceptions that may be raised when an endpoint is called and its response is read."""

_STATUS = re.compile("[0-9]+")
_THROTTLED = ("ThrottlingException", "Throttling", "TooManyRequestsException", "429")
_NOT_READY = ("ModelNotReadyException", "ServiceUnavailable", "ServiceUnavailableException", "503")
_DENIED = ("AccessDeniedException", "AccessDenied", "MissingAuthenticationToken", "IncompleteSignature", "403")
_REFUSED = ("ValidationError", "ValidationException", "413", "400")
_IN_TIME = "It may still be generated. Request fewer tokens, stream (8 min, not 60 s), or use asynchronous inference."
_INVOKE = "The caller needs sagemaker:InvokeEndpoint (`lmi deploy iam`)."
_BIDIRECTIONAL = "The caller needs sagemaker:InvokeEndpointWithBidirectionalStream (`lmi deploy iam`)."
_ROUTED = "The caller needs sagemaker:InvokeInferenceRouter on the router, and InvokeEndpoint on its endpoints."
_NEEDS = {"InvokeInferenceRouter": _ROUTED, "InvokeEndpointWithBidirectionalStream": _BIDIRECTIONAL}
_LOGS = "`lmi deploy logs NAME` shows the container's log."


def failure(error: BaseException) -> RequestFailed:
    """Convert an error of boto3 or urllib3 to the client's own error."""
    match error:
        case EventStreamError():
            return _from_stream(error)
        case ClientError():
            return _from_status(error)
        case StreamStalled():
            return TimedOut("the response stalled for too long", _LOGS)
        case HTTPError() | ParserError():
            return StreamBroken(f"the connection was lost during the response: {error}", _LOGS)
        case ReadTimeoutError():
            return TimedOut(f"no response in time: {error}", _IN_TIME)
        case ConnectTimeoutError() | EndpointConnectionError() | ProxyConnectionError():
            return Unreachable(f"no connection: {error}", "Check the region, and this machine's network.")
        case ConnectionClosedError():
            return Broken(f"the connection was closed without a response: {error}")
        case NoCredentialsError():
            return Forbidden("no AWS credentials were found", SIGN_IN)
        case _ if isinstance(error, NOT_SIGNED_IN):
            return Forbidden(f"no AWS credentials: {error}", SIGN_IN_AGAIN)
        case ParamValidationError():
            return NotSent(" ".join(str(error).split()))
    return RequestFailed(str(error))


def s3_failure(error: BaseException, advice: str) -> RequestFailed:
    """Return the exception for an error of a call to S3. `advice` replaces advice about calls to the model."""
    failed = failure(error)
    if isinstance(failed, (Broken, TimedOut)):
        failed.advice = advice
    return failed


def needs_component(error: BaseException) -> bool:
    """Return whether the request failed because it must name an inference component."""
    return isinstance(error, ClientError) and "component name header is required" in str(error).lower()


def _from_status(error: ClientError) -> RequestFailed:
    """Convert the error that boto3 raises when AWS responds with an error status."""
    response: dict[str, Any] = error.response
    code, message = str(response["Error"].get("Code", "")), str(response["Error"].get("Message", ""))
    request_id = response.get("ResponseMetadata", {}).get("RequestId")
    if _STATUS.fullmatch(code):  # the error of a proxy or a load balancer, not of AWS
        message = f"HTTP {code} {message}"
    if code == "ModelError":
        result = _from_container(response, message)
    elif code in _THROTTLED:
        result = Throttled(f"throttled: {message}", "Send fewer requests at a time, or request a higher quota.")
    elif code in _NOT_READY:
        result = NotReady(f"not ready: {message}")
    elif code in NOT_VALID:
        result = Forbidden(f"{error.operation_name}: {code}: {message}", SIGN_IN_AGAIN)
    elif code in _DENIED:
        needs = _NEEDS.get(error.operation_name, _INVOKE)
        result = Forbidden(f"{error.operation_name}: {code}: {message}", needs)
    elif code in _REFUSED and "no capacity" in message.lower():
        result = NoCapacity(message, "No copy is running. If scaling.min is 0, requests start a copy.")
    elif code in _REFUSED and "not found" in message.lower():
        result = NoSuchEndpoint(message, "Check the name and the region.")
    elif code in _REFUSED:
        result = NotSent(message)
    else:
        result = ServiceFailed(message if _STATUS.fullmatch(code) else f"{code}: {message}")
    result.request_id = request_id
    return result


def _from_container(response: dict[str, Any], message: str) -> RequestFailed:
    status = int(response.get("OriginalStatusCode", 0))
    text, kind = _body(str(response.get("OriginalMessage") or message))
    more: dict[str, Any] = {"original_status": status, "log_stream": response.get("LogStreamArn")}
    if not status and "timed out" in f"{text} {message}":
        return TimedOut(text, _IN_TIME, **more)
    if status in (429, 503):
        return ModelBusy(f"the model is busy ({status}): {text}", "Retry later, or add instances.", **more)
    failed = kind in ("generation", "incomplete_generation") or text.startswith("engine failure")
    if 400 <= status < 500 and not (status == 424 and failed):  # LMI uses 424 for invalid requests, too
        return ModelRefused(f"the model rejected the request ({status}): {text}", **more)
    return ModelFailed(f"the model failed ({status}): {text}", _LOGS, **more)


def _body(text: str) -> tuple[str, str]:
    """Return the message and the type from an error body in TGI's or OpenAI's schema, or else the body and ""."""
    try:
        body = json.loads(text.removeprefix("data:"))  # the body is an event of a stream
    except ValueError:
        return text, ""
    match body:
        case {"error": {"message": str(text), **more}}:
            return text, str(more.get("type", ""))
        case {"error": str(text), **more} | {"message": str(text), **more}:
            return text, str(more.get("error_type", ""))
    return text, ""


def _from_stream(error: EventStreamError) -> RequestFailed:
    code, message = (str(error.response["Error"].get(key, "")) for key in ("Code", "Message"))
    if code == "ModelStreamError" and "allotted time" in message:
        return TimedOut(message, _IN_TIME)
    return StreamBroken(f"{code}: {message}", _LOGS if code == "ModelStreamError" else "")
