"""Presigned URLs, made by botocore's own signer."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from urllib.parse import parse_qsl, urlsplit

import pytest
from botocore.auth import SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from deploy.emulator.access import check_presigned
from deploy.emulator.answers import ApiError


def presigned(seconds: int = 60, service: str = "sagemaker") -> dict[str, str]:
    request = AWSRequest("POST", "http://127.0.0.1/endpoints/e/invocations", data=b"{}")
    SigV4QueryAuth(Credentials("AKID", "secret"), service, "eu-west-1", expires=seconds).add_auth(request)
    return dict(parse_qsl(urlsplit(request.url).query))


def test_a_presigned_url_is_taken() -> None:
    assert check_presigned(presigned(), "eu-west-1", datetime.now(timezone.utc)) == "eu-west-1"


@pytest.mark.parametrize(("query", "code"), [
    (presigned(service="s3"), "InvalidSignatureException"),
    (presigned(700_000), "IncompleteSignature"),
    ({**presigned(), "X-Amz-Expires": "soon"}, "IncompleteSignature"),
    ({"X-Amz-Signature": "0"}, "IncompleteSignature"),
])  # fmt: skip
def test_another_one_is_refused(query: dict[str, str], code: str) -> None:
    with pytest.raises(ApiError) as raised:
        check_presigned(query, None, datetime.now(timezone.utc))
    assert code in str(vars(raised.value))


def test_an_expired_one_and_one_of_another_region_are_refused() -> None:
    now = datetime.now(timezone.utc)
    for region, at in ((None, now + timedelta(hours=1)), ("us-east-1", now)):
        with pytest.raises(ApiError):
            check_presigned(presigned(), region, at)
