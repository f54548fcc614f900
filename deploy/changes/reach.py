"""Whether AWS can be asked at all: a plan without it is a plan all the same."""

from __future__ import annotations

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    CredentialRetrievalError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)

from deploy.aws import error_code

_NOT_SIGNED_IN = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    TokenRetrievalError,
    SSOError,
    ProfileNotFound,
)
_NOT_VALID = (
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "InvalidSignatureException",
    "SignatureDoesNotMatch",
    "AuthFailure",
)


def why_unreachable(error: BotoCoreError | ClientError) -> str | None:
    """Why AWS cannot be asked, in a few words; None: it was asked, and this is its answer."""
    if isinstance(error, _NOT_SIGNED_IN):
        return "no AWS credentials"
    if isinstance(error, ConnectionError | HTTPClientError):
        return "no connection to AWS"
    if isinstance(error, ClientError) and error_code(error) in _NOT_VALID:
        return "the AWS credentials are not valid"
    return None
