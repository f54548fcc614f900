"""Stream responses with InvokeEndpointWithBidirectionalStream. Needs AWS's SDK for SageMaker's HTTP/2 API.

boto3 does not have this operation. The errors of AWS's SDK are raised as the errors that boto3 raises for the other
operations, so that `errors.py` converts both.

See https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from aws_sdk_sagemaker_runtime_http2 import client, config, models
from botocore.exceptions import ClientError, EndpointConnectionError, EventStreamError, NoCredentialsError
from smithy_aws_core.identity import AWSCredentialsIdentity
from smithy_core.exceptions import CallError
from smithy_http.aio.crt import AWSCRTHTTPClient
from urllib3.exceptions import ProtocolError

from deploy.client.errors import NotSent, RequestFailed, TimedOut
from deploy.client.runtime import LOOPBACK, Connection, Runtime, check_size
from deploy.client.streaming import ResponseEnd, json_object

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger(__name__)

_T = TypeVar("_T")

OPERATION = "InvokeEndpointWithBidirectionalStream"
_PORT = 8443  # SageMaker's port for HTTP/2
_CLOSE_SECONDS = 5.0
_JSON = "application/json"
_STREAM_ERRORS = ("ModelStreamError", "InternalStreamFailure")
_CODES = {"InputValidationError": "ValidationError"}
"""Maps this operation's names of errors to boto3's."""

_NOT_OPENED = (
    "SageMaker opens a WebSocket only if the image has the label "
    "com.amazonaws.sagemaker.capabilities.bidirectional-streaming=true. GPU instances also need a recent "
    "InferenceAmiVersion (instance.ami), such as al2023-ami-sagemaker-inference-gpu-4-1."
)


class BidirectionalRuntime(Runtime):
    """A client that sends each request over a bidirectional stream, and ends the stream after the response.

    Args:
        endpoint_name: name of the endpoint.
        region: region of the endpoint, or None to use boto3's setting.
        connection: further settings. `endpoint_url` may be the URL that `lmi deploy local --bidirectional-port` prints.

    Raises:
        NotSent: no region is set, or the URL cannot be used.
    """

    def __init__(self, endpoint_name: str, region: str | None = None, **connection: Unpack[Connection]) -> None:
        super().__init__(endpoint_name, region, **connection)
        self._url = _checked(self._endpoint_url or f"{self._client.meta.endpoint_url}:{_PORT}")
        self._loop = LoopThread()
        self._sdk: Any = None

    def stream(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request, and return its response in the form of InvokeEndpointWithResponseStream.

        Args:
            request: boto3's arguments, of which Body and TargetVariant are supported. The body is JSON.

        Raises:
            RequestFailed: the request failed; see `errors.py`.
        """
        check_request(request)
        check_size(request["Body"])
        return self._with_retries(lambda: self._begin(request))

    def invoke(self, request: Mapping[str, Any]) -> dict[str, Any]:
        raise NotSent(
            "bidirectional streams cannot return a whole response", "Use predict_stream or chat(stream=True)."
        )

    def submit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        raise NotSent("bidirectional streams do not support asynchronous requests", "Use another Predictor.")

    def _begin(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self.session.get_credentials() is None:
            raise NoCredentialsError
        opening = self._open(request.get("TargetVariant"))
        try:
            stream = self._loop.run(opening, self._timeouts.answer)
        except asyncio.TimeoutError as error:
            raise TimedOut(f"{self.endpoint_name} did not open the stream in time", _NOT_OPENED) from error
        except Exception as error:
            raise before_stream(error, self._url) from error
        messages = Messages(stream, self._loop, self._timeouts.gap, request["Body"])
        messages.begin()
        return {
            "Body": messages,
            "ContentType": "application/jsonlines",
            "InvokedProductionVariant": stream.output.invoked_production_variant or "",
        }

    async def _open(self, variant: str | None) -> Any:
        """Return a stream of AWS's SDK whose WebSocket the container has accepted."""
        if self._sdk is None:
            settings = await config.AsyncSageMakerRuntimeHTTP2Config.resolve(
                endpoint_uri=self._url,
                region=self.region,
                aws_credentials_identity_resolver=Credentials(self.session),
                transport=AWSCRTHTTPClient(),
                max_attempts=1,  # this client retries by itself
            )
            self._sdk = client.AsyncSageMakerRuntimeHTTP2Client(config=settings)
        values = models.InvokeEndpointWithBidirectionalStreamInput(
            endpoint_name=self.endpoint_name, target_variant=variant
        )
        stream = await self._sdk.invoke_endpoint_with_bidirectional_stream(values)
        try:
            await stream.await_output()
        except BaseException:
            await stream.close()  # otherwise the SDK's task prints an error when the process ends
            raise
        return stream


class Messages:
    """The messages of one response, in the form of botocore's event stream.

    Args:
        stream: open stream of AWS's SDK.
        loop: loop on which the stream was opened.
        gap: maximum number of seconds between two messages.
        body: the request.
    """

    def __init__(self, stream: Any, loop: LoopThread, gap: float, body: bytes) -> None:
        self._stream = stream
        self._loop = loop
        self._gap = gap
        self._body = body
        self._first = b""
        self._is_closed = False

    def begin(self) -> None:
        """Send the request, and wait for the first message.

        Raises:
            ClientError: the container refuses the request.
        """
        try:
            self._first = self._run(self._exchange()) or b""
            if (refusal := _refusal(self._first)) is not None:
                raise refusal
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[dict[str, dict[str, bytes]]]:
        end = ResponseEnd(self._body)
        message: bytes | None = self._first
        while message:
            yield {"PayloadPart": {"Bytes": message + b"\n"}}
            if end.is_last(message):
                return
            message = self._run(self._receive())

    def close(self) -> None:
        """End the stream, so that the container cancels a request that is still running."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(Exception):  # the stream has ended
            self._loop.run(self._stream.close(), _CLOSE_SECONDS)

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        try:
            return self._loop.run(coroutine, self._gap)
        except asyncio.TimeoutError as error:
            raise TimedOut(f"no message arrived within {self._gap:g} s") from error
        except Exception as error:
            raise within_stream(error) from error

    async def _exchange(self) -> bytes | None:
        part = models.RequestPayloadPart(bytes_=self._body, data_type="UTF8", completion_state="COMPLETE")
        await self._stream.input_stream.send(models.RequestStreamEventPayloadPart(value=part))
        return await self._receive()

    async def _receive(self) -> bytes | None:
        """Return the next message of the container, or None at the end of the stream."""
        message = b""
        while (event := await self._stream.output_stream.receive()) is not None:
            message += bytes(event.value.bytes_)
            if event.value.completion_state != "PARTIAL":
                return message
        return None


class Credentials:
    """Gives AWS's SDK the current credentials of a boto3 session for each request, as they may be temporary."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __deepcopy__(self, memo: Any) -> Credentials:
        """Return the object itself: the SDK copies its configuration, but a session cannot be copied."""
        return self

    async def get_identity(self, *, properties: Any) -> Any:
        frozen = self._session.get_credentials().get_frozen_credentials()
        return AWSCredentialsIdentity(
            access_key_id=frozen.access_key, secret_access_key=frozen.secret_key, session_token=frozen.token
        )


class LoopThread:
    """An event loop in its own thread. It starts with the first coroutine, and ends with this object or the process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_note)
        self._thread = threading.Thread(target=self._loop.run_forever, name="bidirectional streams", daemon=True)
        self._lock = threading.Lock()
        self._end: weakref.finalize[..., LoopThread] | None = None

    def run(self, coroutine: Coroutine[Any, Any, _T], seconds: float) -> _T:
        """Return the result of a coroutine, which is cancelled if this thread is interrupted.

        Raises:
            asyncio.TimeoutError: the coroutine did not end in time.
        """
        with self._lock:
            if self._end is None:
                self._thread.start()
                self._end = weakref.finalize(self, _end, self._loop, self._thread)
            elif not self._end.alive:
                coroutine.close()
                raise RuntimeError("the process ends")
        future = asyncio.run_coroutine_threadsafe(_limited(coroutine, seconds), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """End a loop and its tasks. Unfinished tasks would print errors when the process ends."""
    ending = asyncio.run_coroutine_threadsafe(_end_tasks(), loop)
    if thread is not threading.current_thread():  # which may collect garbage
        with contextlib.suppress(concurrent.futures.TimeoutError):
            ending.result(_CLOSE_SECONDS)
        thread.join(_CLOSE_SECONDS)


async def _end_tasks() -> None:
    loop = asyncio.get_running_loop()
    tasks = asyncio.all_tasks(loop) - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    loop.call_soon(loop.stop)


async def _limited(coroutine: Coroutine[Any, Any, _T], seconds: float) -> _T:
    return await asyncio.wait_for(coroutine, seconds)


def _note(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """Log errors of the SDK's own tasks, which fail when a stream ends early."""
    log.debug("AWS's SDK: %s: %r", context.get("message"), context.get("exception"))


def _checked(url: str) -> str:
    """Return the URL. Raises NotSent if AWS's SDK cannot use it."""
    parts = urlsplit(url)
    advice = "Pass the https URL that `lmi deploy local --bidirectional-port` prints, and set SSL_CERT_FILE as it says."
    if parts.scheme != "https":
        raise NotSent(f"bidirectional streams need https, not {url}", advice)
    if parts.hostname in LOOPBACK and "SSL_CERT_FILE" not in os.environ:
        raise NotSent("SSL_CERT_FILE is not set, so AWS's SDK does not trust this machine's certificate", advice)
    return url


def check_request(request: Mapping[str, Any]) -> None:
    """Raise NotSent if the operation has no equivalent of an argument."""
    if unknown := request.keys() - {"Body", "ContentType", "TargetVariant"}:
        raise NotSent(
            f"{', '.join(sorted(unknown))}: not supported by bidirectional streams",
            "SageMaker does not forward headers. Remove the option, or do not use bidirectional streams.",
        )
    if request.get("ContentType", _JSON) != _JSON:
        raise NotSent(f"the body of a bidirectional stream must be {_JSON}, not {request['ContentType']}")
    if "text_input" in json_object(request["Body"]):
        raise NotSent(
            "text_input: Triton's streams end only with their connection, which stays open here",
            "Use inputs, prompt or messages, or do not use bidirectional streams.",
        )


def before_stream(error: Exception, url: str) -> Any:
    """Return boto3's error for an error that AWS's SDK raises while opening a stream."""
    if isinstance(error, RequestFailed):
        return error
    if not isinstance(error, CallError):
        return EndpointConnectionError(endpoint_url=url, error=error)
    name = type(error).__name__
    members = {
        "Error": {"Code": _CODES.get(name, name), "Message": error.message},
        "OriginalStatusCode": getattr(error, "original_status_code", None) or 0,
        "OriginalMessage": getattr(error, "original_message", None),
        "LogStreamArn": getattr(error, "log_stream_arn", None),
    }
    return ClientError(members, OPERATION)


def within_stream(error: Exception) -> Any:
    """Return botocore's error for an error that AWS's SDK raises in an open stream."""
    if isinstance(error, RequestFailed):
        return error
    if not isinstance(error, CallError):
        return ProtocolError(str(error))
    name = type(error).__name__
    code = getattr(error, "error_code", None)
    message = f"{error.message} ({code})" if code else error.message
    details = {"Error": {"Code": name if name in _STREAM_ERRORS else "InternalStreamFailure", "Message": message}}
    return EventStreamError(details, OPERATION)


def _refusal(message: bytes) -> ClientError | None:
    """Return the error that HTTP would have for this refusal, or None for any other message."""
    value = json_object(message)
    if value.get("type") != "error" or not isinstance(value.get("status"), int):
        return None
    text = message.decode("utf-8", "replace")
    details = {"Code": "ModelError", "Message": text}
    response = {"Error": details, "OriginalStatusCode": value["status"], "OriginalMessage": text}
    return ClientError(response, OPERATION)
