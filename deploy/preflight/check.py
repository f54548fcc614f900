"""The result of a preflight check, and the context that all checks share."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deploy.aws import Aws
from deploy.resolve.decision import Decision
from deploy.spec import Spec

Fetch = Callable[[str, str, Mapping[str, str]], tuple[int, bytes]]
"""Function that sends an HTTP request, given its method, URL and headers, and returns the status and body. It raises
OSError if the server cannot be reached."""


class Verdict(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: name of the check.
        says: result of the check as a phrase.
        advice: how to fix the problem, or empty.
    """

    name: str
    verdict: Verdict
    says: str
    advice: str = ""


@dataclass(frozen=True)
class Context:
    """The context that all checks share.

    Attributes:
        fetch: function that sends HTTP requests to the hub and to the image registry, or None to call only AWS's API.
        bidirectional: whether callers will open bidirectional streams.
    """

    aws: Aws
    spec: Spec
    decision: Decision
    fetch: Fetch | None = None
    bidirectional: bool = False


def ok(name: str, says: str) -> Check:
    return Check(name, Verdict.OK, says)


def warning(name: str, says: str, advice: str = "") -> Check:
    return Check(name, Verdict.WARNING, says, advice)


def error(name: str, says: str, advice: str = "") -> Check:
    return Check(name, Verdict.ERROR, says, advice)
