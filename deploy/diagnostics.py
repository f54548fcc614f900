"""Advice on failed deployments, found by matching messages from AWS and the container against known causes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import yaml

from deploy import data

_QUOTA_TYPE = re.compile(r"'?(ml\.[a-z0-9-]+\.[a-z0-9]+)'?")


@dataclass(frozen=True)
class Cause:
    """A reason why deployments fail. `deploy/data/causes.yaml` lists all of them and explains the fields."""

    name: str
    texts: Sequence[str]
    says: str
    symptom: bool = False

    def matches(self, text: str) -> bool:
        return any(re.search(pattern, text, re.IGNORECASE) for pattern in self.texts)


@cache
def all_causes() -> tuple[Cause, ...]:
    """Return all causes, the most specific first."""
    return tuple(Cause(**fields) for fields in yaml.safe_load(data.text("causes.yaml")))


def causes(reason: str, log_tail: Sequence[str] = ()) -> list[Cause]:
    """Return the likely causes, the most specific first. Mere symptoms are returned only if no other cause matches."""
    text = "\n".join((reason, *log_tail))
    likely = [cause for cause in all_causes() if cause.matches(text)]
    return [cause for cause in likely if not cause.symptom] or likely


def advice(reason: str, log_tail: Sequence[str] = (), name: str = "NAME") -> str:
    """Return advice, one line for each of the two most likely causes, or "" if the cause is unknown.

    Args:
        reason: the resource's FailureReason, or an error message.
        log_tail: last lines of the container log.
        name: name of the endpoint, if it is known.
    """
    lines = []
    for cause in causes(reason, log_tail)[:2]:
        instance = _QUOTA_TYPE.search(reason)
        says = cause.says.replace("{type}", instance.group(1) if instance else "<instance.type>")
        lines.append(says.replace("{name}", name))
    return "\n".join(lines)
