"""Asks IAM whether somebody may do what a policy of `iam.py` allows (`lmi deploy iam --check`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from botocore.exceptions import ClientError

from deploy.aws import Aws, as_ours
from deploy.errors import DeployError, NotAllowed
from deploy.iam.policies import Policy

_SESSION = re.compile(r"^arn:([a-z-]+):sts::(\d{12}):assumed-role/([^/]+)/.+$")


class Denied(NamedTuple):
    """One thing that is not allowed.

    Attributes:
        action: `sagemaker:CreateModel`.
        resource: an ARN, or `*`.
        why: IAM's word: implicitDeny (nothing allows it) or explicitDeny (something forbids it).
    """

    action: str
    resource: str
    why: str


def denied(aws: Aws, principal: str, policy: Policy) -> tuple[Denied, ...]:
    """What of the policy the principal may not do.

    Raises:
        NotAllowed: the caller may not simulate.
        DeployError: there is no such principal.
    """
    return tuple(one for statement in policy["Statement"] for one in _of_statement(aws, principal, statement))


def caller(aws: Aws) -> str:
    """Whose credentials these are: a user's ARN, or the role's that a session is of."""
    arn = str(aws.client("sts").get_caller_identity()["Arn"])
    if (session := _SESSION.match(arn)) is None:
        return arn
    partition, account, role = session.groups()
    return str(_role_arn(aws, role) or f"arn:{partition}:iam::{account}:role/{role}")


def _role_arn(aws: Aws, role: str) -> str | None:
    """With its path, which a session's ARN leaves out (as those of AWS's single sign-on have)."""
    try:
        return str(aws.client("iam").get_role(RoleName=role)["Role"]["Arn"])
    except ClientError:
        return None


def _of_statement(aws: Aws, principal: str, statement: dict[str, Any]) -> Iterator[Denied]:
    request = {
        "PolicySourceArn": principal,
        "ActionNames": statement["Action"],
        "ResourceArns": [_example(resource) for resource in statement["Resource"]],
        "ContextEntries": list(_context(statement.get("Condition", {}))),
    }
    try:
        for page in aws.client("iam").get_paginator("simulate_principal_policy").paginate(**request):
            for result in page["EvaluationResults"]:
                yield from _of_result(result)
    except ClientError as error:
        ours = as_ours(error)
        if isinstance(ours, NotAllowed):
            raise NotAllowed(
                str(ours),
                "--check needs iam:SimulatePrincipalPolicy on whom it asks about; the policies print without it.",
            ) from None
        raise DeployError(f"{principal}: {ours}", ours.advice) from None


def _of_result(result: dict[str, Any]) -> Iterator[Denied]:
    """IAM answers for each resource apart where there are several."""
    for one in result.get("ResourceSpecificResults") or [result]:
        if (decision := one.get("EvalResourceDecision", one.get("EvalDecision"))) != "allowed":
            resource = one.get("EvalResourceName", result.get("EvalResourceName", "*"))
            yield Denied(result["EvalActionName"], resource, str(decision))


def _example(resource: str) -> str:
    """One resource that a pattern means: IAM simulates no patterns but `*` alone."""
    return resource if resource == "*" else resource.replace("*", "x")


def _context(condition: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The circumstances in which the condition holds."""
    for operator, keys in condition.items():
        for key, values in keys.items():
            given = values if isinstance(values, list) else [values]
            kind = "boolean" if operator == "Bool" else "string"
            several = "List" if operator.startswith("ForA") else ""
            texts = [_example(str(value)) for value in given]
            yield {
                "ContextKeyName": key,
                "ContextKeyValues": texts if several else texts[:1],
                "ContextKeyType": kind + several,
            }
