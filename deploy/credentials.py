"""What AWS says of credentials that are not good (any more), and what to do about it."""

NOT_VALID = (
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "InvalidSignatureException",
    "SignatureDoesNotMatch",
    "AuthFailure",
)

SIGN_IN = "Sign in (aws sso login), or set AWS_PROFILE."
SIGN_IN_AGAIN = "Sign in again (aws sso login), or set AWS_PROFILE."
