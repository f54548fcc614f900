"""Delete the resources that a failed `up` created and nothing uses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from botocore.exceptions import BotoCoreError, ClientError

from deploy.aws import Aws, as_deploy_error, is_missing
from deploy.deployer.calls import CALLS, call, identity, removal
from deploy.deployer.wait import Report, wait_for
from deploy.errors import DeployError
from deploy.resources.resource import Kind, Resource

_ONLY_HELD = (Kind.MODEL, Kind.ENDPOINT_CONFIG)
"""Kinds that exist only for others to use."""


def leftovers(
    desired: Sequence[Resource], created: Collection[str], serving: Collection[str], failed: str, *, serves: bool
) -> tuple[Resource, ...]:
    """Return the resources to delete, in that order. Pure.

    Without a serving endpoint these are all that this run created. Otherwise it is the failed resource, if this run
    created it, and the models and configurations that this run created and nothing serves with.

    Args:
        desired: all resources, in the order of their creation.
        created: keys of those that this run created.
        serving: keys of endpoints and components in their desired state.
        failed: key of the resource that failed.
        serves: whether the endpoint existed before, or is in service now.
    """
    by_key = {resource.key: resource for resource in desired}
    if not serves:
        removable = set(created)
    else:
        retained = _needed(serving, by_key)
        held_resources = {key for key in created if key in by_key and by_key[key].kind in _ONLY_HELD}
        removable = ({failed} | held_resources) & set(created) - retained
    return tuple(resource for resource in reversed(desired) if resource.key in removable)


def undo(
    aws: Aws, resources: Sequence[Resource], report: Report, say: Callable[[str], None], every: float = 15.0
) -> tuple[str, ...]:
    """Delete them all, even if one deletion fails.

    Returns:
        One sentence for each resource that remains.
    """
    remaining = []
    for resource in resources:
        try:
            remove(aws, resource, report, every)
            say(f"removed {resource.key}")
        except (ClientError, BotoCoreError) as error:
            remaining.append(f"{resource.key}: {as_deploy_error(error)}")
        except DeployError as error:
            remaining.append(f"{resource.key}: {error}")
    return tuple(remaining)


def remove(aws: Aws, resource: Resource, report: Report, every: float) -> None:
    """Delete one and wait until it is gone. A missing resource is no error."""
    operation, request = removal(resource.kind, identity(resource.kind, resource.request))
    try:
        call(aws, CALLS[resource.kind].service, operation, request)
    except ClientError as error:
        if not is_missing(error):
            raise
        return
    if CALLS[resource.kind].status is not None:
        wait_for(aws, resource, report, gone=True, every=every)


def _needed(keys: Collection[str], by_key: Mapping[str, Resource]) -> set[str]:
    """Return the keys, and those of everything they need, directly or not."""
    needed: set[str] = set()
    waiting = [key for key in keys if key in by_key]
    while waiting:
        key = waiting.pop()
        if key not in needed:
            needed.add(key)
            waiting += [need for need in by_key[key].needs if need in by_key]
    return needed
