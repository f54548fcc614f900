"""`Predictor`, a client for one endpoint, with sessions and conversations."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from botocore.config import Config

from deploy import web_pages
from deploy.client.asynchronous import MAX_INLINE_BYTES, AsyncAnswer, split_s3
from deploy.client.errors import FROM_AWS, ModelFailed, NotSent, RequestFailed, s3_failure
from deploy.client.runtime import BearerToken, Connection, RouterRuntime, Runtime
from deploy.client.serializers import Deserializer, JSONDeserializer, JSONSerializer, Serializer, deserialize_body
from deploy.client.streaming import Stream, stream_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class OpenAIRoute:
    """The base URL of an endpoint's OpenAI route, and a source of tokens for it.

    Attributes:
        base_url: base URL, which ends in /openai/v1. Its only operation is chat/completions.
        token: function that returns a valid token.
    """

    base_url: str
    token: Callable[[], str]

    def client(self, *, asynchronous: bool = False, **options: Any) -> Any:
        """Return a client from the `openai` package.

        Raises:
            NotSent: the package is not installed.
        """
        try:
            import openai
        except ImportError:
            raise NotSent(
                "the openai package is not installed",
                "pip install openai; or use another client with openai_route().base_url and openai_route().token().",
            ) from None
        options = {"max_retries": 0, **options}
        if not asynchronous:
            return openai.OpenAI(base_url=self.base_url, api_key=self.token, **options)

        async def token() -> str:
            return self.token()

        return openai.AsyncOpenAI(base_url=self.base_url, api_key=token, **options)


# -- stateful sessions: all requests with a session's ID reach the same copy of the model ------------------------------


class Session:
    """A stateful session, which `Predictor.session()` opens and the `with` statement closes.

    Requests whose body has the `requestType` NEW_SESSION or CLOSE open and close a session. All other requests of the
    session send its ID in a header.

    Attributes:
        id: the ID that the container assigned to the session, or "" after the session was closed.
        expires: time at which the container drops the session, or None if it is unknown.

    Raises:
        ModelRefused: the container does not support sessions.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        response = self._send("NEW_SESSION", "NEW_SESSION")
        name, _, more = str(response.get("NewSessionId") or "").partition(";")
        self.id = name.strip()
        if not self.id:
            raise ModelFailed(
                "the container's response has no session ID", "Check that sessions are enabled in the container."
            )
        self.expires = _expiry(more)

    def predict(self, data: Any, **options: Any) -> Any:
        """Return the whole response, like `Predictor.predict`.

        Raises:
            ModelRefused: the session is unknown or expired (status 400).
            RequestFailed: the request failed.
        """
        return self._predictor.predict(data, session_id=self.id, **options)

    def predict_stream(self, data: Any, **options: Any) -> Stream:
        return self._predictor.predict_stream(data, session_id=self.id, **options)

    def close(self) -> None:
        """Close the session in the container. Further calls do nothing."""
        if self.id:
            self._send("CLOSE", self.id)
            self.id = ""

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except RequestFailed:
            if error is None:  # otherwise the first error matters
                raise

    def _send(self, request_type: str, name: str) -> dict[str, Any]:
        return self._predictor.runtime.invoke(
            {
                "Body": json.dumps({"requestType": request_type}).encode(),
                "ContentType": "application/json",
                "SessionId": name,
            }
        )


def _expiry(text: str) -> datetime.datetime | None:
    """Parse an attribute such as `Expires=2026-11-20T00:00:00Z`, or return None for any other attribute."""
    name, _, value = text.strip().partition("=")
    if name.lower() != "expires":
        return None
    return datetime.datetime.fromisoformat(value.strip().replace("Z", "+00:00"))


Messages = str | Sequence[Mapping[str, Any]]
"""Messages in OpenAI's format, or the text of one user message."""

_JSON, _FROM_JSON = JSONSerializer(), JSONDeserializer()
_PROMPTS = {"inputs", "messages", "prompt", "text_input"}


class Options(TypedDict, total=False):
    """SageMaker's request headers, under the names that SageMaker's SDK uses."""

    custom_attributes: str
    inference_id: str
    target_model: str
    target_variant: str
    component_name: str
    session_id: str
    prefix_aware_id: str
    content_type: str
    accept: str


_HEADERS = {
    "custom_attributes": "CustomAttributes",
    "inference_id": "InferenceId",
    "target_model": "TargetModel",
    "target_variant": "TargetVariant",
    "component_name": "InferenceComponentName",
    "session_id": "SessionId",
    "prefix_aware_id": "PrefixAwareId",
    "content_type": "ContentType",
    "accept": "Accept",
}


class Predictor:
    """A client for one endpoint.

    Args:
        endpoint_name: name of the endpoint, or of an inference router.
        region: region of the endpoint, or None to use boto3's setting.
        component: inference component to call, or None if the endpoint has at most one component.
        adapter: name of an adapter component to call, instead of `component`.
        routing_target: routing target to call, if `endpoint_name` is an inference router.
        bidirectional: whether to stream with InvokeEndpointWithBidirectionalStream. Other calls are then refused.
        connection: further settings; see `Connection`.

    Raises:
        NotSent: no region is set, the arguments contradict each other, or AWS's SDK is not installed.
        TypeError: a setting is unknown.
    """

    def __init__(
        self,
        endpoint_name: str,
        region: str | None = None,
        *,
        component: str | None = None,
        adapter: str | None = None,
        routing_target: str | None = None,
        bidirectional: bool = False,
        serializer: Serializer = _JSON,
        deserializer: Deserializer = _FROM_JSON,
        **connection: Unpack[Connection],
    ) -> None:
        if component is not None and adapter is not None:
            raise NotSent("pass either component or adapter: an adapter is itself a component, which names its base")
        if routing_target is not None and (component or adapter):
            raise NotSent("routing_target cannot be combined with component or adapter, as the target chooses them")
        if bidirectional and (component or adapter or routing_target):
            raise NotSent("bidirectional cannot be combined with component, adapter or routing_target")
        self.runtime: Runtime
        if bidirectional:
            self.runtime = _bidirectional_runtime(endpoint_name, region, **connection)
        elif routing_target is not None:
            self.runtime = RouterRuntime(endpoint_name, region, routing_target, **connection)
        else:
            self.runtime = Runtime(endpoint_name, region, component=adapter or component, **connection)
        self.serializer = serializer
        self.deserializer = deserializer
        self._token = BearerToken(self.runtime.session, self.runtime.region)

    @property
    def endpoint_name(self) -> str:
        return self.runtime.endpoint_name

    def predict(self, data: Any, initial_args: Mapping[str, Any] | None = None, **options: Unpack[Options]) -> Any:
        """Return the whole response, deserialized. SageMaker waits up to 60 s for it.

        Args:
            initial_args: further arguments for boto3's `invoke_endpoint`.

        Raises:
            RequestFailed: the request failed; see `errors.py`. The other methods also raise it.
        """
        request = self._request(data, initial_args, options)
        request.setdefault("Accept", ", ".join(self.deserializer.ACCEPT))
        response = self.runtime.invoke(request)
        return deserialize_body(self.deserializer, response["Body"], response.get("ContentType", ""))

    def predict_stream(
        self, data: Any, initial_args: Mapping[str, Any] | None = None, **options: Unpack[Options]
    ) -> Stream:
        """Return the response as a stream. SageMaker waits up to 8 min for the stream to end.

        If the body has `inputs`, `messages`, `prompt` or `text_input` but not `stream`, then `stream` is added.
        """
        if isinstance(data, Mapping) and data.keys() & _PROMPTS and "stream" not in data:
            data = {**data, "stream": True}
        return stream_of(self.runtime.stream(self._request(data, initial_args, options)))

    @overload
    def chat(self, messages: Messages, *, stream: Literal[False] = False, **parameters: Any) -> dict[str, Any]: ...

    @overload
    def chat(self, messages: Messages, *, stream: Literal[True], **parameters: Any) -> Stream: ...

    def chat(self, messages: Messages, *, stream: bool = False, **parameters: Any) -> dict[str, Any] | Stream:
        """Request a chat completion in OpenAI's format through `/invocations`, which every LMI container supports.

        Args:
            messages: messages of the conversation, or the text of one user message.
            parameters: further fields of the body, such as `max_tokens` and `temperature`.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = {"messages": list(messages), **parameters}
        if stream:
            return self.predict_stream({**body, "stream": True})
        completion: dict[str, Any] = self.predict({**body, "stream": False})
        return completion

    def session(self) -> Session:
        """Open a stateful session, for use in a `with` statement."""
        return Session(self)

    def openai_route(self) -> OpenAIRoute:
        """Return the base URL and a token source for the endpoint's OpenAI route, for use with any client."""
        return OpenAIRoute(f"{self.runtime.base_url}/openai/v1", self._token)

    def openai(self, *, asynchronous: bool = False, **options: Any) -> Any:
        """Return an `openai` client for the endpoint's OpenAI route. The client renews its bearer tokens itself.

        Args:
            asynchronous: whether to return an `openai.AsyncOpenAI`.
            options: further options of the client. Its retries are off by default, as they would repeat generations.

        Raises:
            NotSent: the package is not installed. `openai_route()` works without it.
        """
        return self.openai_route().client(asynchronous=asynchronous, **options)

    def predict_async(
        self,
        data: Any = None,
        *,
        input_location: str | None = None,
        upload: str | None = None,
        initial_args: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> AsyncAnswer:
        """Send an asynchronous request.

        Args:
            data: request body. Unless `upload` is set, it may have up to 128,000 bytes.
            input_location: the URI of an S3 object that contains the body, instead of `data`.
            upload: the URI, s3://BUCKET/KEY, to which `data` is uploaded first.
        """
        config = Config(retries={"total_max_attempts": 5, "mode": "standard"})
        s3 = web_pages.refused(self.runtime.session.client("s3", region_name=self.runtime.region, config=config))
        request = self._request(b"" if data is None else data, initial_args, options)
        body = request.pop("Body")
        if (data is None) == (input_location is None):
            raise NotSent("pass exactly one of data and input_location")
        if input_location is not None:
            request["InputLocation"] = input_location
        elif upload is not None:
            bucket, key = split_s3(upload)
            try:
                s3.put_object(Bucket=bucket, Key=key, Body=body, ContentType=request["ContentType"])
            except FROM_AWS as error:
                raise s3_failure(error, "Upload the input again.") from error
            request["InputLocation"] = upload
        elif len(body) <= MAX_INLINE_BYTES:
            request["Body"] = body
        else:
            raise NotSent(
                f"the body has {len(body):,} bytes, but an asynchronous request may have at most {MAX_INLINE_BYTES:,}",
                "Pass upload=s3://BUCKET/KEY to upload the body there first.",
            )
        return AsyncAnswer(self.runtime.submit(request), s3, self.deserializer)

    def _request(self, data: Any, initial_args: Mapping[str, Any] | None, options: Mapping[str, Any]) -> dict[str, Any]:
        if unknown := options.keys() - _HEADERS.keys():
            raise NotSent(f"unknown options: {', '.join(sorted(unknown))}; supported: {', '.join(_HEADERS)}")
        body = self.serializer.serialize(data)
        request = {"ContentType": self.serializer.CONTENT_TYPE, **(initial_args or {})}
        request |= {_HEADERS[name]: value for name, value in options.items() if value is not None}
        return {**request, "Body": body.encode() if isinstance(body, str) else body}


def _bidirectional_runtime(endpoint_name: str, region: str | None, **connection: Unpack[Connection]) -> Runtime:
    """Return a runtime for bidirectional streams. Raises NotSent if AWS's SDK is not installed."""
    try:
        from deploy.client.bidirectional import BidirectionalRuntime
    except ImportError as error:
        from handler.core.package import install

        is_old = sys.version_info < (3, 12)
        remedy = "It needs Python 3.12 or newer." if is_old else install("lmi-handler[bidirectional-client]")
        raise NotSent(f"bidirectional streams need AWS's SDK, but {error.name} is not installed", remedy) from None
    return BidirectionalRuntime(endpoint_name, region, **connection)


# -- a conversation with a model ---------------------------------------------------------------------------------------


class Conversation:
    """A conversation with a model.

    Args:
        system: system message, or "" for no system message.
        parameters: parameters of every request, such as `max_tokens` and `temperature`.

    Attributes:
        turns: messages from the user and the model, in OpenAI's format.
    """

    def __init__(self, predictor: Predictor, system: str = "", parameters: Mapping[str, Any] | None = None) -> None:
        self._predictor = predictor
        self._parameters = dict(parameters or {})
        self.system = system
        self.turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def reset(self) -> None:
        """Remove all messages except for the system message."""
        self.turns.clear()

    def ask(self, text: str) -> Iterator[str]:
        """Send a message, and yield the pieces of the reply as they arrive.

        If the caller stops early, the part that has arrived is added to the conversation. After a failure, neither
        the message nor the reply is added, so that the user can ask again.

        Raises:
            RequestFailed: the request failed.
        """
        turn = {"role": "user", "content": text}
        pieces: list[str] = []
        try:
            with self._predictor.chat([*self.messages, turn], stream=True, **self._parameters) as stream:
                for piece in stream.text():
                    pieces.append(piece)
                    yield piece
        except (KeyboardInterrupt, GeneratorExit):
            self._keep(turn, pieces)
            raise
        self._keep(turn, pieces)

    def _keep(self, turn: dict[str, str], pieces: list[str]) -> None:
        self.turns += [turn, {"role": "assistant", "content": "".join(pieces)}]
