"""Classify errors: temporary failures of AWS, and reasons why it cannot be reached at all."""

from __future__ import annotations

from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError

from deploy.aws import error_code
from deploy.credentials import NOT_SIGNED_IN, NOT_VALID
from deploy.web_pages import WebPage

_TEMPORARY = (
    "InternalFailure", "InternalServerError", "InternalError", "InternalServiceError", "ServiceUnavailable",
    "RequestLimitExceeded", "RequestThrottled", "SlowDown", "Throttling", "ThrottledException", "ThrottlingException",
    "TooManyRequestsException",
)  # fmt: skip


def is_temporary(error: BotoCoreError | ClientError) -> bool:
    """Whether a later attempt may succeed: AWS is busy, or the network is down."""
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return error_code(error) in _TEMPORARY or status >= 500
    return isinstance(error, ConnectionError | HTTPClientError)


def why_unreachable(error: BotoCoreError | ClientError) -> str | None:
    """Return in a few words why AWS cannot be asked; None: it answered."""
    if isinstance(error, NOT_SIGNED_IN):
        return "no AWS credentials"
    if isinstance(error, ConnectionError | HTTPClientError | WebPage):
        return "no connection to AWS"
    if isinstance(error, ClientError) and error_code(error) in NOT_VALID:
        return "the AWS credentials are not valid"
    return None
