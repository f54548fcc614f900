"""What can go wrong, each with the exit status that the command line gives.

    DeployError          1   something failed
    ├── SpecError        2   the specification is wrong: says where, and what may stand there
    ├── DoesNotFit       2   the model cannot run on the instance
    ├── Refused          2   not done because it would do harm (a secret in plain text, a prefix that cannot load)
    ├── NotAllowed       3   AWS denies a call: says which permission is missing
    ├── NotThere         4   the endpoint (or what else was named) does not exist
    └── Failed           5   AWS took it and it failed: FailureReason, and what to do about it

The client's own errors (of requests, not of deployments) are in `client/errors.py`.
"""

from __future__ import annotations


class DeployError(Exception):
    """Something failed.

    Args:
        message: one line: what, and where.
        advice: what to do about it; may be several lines, may be empty.
    """

    status = 1

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.advice = advice


class SpecError(DeployError):
    status = 2


class DoesNotFit(DeployError):
    status = 2


class Refused(DeployError):
    status = 2


class NotAllowed(DeployError):
    status = 3


class NotThere(DeployError):
    status = 4


class Failed(DeployError):
    status = 5
