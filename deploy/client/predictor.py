"""The `Predictor`: an endpoint for its users."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from botocore.config import Config

from deploy import web_pages
from deploy.client.asynchronous import MAX_INLINE_BYTES, AsyncAnswer, split_s3
from deploy.client.errors import FROM_AWS, ModelFailed, NotSent, RequestFailed, failure
from deploy.client.runtime import BearerToken, Connection, RouterRuntime, Runtime
from deploy.client.serializers import Deserializer, JSONDeserializer, JSONSerializer, Serializer, deserialize_body
from deploy.client.streaming import Stream, stream_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class OpenAIRoute:
    """Base URL and token of the route.

    Attributes:
        base_url: ends in /openai/v1; its only operation is chat/completions.
        token: a call returns a valid token.
    """

    base_url: str
    token: Callable[[], str]

    def client(self, *, asynchronous: bool = False, **options: Any) -> Any:
        """Return a client of the `openai` package.

        Raises:
            NotSent: the package is not installed.
        """
        try:
            import openai
        except ImportError:
            raise NotSent(
                "the openai package is not installed",
                "pip install openai; or give any client openai_route().base_url and openai_route().token().",
            ) from None
        options = {"max_retries": 0, **options}
        if not asynchronous:
            return openai.OpenAI(base_url=self.base_url, api_key=self.token, **options)

        async def token() -> str:
            return self.token()

        return openai.AsyncOpenAI(base_url=self.base_url, api_key=token, **options)


# -- stateful sessions: requests with a session's id reach the same copy of the model ----------------------------------


class Session:
    """One session, opened by `Predictor.session()` and closed by the `with` statement.

    Special bodies open and close it (`requestType` NEW_SESSION and CLOSE); other requests carry its id in a header.

    Attributes:
        id: the container's id for it.
        expires: when the container forgets it; None: unknown.

    Raises:
        ModelRefused: the container has no sessions.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        response = self._send("NEW_SESSION", "NEW_SESSION")
        name, _, more = str(response.get("NewSessionId") or "").partition(";")
        self.id = name.strip()
        if not self.id:
            raise ModelFailed("the container answered without a session's id", "Check that its sessions are enabled.")
        self.expires = _expiry(more)

    def predict(self, data: Any, **options: Any) -> Any:
        """Return the whole answer, as `Predictor.predict` does. An unknown or expired session raises `ModelRefused`
        (400).
        """
        return self._predictor.predict(data, session_id=self.id, **options)

    def predict_stream(self, data: Any, **options: Any) -> Stream:
        return self._predictor.predict_stream(data, session_id=self.id, **options)

    def close(self) -> None:
        """Close the session in the container. A second call does nothing."""
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

    def _send(self, what: str, name: str) -> dict[str, Any]:
        return self._predictor.runtime.invoke(
            {"Body": json.dumps({"requestType": what}).encode(), "ContentType": "application/json", "SessionId": name}
        )


def _expiry(text: str) -> datetime.datetime | None:
    """Parse `Expires=2026-11-20T00:00:00Z`."""
    name, _, value = text.strip().partition("=")
    if name.lower() != "expires":
        return None
    return datetime.datetime.fromisoformat(value.strip().replace("Z", "+00:00"))


Messages = str | Sequence[Mapping[str, Any]]
"""A conversation in OpenAI's form, or only the user's message."""

_JSON, _FROM_JSON = JSONSerializer(), JSONDeserializer()
_PROMPTS = {"inputs", "messages", "prompt", "text_input"}


class Options(TypedDict, total=False):
    """SageMaker's request headers, under the names of SageMaker's SDK."""

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
    """A client of one endpoint.

    Args:
        endpoint_name: name of the endpoint.
        region: None: boto3's setting.
        component: the inference component; None: the endpoint has none, or only one.
        adapter: an adapter's component, in place of `component`.
        routing_target: `endpoint_name` is an inference router, and this is a routing target of it.
        connection: see `Connection`.

    Raises:
        NotSent: no region is set.
        TypeError: an unknown argument.
    """

    def __init__(
        self,
        endpoint_name: str,
        region: str | None = None,
        *,
        component: str | None = None,
        adapter: str | None = None,
        routing_target: str | None = None,
        serializer: Serializer = _JSON,
        deserializer: Deserializer = _FROM_JSON,
        **connection: Unpack[Connection],
    ) -> None:
        if component is not None and adapter is not None:
            raise NotSent("give component or adapter, not both: an adapter is a component, and knows its base")
        if routing_target is not None and (component or adapter):
            raise NotSent("a routing target names the components of its destinations: do not name one as well")
        self.runtime = (
            Runtime(endpoint_name, region, component=adapter or component, **connection)
            if routing_target is None
            else RouterRuntime(endpoint_name, region, routing_target, **connection)
        )
        self.serializer = serializer
        self.deserializer = deserializer
        self._token = BearerToken(self.runtime.session, self.runtime.region)

    @property
    def endpoint_name(self) -> str:
        return self.runtime.endpoint_name

    def predict(self, data: Any, initial_args: Mapping[str, Any] | None = None, **options: Unpack[Options]) -> Any:
        """Return the whole answer, deserialized. SageMaker waits 60 s for it.

        Args:
            initial_args: boto3's arguments of invoke_endpoint.

        Raises:
            RequestFailed: see `errors.py`; likewise in all other methods.
        """
        request = self._request(data, initial_args, options)
        request.setdefault("Accept", ", ".join(self.deserializer.ACCEPT))
        response = self.runtime.invoke(request)
        return deserialize_body(self.deserializer, response["Body"], response.get("ContentType", ""))

    def predict_stream(
        self, data: Any, initial_args: Mapping[str, Any] | None = None, **options: Unpack[Options]
    ) -> Stream:
        """Return the answer as it arrives. SageMaker waits 8 min for it.

        `stream` is added to a body with `inputs`, `messages`, `prompt` or `text_input` that does not have it.
        """
        if isinstance(data, Mapping) and data.keys() & _PROMPTS and "stream" not in data:
            data = {**data, "stream": True}
        return stream_of(self.runtime.stream(self._request(data, initial_args, options)))

    @overload
    def chat(self, messages: Messages, *, stream: Literal[False] = False, **parameters: Any) -> dict[str, Any]: ...

    @overload
    def chat(self, messages: Messages, *, stream: Literal[True], **parameters: Any) -> Stream: ...

    def chat(self, messages: Messages, *, stream: bool = False, **parameters: Any) -> dict[str, Any] | Stream:
        """Request a chat completion in OpenAI's form through `/invocations`, which every LMI container has.

        Args:
            messages: the conversation, or the user's message.
            parameters: further fields of the body: `max_tokens`, `temperature`, ...
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = {"messages": list(messages), **parameters}
        if stream:
            return self.predict_stream({**body, "stream": True})
        answer: dict[str, Any] = self.predict({**body, "stream": False})
        return answer

    def session(self) -> Session:
        """Return a stateful session, for the `with` statement."""
        return Session(self)

    def openai_route(self) -> OpenAIRoute:
        """Return base URL and token source of the endpoint's OpenAI route, for any client of that API."""
        return OpenAIRoute(f"{self.runtime.base_url}/openai/v1", self._token)

    def openai(self, *, asynchronous: bool = False, **options: Any) -> Any:
        """Return a client of the `openai` package for the endpoint's OpenAI route, with tokens that stay valid.

        Args:
            asynchronous: return an `openai.AsyncOpenAI`.
            options: the client's own. Its retries are off by default: they would repeat generations.

        Raises:
            NotSent: the package is not installed; `openai_route()` works without it.
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
        """Start asynchronous inference.

        Args:
            data: the body; up to 128,000 bytes go with the request.
            input_location: an object in S3 that contains the body, instead of data.
            upload: s3://BUCKET/KEY to store larger data first.
        """
        config = Config(retries={"total_max_attempts": 5, "mode": "standard"})
        s3 = web_pages.refused(self.runtime.session.client("s3", region_name=self.runtime.region, config=config))
        request = self._request(b"" if data is None else data, initial_args, options)
        body = request.pop("Body")
        if (data is None) == (input_location is None):
            raise NotSent("give exactly one of data and input_location")
        if input_location is not None:
            request["InputLocation"] = input_location
        elif upload is not None:
            bucket, key = split_s3(upload)
            try:
                s3.put_object(Bucket=bucket, Key=key, Body=body, ContentType=request["ContentType"])
            except FROM_AWS as error:
                raise failure(error) from error
            request["InputLocation"] = upload
        elif len(body) <= MAX_INLINE_BYTES:
            request["Body"] = body
        else:
            raise NotSent(
                f"{len(body):,} bytes are more than the {MAX_INLINE_BYTES:,} that an asynchronous request may contain",
                "Give upload=s3://BUCKET/KEY to upload the data there first.",
            )
        return AsyncAnswer(self.runtime.submit(request), s3, self.deserializer)

    def _request(self, data: Any, initial_args: Mapping[str, Any] | None, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return boto3's arguments."""
        if unknown := options.keys() - _HEADERS.keys():
            raise NotSent(f"{', '.join(sorted(unknown))}: unknown; supported: {', '.join(_HEADERS)}")
        body = self.serializer.serialize(data)
        request = {"ContentType": self.serializer.CONTENT_TYPE, **(initial_args or {})}
        request |= {_HEADERS[name]: value for name, value in options.items() if value is not None}
        return {**request, "Body": body.encode() if isinstance(body, str) else body}


# -- a conversation with a model ---------------------------------------------------------------------------------------


class Conversation:
    """A conversation.

    Args:
        system: the system message; empty: none.
        parameters: parameters of every request: `max_tokens`, `temperature`, ...

    Attributes:
        turns: messages of the user and the model, in OpenAI's form.
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
        """Forget the turns; the system message stays."""
        self.turns.clear()

    def ask(self, text: str) -> Iterator[str]:
        """Yield the answer's pieces as they arrive.

        An interrupted answer is kept as far as it came. A failed one is not kept, so that the user can ask again.

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
