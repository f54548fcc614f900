"""A double of AWS on loopback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.doubles.aws import Cloud


@pytest.fixture(scope="session")
def _cloud() -> Iterator[Cloud]:
    cloud = Cloud()
    yield cloud
    cloud.stop()


@pytest.fixture
def cloud(_cloud: Cloud, _no_aws: None, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    """AWS, empty; boto3 goes there."""
    _cloud.reset()
    monkeypatch.setenv("AWS_ENDPOINT_URL", _cloud.url)
    return _cloud
