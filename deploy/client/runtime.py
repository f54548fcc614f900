"""Call one endpoint through SageMaker Runtime, with timeouts, retries and typed errors, for any body schema."""

from __future__ import annotations

import base64
import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar
from urllib.parse import urlsplit

import boto3
from botocore.auth import SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.exceptions import UnknownServiceError

from deploy import web_pages
from deploy.client.errors import (
    FROM_AWS,
    ComponentFailed,
    Forbidden,
    NoCapacity,
    NotSent,
    NotStarted,
    RequestFailed,
    failure,
    needs_component,
)
from deploy.credentials import SIGN_IN

if TYPE_CHECKING:
    from typing_extensions import Unpack

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ANY_REGION = "us-east-1"


def boto_session(region: str | None = None, endpoint_url: str | None = None) -> Any:
    """Return a boto3 session.

    If `endpoint_url` refers to an emulator on this machine, a missing region and missing credentials are filled in,
    because the emulator accepts any signature.
    """
    session = boto3.session.Session(region_name=region or os.environ.get("AWS_REGION"))
    if endpoint_url is None or urlsplit(endpoint_url).hostname not in LOOPBACK:
        return session
    region = session.region_name or _ANY_REGION
    if session.get_credentials() is None:
        return boto3.session.Session("local", "local", region_name=region)
    return boto3.session.Session(region_name=region)


def runtime_client(
    session: Any, region: str | None, endpoint_url: str | None, service: str = "sagemaker-runtime", **config: Any
) -> Any:
    """Return a boto3 client for SageMaker Runtime without retries, as a retry would start another generation.

    Args:
        service: boto3's name for the service, which differs for inference routers.
        config: further arguments for botocore's `Config`.
    """
    once = {"total_max_attempts": 1, "mode": "standard"}
    client_config = Config(tcp_keepalive=True, retries=once, user_agent_extra="lmi-client", **config)
    return web_pages.refused(
        session.client(service, region_name=region, endpoint_url=endpoint_url, config=client_config)
    )


# -- find the inference component for a request that does not name a component -----------------------------------------


def only_component(session: Any, region: str, endpoint_name: str) -> str:
    """Return the endpoint's only inference component, not counting adapters.

    This calls ListInferenceComponents, and also DescribeInferenceComponent if there are several components.

    Raises:
        NotSent: the endpoint has no component, or has several.
        RequestFailed: the components cannot be listed.
    """
    client = web_pages.refused(session.client("sagemaker", region_name=region))
    try:
        pages = client.get_paginator("list_inference_components").paginate(EndpointNameEquals=endpoint_name)
        names = [item["InferenceComponentName"] for page in pages for item in page["InferenceComponents"]]
        if len(names) > 1:
            names = [name for name in names if not _is_adapter(client, name)]
    except FROM_AWS as error:
        raise _cannot_list(failure(error), endpoint_name) from error
    if len(names) == 1:
        return str(names[0])
    if not names:
        raise NotSent(f"{endpoint_name} has no inference component yet", "Wait until `lmi deploy up` has finished.")
    raise NotSent(
        f"{endpoint_name} has several inference components: {', '.join(sorted(names))}",
        "Pass a name as component= or --component.",
    )


def _is_adapter(client: Any, name: str) -> bool:
    specification = client.describe_inference_component(InferenceComponentName=name).get("Specification", {})
    return "BaseInferenceComponentName" in specification


def check_component(client: Any, name: str) -> None:
    """Raise an error if an inference component has failed, because it will then never get a copy.

    Args:
        client: boto3's client for SageMaker. If it cannot read the component, nothing is checked.

    Raises:
        ComponentFailed: the component has failed.
    """
    try:
        component = client.describe_inference_component(InferenceComponentName=name)
    except FROM_AWS:
        return
    if component["InferenceComponentStatus"] == "Failed":
        advice = "`lmi deploy up` creates it again; `lmi deploy logs NAME` shows the container's log."
        reason = component.get("FailureReason", "SageMaker reports no reason")
        raise ComponentFailed(f"the inference component {name} has failed: {reason}", advice)


def _cannot_list(error: RequestFailed, endpoint_name: str) -> RequestFailed:
    error.args = (f"requests to {endpoint_name} must name an inference component, and listing them failed: {error}",)
    error.advice = "Pass a name as component= or --component."
    return error


# -- retry requests that have not started (`NotStarted`), within time limits -------------------------------------------
# boto3's own retries are off. After a read timeout, boto3 would send the request again while the model still works on
# the first request, so that one response could cost three generations.

_T = TypeVar("_T")


@dataclass(frozen=True)
class Patience:
    """Time limits for retries, in seconds from the first attempt.

    Attributes:
        busy: limit while requests are throttled, the model is not ready, or there is no connection.
        cold: limit while no copy is running. An instance takes minutes to start.
        first: maximum length of the first pause. The maximum doubles for each further pause, and a pause lasts at least
            half of its maximum.
        longest: maximum length of any pause.
    """

    busy: float = 60.0
    cold: float = 900.0
    first: float = 0.5
    longest: float = 20.0

    def limit(self, error: NotStarted) -> float:
        return self.cold if isinstance(error, NoCapacity) else self.busy


IMPATIENT = Patience(busy=0, cold=0)


def with_retries(
    attempt: Callable[[], _T],
    patience: Patience,
    report: Callable[[NotStarted, float], None] | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> _T:
    """Return the result of `attempt`, which is repeated while it raises `NotStarted`.

    Args:
        report: function that is called before each pause, with the error and the pause in seconds.

    Raises:
        NotStarted: the time limit has passed. This is the error from the last attempt.
        RequestFailed: `attempt` raised any other error, which is not retried.
    """
    started, pause = clock(), patience.first
    while True:
        try:
            return attempt()
        except NotStarted as error:
            remaining = started + patience.limit(error) - clock()
            if remaining <= 0:
                raise
            wait = min(pause * random.uniform(0.5, 1.0), remaining)
            if report is not None:
                report(error, wait)
            sleep(wait)
            pause = min(2 * pause, patience.longest)


WARN_BYTES = 6 * 1024 * 1024
MAX_BYTES = 25 * 1024 * 1024
"""Maximum size of a request body. AWS's documentation states 25 MB, but the API model states 6 MiB (`WARN_BYTES`).
The client warns if a body exceeds the limit in the API model, and raises an error if it exceeds 25 MiB."""


class LargePayload(UserWarning):
    """A warning that SageMaker may reject the request because of its size."""


class Timeouts(NamedTuple):
    """Timeouts in seconds: for connecting, for a response (SageMaker's own is 60 s), and between parts of a stream."""

    connect: float = 10.0
    answer: float = 70.0
    gap: float = 120.0


class Connection(TypedDict, total=False):
    """Settings for the connection to an endpoint.

    Attributes:
        endpoint_url: the URL to use instead of AWS's, such as the URL that `lmi deploy local` prints.
        session: boto3 session with credentials of another profile or role, or None for a new session.
        patience: time limits for retrying requests that have not started.
        timeouts: timeouts of a single attempt.
        report: function that is called before each pause between attempts, with the error and the pause in seconds.
        connections: maximum number of concurrent requests.
    """

    endpoint_url: str | None
    session: Any
    patience: Patience
    timeouts: Timeouts
    report: Callable[[NotStarted, float], None] | None
    connections: int


class Runtime:
    """A thread-safe SageMaker Runtime client for one endpoint.

    Args:
        endpoint_name: name of the endpoint.
        region: region of the endpoint, or None to use boto3's setting.
        component: inference component or adapter to call, or None if the endpoint has at most one component.
        connection: further settings; see `Connection`.

    Raises:
        NotSent: no region is set.
        TypeError: a setting is unknown.
    """

    service = "sagemaker-runtime"

    def __init__(
        self,
        endpoint_name: str,
        region: str | None = None,
        *,
        component: str | None = None,
        **connection: Unpack[Connection],
    ) -> None:
        if unknown := connection.keys() - Connection.__annotations__.keys():
            raise TypeError(
                f"unknown arguments: {', '.join(sorted(unknown))}; supported: {', '.join(Connection.__annotations__)}"
            )
        self.endpoint_name = endpoint_name
        self.component = component
        self._endpoint_url = connection.get("endpoint_url")
        self.session = connection.get("session") or boto_session(region, self._endpoint_url)
        self.region: str = region or self.session.region_name or ""
        if not self.region:
            raise NotSent("no region is set", "Pass --region (in Python: region=), or set AWS_REGION.")
        self._patience = connection.get("patience", Patience())
        self._timeouts = connection.get("timeouts", Timeouts())
        self._report = connection.get("report")
        self._connections = connection.get("connections", 10)
        self._lock = threading.Lock()  # boto3's session is not thread-safe
        self._clients: dict[float, Any] = {}

    def invoke(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Call InvokeEndpoint, and return boto3's response with all bytes of the body as `Body`.

        Args:
            request: boto3's arguments, except for the endpoint name.

        Raises:
            RequestFailed: the request failed; see `errors.py`.
        """
        client = self._client  # created before the attempts, as this takes time

        def call(arguments: dict[str, Any]) -> dict[str, Any]:
            response: dict[str, Any] = client.invoke_endpoint(**arguments)
            return {**response, "Body": response["Body"].read()}

        return self._call(call, request)

    def stream(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Call InvokeEndpointWithResponseStream, and return boto3's response with botocore's event stream as `Body`."""
        client = self._streaming
        return self._call(lambda arguments: client.invoke_endpoint_with_response_stream(**arguments), request)

    def submit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Call InvokeEndpointAsync, and return boto3's response."""
        client = self._client
        return self._with_retries(lambda: client.invoke_endpoint_async(EndpointName=self.endpoint_name, **request))

    @property
    def base_url(self) -> str:
        """Return the URL under which the endpoint's own routes are available."""
        route = f"{str(self._client.meta.endpoint_url).rstrip('/')}/endpoints/{self.endpoint_name}"
        return route + (f"/inference-components/{self.component}" if self.component else "")

    def _call(self, call: Callable[[dict[str, Any]], dict[str, Any]], request: Mapping[str, Any]) -> dict[str, Any]:
        check_size(request.get("Body", b""))
        arguments = {"EndpointName": self.endpoint_name, **request}
        if self.component is not None:
            arguments.setdefault("InferenceComponentName", self.component)
        component = arguments.get("InferenceComponentName")
        try:
            return self._with_retries(lambda: call(arguments), component)
        except _NeedsComponent:
            self.component = only = only_component(self.session, self.region, self.endpoint_name)
            return self._with_retries(lambda: call({**arguments, "InferenceComponentName": only}), only)

    def _with_retries(self, call: Callable[[], _T], component: str | None = None) -> _T:
        def attempt() -> _T:
            try:
                return call()
            except FROM_AWS as error:
                if needs_component(error):
                    raise _NeedsComponent(str(failure(error))) from error
                failed = failure(error)
                if isinstance(failed, NoCapacity) and component is not None and self._endpoint_url is None:
                    check_component(self._control, component)
                raise failed from error

        return with_retries(attempt, self._patience, self._report)

    @cached_property
    def _control(self) -> Any:
        with self._lock:
            return web_pages.refused(self.session.client("sagemaker", region_name=self.region))

    @property
    def _client(self) -> Any:
        return self._client_for(self._timeouts.answer)

    @property
    def _streaming(self) -> Any:
        return self._client_for(self._timeouts.gap)

    def _client_for(self, read_timeout: float) -> Any:
        with self._lock:
            if read_timeout not in self._clients:
                self._clients[read_timeout] = runtime_client(
                    self.session,
                    self.region,
                    self._endpoint_url,
                    self.service,
                    read_timeout=read_timeout,
                    connect_timeout=self._timeouts.connect,
                    max_pool_connections=self._connections,
                )
            return self._clients[read_timeout]


def check_size(body: bytes) -> None:
    """Raise NotSent if the body exceeds SageMaker's maximum, and warn if it exceeds the limit in the API model."""
    if len(body) > MAX_BYTES:
        raise NotSent(
            f"the body has {len(body):,} bytes, but SageMaker accepts at most {MAX_BYTES:,}",
            "Asynchronous inference accepts up to 1 GB from S3.",
        )
    if len(body) > WARN_BYTES:
        text = f"the body has {len(body):,} bytes, but SageMaker may accept only {WARN_BYTES:,}"
        warnings.warn(text, LargePayload, stacklevel=5)


class _NeedsComponent(NotSent): ...


# -- bearer tokens for an endpoint's OpenAI route ----------------------------------------------------------------------
# A token is `sagemaker-api-key-` and the base64 of a presigned `CallWithBearerToken` (as sagemaker-core's token
# generator creates it). It is created on this machine, and is valid for up to 12 hours or until the credentials expire.
# As it gives access to all endpoints that the credentials do, it must not be logged. The caller needs
# sagemaker:CallWithBearerToken on `*`.

PREFIX = "sagemaker-api-key-"
LONGEST = 12 * 3600
_AHEAD = 300  # seconds before its expiry (at most half its lifetime) at which a token is replaced


def bearer_token(credentials: Any, region: str, seconds: int = LONGEST) -> str:
    """Return a new bearer token for the OpenAI routes of the endpoints in a region.

    Args:
        credentials: frozen botocore credentials.
        seconds: lifetime of the token, from 1 to 43200.

    Raises:
        NotSent: the lifetime is invalid.
    """
    if not 1 <= seconds <= LONGEST:
        raise NotSent(f"the lifetime of a bearer token must be 1 to {LONGEST} s, not {seconds}")
    request = AWSRequest(
        "POST",
        "https://sagemaker.amazonaws.com/",
        headers={"Host": "sagemaker.amazonaws.com"},
        params={"Action": "CallWithBearerToken"},
    )
    SigV4QueryAuth(credentials, "sagemaker", region, expires=seconds).add_auth(request)
    signed = request.url.removeprefix("https://") + "&Version=1"
    return PREFIX + base64.b64encode(signed.encode()).decode()


class BearerToken:
    """A source of bearer tokens, which reuses a token until shortly before it expires. Thread-safe.

    Args:
        session: boto3 session. Its credentials are read on each call, as they may be temporary.
    """

    def __init__(
        self, session: Any, region: str, seconds: int = LONGEST, clock: Callable[[], float] = time.time
    ) -> None:
        self._session = session
        self._region = region
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._token = ""
        self._until = 0.0
        self._key: tuple[Any, ...] = ()

    def __call__(self) -> str:
        """Return a valid token. Raises Forbidden if no credentials are found."""
        credentials = self._session.get_credentials()
        if credentials is None:
            raise Forbidden("no AWS credentials were found", SIGN_IN)
        frozen = credentials.get_frozen_credentials()
        key = (frozen.access_key, frozen.secret_key, frozen.token)
        with self._lock:
            if key != self._key or self._clock() >= self._until:
                self._token = bearer_token(frozen, self._region, self._seconds)
                self._until = self._clock() + self._seconds - min(_AHEAD, self._seconds / 2)
                self._key = key
            return self._token

    def __repr__(self) -> str:
        return "BearerToken(...)"


# -- call endpoints through an inference router, which may choose an endpoint in another Region ------------------------


_SERVICE = "sagemaker-inference-router-runtime"
_TAKES = ("Accept", "Body", "ContentType", "CustomAttributes", "InferenceId", "PrefixAwareId")
_ROUTER_TIMEOUT = 170.0  # seconds: AWS's minimum for a router's client, as a router may try a second destination


class RouterRuntime(Runtime):
    """A client that calls a routing target of an inference router. `endpoint_name` is the router's name.

    Args:
        router: name of the inference router.
        routing_target: name of the routing target in the router.
    """

    service = _SERVICE

    def __init__(self, router: str, region: str | None, routing_target: str, **connection: Unpack[Connection]) -> None:
        super().__init__(router, region, **connection)
        self._target = routing_target

    def invoke(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Call InvokeInferenceRouter. The response also contains `InvokedRoutedResourceArn` and `RoutingReason`."""
        if unknown := request.keys() - set(_TAKES):
            raise NotSent(f"{', '.join(sorted(unknown))}: not supported; routers accept only {', '.join(_TAKES)}")
        if len(request.get("Body", b"")) > WARN_BYTES:
            raise NotSent(f"the body has {len(request['Body']):,} bytes, but a router accepts at most {WARN_BYTES:,}")
        client = self._client
        arguments = {"InferenceRouterName": self.endpoint_name, "RoutingTargetName": self._target, **request}

        def call() -> dict[str, Any]:
            response: dict[str, Any] = client.invoke_inference_router(**arguments)
            return {**response, "Body": response["Body"].read()}

        return self._with_retries(call)

    def stream(self, request: Mapping[str, Any]) -> dict[str, Any]:
        raise NotSent("inference routers do not support streaming", "Use predict, or call an endpoint of the router.")

    def submit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        raise NotSent("inference routers do not support asynchronous requests", "Send the request to an endpoint.")

    @property
    def base_url(self) -> str:
        raise NotSent("inference routers have no OpenAI route", "Use predict or chat, or the route of an endpoint.")

    @property
    def _client(self) -> Any:
        try:
            return self._client_for(max(self._timeouts.answer, _ROUTER_TIMEOUT))
        except UnknownServiceError:
            raise NotSent("this boto3 does not support inference routers", "pip install --upgrade boto3") from None
