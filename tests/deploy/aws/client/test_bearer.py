"""The OpenAI route's key: its bytes, its life, and the client that bears it."""

from __future__ import annotations

import base64
import datetime
import sys
import types
from urllib.parse import parse_qs, urlsplit

import boto3
import botocore.auth
import pytest
from botocore.credentials import Credentials, ReadOnlyCredentials

from deploy.client import Forbidden, NotSent, OpenAIRoute, Predictor, bearer_token
from deploy.client.runtime import BearerToken

KEYS = ("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")


@pytest.fixture
def noon(monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime.datetime(2026, 11, 20, 12, 0, 0)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *args, **kwargs: now)


def decoded(token: str) -> str:
    return base64.b64decode(token.removeprefix("sagemaker-api-key-")).decode()


@pytest.mark.usefixtures("noon")
def test_the_key_is_that_of_amazons_generator() -> None:
    """What sagemaker-core 2.27.0's token generator makes at that time of these keys."""
    token = bearer_token(ReadOnlyCredentials(*KEYS, None), "us-east-1")
    assert token.startswith("sagemaker-api-key-")
    assert decoded(token) == (
        "sagemaker.amazonaws.com/?Action=CallWithBearerToken&X-Amz-Algorithm=AWS4-HMAC-SHA256"
        "&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20261120%2Fus-east-1%2Fsagemaker%2Faws4_request"
        "&X-Amz-Date=20261120T120000Z&X-Amz-Expires=43200&X-Amz-SignedHeaders=host"
        "&X-Amz-Signature=dba38ad8b1d88d8ba3bef97fd30a730fccec89506602e683aaab35b122d82d41&Version=1"
    )


@pytest.mark.usefixtures("noon")
def test_temporary_credentials_region_and_life() -> None:
    token = bearer_token(ReadOnlyCredentials(*KEYS, "SESSION+/=TOKEN"), "eu-central-1", 900)
    query = parse_qs(urlsplit(f"https://{decoded(token)}").query)
    assert query["X-Amz-Security-Token"] == ["SESSION+/=TOKEN"]
    assert query["X-Amz-Expires"] == ["900"]
    assert "/eu-central-1/sagemaker/" in query["X-Amz-Credential"][0]
    assert query["X-Amz-Signature"] == ["c7dd4406f4ce4ce988fd71a710de357097abfd4e8d7088512b6d278ec652f90e"]


@pytest.mark.parametrize("seconds", [0, 43_201])
def test_another_life_is_refused(seconds: int) -> None:
    with pytest.raises(NotSent, match="must be 1 to 43200 s"):
        bearer_token(ReadOnlyCredentials(*KEYS, None), "us-east-1", seconds)


class Session:
    def __init__(self) -> None:
        self.credentials: Credentials | None = Credentials(*KEYS)

    def get_credentials(self) -> Credentials | None:
        return self.credentials


def test_a_key_is_kept_until_shortly_before_its_end() -> None:
    now = [1000.0]
    session = Session()
    made = BearerToken(session, "us-east-1", 3600, clock=lambda: now[0])
    first, until = made(), made._until
    assert until == 1000 + 3600 - 300
    now[0] = until - 1
    assert made() == first
    assert made._until == until
    now[0] = until
    made()
    assert made._until == until + 3300


def test_new_credentials_make_a_new_key() -> None:
    session = Session()
    made = BearerToken(session, "us-east-1")
    first = made()
    session.credentials = Credentials("AKIAI44QH8DHBEXAMPLE", KEYS[1])
    assert made() != first
    assert "AKIAI44QH8DHBEXAMPLE" in decoded(made())


def test_without_credentials_there_is_no_key() -> None:
    session = Session()
    session.credentials = None
    with pytest.raises(Forbidden, match="no AWS credentials"):
        BearerToken(session, "us-east-1")()


def test_a_key_is_not_shown() -> None:
    route = OpenAIRoute("https://x", BearerToken(Session(), "us-east-1"))
    assert "sagemaker-api-key" not in repr(route)


def test_the_routes_address(boto: boto3.session.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    addresses = [
        Predictor("e", region, component=component, session=boto).openai_route().base_url
        for region, component in [("eu-west-1", None), ("cn-north-1", None), ("us-east-1", "base")]
    ]
    assert addresses == [
        "https://runtime.sagemaker.eu-west-1.amazonaws.com/endpoints/e/openai/v1",
        "https://runtime.sagemaker.cn-north-1.amazonaws.com.cn/endpoints/e/openai/v1",
        "https://runtime.sagemaker.us-east-1.amazonaws.com/endpoints/e/inference-components/base/openai/v1",
    ]
    local = Predictor("e", "us-east-1", endpoint_url="http://127.0.0.1:8081/", session=boto)
    assert local.openai_route().base_url == "http://127.0.0.1:8081/endpoints/e/openai/v1"


def test_openais_client_asks_for_the_key_each_time(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/clients drives the real package."""
    module = types.ModuleType("openai")
    made = {}

    def client(**options: object) -> str:
        made.update(options)
        return "client"

    monkeypatch.setattr(module, "OpenAI", client, raising=False)
    monkeypatch.setitem(sys.modules, "openai", module)
    assert predictor.openai(timeout=5) == "client"
    assert made.pop("api_key") is predictor.openai_route().token
    assert made == {"base_url": predictor.openai_route().base_url, "max_retries": 0, "timeout": 5}


def test_without_the_package_it_says_so(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(NotSent, match="openai package is not installed") as caught:
        predictor.openai()
    assert "openai_route()" in caught.value.advice
