"""From a specification to a plan, by AWS's answers where it can be asked; and what an upload needs before."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from botocore.exceptions import BotoCoreError, ClientError

from deploy.aws import Aws
from deploy.deployer.live import Live, look
from deploy.deployer.plan import Plan, plan
from deploy.deployer.reach import why_unreachable
from deploy.deployer.teardown import users_of
from deploy.errors import Refused
from deploy.preflight.check import Check
from deploy.preflight.checks import over_the_network, preflight
from deploy.resolve.candidates import Candidates
from deploy.resolve.decision import Decision
from deploy.resolve.resolver import resolve
from deploy.resources.build import resources, warnings
from deploy.resources.resource import Json, Kind, Resource
from deploy.s3.parts import sender_there
from deploy.s3.upload import WORKERS, Sent, Uploaded, UploadPlan, plan_upload, upload
from deploy.spec import Spec


@dataclass(frozen=True)
class Prepared:
    """A specification with all that follows from it.

    Attributes:
        wanted: in the order of making.
        warnings: what the user should know before saying yes, a sentence each.
        candidates: the instance types; None: the model's size is unknown.
    """

    spec: Spec
    decision: Decision
    wanted: tuple[Resource, ...]
    warnings: tuple[str, ...]
    candidates: Candidates | None

    def plan(self, live: Live, *, adopt: bool = False) -> Plan:
        return plan(self.wanted, live, keep=self.spec.update.keep, adopt=adopt)


def prepare(spec: Spec, region: str, aws: Aws | None, *, allow_plaintext_secret: bool = False) -> Prepared:
    """Settle it and build its resources. Changes nothing.

    Args:
        aws: None: nothing is asked.

    Raises:
        SpecError, DoesNotFit, Refused, NotThere: as `resolve` and `resources`.
    """
    resolution = resolve(spec, region, aws=aws)
    decision = resolution.decision
    wanted = resources(spec, decision, allow_plaintext_secret=allow_plaintext_secret)
    return Prepared(spec, decision, wanted, warnings(spec, decision), resolution.candidates)


@dataclass(frozen=True)
class Outlook:
    """What `lmi deploy plan` shows.

    Attributes:
        upload: what would be sent; None: no model data of this machine, or AWS could not be asked.
        unasked: why AWS was not asked; None: it was.
        checks: what was looked at that would fail; none where AWS was not asked.
    """

    prepared: Prepared
    plan: Plan
    upload: str | None = None
    unasked: str | None = None
    checks: tuple[Check, ...] = ()


def outlook(
    spec: Spec, aws: Aws, *, offline: bool = False, adopt: bool = False, allow_plaintext_secret: bool = False
) -> Outlook:
    """The plan, made with AWS's answers; without them, as if nothing existed, where it cannot be asked."""

    def prepared(of: Aws | None) -> Prepared:
        return prepare(spec, aws.region, of, allow_plaintext_secret=allow_plaintext_secret)

    why = "--offline" if offline else None
    if not offline:
        try:
            asked = prepared(aws)
            live = look(aws, spec.name, asked.wanted)
            planned = asked.plan(live, adopt=adopt)
            asked = replace(asked, warnings=(*asked.warnings, *scaled_by_hand(spec, live)))
            checks = preflight(aws, spec, asked.decision, fetch=over_the_network, without=("name",))
            return Outlook(asked, planned, _upload(spec, aws, live), checks=tuple(checks))
        except (BotoCoreError, ClientError) as error:
            why = why_unreachable(error)
            if why is None:
                raise
    alone = prepared(None)
    return Outlook(alone, alone.plan(Live(spec.name, asked=False)), unasked=why)


def scaled_by_hand(spec: Spec, live: Live) -> tuple[str, ...]:
    """A warning where the endpoint was scaled by hand, and an update would take that back.

    Where `scaling` or `instance.managed` are, an update keeps the instances (`builders/endpoint.py`).
    """
    endpoint = live.endpoint
    if spec.scaling is not None or spec.instance.managed is not None or endpoint is None or endpoint.failed:
        return ()
    config = live.get(Kind.ENDPOINT_CONFIG, (str(endpoint.said["EndpointConfigName"]),))
    variants = config.said["ProductionVariants"] if config is not None else ()
    begun = {one["VariantName"]: one.get("InitialInstanceCount") for one in variants}
    return tuple(
        f"{endpoint.name} is scaled to {count} instances, instance.count is {spec.instance.count}, and an update takes "
        f"it there; to keep them, write instance.count: {count}, or scaling:"
        for one in endpoint.said.get("ProductionVariants", ())
        # As many as it began with: then the file has changed, and the plan shows it.
        if (count := one.get("DesiredInstanceCount")) not in (None, spec.instance.count, begun.get(one["VariantName"]))
    )


def upload_model(spec: Spec, aws: Aws, progress: Callable[[Sent], None]) -> Uploaded | None:
    """Send `model.path`, where the specification has one; what is there already is not sent again."""
    model = spec.model
    if model.directory is None or model.upload is None:
        return None
    return upload(
        aws,
        model.directory,
        model.upload,
        progress,
        isolated=spec.network.isolated,
        own_code=spec.own_code,
        deployment=spec.name,
    )


def check_data(spec: Spec, aws: Aws, live: Live) -> UploadPlan | None:
    """What would be uploaded; None: the specification has no `model.path`. Changes nothing.

    Raises:
        Refused: other files would come under what serves: instances that come later would load a mixture or the new
            version, an update could not be rolled back, and the model, which names the prefix, would stay the same.
            Likewise where what would be sent is in the place of another deployment's, or another model loads it.
    """
    model = spec.model
    if model.directory is None or model.upload is None:
        return None
    planned = plan_upload(aws, model.directory, model.upload, isolated=spec.network.isolated, own_code=spec.own_code)
    serves = live.endpoint is not None and not live.endpoint.failed
    users = [found.name for found in live.ours if found.kind is Kind.MODEL and _data(found.said) == model.upload]
    if planned.missing and serves and users:
        raise Refused(
            f"model.path is not what {live.deployment} serves from {model.upload}: {len(planned.missing)} files are "
            f"new or changed, e.g. {planned.missing[0]}",
            "Write another prefix into model.upload (as s3://bucket/model-2/): the endpoint is then updated to it, and "
            "can be rolled back to the old files.",
        )
    if planned.missing:
        _refuse_another_s(aws, planned, live)
    return planned


def _refuse_another_s(aws: Aws, planned: UploadPlan, live: Live) -> None:
    """Raises: Refused: what would be sent lies where another model loads from, or in the place of what another sent."""
    own = {found.name for found in live.ours if found.kind is Kind.MODEL}
    there = users_of(aws, str(planned.prefix))
    users = [f"the model {name} loads from {where}" for name, where in there.items() if name not in own]
    with ThreadPoolExecutor(WORKERS) as pool:
        senders = set(pool.map(lambda name: sender_there(aws, planned.prefix, name), planned.changed))
    users += [f"the deployment {name} sent files there" for name in senders if name not in (None, live.deployment)]
    if users:
        raise Refused(
            f"{planned.prefix} is also another's: {sorted(users)[0]}"
            + (f", and {len(users) - 1} more" if len(users) > 1 else "")
            + f"; {len(planned.missing)} files would be new or changed there, e.g. {planned.missing[0]}",
            "Write another prefix into model.upload, as s3://bucket/model-2/.",
        )


def _data(model: Json) -> str | None:
    """Where a model that AWS shows has its data."""
    uri = model.get("PrimaryContainer", {}).get("ModelDataSource", {}).get("S3DataSource", {}).get("S3Uri")
    return None if uri is None else str(uri)


def _upload(spec: Spec, aws: Aws, live: Live) -> str | None:
    planned = check_data(spec, aws, live)
    return None if planned is None else "\n".join([str(planned), *(str(finding) for finding in planned.findings)])
