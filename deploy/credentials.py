"""Errors that boto3 and AWS report for missing or invalid credentials, and advice on them."""

from botocore.exceptions import (
    CredentialRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)

NOT_SIGNED_IN = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    TokenRetrievalError,
    SSOError,
    ProfileNotFound,
)
"""boto3 exceptions for missing or expired credentials."""

NOT_VALID = (
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "InvalidSignatureException",
    "SignatureDoesNotMatch",
    "AuthFailure",
)
"""AWS error codes for invalid or expired credentials."""

SIGN_IN = "Sign in (aws sso login), or set AWS_PROFILE."
SIGN_IN_AGAIN = "Sign in again (aws sso login), or set AWS_PROFILE."
