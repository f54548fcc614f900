"""Create boto3 clients with one configuration for all commands, and convert boto3 errors to `DeployError`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError
from botocore.parsers import ResponseParserError

from deploy import web_pages
from deploy.credentials import NOT_SIGNED_IN, NOT_VALID, SIGN_IN, SIGN_IN_AGAIN
from deploy.diagnostics import advice
from deploy.errors import DeployError, NotAllowed, SpecError

_T = TypeVar("_T")

_CONFIG = Config(retries={"total_max_attempts": 5, "mode": "standard"}, user_agent_extra="lmi-deploy")
_QUICK = _CONFIG.merge(Config(connect_timeout=3, read_timeout=10, retries={"total_max_attempts": 2}))
"""Configuration for optional calls, which must fail quickly if AWS is unreachable."""

_DENIED = ("AccessDeniedException", "AccessDenied", "UnauthorizedOperation", "403")
_GONE = ("ObjectNotFoundException", "ResourceNotFound", "ResourceNotFoundException")


class Aws:
    """Clients for AWS services in one account and region.

    Args:
        region: region to use. The default is AWS_REGION, or else the region in boto3's configuration.

    Raises:
        SpecError: no region is set.
    """

    def __init__(self, region: str | None = None) -> None:
        self._session = boto3.session.Session(region_name=region or os.environ.get("AWS_REGION"))
        if self._session.region_name is None:
            raise no_region()
        self.region: str = self._session.region_name
        self._clients: dict[str, Any] = {}

    def client(self, service: str) -> Any:
        """Return a client for the service. AWS_ENDPOINT_URL and AWS_ENDPOINT_URL_<SERVICE> override its endpoint."""
        if service not in self._clients:
            self._clients[service] = web_pages.refused(self._session.client(service, config=_CONFIG))
        return self._clients[service]

    def quick_client(self, service: str, region: str) -> Any:
        """Return a client with short timeouts and one retry."""
        return self._session.client(service, region_name=region, config=_QUICK)

    @property
    def partition(self) -> str:
        """Return the partition, such as `aws`. Credentials must not be sent to another partition."""
        return str(self._session.get_partition_for_region(self.region))

    def account(self) -> str:
        """Return the twelve-digit account ID that STS reports."""
        return str(self.client("sts").get_caller_identity()["Account"])


def pages(aws: Aws, service: str, operation: str, field: str, **arguments: Any) -> Iterator[Any]:
    """Yield the items of a paginated list.

    Args:
        operation: name of the boto3 method, such as `list_models`.
        field: name of the list in each page. A page without it counts as empty.
        arguments: arguments of the operation.
    """
    for page in aws.client(service).get_paginator(operation).paginate(**arguments):
        yield from page.get(field, ())


def components_of(aws: Aws, endpoint: str) -> list[str]:
    """Return the sorted names of an endpoint's inference components, including adapters."""
    items = pages(aws, "sagemaker", "list_inference_components", "InferenceComponents", EndpointNameEquals=endpoint)
    return sorted(str(item["InferenceComponentName"]) for item in items)


def variants_of(description: Mapping[str, Any]) -> list[Any]:
    """Return the variants of an endpoint or an endpoint configuration, including shadow variants."""
    return [*description.get("ProductionVariants", ()), *description.get("ShadowProductionVariants", ())]


def no_region() -> SpecError:
    return SpecError("no region is set", "Pass --region, set AWS_REGION, or add region: to the specification.")


def error_code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def error_message(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Message", ""))


def is_missing(error: ClientError) -> bool:
    """Return whether the error means that a resource does not exist. SageMaker reports this only in the message."""
    message = error_message(error).lower()
    return error_code(error) in _GONE or (
        error_code(error).startswith("Validation") and ("could not find" in message or "does not exist" in message)
    )


def unless_missing(ask: Callable[[], _T]) -> _T | None:
    """Return the result of `ask`, or None if AWS reports that the resource does not exist."""
    try:
        return ask()
    except ClientError as error:
        if is_missing(error):
            return None
        raise


def is_denied(error: ClientError) -> bool:
    """Return whether the caller's policies do not allow the call."""
    return error_code(error) in _DENIED


def as_deploy_error(error: BotoCoreError | ClientError | ResponseParserError) -> DeployError:
    """Convert a boto3 error to a `DeployError` with advice."""
    if isinstance(error, ResponseParserError):
        return DeployError(f"AWS's response cannot be parsed: {str(error).splitlines()[0]}")
    if isinstance(error, NoCredentialsError):
        return NotAllowed("no AWS credentials were found", SIGN_IN)
    if isinstance(error, NOT_SIGNED_IN):
        return NotAllowed(f"no AWS credentials: {error}", SIGN_IN_AGAIN)
    if isinstance(error, NoRegionError):
        return no_region()
    if isinstance(error, ClientError):
        message = f"{error.operation_name}: {error_code(error)}: {error.response.get('Error', {}).get('Message', '')}"
        if error_code(error) in NOT_VALID:
            return NotAllowed(message, SIGN_IN_AGAIN)
        if is_denied(error):
            return NotAllowed(message, "`lmi deploy iam` prints the permissions that the deployer and the role need.")
        return DeployError(message, advice(message))
    return DeployError(str(error))
