"""What a check before `up` gives, and what all checks are given."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deploy.aws import Aws
from deploy.resolve.decision import Decision
from deploy.spec import Spec

Fetch = Callable[[str, str, Mapping[str, str]], tuple[int, bytes]]
"""Method, URL and headers to status and body; OSError where there is no network."""


class Verdict(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `says`: what was found; `advice`: what to change, empty where all is well."""

    name: str
    verdict: Verdict
    says: str
    advice: str = ""


@dataclass(frozen=True)
class Given:
    """What checks look at. `fetch`: None where nothing but AWS is asked."""

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
