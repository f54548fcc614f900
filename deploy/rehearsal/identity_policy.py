"""Identity policies as IAM evaluates them: nothing is allowed but what a statement allows, and a denial wins.

Moto's own evaluation ignores conditions, and most services never ask it for a resource, so it allows what AWS denies.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


class Unexplained(Exception):
    """A call or a policy that this package cannot evaluate."""


Context = Mapping[str, str | list[str]]
_ELEMENTS = {"Sid", "Effect", "Action", "NotAction", "Resource", "NotResource", "Condition"}


@dataclass(frozen=True)
class Need:
    """What IAM is asked about: one action on one resource.

    Attributes:
        resource: an ARN, or `*` for an action that takes no resource.
        context: the request's condition keys; IAM heeds no case in their names.
    """

    action: str
    resource: str
    context: Context = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.action} on {self.resource}"


def allowed(policies: Iterable[Mapping[str, Any]], need: Need) -> bool:
    """Whether the policies together allow it."""
    effects = {
        statement["Effect"] for policy in policies for statement in policy["Statement"] if _applies(statement, need)
    }
    return effects == {"Allow"}


def _applies(statement: Mapping[str, Any], need: Need) -> bool:
    unknown = set(statement) - _ELEMENTS
    if unknown:
        raise Unexplained(f"this evaluation does not know {', '.join(sorted(unknown))} of a statement")
    return (
        _names(statement, "Action", lambda pattern: _like(pattern.lower(), need.action.lower()))
        and _names(statement, "Resource", lambda pattern: _covers(pattern, need.resource))
        and all(
            _holds(operator, key, _list(values), need.context)
            for operator, keys in statement.get("Condition", {}).items()
            for key, values in keys.items()
        )
    )


def _names(statement: Mapping[str, Any], element: str, matches: Callable[[str], bool]) -> bool:
    """Whether an element, or the one that names everything else, names what is asked about."""
    if element in statement:
        return any(map(matches, _list(statement[element])))
    return not any(map(matches, _list(statement[f"Not{element}"])))


def _covers(pattern: str, resource: str) -> bool:
    """Whether a pattern of ARNs covers a resource: case matters, and a wildcard stays within its part of the ARN."""
    if pattern == "*":
        return True
    parts, wanted = pattern.split(":", 5), resource.split(":", 5)
    return len(parts) == len(wanted) == 6 and all(map(_like, parts, wanted))


def _holds(operator: str, key: str, values: list[str], context: Context) -> bool:
    """Whether a condition holds. Without its key in the request it does not, unless it ends in IfExists."""
    several, _, name = operator.rpartition(":")
    compare = _OPERATORS.get(name.removesuffix("IfExists"))
    if compare is None or several not in ("", "ForAnyValue"):
        raise Unexplained(f"this evaluation does not know the condition {operator}")
    given = next((value for there, value in context.items() if there.lower() == key.lower()), None)
    if given is None:
        return name.endswith("IfExists")
    assert isinstance(given, str) == (not several), f"{key}: {operator} is for {'several' if several else 'one'}"
    return any(compare(pattern, value) for pattern in values for value in _list(given))


_OPERATORS: dict[str, Callable[[str, str], bool]] = {
    "StringEquals": lambda pattern, value: pattern == value,
    "StringLike": lambda pattern, value: _like(pattern, value),
    "ArnLike": lambda pattern, value: _covers(pattern, value),
    "Bool": lambda pattern, value: pattern.lower() == value.lower(),
}


def _like(pattern: str, value: str) -> bool:
    return _regex(pattern).fullmatch(value) is not None


@functools.cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile("".join({"*": ".*", "?": "."}.get(one, re.escape(one)) for one in pattern), re.DOTALL)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
