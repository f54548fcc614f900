"""Errors of a request, by what the caller may do about them.

    RequestFailed                any of the errors below; all are `DeployError`s, which the command line prints
    ├── NotStarted               nothing was computed, so the request may be sent again (`aws.py` does)
    │   ├── NoCapacity           scaled to zero, or all copies starting
    │   ├── Throttled            too many requests for the account or endpoint
    │   ├── NotReady             the model is loading, or SageMaker has no healthy instance
    │   └── Unreachable          no connection to SageMaker
    ├── NotSent                  SageMaker does not accept it: too large, a wrong parameter, an unknown endpoint
    │   ├── NoSuchEndpoint
    │   └── ComponentFailed      the inference component has failed, so no copy of it will come
    ├── Forbidden                AWS denies the call
    ├── ModelRefused             the container answered 4xx: the request is wrong (LMI: 424, also used for others)
    ├── ModelFailed              the container answered 5xx, its engine failed, or it failed within a stream
    │   └── ModelBusy            429 or 503: its queue is full, or it is stopping
    ├── ServiceFailed            SageMaker itself failed; the model may have run
    └── Broken                   the answer is incomplete; the model may still be running
        ├── TimedOut             SageMaker's limit (60 s, of a stream 8 min), or the client's
        └── StreamBroken         the connection was lost, or the stream ended early

Each keeps the part of the answer that arrived before it in `arrived`.
"""

from __future__ import annotations

import json
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
        original_status: the container's status; None: unknown; 0: SageMaker reports that there was none.
        log_stream: ARN of the container's log; None: unknown.
        request_id: AWS's id of the request, for its support; None: unknown.
        arrived: a stream's events before the failure, in order.
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


# -- convert errors of boto3 and urllib3 into the client's errors. Pure ------------------------------------------------
# An error within a stream arrives as an `EventStreamError`, which has only code and message. A connection that is cut
# or stalls within a stream raises urllib3's own error, which botocore does not wrap.

FROM_AWS = (BotoCoreError, ClientError, HTTPError, ParserError)
"""Exceptions of calling an endpoint and reading its answer."""

_THROTTLED = ("ThrottlingException", "Throttling", "TooManyRequestsException", "429")
_NOT_READY = ("ModelNotReadyException", "ServiceUnavailable", "ServiceUnavailableException", "503")
_DENIED = ("AccessDeniedException", "AccessDenied", "MissingAuthenticationToken", "IncompleteSignature", "403")
_REFUSED = ("ValidationError", "ValidationException", "413", "400")
_IN_TIME = (
    "Ask for fewer tokens, stream the answer, or use asynchronous inference: SageMaker waits 60 s (streams: 8 min)."
)
_INVOKE = "It needs sagemaker:InvokeEndpoint (`lmi deploy iam`)."
_ROUTED = "It needs sagemaker:InvokeInferenceRouter on the router, and sagemaker:InvokeEndpoint on its destinations."
_LOGS = "`lmi deploy logs NAME` shows what the container wrote."


def failure(error: BaseException) -> RequestFailed:
    """Return the client's error."""
    match error:
        case EventStreamError():
            return _from_stream(error)
        case ClientError():
            return _from_status(error)
        case StreamStalled():
            return TimedOut("nothing arrived for too long in the middle of the answer", _LOGS)
        case HTTPError() | ParserError():
            return StreamBroken(f"the connection was cut in the middle of the answer: {error}", _LOGS)
        case ReadTimeoutError():
            return TimedOut("no answer in time; the model may still be working on it", _IN_TIME)
        case ConnectTimeoutError() | EndpointConnectionError() | ProxyConnectionError():
            return Unreachable(f"no connection: {error}", "Check the region, and that this machine can reach it.")
        case ConnectionClosedError():
            return Broken(f"the connection was closed without an answer: {error}")
        case NoCredentialsError():
            return Forbidden("no AWS credentials were found", SIGN_IN)
        case _ if isinstance(error, NOT_SIGNED_IN):
            return Forbidden(f"no AWS credentials: {error}", SIGN_IN_AGAIN)
        case ParamValidationError():
            return NotSent(" ".join(str(error).split()))
    return RequestFailed(str(error))


def needs_component(error: BaseException) -> bool:
    """Return whether the endpoint has inference components, and the request must name one."""
    return isinstance(error, ClientError) and "component name header is required" in str(error).lower()


def _from_status(error: ClientError) -> RequestFailed:
    """Convert an error status."""
    response: dict[str, Any] = error.response
    code, message = str(response["Error"].get("Code", "")), str(response["Error"].get("Message", ""))
    request_id = response.get("ResponseMetadata", {}).get("RequestId")
    if code.isdigit():  # not AWS's own error: a proxy's or a load balancer's
        message = f"HTTP {code} {message}"
    if code == "ModelError":
        result = _from_container(response, message)
    elif code in _THROTTLED:
        result = Throttled(f"throttled: {message}", "Send less at once, or ask for a higher quota.")
    elif code in _NOT_READY:
        result = NotReady(f"not ready: {message}")
    elif code in NOT_VALID:
        result = Forbidden(f"{error.operation_name}: {code}: {message}", SIGN_IN_AGAIN)
    elif code in _DENIED:
        needs = _ROUTED if error.operation_name == "InvokeInferenceRouter" else _INVOKE
        result = Forbidden(f"{error.operation_name}: {code}: {message}", needs)
    elif code in _REFUSED and "no capacity" in message.lower():
        result = NoCapacity(message, "No copy is running. If scaling.min is 0, requests start one.")
    elif code in _REFUSED and "not found" in message.lower():
        result = NoSuchEndpoint(message, "Check the name and the region.")
    elif code in _REFUSED:
        result = NotSent(message)
    else:
        result = ServiceFailed(message if code.isdigit() else f"{code}: {message}")
    result.request_id = request_id
    return result


def _from_container(response: dict[str, Any], message: str) -> RequestFailed:
    status = int(response.get("OriginalStatusCode", 0))
    text, kind = _body(str(response.get("OriginalMessage") or message))
    more: dict[str, Any] = {"original_status": status, "log_stream": response.get("LogStreamArn")}
    if not status and "timed out" in f"{text} {message}":
        return TimedOut(text, _IN_TIME, **more)
    if status in (429, 503):
        return ModelBusy(f"the model is busy ({status}): {text}", "Send it again later, or scale out.", **more)
    if 400 <= status < 500 and not (status == 424 and _is_engine_failure(text, kind)):
        return ModelRefused(f"the model refused it ({status}): {text}", **more)
    return ModelFailed(f"the model failed ({status}): {text}", _LOGS, **more)


def _body(text: str) -> tuple[str, str]:
    """Return an error body's message, and its kind as TGI or OpenAI name it."""
    try:
        body = json.loads(text.removeprefix("data:"))  # the event of a stream
    except ValueError:
        return text, ""
    match body:
        case {"error": {"message": str(text), **more}}:
            return text, str(more.get("type", ""))
        case {"error": str(text), **more} | {"message": str(text), **more}:
            return text, str(more.get("error_type", ""))
    return text, ""


def _is_engine_failure(text: str, kind: str) -> bool:
    """Return whether a 424 is about the engine: LMI uses that status for wrong requests and for engine failures."""
    return kind in ("generation", "incomplete_generation") or text.startswith("engine failure")


def _from_stream(error: EventStreamError) -> RequestFailed:
    code, message = (str(error.response["Error"].get(key, "")) for key in ("Code", "Message"))
    if code == "ModelStreamError" and "allotted time" in message:
        return TimedOut(message, _IN_TIME)
    return StreamBroken(f"{code}: {message}", _LOGS if code == "ModelStreamError" else "")
