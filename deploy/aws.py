"""boto3 clients with one configuration for all commands, and boto3's errors as `DeployError`s."""

from __future__ import annotations

import os
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError

from deploy.credentials import NOT_SIGNED_IN, NOT_VALID, SIGN_IN, SIGN_IN_AGAIN
from deploy.diagnostics.advice import advice
from deploy.errors import DeployError, NotAllowed, SpecError

_CONFIG = Config(retries={"total_max_attempts": 5, "mode": "standard"}, user_agent_extra="lmi-deploy")
_DENIED = ("AccessDeniedException", "AccessDenied", "UnauthorizedOperation", "403")
_GONE = ("ObjectNotFoundException", "ResourceNotFound", "ResourceNotFoundException")


class Aws:
    """AWS in one account and region.

    Args:
        region: None: AWS_REGION, else boto3's own setting.

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
        """Return a client of the service. AWS_ENDPOINT_URL and AWS_ENDPOINT_URL_<SERVICE> redirect it."""
        if service not in self._clients:
            self._clients[service] = self._session.client(service, config=_CONFIG)
        return self._clients[service]

    @property
    def partition(self) -> str:
        """The region's part of AWS: `aws`, `aws-cn`, and others."""
        return str(self._session.get_partition_for_region(self.region))

    def account(self) -> str:
        """Ask STS for the account's twelve digits."""
        return str(self.client("sts").get_caller_identity()["Account"])


def no_region() -> SpecError:
    return SpecError("no region is set", "Give --region, set AWS_REGION, or write region: into the specification.")


def error_code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def is_missing(error: ClientError) -> bool:
    """Whether the error means "does not exist". SageMaker has no error code for it, only a message."""
    message = str(error.response.get("Error", {}).get("Message", "")).lower()
    return error_code(error) in _GONE or (
        error_code(error).startswith("Validation") and ("could not find" in message or "does not exist" in message)
    )


def is_denied(error: ClientError) -> bool:
    """Whether the caller's policies do not allow the call."""
    return error_code(error) in _DENIED


def as_deploy_error(error: BotoCoreError | ClientError) -> DeployError:
    """Convert an error of boto3, with advice."""
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
            return NotAllowed(message, "`lmi deploy iam` prints what the deployer and the role must be allowed.")
        return DeployError(message, advice(message))
    return DeployError(str(error))
