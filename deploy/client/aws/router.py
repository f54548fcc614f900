"""Call endpoints through a routing target of an inference router, which may choose one in another Region."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from botocore.exceptions import UnknownServiceError

from deploy.client.aws.runtime import WARN_BYTES, Runtime
from deploy.client.errors import NotSent

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from deploy.client.aws.runtime import Connection

_SERVICE = "sagemaker-inference-router-runtime"
_TAKES = ("Accept", "Body", "ContentType", "CustomAttributes", "InferenceId", "PrefixAwareId")
_ANSWER = 170.0  # seconds: AWS's minimum for a router's client, as a router may try a second destination


class RouterRuntime(Runtime):
    """Calls through a routing target. Its `endpoint_name` is the router's.

    Args:
        routing_target: its name in the router.
    """

    service = _SERVICE

    def __init__(self, router: str, region: str | None, routing_target: str, **connection: Unpack[Connection]) -> None:
        super().__init__(router, region, **connection)
        self._target = routing_target

    def invoke(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """InvokeInferenceRouter. Beside `Body` the result has `InvokedRoutedResourceArn` and `RoutingReason`."""
        if unknown := request.keys() - set(_TAKES):
            raise NotSent(f"{', '.join(sorted(unknown))}: an inference router takes only {', '.join(_TAKES)}")
        if len(request.get("Body", b"")) > WARN_BYTES:
            raise NotSent(f"the request has {len(request['Body']):,} bytes; a router takes at most {WARN_BYTES:,}")
        client = self._client
        arguments = {"InferenceRouterName": self.endpoint_name, "RoutingTargetName": self._target, **request}

        def call() -> dict[str, Any]:
            response: dict[str, Any] = client.invoke_inference_router(**arguments)
            return {**response, "Body": response["Body"].read()}

        return self._with_retries(call)

    def stream(self, request: Mapping[str, Any]) -> dict[str, Any]:
        raise NotSent("an inference router has no streams", "Use predict, or stream from one of its endpoints.")

    def submit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        raise NotSent("asynchronous requests through an inference router are not supported", "Send to the endpoint.")

    @property
    def base_url(self) -> str:
        raise NotSent("an inference router has no OpenAI route", "Use predict or chat, or the route of an endpoint.")

    @property
    def _client(self) -> Any:
        try:
            return self._client_for(max(self._timeouts.answer, _ANSWER))
        except UnknownServiceError:
            raise NotSent("this boto3 has no inference routers", "pip install --upgrade boto3") from None
