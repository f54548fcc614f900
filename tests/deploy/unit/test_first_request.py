"""The command that `up` ends with can be run as it stands."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.cli.up import first_request
from deploy.spec import Spec

BASE: dict[str, Any] = {
    "name": "chat",
    "role": "arn:aws:iam::123456789012:role/lmi",
    "image": {"uri": "123456789012.dkr.ecr.us-east-1.amazonaws.com/lmi:1"},
    "model": {"id": "org/model"},
    "instance": {"type": "ml.g5.xlarge"},
}


@pytest.mark.parametrize(
    ("more", "command"),
    [
        ({}, "lmi deploy chat chat"),
        ({"async": {"output": "s3://answers/a"}}, "lmi deploy invoke chat --async 'Hello'"),
        ({"components": [{"name": "one"}]}, "lmi deploy chat chat"),
        ({"components": [{"name": "one"}, {"name": "two"}]}, "lmi deploy chat chat --component one"),
        ({"endpoint": "both", "components": [{"name": "rank"}]}, "lmi deploy chat both --component rank"),
    ],
)
def test_it_names_what_the_endpoint_asks_for(more: dict[str, Any], command: str) -> None:
    assert first_request(Spec.model_validate(BASE | more)) == command
