"""Ask IAM whether a principal may do what a policy allows (`lmi deploy iam --check`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from botocore.exceptions import ClientError

from deploy.aws import Aws, as_deploy_error
from deploy.errors import DeployError, NotAllowed
from deploy.iam.policies import Policy

_SESSION = re.compile(r"^arn:([a-z-]+):sts::([0-9]{12}):assumed-role/([^/]+)/.+$")


class Denial(NamedTuple):
    """A denied action.

    Attributes:
        action: action, such as `sagemaker:CreateModel`.
        resource: the ARN of the resource, or `*`.
        decision: IAM's decision: implicitDeny (no policy allows the action) or explicitDeny (a policy denies it).
    """

    action: str
    resource: str
    decision: str


def denials(aws: Aws, principal: str, policy: Policy) -> tuple[Denial, ...]:
    """Return the actions in the policy that are denied to the principal.

    Raises:
        NotAllowed: the caller is not allowed to simulate policies.
        DeployError: the principal does not exist.
    """
    return tuple(item for statement in policy["Statement"] for item in _of_statement(aws, principal, statement))


def caller(aws: Aws) -> str:
    """Return the ARN of the user or role that the caller's credentials belong to."""
    arn = str(aws.client("sts").get_caller_identity()["Arn"])
    if (session := _SESSION.match(arn)) is None:
        return arn
    partition, account, role = session.groups()
    try:
        return str(aws.client("iam").get_role(RoleName=role)["Role"]["Arn"])  # with its path, which a session omits
    except ClientError:
        return f"arn:{partition}:iam::{account}:role/{role}"


def _of_statement(aws: Aws, principal: str, statement: dict[str, Any]) -> Iterator[Denial]:
    request = {
        "PolicySourceArn": principal,
        "ActionNames": statement["Action"],
        "ResourceArns": [_example(resource) for resource in statement["Resource"]],
        "ContextEntries": list(_context(statement.get("Condition", {}))),
    }
    try:
        for page in aws.client("iam").get_paginator("simulate_principal_policy").paginate(**request):
            for result in page["EvaluationResults"]:
                for item in result.get("ResourceSpecificResults") or [result]:  # IAM lists each resource separately
                    if (decision := item.get("EvalResourceDecision", item.get("EvalDecision"))) != "allowed":
                        resource = item.get("EvalResourceName", result.get("EvalResourceName", "*"))
                        yield Denial(result["EvalActionName"], resource, str(decision))
    except ClientError as error:
        failure = as_deploy_error(error)
        if isinstance(failure, NotAllowed):
            raise NotAllowed(
                str(failure),
                "--check needs iam:SimulatePrincipalPolicy on the principal that it checks. `lmi deploy iam --who "
                "checker` prints that policy.",
            ) from None
        raise DeployError(f"{principal}: {failure}", failure.advice) from None


def _example(resource: str) -> str:
    """Return an example that matches a pattern, because IAM cannot simulate patterns other than `*`."""
    return resource if resource == "*" else resource.replace("*", "x")


def _context(condition: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield context entries for the simulation that satisfy the condition."""
    for operator, keys in condition.items():
        for key, values in keys.items():
            items = values if isinstance(values, list) else [values]
            several = operator.startswith("ForA")
            yield {
                "ContextKeyName": key,
                "ContextKeyValues": [_example(str(value)) for value in (items if several else items[:1])],
                "ContextKeyType": ("boolean" if operator == "Bool" else "string") + "List" * several,
            }
