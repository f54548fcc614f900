"""Rows of the table of permissions, and the statements that they make. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from deploy.iam.arns import Arns, Condition, Scope

Statement = dict[str, Any]
Policy = dict[str, Any]


class Row(NamedTuple):
    """Actions, and on what they are needed.

    Attributes:
        sid: of the statement. Rows that share it, and the condition, are one statement.
        actions: with the service before the first: "sagemaker:CreateModel DeleteModel".
        on: returns the resources, from what the specification has; nothing: the actions are not needed.
    """

    sid: str
    actions: str
    on: Callable[[Arns], Sequence[str] | Sequence[Scope]]


def statements(rows: Iterable[Row], arns: Arns) -> list[Statement]:
    """Return what the rows allow, each statement with a name of its own."""
    found: dict[str, list[Statement]] = {}
    for sid, actions, on in rows:
        service, _, names = actions.partition(":")
        asked = on(arns)
        plain = Scope([one for one in asked if isinstance(one, str)])
        for resources, condition in (plain, *[one for one in asked if isinstance(one, Scope)]):
            if resources:
                same = found.setdefault(sid, [])
                one = next((one for one in same if one.get("Condition") == condition), None)
                if one is None:
                    same.append(one := allow(f"{sid}{len(same) or ''}", [], [], condition))
                needed = [f"{service}:{name}" for name in names.split()]
                one["Action"] += [action for action in needed if action not in one["Action"]]
                one["Resource"] += [resource for resource in resources if resource not in one["Resource"]]
    return [one for same in found.values() for one in same]


def allow(sid: str, actions: Sequence[str], resources: Sequence[str], condition: Condition | None = None) -> Statement:
    """Return a statement that allows actions on resources."""
    statement = {"Sid": sid, "Effect": "Allow", "Action": list(actions), "Resource": list(resources)}
    return {**statement, "Condition": condition} if condition else statement


def policy(found: list[Statement]) -> Policy:
    """Return a policy of statements."""
    return {"Version": "2012-10-17", "Statement": found}
