"""Credentials that have expired, or are none: the same answer in every command."""

from __future__ import annotations

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ProfileNotFound,
    SSOTokenLoadError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)

from deploy.aws import as_deploy_error
from deploy.deployer.calls import why_unreachable
from deploy.errors import NotAllowed
from tests.one_test import in_one_test


@in_one_test(
    "error",
    [
        TokenRetrievalError(provider="sso", error_msg="expired"),
        SSOTokenLoadError(profile_name="p", error_msg="no token"),
        UnauthorizedSSOTokenError(),
        ProfileNotFound(profile="p"),
        ClientError({"Error": {"Code": "ExpiredToken", "Message": "expired"}}, "ListModels"),
        ClientError({"Error": {"Code": "ExpiredTokenException", "Message": "expired"}}, "ListModels"),
        ClientError({"Error": {"Code": "InvalidClientTokenId", "Message": "not valid"}}, "GetCallerIdentity"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_who_is_not_signed_in_is_to_sign_in_again(error: BotoCoreError | ClientError) -> None:
    ours = as_deploy_error(error)
    assert isinstance(ours, NotAllowed)
    assert "Sign in again" in ours.advice
    assert why_unreachable(error) is not None
