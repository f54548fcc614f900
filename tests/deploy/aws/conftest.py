"""AWS on loopback, in which the commands under test may do what the printed policies allow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.httpsession import URLLib3Session

from deploy.cli.main import main as run
from tests.deploy.doubles.aws import Cloud
from tests.deploy.doubles.deployments import Deployer
from tests.deploy.doubles.endpoints import set_quotas


@pytest.fixture(scope="session")
def _cloud() -> Iterator[Cloud]:
    cloud = Cloud()
    yield cloud
    cloud.stop()


@pytest.fixture
def cloud(_cloud: Cloud, _no_aws: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """AWS, empty; boto3 goes there, in this process without a socket.

    The caller may do nothing: `permit`, or `Deployer`, gives it what is printed for a specification. A call that is
    denied fails the test, unless the test expects it and clears `denied`.
    """
    _cloud.reset()
    _cloud.policies.clear()
    _cloud.denied.clear()
    monkeypatch.setenv("AWS_ENDPOINT_URL", _cloud.url)
    by_socket = URLLib3Session.send

    def send(session: URLLib3Session, request: AWSPreparedRequest) -> AWSResponse:
        return _cloud.send(request) if request.url.startswith(_cloud.url) else by_socket(session, request)

    monkeypatch.setattr(URLLib3Session, "send", send)
    yield _cloud
    assert _cloud.denied == []


@pytest.fixture
def main(cloud: Cloud) -> Deployer:
    """`lmi deploy` by somebody whom the printed policy of the file allows every call that it makes."""
    return Deployer(cloud, run)


@pytest.fixture
def quotas() -> dict[str, float]:
    """The account's quotas; moto knows none."""
    return {f"ml.g6e.{size} for endpoint usage": 8.0 for size in ("2xlarge", "4xlarge", "12xlarge")}


@pytest.fixture
def only_aws(quotas: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands ask no hub and no registry, and look again at once."""
    for place in ("batch", "doctor", "plan", "up"):
        monkeypatch.setattr(f"deploy.cli.{place}.over_the_network", None)
    monkeypatch.setattr("deploy.deployer.apply.EVERY", 0.0)
    set_quotas(monkeypatch, quotas)
