"""Call SageMaker Runtime for one endpoint, with own timeouts, retries and errors. Independent of the body's schema."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

from deploy.client.aws.account import boto_session, runtime_client
from deploy.client.aws.components import only_component
from deploy.client.aws.failures import FROM_AWS, failure, needs_component
from deploy.client.errors import NotSent, NotStarted
from deploy.client.retry import PATIENT, Patience, with_retries

if TYPE_CHECKING:
    from typing_extensions import Unpack

WARN_BYTES = 6 * 1024 * 1024
MAX_BYTES = 25 * 1024 * 1024
"""The API's model says 6 MiB, its documentation 25 MB: the client warns above the first, refuses above the second."""

_T = TypeVar("_T")


class LargePayload(UserWarning):
    """SageMaker may refuse the request for its size."""


class Timeouts(NamedTuple):
    """Timeouts in seconds: for a connection; for an answer (SageMaker gives up after 60); between parts of a stream."""

    connect: float = 10.0
    answer: float = 70.0
    gap: float = 120.0


class Connection(TypedDict, total=False):
    """How an endpoint is reached.

    Attributes:
        endpoint_url: another address than AWS's: that of `lmi deploy local`.
        session: boto3's session, for credentials of another profile or role; None: a new one.
        patience: how long to retry a request that has not started.
        timeouts: in seconds.
        report: called before each pause between two attempts, with the error and the pause in seconds.
        connections: maximum of concurrent requests.
    """

    endpoint_url: str | None
    session: Any
    patience: Patience
    timeouts: Timeouts
    report: Callable[[NotStarted, float], None] | None
    connections: int


class Runtime:
    """Calls to one endpoint. Thread-safe.

    Args:
        endpoint_name: name of the endpoint.
        region: None: boto3's setting.
        component: the inference component or adapter; None: the endpoint has none, or only one.
        connection: see `Connection`.

    Raises:
        NotSent: no region is set.
        TypeError: an unknown argument.
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
            raise TypeError(f"{', '.join(sorted(unknown))}: there are only {', '.join(Connection.__annotations__)}")
        self.endpoint_name = endpoint_name
        self.component = component
        self._endpoint_url = connection.get("endpoint_url")
        self.session = connection.get("session") or boto_session(region, self._endpoint_url)
        self.region: str = region or self.session.region_name or ""
        if not self.region:
            raise NotSent("no region is set", "Give --region (in Python: region=), or set AWS_REGION.")
        self._patience = connection.get("patience", PATIENT)
        self._timeouts = connection.get("timeouts", Timeouts())
        self._report = connection.get("report")
        self._connections = connection.get("connections", 10)
        self._lock = threading.Lock()  # boto3's session is not thread-safe
        self._clients: dict[float, Any] = {}

    def invoke(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """InvokeEndpoint. `Body` of the result holds all bytes.

        Args:
            request: boto3's arguments except the endpoint's name; likewise below.

        Raises:
            RequestFailed: see `errors.py`; likewise below.
        """
        client = self._client  # outside of the attempts, as creating a client takes time

        def call(arguments: dict[str, Any]) -> dict[str, Any]:
            response: dict[str, Any] = client.invoke_endpoint(**arguments)
            return {**response, "Body": response["Body"].read()}

        return self._call(call, request)

    def stream(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """InvokeEndpointWithResponseStream. `Body` of the result is botocore's event stream."""
        client = self._streaming
        return self._call(lambda arguments: client.invoke_endpoint_with_response_stream(**arguments), request)

    def submit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """InvokeEndpointAsync."""
        client = self._client
        return self._with_retries(lambda: client.invoke_endpoint_async(EndpointName=self.endpoint_name, **request))

    @property
    def base_url(self) -> str:
        """The address of the endpoint's routes."""
        route = f"{str(self._client.meta.endpoint_url).rstrip('/')}/endpoints/{self.endpoint_name}"
        return route + (f"/inference-components/{self.component}" if self.component else "")

    def _call(self, call: Callable[[dict[str, Any]], dict[str, Any]], request: Mapping[str, Any]) -> dict[str, Any]:
        check_size(request.get("Body", b""))
        arguments = {"EndpointName": self.endpoint_name, **request}
        if self.component is not None:
            arguments.setdefault("InferenceComponentName", self.component)
        try:
            return self._with_retries(lambda: call(arguments))
        except _NeedsComponent:
            self.component = only_component(self.session, self.region, self.endpoint_name)
            return self._with_retries(lambda: call({**arguments, "InferenceComponentName": self.component}))

    def _with_retries(self, call: Callable[[], _T]) -> _T:
        def attempt() -> _T:
            try:
                return call()
            except FROM_AWS as error:
                if needs_component(error):
                    raise _NeedsComponent(str(failure(error))) from error
                raise failure(error) from error

        return with_retries(attempt, self._patience, self._report)

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
    """Raise NotSent above SageMaker's maximum; warn above the API model's limit."""
    if len(body) > MAX_BYTES:
        raise NotSent(
            f"the request has {len(body):,} bytes; SageMaker takes at most {MAX_BYTES:,}",
            "Asynchronous inference takes up to 1 GB from S3.",
        )
    if len(body) > WARN_BYTES:
        warnings.warn(f"{len(body):,} bytes: SageMaker may take only {WARN_BYTES:,}", LargePayload, stacklevel=5)


class _NeedsComponent(NotSent): ...
