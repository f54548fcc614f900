"""IAM's users and roles of the rehearsal: what their policies are, who may take a role, and simulations."""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from moto.core.responses import ActionResult
from moto.iam.models import Role, User, iam_backends
from moto.iam.responses import IamResponse

from deploy.rehearsal.identity_policy import Need, allowed
from deploy.rehearsal.sagemaker import ACCOUNT

Policy = Mapping[str, Any]


def policies_of(caller: str) -> list[Policy]:
    """Return the policies of somebody: of an access key's user with its groups, or of a user or role by its ARN."""
    if (role := _role(caller)) is not None:
        return [*map(_document, role.policies.values()), *_attached(role.managed_policies)]
    if (user := _user(caller)) is None:
        return []
    holders = [user, *(group for group in _backend(user.arn).groups.values() if user in group.users)]
    return [
        policy
        for one in holders
        for policy in (*map(_document, one.policies.values()), *_attached(one.managed_policies))
    ]


def arn_of(key: str) -> str | None:
    """Return the ARN of an access key's user; None: nobody has it."""
    user = _user(key)
    return None if user is None else str(user.arn)


def trusts_sagemaker(arn: str) -> bool:
    """Whether there is such a role, and SageMaker may take it."""
    role = _role(arn)
    if role is None:
        return False
    return any(_lets_in(statement) for statement in _listed(_document(role.assume_role_policy_document), "Statement"))


def install(owner: str) -> None:
    """Answer simulations, which moto lacks.

    Args:
        owner: ARN of the account's owner, who may do everything.
    """

    def simulate_principal_policy(self: IamResponse) -> ActionResult:
        source, context = self.params["PolicySourceArn"], dict(map(_entry, self.params.get("ContextEntries", ())))
        whole: list[Policy] = [{"Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}]
        policies = whole if source == owner else policies_of(source)
        needs = [
            Need(action, resource, context)
            for action in self.params["ActionNames"]
            for resource in self.params.get("ResourceArns") or ["*"]
        ]
        results = [
            {
                "EvalActionName": need.action,
                "EvalResourceName": need.resource,
                "EvalDecision": "allowed" if allowed(policies, need) else "implicitDeny",
            }
            for need in needs
        ]
        return ActionResult({"EvaluationResults": results, "IsTruncated": False})

    IamResponse.simulate_principal_policy = simulate_principal_policy  # type: ignore[attr-defined]


def _entry(entry: Mapping[str, Any]) -> tuple[str, str | list[str]]:
    """Return name and value of a condition key."""
    values = entry["ContextKeyValues"]
    return str(entry["ContextKeyName"]), values if str(entry["ContextKeyType"]).endswith("List") else values[0]


def _lets_in(statement: Mapping[str, Any]) -> bool:
    principal = statement.get("Principal", {})
    services = _listed(principal, "Service") if isinstance(principal, dict) else []
    return statement.get("Effect") == "Allow" and "sagemaker.amazonaws.com" in services


def _role(arn: str) -> Role | None:
    if not re.match(r"arn:[^:]+:iam::", arn):
        return None
    return next((role for role in _backend(arn).roles.values() if role.arn == arn), None)


def _user(caller: str) -> User | None:
    """Return the user of an access key, or by an ARN."""
    return next((user for user in _users() if caller == user.arn or caller in _keys(user)), None)


def _users() -> Iterator[User]:
    return (user for backend in iam_backends[ACCOUNT].values() for user in backend.users.values())


def _keys(user: User) -> set[str]:
    return {key.access_key_id for key in user.access_keys if key.status == "Active"}


def _backend(arn: str) -> Any:
    return iam_backends[ACCOUNT][arn.split(":")[1]]


def _attached(policies: Mapping[str, Any]) -> Iterable[Policy]:
    return [_document(policy.document) for policy in policies.values()]


def _document(text: str) -> Policy:
    content: Policy = json.loads(text if text.lstrip().startswith("{") else urllib.parse.unquote(text))
    return {**content, "Statement": _listed(content, "Statement")}


def _listed(values: Mapping[str, Any], name: str) -> list[Any]:
    value = values.get(name, [])
    return value if isinstance(value, list) else [value]
