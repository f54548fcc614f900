"""After a failure: which of the things that this run made are no good to anybody, and their removal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from botocore.exceptions import BotoCoreError, ClientError

from deploy.aws import Aws, as_ours, is_missing
from deploy.deployer.calls import CALLS, call, identity, removal
from deploy.deployer.wait import Report, wait_for
from deploy.errors import DeployError
from deploy.resources.resource import Kind, Resource

_ONLY_HELD = (Kind.MODEL, Kind.ENDPOINT_CONFIG)
"""Nothing of their own: they are there for what uses them."""


def leftovers(
    wanted: Sequence[Resource], made: Collection[str], finished: Collection[str], failed: str, *, serves: bool
) -> tuple[Resource, ...]:
    """What is to go, in the order of removal. Pure.

    Where there is no endpoint that serves, that is all that this run made. Else it is the thing that failed, if it is
    new, and what was made for it alone: what serves, and what that needs, stays.

    Args:
        wanted: all resources, in the order of making.
        made: keys of those that this run made.
        finished: keys of endpoints and components that serve as wanted.
        failed: the key of the one at which it ended.
        serves: whether the endpoint was there before, or has come into service.
    """
    by_key = {resource.key: resource for resource in wanted}
    if not serves:
        gone = set(made)
    else:
        kept = _needed(finished, by_key)
        held = {key for key in _needed([failed], by_key) if by_key[key].kind in _ONLY_HELD}
        gone = ({failed} | held) & set(made) - kept
    return tuple(resource for resource in reversed(wanted) if resource.key in gone)


def undo(
    aws: Aws, resources: Sequence[Resource], report: Report, say: Callable[[str], None], every: float = 15.0
) -> tuple[str, ...]:
    """Remove them, whatever happens to single ones.

    Returns:
        What is still there, a sentence each.
    """
    left = []
    for resource in resources:
        try:
            remove(aws, resource, report, every)
            say(f"removed {resource.key}")
        except (ClientError, BotoCoreError) as error:
            left.append(f"{resource.key}: {as_ours(error)}")
        except DeployError as error:
            left.append(f"{resource.key}: {error}")
    return tuple(left)


def remove(aws: Aws, resource: Resource, report: Report, every: float) -> None:
    """Delete it and wait until it is gone; that it is gone already is fine."""
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
    """These, and all that they need, and so on."""
    found: set[str] = set()
    waiting = [key for key in keys if key in by_key]
    while waiting:
        key = waiting.pop()
        if key not in found:
            found.add(key)
            waiting += [need for need in by_key[key].needs if need in by_key]
    return found
