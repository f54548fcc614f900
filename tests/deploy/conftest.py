"""Keep every test below away from AWS and the hub: fake credentials, and an address where nothing listens."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.loaders import Loader

from deploy.aws import Aws

_NOWHERE = "http://127.0.0.1:9"  # where nothing listens: a test that asks AWS without `cloud` fails at once


@pytest.fixture(autouse=True)
def _no_aws(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fake credentials, no configuration of the user's, and an address where nothing is."""
    for name in (
        "AWS_PROFILE",
        "AWS_SESSION_TOKEN",
        "AWS_ROLE_ARN",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_DEFAULT_PROFILE",
        "HF_TOKEN",
        "HF_ENDPOINT",
    ):
        monkeypatch.delenv(name, raising=False)
    nothing = str(tmp_path_factory.getbasetemp() / "no-aws-configuration")
    for name, value in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": nothing,
        "AWS_SHARED_CREDENTIALS_FILE": nothing,
        "AWS_ENDPOINT_URL": _NOWHERE,
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session", autouse=True)
def _models_read_once() -> Iterator[None]:
    """boto3 looks for megabytes of JSON, and reads them, for each client of each session: here once for all tests."""
    loader = Loader()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "search_paths", property(lambda loader: [*loader._search_paths]))  # each session adds one
        patch.setattr("botocore.session.create_loader", lambda path: loader)
        yield


@pytest.fixture(scope="module", autouse=True)
def _clients_made_once() -> Iterator[None]:
    """A client takes boto3 as much computing as several calls: the commands of a file's tests share them."""
    made: dict[tuple[Any, ...], dict[str, Any]] = {}
    init = Aws.__init__

    def start(aws: Aws, region: str | None = None) -> None:
        init(aws, region)
        settings = sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS"))
        aws._clients = made.setdefault((aws.region, *settings), {})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Aws, "__init__", start)
        yield


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds for which `calls.call` would have waited."""
    waited: list[float] = []
    monkeypatch.setattr("deploy.deployer.calls.pause", waited.append)
    return waited


@pytest.fixture(autouse=True)
def _boto3_does_not_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own tries follow each other at once."""
    monkeypatch.setattr("botocore.endpoint.time", types.SimpleNamespace(sleep=lambda seconds: None))
