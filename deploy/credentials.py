"""Credentials that are missing, or not good (any more): what boto3 and AWS say of them, and what to do about it."""

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
"""What boto3 raises where it has no credentials, or none that are still good."""

NOT_VALID = (
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "InvalidSignatureException",
    "SignatureDoesNotMatch",
    "AuthFailure",
)
"""AWS's codes."""

SIGN_IN = "Sign in (aws sso login), or set AWS_PROFILE."
SIGN_IN_AGAIN = "Sign in again (aws sso login), or set AWS_PROFILE."
