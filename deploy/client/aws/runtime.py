"""SageMaker's runtime for one endpoint: boto3's calls with our timeouts, our retries and our errors.

Nothing here knows what a body holds. Contract sagemaker.md, sections 1.1, 1.4 and 8.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from botocore.config import Config

from deploy.client.aws.account import boto_session
from deploy.client.aws.components import only_component
from deploy.client.aws.failures import FROM_AWS, failure, needs_component
from deploy.client.errors import NotSent, NotStarted
from deploy.client.retry import PATIENT, Patience, with_retries

WARN_BYTES = 6 * 1024 * 1024
MAX_BYTES = 25 * 1024 * 1024
"""The API's model says 6 MiB, its documentation 25 MB: beyond the first we warn, beyond the second we do not send."""

_T = TypeVar("_T")


class LargePayload(UserWarning):
    """SageMaker may refuse the request for its size."""


class Timeouts(NamedTuple):
    """Seconds: until a connection; until an answer, on which SageMaker gives up after 60; between a stream's parts."""

    connect: float = 10.0
    answer: float = 70.0
    gap: float = 120.0


TIMEOUTS = Timeouts()


class Runtime:
    """Calls about one endpoint. Safe among threads.

    Args:
        endpoint_name: as `lmi deploy up` named it.
        region: None: what boto3 is set to.
        component: the inference component (an adapter is one too); None: none, or the only one there is.
        endpoint_url: another address than AWS's, for the emulator.
        session: boto3's, for credentials of another profile or role.
        report: called before a pause that precedes another attempt.
        connections: how many requests may be under way at once.

    Raises:
        NotSent: there is no region.
    """

    def __init__(
        self,
        endpoint_name: str,
        region: str | None = None,
        *,
        component: str | None = None,
        endpoint_url: str | None = None,
        session: Any = None,
        patience: Patience = PATIENT,
        timeouts: Timeouts = TIMEOUTS,
        report: Callable[[NotStarted, float], None] | None = None,
        connections: int = 10,
    ) -> None:
        self.endpoint_name = endpoint_name
        self.component = component
        self.session = session or boto_session(region, endpoint_url)
        self.region: str = region or self.session.region_name or ""
        if not self.region:
            raise NotSent("no region is set", "Give --region (in Python: region=), or set AWS_REGION.")
        self._endpoint_url = endpoint_url
        self._patience = patience
        self._timeouts = timeouts
        self._report = report
        self._connections = connections
        self._lock = threading.Lock()  # a session makes one client at a time
        self._clients: dict[float, Any] = {}

    def invoke(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """InvokeEndpoint; `Body` of what is returned is read to its end.

        Args:
            request: boto3's arguments but the endpoint's name; so in the other two.

        Raises:
            RequestFailed: see `errors.py`; so do the other two.
        """
        client = self._client  # making it takes time that is no attempt's

        def call(arguments: dict[str, Any]) -> dict[str, Any]:
            response: dict[str, Any] = client.invoke_endpoint(**arguments)
            return {**response, "Body": response["Body"].read()}

        return self._call(call, request)

    def stream(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """InvokeEndpointWithResponseStream; `Body` is botocore's event stream."""
        client = self._streaming
        return self._call(lambda arguments: client.invoke_endpoint_with_response_stream(**arguments), request)

    def submit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """InvokeEndpointAsync."""
        client = self._client
        return self._with_retries(lambda: client.invoke_endpoint_async(EndpointName=self.endpoint_name, **request))

    @property
    def base_url(self) -> str:
        """The address of this endpoint's routes: the partition's, or the one that was given."""
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
                self._clients[read_timeout] = self._new_client(read_timeout)
            return self._clients[read_timeout]

    def _new_client(self, read_timeout: float) -> Any:
        config = Config(
            connect_timeout=self._timeouts.connect,
            read_timeout=read_timeout,
            tcp_keepalive=True,
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=self._connections,
            user_agent_extra="lmi-client",
        )
        return self.session.client(
            "sagemaker-runtime", region_name=self.region, endpoint_url=self._endpoint_url, config=config
        )


def check_size(body: bytes) -> None:
    """Raises NotSent beyond what SageMaker can take; warns where it may not."""
    if len(body) > MAX_BYTES:
        raise NotSent(
            f"the request has {len(body):,} bytes; SageMaker takes at most {MAX_BYTES:,}",
            "Asynchronous inference takes up to 1 GB from S3.",
        )
    if len(body) > WARN_BYTES:
        warnings.warn(f"{len(body):,} bytes: SageMaker may take only {WARN_BYTES:,}", LargePayload, stacklevel=5)


class _NeedsComponent(NotSent): ...
