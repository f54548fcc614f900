"""The Hugging Face token out of Secrets Manager, which moto plays."""

from __future__ import annotations

import json
from collections.abc import Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer

from handler.container.start import with_token
from handler.core.errors import ConfigError

REGION = "eu-west-1"
ARN = f"arn:aws:secretsmanager:{REGION}:123456789012:secret:hf-AbCdEf"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield "http://{}:{}".format(*server.get_host_and_port())
    finally:
        server.stop()


@pytest.fixture(autouse=True)
def aws(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)  # the region is the ARN's


def secret(text: str, name: str) -> str:
    arn = boto3.client("secretsmanager", region_name=REGION).create_secret(Name=name, SecretString=text)["ARN"]
    assert isinstance(arn, str)
    return arn


@pytest.mark.parametrize(
    "text",
    ["hf_abc\n", "\ufeffhf_abc\r\n", json.dumps({"HF_TOKEN": "hf_abc", "other": "x"}), json.dumps({"token": "hf_abc"})],
)
def test_token_is_the_text_or_a_member(text: str, request: pytest.FixtureRequest) -> None:
    arn = secret(text, f"good-{abs(hash(request.node.name))}")
    assert with_token({"HF_TOKEN_SECRET_ARN": arn, "A": "b"}) == {
        "HF_TOKEN_SECRET_ARN": arn,
        "A": "b",
        "HF_TOKEN": "hf_abc",
    }


def test_without_a_secret_nothing_is_asked() -> None:
    environ = {"HF_TOKEN": "hf_abc"}
    assert with_token(environ) is environ


@pytest.mark.parametrize("text", ["two words", "{broken", json.dumps({"a": "x", "b": "y"})])
def test_what_is_no_token_is_refused_without_showing_it(text: str, request: pytest.FixtureRequest) -> None:
    arn = secret(text, f"bad-{abs(hash(request.node.name))}")
    with pytest.raises(ConfigError, match=arn) as error:
        with_token({"HF_TOKEN_SECRET_ARN": arn})
    assert text not in str(error.value)


def test_a_secret_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="ResourceNotFoundException: the secret does not exist"):
        with_token({"HF_TOKEN_SECRET_ARN": ARN})


def test_a_secret_names_the_profile_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match=r"cannot be read: The config profile \(nobody\) could not be found \("):
        with_token({"HF_TOKEN_SECRET_ARN": ARN})


def test_unreachable_service_speaks_of_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"EndpointConnectionError.*network isolation.*interface endpoint"):
        with_token({"HF_TOKEN_SECRET_ARN": ARN})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "this container is offline"),
        ({"HF_TOKEN": "hf_abc"}, "HF_TOKEN and HF_TOKEN_SECRET_ARN are both set"),
        ({"HF_TOKEN_SECRET_ARN": "hf_abc"}, "is not a secret's ARN"),
    ],
)
def test_what_cannot_be_is_refused_before_asking(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_token({"HF_TOKEN_SECRET_ARN": ARN, **environ})


def test_access_denied_names_the_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.exceptions import ClientError

    class Denied:
        def get_secret_value(self, **_: str) -> None:
            raise ClientError({"Error": {"Code": "AccessDeniedException", "Message": ""}}, "GetSecretValue")

    monkeypatch.setattr(boto3, "client", lambda *_, **__: Denied())
    with pytest.raises(ConfigError, match="the execution role needs secretsmanager:GetSecretValue"):
        with_token({"HF_TOKEN_SECRET_ARN": ARN})
