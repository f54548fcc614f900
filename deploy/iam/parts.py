"""Policies in parts that AWS takes. Pure."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from deploy.iam.statements import Policy

MOST = 6144
"""Characters of a managed policy (quota "Managed policy length"); AWS does not count white space."""


def length(policy: Policy) -> int:
    """Return the characters that AWS counts."""
    return len(json.dumps(policy, separators=(",", ":")))


def parts(policy: Policy, most: int = MOST) -> list[Policy]:
    """Return policies of at most so many characters which together allow what the policy allows; one, if it fits."""
    found: list[Policy] = []
    for statement in policy["Statement"]:
        rest: dict[str, Any] | None = statement
        while rest is not None:
            last = found[-1]["Statement"] if found else []
            taken, left = _split(policy, last, rest, most)
            if taken is not None:
                found[-1:] = [{**policy, "Statement": [*last, taken]}]
            else:
                found.append({**policy, "Statement": []})
            rest = left
    return found


def _split(
    policy: Policy, before: list[dict[str, Any]], statement: dict[str, Any], most: int
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return as much of a statement as fits behind others, and the rest. Only what is too long alone is divided.

    One resource, or one value of a condition, suffices to be allowed: each may stand in a statement of its own.
    """

    def fits(others: list[dict[str, Any]], one: dict[str, Any]) -> bool:
        return length({**policy, "Statement": [*others, one]}) <= most

    if fits(before, statement):
        return statement, None
    if fits([], statement):
        return None, statement
    values, with_values = _list_of(statement)
    count = bisect_left(
        range(len(values)), True, key=lambda number: not fits(before, with_values(values[: number + 1]))
    )
    if count:
        return with_values(values[:count]), with_values(values[count:])
    assert before, f"{statement['Sid']}: one value alone is too long"
    return None, statement


def _list_of(statement: dict[str, Any]) -> tuple[list[str], Callable[[list[str]], dict[str, Any]]]:
    """Return the longest list of alternatives of a statement, and how to put another in its place."""
    lists: list[tuple[list[str], Callable[[list[str]], dict[str, Any]]]] = [
        (statement["Resource"], lambda some: {**statement, "Resource": some})
    ]
    for operator, keys in statement.get("Condition", {}).items():
        for key, values in keys.items():
            if isinstance(values, list):
                lists.append((values, _put(statement, operator, key)))
    return max(lists, key=lambda one: len(one[0]))


def _put(statement: dict[str, Any], operator: str, key: str) -> Callable[[list[str]], dict[str, Any]]:
    conditions = statement["Condition"]
    return lambda some: {**statement, "Condition": {**conditions, operator: {**conditions[operator], key: some}}}
