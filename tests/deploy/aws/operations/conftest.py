"""Whoever looks at the endpoints of these tests has the policies that are printed for them, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.doubles.aws import Cloud
from tests.deploy.doubles.deployments import PLAIN, permit

CHAT: dict[str, Any] = {**PLAIN, "name": "chat"}
COMPONENTS: dict[str, Any] = {
    **CHAT,
    "components": [
        {"name": "chat-a", "adapters": [{"name": "chat-lora", "artifact": "s3://adapters/a.tar.gz"}]},
        {"name": "chat-b"},
    ],
}
"""What `make_endpoint` makes by hand."""


@pytest.fixture(autouse=True)
def _permitted(request: pytest.FixtureRequest) -> None:
    if "cloud" in request.fixturenames:
        cloud: Cloud = request.getfixturevalue("cloud")
        permit(cloud, CHAT, COMPONENTS, *({**CHAT, "name": absent} for absent in ("none", "nope")))
