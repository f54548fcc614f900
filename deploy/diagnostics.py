"""Advice for a failure: from the texts of AWS and the container to changes in the specification."""

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
    """One reason why deployments fail; `deploy/data/causes.yaml` lists them, and explains the fields."""

    name: str
    texts: Sequence[str]
    says: str
    symptom: bool = False

    def matches(self, text: str) -> bool:
        return any(re.search(pattern, text, re.IGNORECASE) for pattern in self.texts)


@cache
def known_causes() -> tuple[Cause, ...]:
    """Return all causes, the most specific ones first."""
    return tuple(Cause(**fields) for fields in yaml.safe_load(data.text("causes.yaml")))


def causes(reason: str, log_tail: Sequence[str] = ()) -> list[Cause]:
    """Return the likely causes, most specific first; symptoms only if there is no other."""
    text = "\n".join((reason, *log_tail))
    likely = [cause for cause in known_causes() if cause.matches(text)]
    return [cause for cause in likely if not cause.symptom] or likely


def advice(reason: str, log_tail: Sequence[str] = (), name: str = "NAME") -> str:
    """Return what to change, a line for each likely cause (two at most); empty: the cause is unknown.

    Args:
        reason: FailureReason, or an error's message.
        log_tail: the last lines of the container's log.
        name: the endpoint's name, if known.
    """
    lines = []
    for cause in causes(reason, log_tail)[:2]:
        instance = _QUOTA_TYPE.search(reason)
        says = cause.says.replace("{type}", instance.group(1) if instance else "<instance.type>")
        lines.append(says.replace("{name}", name))
    return "\n".join(lines)
