"""Makes a plan so: one call after the other, waiting where the next one needs it.

Run again after any end, it goes on where it was: everything is found by its name and its tag (`live.py`), and a thing
that AWS is still at is waited for first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from deploy.aws import Aws, as_ours, is_missing
from deploy.deployer.calls import CALLS, call, is_duplicate, show, tags_of
from deploy.deployer.live import Live, LiveResource, look
from deploy.deployer.plan import Action, Plan, Verb
from deploy.deployer.rollback import leftovers, undo
from deploy.deployer.wait import SETTLES, Report, wait_for
from deploy.errors import DeployError, Failed, NotThere, Refused
from deploy.resources.names import TAG_DEPLOYMENT
from deploy.resources.resource import FAILED, READY, Kind, Ref, Resource, refs, resolved

EVERY = 15.0
"""Seconds between two looks at what AWS is at."""

_MAKES = (Verb.CREATE, Verb.REPLACE)


@dataclass(frozen=True)
class ApplyOptions:
    """How a plan is carried out.

    Attributes:
        say: told of every step, a line each.
        report: told of every look while waiting.
        keep_failed: leave what failed, to be looked at.
        every: seconds between two looks.
        limit: seconds after which an endpoint or a component is given up.
    """

    say: Callable[[str], None]
    report: Report
    keep_failed: bool = False
    every: float = field(default_factory=lambda: EVERY)
    limit: float = 7200.0


@dataclass
class Run:
    """What has been done so far, for who has to undo it or go on.

    Attributes:
        made: keys of what is new.
        finished: keys of endpoints and components that serve as wanted.
        at: what is being done.
    """

    made: list[str] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    at: Action | None = None


def look_when_idle(aws: Aws, deployment: str, wanted: Sequence[Resource], ways: ApplyOptions) -> Live:
    """What there is once AWS is at nothing of it: a killed run's creation or update goes on by itself."""
    live = look(aws, deployment, wanted)
    for found in live.busy:
        ways.say(f"{found.kind.value}/{found.name} is {found.status}: waiting for it")
        _settle(aws, found, ways)
    return look(aws, deployment, wanted) if live.busy else live


def apply(aws: Aws, plan: Plan, wanted: Sequence[Resource], ways: ApplyOptions, run: Run | None = None) -> None:
    """Carry it out.

    Args:
        wanted: the resources that the plan was made of.
        run: written to; who was interrupted reads in it how far it came.

    Raises:
        Failed: AWS gave up on something. What this run made for it is gone again, unless `keep_failed`.
        DeployError, NotAllowed: a call was refused; likewise.
    """
    run = Run() if run is None else run
    steps = _Steps(aws, plan, ways, run)
    for action in plan.actions:
        run.at = action
        try:
            steps.do(action)
        except (DeployError, ClientError, BotoCoreError) as error:
            ours = error if isinstance(error, DeployError) else as_ours(error)
            raise _roll_back(aws, ours, plan, wanted, ways, run) from error
    run.at = None


class _Steps:
    """The calls of one plan, and what AWS has said of the things so far."""

    def __init__(self, aws: Aws, plan: Plan, ways: ApplyOptions, run: Run) -> None:
        self._aws, self._plan, self._ways, self._run = aws, plan, ways, run
        self._resources = {action.key: action.resource for action in plan.actions if action.resource is not None}
        self._said: dict[str, dict[str, Any]] = {}

    def do(self, action: Action) -> None:
        if action.verb in _MAKES:
            self._make(action)
        elif action.verb is Verb.UPDATE:
            self._ways.say(f"change {action.key}")
            self._call(action)
        elif action.verb is Verb.TAG:
            self._ways.say(f"tag {action.key}")
            self._call(action)
            return
        elif action.verb is Verb.DELETE:
            self._delete(action)
            return
        if CALLS[action.kind].status is not None and action.resource is not None:
            if action.verb is not Verb.UNCHANGED:
                wait_for(
                    self._aws,
                    action.resource,
                    self._ways.report,
                    limit=self._ways.limit,
                    every=self._ways.every,
                    settles=SETTLES,
                )
            self._run.finished.add(action.key)

    def _make(self, action: Action) -> None:
        self._ways.say(f"make {action.key}")
        # Before the call: if its answer is lost, the thing may be there all the same.
        self._run.made.append(action.key)
        try:
            self._call(action)
        except ClientError as error:
            if not is_duplicate(error):
                self._run.made.remove(action.key)
                raise
            self._run.made.remove(action.key)
            self._own(action)

    def _own(self, action: Action) -> None:
        """It came between the look and the call: another run of ours, or another's thing.

        Raises:
            Refused: another's.
        """
        said = show(self._aws, action.kind, action.which)
        if said is None or tags_of(self._aws, action.kind, said).get(TAG_DEPLOYMENT) != self._plan.deployment:
            raise Refused(f"{action.key} exists and was not made by this deployment", "Choose another name.")

    def _delete(self, action: Action) -> None:
        self._ways.say(f"remove {action.key}" + (f" ({action.why})" if action.why else ""))
        try:
            self._call(action)
        except ClientError as error:
            if is_missing(error):
                return
            raise
        if CALLS[action.kind].status is not None:
            gone = Resource(action.kind, action.which[-1], {})
            wait_for(self._aws, gone, self._ways.report, gone=True, limit=self._ways.limit, every=self._ways.every)

    def _call(self, action: Action) -> None:
        request = action.request or {}
        for ref in refs(request):
            self._learn(ref)
        self._said[action.key] = call(
            self._aws,
            action.service,
            action.operation,
            resolved(request, lambda ref: self._said[ref.key][ref.attribute]),
        )

    def _learn(self, ref: Ref) -> None:
        """What AWS says of a thing that was there before this run."""
        if ref.attribute in self._said.get(ref.key, {}):
            return
        action = next((one for one in self._plan.actions if one.key == ref.key), None)
        said = None if action is None else show(self._aws, action.kind, action.which)
        if said is None or ref.attribute not in said:
            raise DeployError(f"{ref.key} has no {ref.attribute}")
        self._said[ref.key] = said


def _settle(aws: Aws, found: LiveResource, ways: ApplyOptions) -> None:
    """Wait until AWS has done; how it ended is seen by the next look, and is then the plan's business."""
    resource = Resource(found.kind, found.name, {})
    try:
        wait_for(aws, resource, ways.report, gone=found.status == "Deleting", limit=ways.limit, every=ways.every)
    except (Failed, NotThere) as error:
        ways.say(str(error))


def _may_go_on(aws: Aws, at: Action | None) -> bool:
    """Whether a change of what serves may not have ended: then what it needs must not be taken from under it.

    AWS forbids to delete a configuration that an update is under way to, and does not always notice.
    """
    if at is None or at.verb is not Verb.UPDATE or (status := CALLS[at.kind].status) is None:
        return False
    try:
        said = show(aws, at.kind, at.which)
    except (ClientError, BotoCoreError):
        return True
    if said is None:
        return False
    wanted = at.request or {}
    config, model = wanted.get("EndpointConfigName"), wanted.get("Specification", {}).get("ModelName")
    if said[status] in READY:
        serves = said.get("EndpointConfigName"), said.get("Specification", {}).get("ModelName")
        return (config, model) != (None, None) and (config, model) == serves
    return said[status] not in FAILED


def _roll_back(
    aws: Aws, error: DeployError, plan: Plan, wanted: Sequence[Resource], ways: ApplyOptions, run: Run
) -> DeployError:
    """The error to raise, after what it left is gone, with what is still there said."""
    failed = run.at.key if run.at is not None else ""
    coming = {action.key for action in plan.actions if action.verb in _MAKES and action.kind is Kind.ENDPOINT}
    gone = leftovers(wanted, run.made, run.finished, failed, serves=coming <= run.finished)
    said = [error.advice] if error.advice else []
    if gone and _may_go_on(aws, run.at):
        names = ", ".join(one.key for one in gone)
        said.append(
            f"AWS may still be changing {failed}, or serve with what is new: {names} stay. Run `lmi deploy up` again: "
            "it waits, and goes on from there."
        )
    elif gone and ways.keep_failed:
        said.append(f"Kept as it is: {', '.join(one.key for one in gone)}. `lmi deploy down` removes it.")
    elif gone:
        ways.say(f"failed: {error}")
        left = undo(aws, gone, ways.report, ways.say, ways.every)
        said += [f"Could not be removed: {one}" for one in left]
    endpoint = next((one for one in wanted if one.kind is Kind.ENDPOINT and one.key in run.finished), None)
    if endpoint is not None and endpoint.key in run.made:
        said.append(
            f"{endpoint.key} is up and costs money: `lmi deploy up` goes on from here, `lmi deploy down` ends it."
        )
    error.advice = "\n".join(said)
    return error
