"""The deployer of these tests has the policies that are printed for their specifications, and no other."""

from __future__ import annotations

import pytest

from tests.deploy.doubles.aws import Cloud
from tests.deploy.doubles.deployments import COMPONENTS, PLAIN, permit

CHAT = {**PLAIN, "name": "chat", "components": [{"name": "one"}, {"name": "two"}], "alarms": {}}
"""What tests of waiting make by hand."""


@pytest.fixture(autouse=True)
def _permitted(cloud: Cloud) -> None:
    permit(cloud, PLAIN, COMPONENTS, CHAT)
