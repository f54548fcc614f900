"""The emulator's inference router: it has the endpoint's name, any routing target, and one destination."""

from __future__ import annotations

from collections.abc import Mapping

from deploy.local.answers import ApiError
from deploy.local.endpoint import ACCOUNT, Endpoint
from deploy.local.headers import CUSTOM_ATTRIBUTES, Operation

ROUTED = Operation("Content-Type", "Accept", False, (CUSTOM_ATTRIBUTES,))

_TARGET = "X-Amzn-SageMaker-Routing-Target-Name"
_CODES = {"ValidationError": "ValidationException", "ServiceUnavailable": "ServiceUnavailableException"}


def check_target(headers: Mapping[str, str]) -> None:
    """Check that a request names its routing target.

    Raises:
        ApiError: it names none.
    """
    if not headers.get(_TARGET):
        raise ApiError(400, "ValidationError", f"Header {_TARGET} is required.")


def check_body(body: bytes, limit: int) -> None:
    """Check the size of a request's body.

    Raises:
        ApiError: it is empty, or larger than a router takes.
    """
    if not body:
        raise ApiError(400, "ValidationError", "The request's body can't be empty.")
    if len(body) > limit:
        raise ApiError(413, "ValidationError", f"Request body is larger than {limit} bytes, which a router takes.")


def as_routers(error: ApiError) -> ApiError:
    """Return an error under the name that the router's API has for it."""
    return ApiError(error.status, _CODES.get(error.code, error.code), str(error), **error.members)


def destination(endpoint: Endpoint, region: str) -> dict[str, str]:
    """Return the headers that tell which destination served, and why."""
    arn = f"arn:aws:sagemaker:{region}:{ACCOUNT}:endpoint/{endpoint.name}"
    return {
        "X-Amzn-SageMaker-Invoked-Routed-Resource-Arn": arn,
        "X-Amzn-SageMaker-Invoked-Routing-Reason": "local-preferred",
    }
