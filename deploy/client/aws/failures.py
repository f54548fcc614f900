"""Convert errors of boto3 and urllib3 into the client's errors. Pure.

An error within a stream arrives as an `EventStreamError`, which has only code and message. A connection that is cut or
stalls within a stream raises urllib3's own error, which botocore does not wrap.
"""

from __future__ import annotations

import json
from typing import Any

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

from deploy.client import errors
from deploy.client.errors import RequestFailed
from deploy.credentials import NOT_SIGNED_IN, NOT_VALID, SIGN_IN, SIGN_IN_AGAIN

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
            return errors.TimedOut("nothing came for too long in the middle of the answer", _LOGS)
        case HTTPError() | ParserError():
            return errors.StreamBroken(f"the connection was cut in the middle of the answer: {error}", _LOGS)
        case ReadTimeoutError():
            return errors.TimedOut("no answer in time; the model may still be at it", _IN_TIME)
        case ConnectTimeoutError() | EndpointConnectionError() | ProxyConnectionError():
            return errors.Unreachable(f"no connection: {error}", "Is the region right, and is there a way to it?")
        case ConnectionClosedError():
            return errors.Broken(f"the connection was closed without an answer: {error}")
        case NoCredentialsError():
            return errors.Forbidden("no AWS credentials were found", SIGN_IN)
        case _ if isinstance(error, NOT_SIGNED_IN):
            return errors.Forbidden(f"no AWS credentials: {error}", SIGN_IN_AGAIN)
        case ParamValidationError():
            return errors.NotSent(" ".join(str(error).split()))
    return errors.RequestFailed(str(error))


def needs_component(error: BaseException) -> bool:
    """Whether the endpoint has inference components, and the request must name one."""
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
        result = errors.Throttled(f"throttled: {message}", "Send less at once, or ask for a higher quota.")
    elif code in _NOT_READY:
        result = errors.NotReady(f"not ready: {message}")
    elif code in NOT_VALID:
        result = errors.Forbidden(f"{error.operation_name}: {code}: {message}", SIGN_IN_AGAIN)
    elif code in _DENIED:
        needs = _ROUTED if error.operation_name == "InvokeInferenceRouter" else _INVOKE
        result = errors.Forbidden(f"{error.operation_name}: {code}: {message}", needs)
    elif code in _REFUSED and "no capacity" in message.lower():
        result = errors.NoCapacity(message, "No copy is up. One is started by requests if scaling.min is 0.")
    elif code in _REFUSED and "not found" in message.lower():
        result = errors.NoSuchEndpoint(message, "Is the name right, and the region?")
    elif code in _REFUSED:
        result = errors.NotSent(message)
    else:
        result = errors.ServiceFailed(message if code.isdigit() else f"{code}: {message}")
    result.request_id = request_id
    return result


def _from_container(response: dict[str, Any], message: str) -> RequestFailed:
    status = int(response.get("OriginalStatusCode", 0))
    text, kind = _body(str(response.get("OriginalMessage") or message))
    more: dict[str, Any] = {"original_status": status, "log_stream": response.get("LogStreamArn")}
    if not status and "timed out" in f"{text} {message}":
        return errors.TimedOut(text, _IN_TIME, **more)
    if status in (429, 503):
        return errors.ModelBusy(f"the model is busy ({status}): {text}", "Send it again later, or scale out.", **more)
    if 400 <= status < 500 and not (status == 424 and _is_engine_failure(text, kind)):
        return errors.ModelRefused(f"the model refused it ({status}): {text}", **more)
    return errors.ModelFailed(f"the model failed ({status}): {text}", _LOGS, **more)


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
    """Whether a 424 is about the engine: LMI uses that status for wrong requests and for engine failures."""
    return kind in ("generation", "incomplete_generation") or text.startswith("engine failure")


def _from_stream(error: EventStreamError) -> RequestFailed:
    code, message = (str(error.response["Error"].get(key, "")) for key in ("Code", "Message"))
    if code == "ModelStreamError" and "allotted time" in message:
        return errors.TimedOut(message, _IN_TIME)
    return errors.StreamBroken(f"{code}: {message}", _LOGS if code == "ModelStreamError" else "")
