"""Turn a specification into a plan. Only `upload_models` changes anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from deploy.aws import Aws
from deploy.deployer.live import Live
from deploy.deployer.plan import Plan, plan
from deploy.deployer.shadow import Share, beside, plan_promotion, plan_shadow
from deploy.deployer.teardown import data_uri, users_of
from deploy.errors import Refused, SpecError
from deploy.resolve.components import Placed, Sums, without_room
from deploy.resolve.decision import Decision
from deploy.resolve.fit import Resolution
from deploy.resolve.model.files import hub_to_ask
from deploy.resolve.prices import ask as ask_prices
from deploy.resolve.resolver import resolve
from deploy.resources.build import resources, warnings
from deploy.resources.resource import Kind, Resource, containers, specifications
from deploy.s3.upload import WORKERS, UploadPlan, UploadProgress, counted, object_sender, plan_upload, upload
from deploy.spec import Spec
from deploy.spec.components import servers
from deploy.spec.options import ADVICE, options_problems, problems_error


@dataclass(frozen=True)
class Preparation:
    """A specification with its resolution and its desired resources.

    Attributes:
        resources_in_order: desired resources, in the order of their creation.
        warnings: sentences for the user to read before confirming.
    """

    spec: Spec
    resolution: Resolution
    resources_in_order: tuple[Resource, ...]
    warnings: tuple[str, ...]
    allow_plaintext_secret: bool = False

    @property
    def decision(self) -> Decision:
        return self.resolution.decision


@dataclass(frozen=True)
class Comparison:
    """The result of comparing a preparation with the existing resources in AWS.

    Attributes:
        plan: plan for the desired resources.
        warnings: sentences for the user to read before confirming.
        uploads: planned uploads of models from this machine.
        sums: resources that all components on the endpoint need, or None if there are none or AWS was not queried.
    """

    plan: Plan
    warnings: tuple[str, ...] = ()
    uploads: tuple[UploadPlan, ...] = ()
    sums: Sums | None = None


def prepare(spec: Spec, region: str, aws: Aws | None, *, allow_plaintext_secret: bool = False) -> Preparation:
    """Resolve the specification and build its resources.

    Args:
        aws: clients for querying AWS, or None to resolve without AWS.

    Raises:
        SpecError, DoesNotFit, Refused, NotThere: the specification cannot be resolved or built.
    """
    try:
        resolution = resolve(spec, region) if aws is None else resolve_online(spec, aws)
    except SpecError as error:  # report wrong options as well, which are known without a decision
        if wrong := options_problems(spec):
            advice = "\n".join(filter(None, (error.advice, ADVICE)))
            raise problems_error([str(error), *wrong], advice) from None
        raise
    decision = resolution.decision
    resources_in_order = resources(spec, decision, allow_plaintext_secret=allow_plaintext_secret)
    return Preparation(spec, resolution, resources_in_order, warnings(spec, decision), allow_plaintext_secret)


def resolve_online(spec: Spec, aws: Aws) -> Resolution:
    """Resolve the specification with information from AWS and the hub."""
    account = aws.account()  # called first, as the rest is useless without AWS
    return resolve(spec, aws.region, account=account, aws=aws, hub=hub_to_ask(), prices=ask_prices(aws))


def compare(preparation: Preparation, aws: Aws, live: Live, *, adopt: bool = False) -> Comparison:
    """Compare a preparation with the existing resources.

    Args:
        adopt: whether to take over resources that have a desired name but another owner.

    Raises:
        Refused, NotThere: the existing resources do not allow the changes (see `plan`), or an upload would
            overwrite files that a model uses.
        SpecError: the components do not fit next to other deployments' components, or have the wrong instance type.
    """
    spec = preparation.spec
    planned = plan(preparation.resources_in_order, live, keep=spec.update.keep, adopt=adopt)
    checked = [check_data(server, aws, live) for server in servers(spec)]
    uploads = {str(upload.prefix): upload for upload in checked if upload is not None}
    sums, notes = sums_on_endpoint(spec, preparation.resolution.sums, live)
    return Comparison(planned, (*scaled_by_hand(spec, live), *notes), tuple(uploads.values()), sums)


def compare_beside(preparation: Preparation, aws: Aws, live: Live, share: Share) -> tuple[Preparation, Comparison]:
    """Return the preparation of a shadow on another owner's endpoint, and its comparison with the existing resources.

    Raises:
        NotThere: the endpoint does not exist.
        Refused: the endpoint cannot get a shadow, or the upload would affect another model.
    """
    spec = preparation.spec
    resources = beside(spec, preparation.resources_in_order, live, share)
    # The checks and the price concern only the shadow.
    shadow_spec = spec.model_copy(
        update={"instance": spec.instance.model_copy(update={"count": share.count}), "scaling": None}
    )
    uploaded = check_data(spec, aws, live)
    notes = (
        f"{share.percent} % of the requests are copied to the shadow, and its responses are discarded",
        "AWS updates an endpoint by starting new instances next to the old instances, which needs additional capacity "
        "and quota during the update",
    )
    comparison = Comparison(plan_shadow(resources, live), notes, () if uploaded is None else (uploaded,))
    return replace(preparation, spec=shadow_spec, resources_in_order=resources), comparison


def compare_promotion(preparation: Preparation, aws: Aws, live: Live) -> Comparison:
    """Compare the promotion of the shadow with the existing resources.

    Raises:
        NotThere: there is no shadow.
        Refused: the endpoint is not in service, the shadow differs from the specification, or an upload of the model
            would affect another model.
    """
    planned = plan_promotion(preparation.resources_in_order, live, preparation.spec.update.keep)
    check_data(preparation.spec, aws, live)
    return Comparison(planned)


def compare_offline(preparation: Preparation) -> Comparison:
    """Compare a preparation with an empty account, without querying AWS."""
    spec = preparation.spec
    return Comparison(plan(preparation.resources_in_order, Live(spec.deployment, online=False), keep=spec.update.keep))


def scaled_by_hand(spec: Spec, live: Live) -> tuple[str, ...]:
    """Return warnings if the endpoint was scaled manually and an update would undo that.

    With `scaling` or `instance.managed`, an update keeps the number of instances (`resources/build.py`).
    """
    endpoint = live.endpoint
    automatic = spec.scaling is not None or spec.instance.managed is not None
    if automatic or spec.endpoint is not None or endpoint is None or endpoint.failed:
        return ()
    initial = {item["VariantName"]: item.get("InitialInstanceCount") for item in live.variants}
    return tuple(
        f"{endpoint.name} is scaled to {count} instances, but an update would scale it to instance.count, which is "
        f"{spec.instance.count}; to prevent that, set instance.count: {count}, or scaling:"
        for item in endpoint.description.get("ProductionVariants", ())
        # No warning if the endpoint has its initial number of instances: then the file has changed, as the plan shows.
        if (count := item.get("DesiredInstanceCount"))
        not in (None, spec.instance.count, initial.get(item["VariantName"]))
    )


def upload_models(spec: Spec, aws: Aws, live: Live, progress: Callable[[UploadProgress], None]) -> None:
    """Upload each `model.path` of the specification. Files that are already in S3 are skipped.

    Raises:
        Refused: the upload would change files that are in use; see `check_data`.
    """
    for server in servers(spec):
        model = server.model
        if model.directory is not None and model.upload is not None:
            check_data(server, aws, live)  # again, as the files may have changed since the plan was made
            upload(
                aws,
                model.directory,
                model.upload,
                progress,
                isolated=server.network.isolated,
                trusts_code=server.trusts_code,
                deployment=spec.deployment,
            )


def check_data(spec: Spec, aws: Aws, live: Live) -> UploadPlan | None:
    """Plan the upload of a server's model, or return None if the server has no `model.path`.

    Raises:
        Refused: the upload would change files that a serving endpoint, another deployment or another model uses. New
            instances of a serving endpoint would load a mixture of old and new files, and an update could not be
            rolled back.
    """
    model = spec.model
    if model.directory is None or model.upload is None:
        return None
    planned = plan_upload(
        aws, model.directory, model.upload, isolated=spec.network.isolated, trusts_code=spec.trusts_code
    )
    serves = live.endpoint is not None and not live.endpoint.failed
    users = [
        existing.name
        for existing in live.owned
        if existing.kind is Kind.MODEL and model.upload in map(data_uri, containers(existing.description))
    ]
    if planned.missing and serves and users:
        raise Refused(
            f"model.path differs from what {live.deployment} serves from {model.upload}: "
            f"{counted(len(planned.missing), 'file')} new or changed, such as {planned.missing[0]}",
            "Set model.upload to another prefix, such as s3://bucket/model-2/. The endpoint is then updated to the new "
            "files, and can be rolled back to the old files.",
        )
    if planned.missing:
        _refuse_foreign(aws, planned, live)
    return planned


def _refuse_foreign(aws: Aws, planned: UploadPlan, live: Live) -> None:
    """Raise Refused if another model loads from the prefix, or another deployment uploaded a file that would change."""
    deployment_models = {existing.name for existing in live.owned if existing.kind is Kind.MODEL}
    uris = users_of(aws, str(planned.prefix))
    users = [f"the model {name} loads from {where}" for name, where in uris.items() if name not in deployment_models]
    with ThreadPoolExecutor(WORKERS) as pool:
        senders = set(pool.map(lambda name: object_sender(aws, planned.prefix, name), planned.changed))
    users += [f"the deployment {name} uploaded files there" for name in senders if name not in (None, live.deployment)]
    if users:
        raise Refused(
            f"{planned.prefix} is in use: {sorted(users)[0]}"
            + (f", and {len(users) - 1} more" if len(users) > 1 else "")
            + f"; {counted(len(planned.missing), 'file')} would be added or changed, such as {planned.missing[0]}",
            "Set model.upload to another prefix, such as s3://bucket/model-2/.",
        )


# -- check whether the components of several deployments fit on one endpoint -------------------------------------------


def sums_on_endpoint(spec: Spec, sums: Sums | None, live: Live) -> tuple[Sums | None, tuple[str, ...]]:
    """Return the sums of all components on the endpoint, including other deployments' components, and warnings.

    Raises:
        SpecError: the instance type differs from that of the shared endpoint, or the first copies do not fit.
    """
    variant: Mapping[str, Any] = next(iter(live.variants), {})
    if sums is None:
        return None, ()
    if spec.endpoint is not None and variant:
        _check_type(spec, variant)
        sums = replace(sums, count=_instances(variant, live))
    foreign = tuple(_placed(live))
    if not foreign and spec.endpoint is None:
        return sums, ()
    together = replace(sums, placed=(*sums.placed, *foreign))
    if sums.instance is None:
        return together, ()
    names = ", ".join(item.name for item in foreign) or "none"
    where = f"{sums.count} x {sums.instance.name} with other deployments' components ({names})"
    problem = without_room(together, where)
    if problem and not spec.instance.unchecked:
        raise SpecError(problem, "Use fewer copies, or have the endpoint's owner add instances.")
    notes = [f"{problem} (instance.unchecked)."] if problem else []
    if foreign and spec.endpoint is None:
        notes.append(f"changes to the endpoint's instances also affect components of other deployments: {names}.")
    return together, tuple(notes)


def _check_type(spec: Spec, variant: Mapping[str, Any]) -> None:
    pools = [pool["InstanceType"] for pool in variant.get("InstancePools", ())]
    types = pools or [variant.get("InstanceType")]
    if spec.instance.type not in types:
        raise SpecError(
            f"instance.type: {spec.instance.type}, but the endpoint {spec.endpoint} has {' or '.join(map(str, types))}",
            "Set instance.type to a type that the endpoint has, because the memory is checked for that type.",
        )


def _instances(variant: Mapping[str, Any], live: Live) -> int:
    """Return the maximum number of instances that the shared endpoint can have."""
    managed = variant.get("ManagedInstanceScaling", {})
    if managed.get("Status") == "ENABLED" and "MaxInstanceCount" in managed:
        return int(managed["MaxInstanceCount"])
    variants = live.endpoint.description.get("ProductionVariants", ()) if live.endpoint is not None else ()
    counts = [item.get("DesiredInstanceCount") for item in variants if item["VariantName"] == variant["VariantName"]]
    return int(next(iter(counts), None) or variant.get("InitialInstanceCount", 1))


def _placed(live: Live) -> Iterator[Placed]:
    """Yield the resources that other deployments' components need. Adapters share their base component's resources."""
    for item in live.foreign_components:
        specification = next((part for part in specifications(item.description) if part), {})
        needs = specification.get("ComputeResourceRequirements", {})
        if "BaseInferenceComponentName" in specification:
            continue
        yield Placed(
            item.name,
            f"{specification.get('ModelName', '')} (other deployment)".strip(),
            int(item.description.get("RuntimeConfig", {}).get("DesiredCopyCount", 0)),
            int(needs.get("NumberOfAcceleratorDevicesRequired", 0)),
            int(needs.get("MinMemoryRequiredInMb", 0)),
            float(needs.get("NumberOfCpuCoresRequired", 0)),
        )
