"""The caller, as STS and IAM name it."""

from __future__ import annotations

import pytest

from deploy.aws import Aws
from deploy.iam.simulation import caller
from tests.deploy.doubles.aws import CALLER, Cloud
from tests.deploy.doubles.deployer import printed
from tests.deploy.doubles.deployments import PLAIN


@pytest.mark.parametrize(("arn", "path", "who"), [
    ("arn:aws:iam::123456789012:user/ann", None, "arn:aws:iam::123456789012:user/ann"),
    ("arn:aws:sts::123456789012:assumed-role/Dev/ann", "/sso/", "arn:aws:iam::123456789012:role/sso/Dev"),
    ("arn:aws:sts::123456789012:assumed-role/Dev/ann", None, "arn:aws:iam::123456789012:role/Dev"),
])  # fmt: skip
def test_the_caller_of_a_session_is_its_role(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, arn: str, path: str | None, who: str
) -> None:
    if path is not None:
        cloud.client("iam").create_role(RoleName="Dev", Path=path, AssumeRolePolicyDocument="{}")
    # The deployer's own role is in no specification: who has one with a path needs this beside the printed policy.
    own = {"Effect": "Allow", "Action": "iam:GetRole", "Resource": "arn:aws:iam::123456789012:role/*"}
    cloud.policies[CALLER] = [printed(PLAIN), {"Statement": [own]}]
    aws = Aws("us-east-1")
    monkeypatch.setattr(aws.client("sts"), "get_caller_identity", lambda: {"Arn": arn})
    assert caller(aws) == who
