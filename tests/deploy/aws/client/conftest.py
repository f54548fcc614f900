"""The double of AWS, and a predictor on it. Nothing of these tests can leave the machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest

from deploy.client import Patience, Predictor, Timeouts
from tests.deploy.aws.client.double import Double, double
from tests.deploy.doubles.deployments import PLAIN, printed

ENDPOINT: dict[str, Any] = {**PLAIN, "name": "e"}
SCALED: dict[str, Any] = {
    **ENDPOINT,
    "components": [{"name": name, "copies": 0} for name in ("base", "french", "a", "b", "c")],
}
ASYNC: dict[str, Any] = {**ENDPOINT, "scaling": None, "async": {"output": "s3://b-1/", "failures": "s3://b-1/failed/"}}
"""What the tests' endpoints were made from; the caller has their printed policies of the invoker."""


@pytest.fixture(autouse=True)
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    with double() as made:
        made.policies = [printed(content, "invoker") for content in (ENDPOINT, SCALED, ASYNC)]
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
        for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION"):
            monkeypatch.delenv(name, raising=False)
        yield made
        assert made.denied == []


@pytest.fixture(scope="session")
def boto() -> boto3.session.Session:
    """One session: it keeps AWS's service descriptions, which take long to read."""
    return boto3.session.Session("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")


@pytest.fixture
def predictor(aws: Double, boto: boto3.session.Session) -> Predictor:
    return Predictor("e", "us-east-1", session=boto, patience=Patience(first=0.01))


@pytest.fixture
def impatient(aws: Double, boto: boto3.session.Session) -> Predictor:
    """One that soon gives up what stalls."""
    return Predictor("e", "us-east-1", session=boto, timeouts=Timeouts(answer=2, gap=2))
