"""moto does not simulate policies: botocore's own stub stands for IAM, and validates what it is asked."""

from __future__ import annotations

from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from deploy.aws import Aws
from deploy.errors import DeployError, NotAllowed
from deploy.iam.simulation import Denial, denials

ROLE = "arn:aws:iam::123456789012:role/lmi"


POLICY = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Sid": "Role",
            "Effect": "Allow",
            "Action": ["iam:PassRole"],
            "Resource": [ROLE],
            "Condition": {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}},
        },
        {
            "Sid": "Data",
            "Effect": "Allow",
            "Action": ["s3:GetObject"],
            "Resource": ["arn:aws:s3:::b/*", "arn:aws:s3:::c/*"],
        },
    ],
}


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> tuple[Aws, Stubber]:
    aws = Aws("us-east-1")
    client = boto3.client("iam")
    monkeypatch.setattr(aws, "client", lambda service: client)
    stubber = Stubber(client)
    stubber.activate()
    return aws, stubber


def result(action: str, resource: str, decision: str, **more: Any) -> dict[str, Any]:
    return {"EvalActionName": action, "EvalResourceName": resource, "EvalDecision": decision, **more}


def test_what_is_denied_is_named_with_its_resource(stub: tuple[Aws, Stubber]) -> None:
    aws, stubber = stub
    stubber.add_response(
        "simulate_principal_policy",
        {"EvaluationResults": [result("iam:PassRole", ROLE, "explicitDeny")]},
        {
            "PolicySourceArn": ROLE,
            "ActionNames": ["iam:PassRole"],
            "ResourceArns": [ROLE],
            "ContextEntries": [
                {
                    "ContextKeyName": "iam:PassedToService",
                    "ContextKeyValues": ["sagemaker.amazonaws.com"],
                    "ContextKeyType": "string",
                }
            ],
        },
    )
    each = [
        {"EvalResourceName": "arn:aws:s3:::b/x", "EvalResourceDecision": "allowed"},
        {"EvalResourceName": "arn:aws:s3:::c/x", "EvalResourceDecision": "implicitDeny"},
    ]
    stubber.add_response(
        "simulate_principal_policy",
        {"EvaluationResults": [result("s3:GetObject", "*", "implicitDeny", ResourceSpecificResults=each)]},
        {
            "PolicySourceArn": ROLE,
            "ActionNames": ["s3:GetObject"],
            "ResourceArns": ["arn:aws:s3:::b/x", "arn:aws:s3:::c/x"],
            "ContextEntries": [],
        },
    )
    assert denials(aws, ROLE, POLICY) == (
        Denial("iam:PassRole", ROLE, "explicitDeny"),
        Denial("s3:GetObject", "arn:aws:s3:::c/x", "implicitDeny"),
    )
    stubber.assert_no_pending_responses()


def test_who_may_not_simulate_is_told_what_that_needs(stub: tuple[Aws, Stubber]) -> None:
    aws, stubber = stub
    stubber.add_client_error("simulate_principal_policy", "AccessDenied", "no", expected_params=None)
    with pytest.raises(NotAllowed) as raised:
        denials(aws, ROLE, POLICY)
    assert "iam:SimulatePrincipalPolicy" in raised.value.advice


def test_a_role_that_is_not_there(stub: tuple[Aws, Stubber]) -> None:
    aws, stubber = stub
    stubber.add_client_error("simulate_principal_policy", "NoSuchEntity", "cannot be found")
    with pytest.raises(DeployError, match="role/lmi: SimulatePrincipalPolicy: NoSuchEntity"):
        denials(aws, ROLE, POLICY)
