"""Errors of deployments, each with the exit status of the command line.

    DeployError          1   something failed
    ├── SpecError        2   the specification is invalid: the message names the field and the valid values
    ├── DoesNotFit       2   the model cannot run on the instance
    ├── Refused          2   the request is refused (a secret in plain text, model data that cannot be loaded)
    ├── NotAllowed       3   AWS denies a call: the message names the missing permission
    ├── NotThere         4   the endpoint or another resource does not exist
    └── Failed           5   AWS accepted the call, but the resource failed: FailureReason, with advice

Errors of requests to an endpoint are in `client/errors.py`.
"""

from __future__ import annotations


class DeployError(Exception):
    """An error with advice.

    Args:
        message: one line that describes the problem and its location.
        advice: how to solve the problem, in any number of lines, or "".
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
