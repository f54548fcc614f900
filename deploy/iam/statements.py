"""The form of a policy's statements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Statement = dict[str, Any]


def allow(
    sid: str, actions: Sequence[str], resources: Sequence[str], condition: dict[str, Any] | None = None
) -> Statement:
    """Return a statement that allows actions on resources."""
    statement = {"Sid": sid, "Effect": "Allow", "Action": list(actions), "Resource": list(resources)}
    return {**statement, "Condition": condition} if condition else statement
