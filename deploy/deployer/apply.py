"""Apply a plan one call at a time, and wait for each resource before making calls that depend on it.

`up` can be repeated after any interruption, as resources are found by name and tag (`live.py`). It first waits for
resources that AWS is still changing.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from deploy.aws import Aws, as_deploy_error, is_missing, unless_missing
from deploy.deployer.calls import CALLS, CONSISTENCY_SECONDS, call, identity_of, is_duplicate, is_there, removal, show
from deploy.deployer.live import Live, look, pending_configs
from deploy.deployer.plan import Action, Plan, Verb
from deploy.deployer.wait import Report, wait_for
from deploy.errors import DeployError, Failed, NotThere, Refused
from deploy.resources.resource import (
    FAILED,
    MIXED,
    READY,
    Json,
    Kind,
    Ref,
    Resource,
    refs,
    resolved,
    specifications,
)

_ONLY_HELD = (Kind.MODEL, Kind.ENDPOINT_CONFIG)
"""Kinds of resources that do nothing by themselves, and are only used by other resources."""


def leftovers(
    desired: Sequence[Resource], created: Collection[str], serving: Collection[str], failed: str, *, serves: bool
) -> tuple[Resource, ...]:
    """Return the resources to delete after a failure, in the order of deletion.

    If no endpoint is serving, these are all resources that this run created. Otherwise, they are the failed resource,
    if this run created it, and the unused models and configurations that this run created.

    Args:
        desired: all resources, in the order of their creation.
        created: keys of the resources that this run created.
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
    """Delete all of the resources, even if some deletions fail.

    Returns:
        A line for each resource that could not be deleted, with its key and the error.
    """
    remaining = []
    for resource in resources:
        try:
            remove(aws, resource, report, every)
            say(f"deleted {resource.key}")
        except (DeployError, ClientError, BotoCoreError) as error:
            remaining.append(f"{resource.key}: {_deploy_error(error)}")
    return tuple(remaining)


def _deploy_error(error: DeployError | ClientError | BotoCoreError) -> DeployError:
    return error if isinstance(error, DeployError) else as_deploy_error(error)


def remove(aws: Aws, resource: Resource, report: Report, every: float) -> None:
    """Delete a resource, and wait until it no longer exists. A missing resource is not an error."""
    operation, request = removal(resource.kind, identity_of(resource))
    response = unless_missing(lambda: call(aws, CALLS[resource.kind].service, operation, request))
    if response is not None and CALLS[resource.kind].status is not None:
        wait_for(aws, resource, report, gone=True, every=every)


def _needed(keys: Collection[str], by_key: Mapping[str, Resource]) -> set[str]:
    """Return `keys` and the keys of all resources on which these resources depend, directly or indirectly."""
    needed: set[str] = set()
    waiting = [key for key in keys if key in by_key]
    while waiting:
        key = waiting.pop()
        if key not in needed:
            needed.add(key)
            waiting += [need for need in by_key[key].needs if need in by_key]
    return needed


EVERY = 15.0
"""Seconds between two polls."""

_MAKES = (Verb.CREATE, Verb.REPLACE)


@dataclass(frozen=True)
class ApplyOptions:
    """Options for applying a plan.

    Attributes:
        say: function that is called with a line of text for each step.
        report: function that is called on each poll.
        keep_failed: whether to keep resources that failed.
        every: seconds between two polls.
        limit: timeout in seconds for waiting for an endpoint or a component.
    """

    say: Callable[[str], None]
    report: Report
    keep_failed: bool = False
    every: float = field(default_factory=lambda: EVERY)
    limit: float = 7200.0

    def wait(self, aws: Aws, resource: Resource, **more: Any) -> None:
        wait_for(aws, resource, self.report, limit=self.limit, every=self.every, **more)


@dataclass
class Run:
    """The state of a run, for the rollback and for the report after an interruption.

    Attributes:
        created: keys of the resources that this run created.
        serving: keys of endpoints and components in their desired state.
        deregistered: deletions that must be undone if the update after them fails.
        current: action in progress, if any.
        called: whether a call of the current action was started, so that AWS may have received it.
    """

    created: list[str] = field(default_factory=list)
    serving: set[str] = field(default_factory=set)
    deregistered: list[Action] = field(default_factory=list)
    current: Action | None = None
    called: bool = False


def look_when_idle(aws: Aws, deployment: str, desired: Sequence[Resource], options: ApplyOptions) -> Live:
    """Wait until AWS has finished earlier changes, such as those of a killed run, and return the existing resources."""
    live = look(aws, deployment, desired)
    for existing in live.busy:
        options.say(f"{existing.key} is {existing.status}: waiting until AWS has finished")
        try:
            options.wait(aws, Resource(existing.kind, existing.name, {}), gone=existing.status == "Deleting")
        except (Failed, NotThere) as error:  # the next plan handles it
            options.say(str(error))
    return look(aws, deployment, desired) if live.busy else live


def apply(aws: Aws, plan: Plan, desired: Sequence[Resource], options: ApplyOptions, run: Run | None = None) -> None:
    """Apply the plan.

    Args:
        desired: desired resources, from which the plan was made.
        run: state that is updated with each step.

    Raises:
        Failed: a resource failed. Resources that this run created for it are deleted, unless `keep_failed` is set or
            they may still be in use.
        DeployError, NotAllowed: a call to AWS failed. Resources are deleted in the same way.
    """
    run = Run() if run is None else run
    steps = _Steps(aws, plan, options, run)
    for action in plan.actions:
        run.current, run.called = action, False
        try:
            steps.do(action)
        except (DeployError, ClientError, BotoCoreError) as error:
            raise _roll_back(aws, _deploy_error(error), plan, desired, options, run) from error
    run.current = None


class _Steps:
    """An executor of a plan's actions that stores AWS's descriptions of the resources for later calls."""

    def __init__(self, aws: Aws, plan: Plan, options: ApplyOptions, run: Run) -> None:
        self._aws, self._plan, self._options, self._run = aws, plan, options, run
        self._resources = {action.key: action.resource for action in plan.actions if action.resource is not None}
        self._descriptions: dict[str, dict[str, Any]] = {}

    def do(self, action: Action) -> None:
        if action.verb in _MAKES:
            self._make(action)
        elif action.verb is Verb.DELETE:
            self._delete(action)
        elif action.verb is not Verb.UNCHANGED:
            self._options.say(f"{action.verb.value} {action.key}")
            self._call(action)
        has_status = CALLS[action.kind].status is not None
        if has_status and action.resource is not None and action.verb is not Verb.TAG:
            if action.verb is not Verb.UNCHANGED:
                self._options.wait(self._aws, action.resource, consistency=CONSISTENCY_SECONDS)
            self._run.serving.add(action.key)
            if action.kind is Kind.ENDPOINT:
                self._run.deregistered.clear()

    def _make(self, action: Action) -> None:
        self._options.say(f"create {action.key}")
        # Recorded before the call: if its response is lost, the resource may exist nevertheless.
        self._run.created.append(action.key)
        try:
            self._call(action)
        except ClientError as error:
            self._run.created.remove(action.key)
            if not is_duplicate(error):
                raise
            # The resource was created after the plan was made, and may have been deleted since.
            if not is_there(self._aws, action.kind, action.which, self._plan.deployment):
                raise Failed(f"{action.key} existed, but was deleted meanwhile", "Run this again.") from error

    def _delete(self, action: Action) -> None:
        self._options.say(f"delete {action.key}" + (f" ({action.reason})" if action.reason else ""))
        if action.undo:  # recorded before the call, whose response may be lost
            self._run.deregistered.append(action)
        try:
            self._call(action)
        except ClientError as error:
            if is_missing(error):
                return
            raise
        if CALLS[action.kind].status is not None:
            self._options.wait(self._aws, Resource(action.kind, action.which[-1], {}), gone=True)

    def _call(self, action: Action) -> None:
        request = action.request or {}
        for ref in refs(request):
            self._look_up(ref)
        self._run.called = True
        self._descriptions[action.key] = call(
            self._aws,
            action.service,
            action.operation,
            resolved(request, lambda ref: self._descriptions[ref.key][ref.attribute]),
            is_due=lambda: not action.expects or self._is_as_planned(action),
        )

    def _is_as_planned(self, action: Action) -> bool:
        """Return True if the endpoint is still as planned, or False if another run has started or made the same update.

        Raises:
            Refused: the endpoint serves something else, is being updated, or was deleted.
        """
        description = show(self._aws, action.kind, action.which) or {}
        status, serves = description.get("EndpointStatus", "deleted"), description.get("EndpointConfigName")
        desired = (action.request or {})["EndpointConfigName"]
        if desired in pending_configs(description) or (status in READY and serves == desired):
            return False
        if serves == action.expects and status in (*READY, *MIXED):
            return True
        advice = "The endpoint was not changed. Run this again when the endpoint is InService."
        if serves == action.expects:
            raise Refused(f"{action.key} is {status}, and only an endpoint in service can be updated", advice)
        raise Refused(
            f"{action.key} has changed since the plan was made: it served {action.expects}, but is now {status}"
            + (f" with {serves}" if serves else ""),
            advice,
        )

    def _look_up(self, ref: Ref) -> None:
        """Read the description of a resource that existed before this run."""
        if ref.attribute in self._descriptions.get(ref.key, {}):
            return
        action = next((item for item in self._plan.actions if item.key == ref.key), None)
        description = None if action is None else show(self._aws, action.kind, action.which)
        if description is None or ref.attribute not in description:
            raise DeployError(f"{ref.key} has no {ref.attribute}")
        self._descriptions[ref.key] = description


def _may_still_change(aws: Aws, current: Action) -> bool:
    """Return whether an update may be in progress or complete. In that case, nothing that it needs may be deleted.

    AWS forbids deleting a configuration during an update to it, but does not always prevent it.
    """
    if current.verb is not Verb.UPDATE or (status := CALLS[current.kind].status) is None:
        return False
    try:
        description = show(aws, current.kind, current.which)
    except (ClientError, BotoCoreError):
        return True
    if description is None:
        return False
    desired = current.request or {}
    config, models = desired.get("EndpointConfigName"), _models(desired)
    if description[status] in READY:
        serves = description.get("EndpointConfigName"), _models(description)
        return (config, models) != (None, set()) and (config, models) == serves
    return description[status] not in FAILED


def _models(component: Json) -> set[Any]:
    return {specification["ModelName"] for specification in specifications(component) if "ModelName" in specification}


def _roll_back(
    aws: Aws, error: DeployError, plan: Plan, desired: Sequence[Resource], options: ApplyOptions, run: Run
) -> DeployError:
    """Delete unused resources that the failed run created, and return the error with advice on what remains."""
    failed = run.current.key if run.current is not None else ""
    coming = {action.key for action in plan.actions if action.verb in _MAKES and action.kind is Kind.ENDPOINT}
    removable = leftovers(desired, run.created, run.serving, failed, serves=coming <= run.serving)
    advice = [error.advice] if error.advice else []
    advice += _register_again(aws, options, run)
    advice += _clean_up(aws, removable, error, options, run)
    advice += [
        f"{item.key} is running and costs money. `lmi deploy up` continues from here, `lmi deploy down` deletes it."
        for item in desired
        if item.kind is Kind.ENDPOINT and item.key in run.serving and item.key in run.created
    ]
    error.advice = "\n".join(advice)
    return error


def _register_again(aws: Aws, options: ApplyOptions, run: Run) -> Iterator[str]:
    """Undo deregistrations from automatic scaling after a failed update, and yield advice on those that remain."""
    if not run.deregistered:
        return
    if run.current is not None and _may_still_change(aws, run.current):
        names = ", ".join(action.which[-1] for action in run.deregistered)
        yield f"{names} does not scale automatically now. Run `lmi deploy up` again to register it."
        return
    for action in run.deregistered:
        try:
            _recreate(aws, action.undo)
            options.say(f"registered {action.key} again")
        except (DeployError, ClientError, BotoCoreError) as error:
            yield f"{action.key} could not be registered again: {_deploy_error(error)}"


def _recreate(aws: Aws, resources: Sequence[Resource]) -> None:
    """Create the resources in order. Their references may only refer to each other."""
    created: dict[str, dict[str, Any]] = {}
    for resource in resources:
        calls = CALLS[resource.kind]
        request = resolved(resource.request, lambda ref: created[ref.key][ref.attribute])
        created[resource.key] = call(aws, calls.service, calls.create, request)


def _clean_up(
    aws: Aws, removable: Sequence[Resource], error: DeployError, options: ApplyOptions, run: Run
) -> Iterator[str]:
    """Delete the resources unless they may be in use or the user keeps them, and yield advice on those that remain."""
    names = ", ".join(item.key for item in removable)
    if removable and run.current is not None and _may_still_change(aws, run.current):
        yield (
            f"AWS may still be changing {run.current.key} or serving with the new resources, so {names} are kept. Run "
            "`lmi deploy up` again to continue."
        )
    elif removable and options.keep_failed:
        yield f"Kept: {names}. `lmi deploy down` deletes them."
    elif removable:
        options.say(f"failed: {error}")
        for item in undo(aws, removable, options.report, options.say, options.every):
            yield f"Could not be deleted: {item}"


# -- handle Ctrl-C and SIGTERM: report how far the run got -------------------------------------------------------------


class Terminated(KeyboardInterrupt):
    """The exception that is raised on SIGTERM."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Make SIGTERM raise `Terminated`, just as SIGINT raises KeyboardInterrupt."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def status_of(interrupt: KeyboardInterrupt) -> int:
    """Return the exit status that shells use for a signal, which is 128 plus the signal number."""
    return 128 + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)


def to_the_end(work: Callable[[Run], int], again: str, remove: str) -> int:
    """Run `work`, and return its exit status. If it is interrupted, print how far it got.

    Args:
        again: command that continues.
        remove: command that deletes everything, with all of its arguments.
    """
    run = Run()
    try:
        with interruptible():
            return work(run)
    except KeyboardInterrupt as interrupt:
        print(_interruption(run, again, remove), file=sys.stderr)
        return status_of(interrupt)


def _interruption(run: Run, again: str, remove: str) -> str:
    """Return a report with the current step, the created resources, and the commands to continue or to clean up."""
    lines = ["Interrupted."]
    if run.current is not None and run.called:
        lines.append(f"Current step: {run.current.key}. AWS finishes changes that it has started.")
    elif run.current is not None and run.current.verb is not Verb.UNCHANGED:
        lines.append(f"Next step, not started: {run.current.verb.value} {run.current.key}.")
    if run.deregistered:
        names = ", ".join(action.which[-1] for action in run.deregistered)
        lines.append(f"Deregistered from automatic scaling: {names}.")
    if run.created:
        lines.append(f"Created in this run: {', '.join(run.created)}.")
    lines.append(f"To continue, run `lmi deploy {again}` again; to delete everything, `lmi deploy {remove}`.")
    return "\n".join(lines)
