"""Refuse an endpoint that somebody else manages, or that is not settled."""

from __future__ import annotations

from deploy.adopt.source import Source
from deploy.errors import Refused
from deploy.resources.names import TAG_DEPLOYMENT, TAG_STACK
from deploy.resources.resource import READY

_BESIDE = "--name ANOTHER writes a file for an endpoint of its own beside it."


def refuse_owned(source: Source) -> None:
    """Raises Refused if lmi deploy or CloudFormation manages the endpoint."""
    deployment, stack = source.tags.get(TAG_DEPLOYMENT), source.tags.get(TAG_STACK)
    if deployment == source.name:
        raise Refused(f"{source.name} was made by lmi deploy: its file is its specification already", _BESIDE)
    if deployment is not None:
        raise Refused(f"{source.name} belongs to another deployment of lmi deploy, {deployment}", _BESIDE)
    if stack is not None:
        raise Refused(
            f"{source.name} belongs to CloudFormation's stack {stack}, which would undo what lmi deploy changes",
            f"Take it out of the stack first (DeletionPolicy: Retain). Or: {_BESIDE}",
        )


def refuse_unsettled(source: Source) -> None:
    """Raises Refused unless the endpoint is in service."""
    status = source.endpoint.get("EndpointStatus", READY[0])
    if status not in READY:
        raise Refused(
            f"{source.name} is {status}: what it serves is not settled", f"Wait until it is InService. Or: {_BESIDE}"
        )
