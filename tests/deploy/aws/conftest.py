"""AWS on loopback, in which the commands under test may do what the printed policies allow."""

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
def cloud(_cloud: Cloud, _no_aws: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """AWS, empty; boto3 goes there.

    The caller may do nothing: `permit`, or `Deployer`, gives it what is printed for a specification. A call that is
    denied fails the test, unless the test expects it and clears `denied`.
    """
    _cloud.reset()
    _cloud.policies.clear()
    _cloud.denied.clear()
    monkeypatch.setenv("AWS_ENDPOINT_URL", _cloud.url)
    yield _cloud
    assert _cloud.denied == []
