"""The result of a preflight check, and the context of all checks."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deploy.aws import Aws
from deploy.resolve.decision import Decision
from deploy.spec import Spec

Fetch = Callable[[str, str, Mapping[str, str]], tuple[int, bytes]]
"""Fetch by method, URL and headers; return status and body. Raises OSError without a network."""


class Verdict(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Check:
    """The result of one check. `says`: the finding; `advice`: what to change, empty if nothing."""

    name: str
    verdict: Verdict
    says: str
    advice: str = ""


@dataclass(frozen=True)
class Context:
    """The context of the checks. `fetch`: None: ask AWS only."""

    aws: Aws
    spec: Spec
    decision: Decision
    fetch: Fetch | None = None


def ok(name: str, says: str) -> Check:
    return Check(name, Verdict.OK, says)


def warning(name: str, says: str, advice: str = "") -> Check:
    return Check(name, Verdict.WARNING, says, advice)


def error(name: str, says: str, advice: str = "") -> Check:
    return Check(name, Verdict.ERROR, says, advice)
