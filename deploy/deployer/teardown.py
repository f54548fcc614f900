"""Delete logs and uploaded model data on request (`lmi deploy down --logs --data`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from botocore.exceptions import ClientError

from deploy.aws import Aws, is_missing, pages
from deploy.deployer.calls import call, show
from deploy.deployer.live import Live
from deploy.errors import Refused, SpecError
from deploy.operations.logs import component_group, endpoint_group
from deploy.resolve.components import Placed, Sums, without_room
from deploy.resources.resource import Kind, containers, specifications
from deploy.s3.prefix import Prefix, delete, objects
from deploy.s3.upload import object_digest
from deploy.spec import Spec

_WORKERS = 8  # parallel requests to S3


def log_groups(endpoint: str | None, components: Iterable[str]) -> list[str]:
    """Return the log groups of an endpoint (None: it stays) and of components."""
    of_endpoint = [endpoint_group(endpoint)] if endpoint is not None else []
    return [*of_endpoint, *(component_group(name) for name in components)]


def delete_logs(aws: Aws, groups: Iterable[str]) -> Iterator[str]:
    """Delete the log groups, and yield those that existed."""
    for group in groups:
        try:
            call(aws, "logs", "delete_log_group", {"logGroupName": group})
        except ClientError as error:
            if not is_missing(error):
                raise
        else:
            yield group


def users_of(aws: Aws, uri: str) -> dict[str, str]:
    """Return all models of the account and region that load from the prefix, above or below it, by name."""
    names = [item["ModelName"] for item in pages(aws, "sagemaker", "list_models", "Models")]
    with ThreadPoolExecutor(_WORKERS) as pool:
        descriptions = list(pool.map(lambda name: show(aws, Kind.MODEL, (name,)), names))
    users = {}
    for name, description in zip(names, descriptions, strict=True):
        for container in containers(description or {}):
            where = container.get("ModelDataSource", {}).get("S3DataSource", {}).get("S3Uri")
            where = where or container.get("ModelDataUrl")
            if where and (where.startswith(uri) or uri.startswith(where)):
                users[name] = str(where)
    return users


def check_users(aws: Aws, uri: str, own_models: Iterable[str]) -> None:
    """Check that no other model loads from the prefix.

    Args:
        own_models: models that are deleted before the data.

    Raises:
        Refused: another model loads from there.
    """
    others = {name: where for name, where in users_of(aws, uri).items() if name not in set(own_models)}
    if others:
        name, where = sorted(others.items())[0]
        raise Refused(
            f"{uri} is also what the model {name} loads from ({where})"
            + (f", and {len(others) - 1} more" if len(others) > 1 else ""),
            "Leave --data out, or remove those first.",
        )


def delete_data(aws: Aws, uri: str) -> tuple[int, int]:
    """Delete the objects below the prefix that `up` uploaded (marked by their digest), and unfinished uploads.

    Returns:
        The number of deleted objects, and the number of others that remain.

    Raises:
        Failed: S3 did not delete some.
    """
    prefix = Prefix.of(uri)
    there = objects(aws, prefix)
    with ThreadPoolExecutor(_WORKERS) as pool:
        digests = list(pool.map(lambda entry: object_digest(aws, prefix, entry.name), there))
    uploaded = [entry.name for entry, digest in zip(there, digests, strict=True) if digest is not None]
    delete(aws, prefix, uploaded)
    where = {"Bucket": prefix.bucket, "Prefix": prefix.key}
    for item in pages(aws, "s3", "list_multipart_uploads", "Uploads", **where):
        # Parts of a killed run, which cost as much as objects.
        aws.client("s3").abort_multipart_upload(Bucket=prefix.bucket, Key=item["Key"], UploadId=item["UploadId"])
    return len(uploaded), len(there) - len(uploaded)


# -- components of several deployments on one endpoint: whether all of them have room on its instances -----------------


def beside_others(spec: Spec, sums: Sums | None, live: Live) -> tuple[Sums | None, tuple[str, ...]]:
    """Return the components with those of others on the endpoint, and warnings.

    Raises:
        SpecError: the type is not the shared endpoint's, or the first copies have no room beside the others'.
    """
    variants = live.config.description["ProductionVariants"] if live.config is not None else ()
    variant: Mapping[str, Any] = next(iter(variants), {})
    if sums is None:
        return None, ()
    if spec.endpoint is not None and variant:
        _check_type(spec, variant)
        sums = replace(sums, count=_instances(variant, live))
    others = tuple(_placed(live))
    if not others and spec.endpoint is None:
        return sums, ()
    together = replace(sums, placed=(*sums.placed, *others))
    if sums.instance is None:
        return together, ()
    names = ", ".join(item.name for item in others) or "none"
    where = f"{sums.count} x {sums.instance.name} with the components of others ({names})"
    problem = without_room(together, where)
    if problem and not spec.instance.unchecked:
        raise SpecError(problem, "Take fewer copies, or have the endpoint's owner add instances.")
    told = [f"{problem} (instance.unchecked)."] if problem else []
    if others and spec.endpoint is None:
        told.append(f"components of others are on this endpoint, and what changes it changes their instances: {names}.")
    return together, tuple(told)


def _check_type(spec: Spec, variant: Mapping[str, Any]) -> None:
    pools = [pool["InstanceType"] for pool in variant.get("InstancePools", ())]
    types = pools or [variant.get("InstanceType")]
    if spec.instance.type not in types:
        raise SpecError(
            f"instance.type: {spec.instance.type}, and the endpoint {spec.endpoint} has {' or '.join(map(str, types))}",
            "Name that type: the fit is computed for it.",
        )


def _instances(variant: Mapping[str, Any], live: Live) -> int:
    """Return the most instances that the shared endpoint may have."""
    managed = variant.get("ManagedInstanceScaling", {})
    if managed.get("Status") == "ENABLED" and "MaxInstanceCount" in managed:
        return int(managed["MaxInstanceCount"])
    variants = live.endpoint.description.get("ProductionVariants", ()) if live.endpoint is not None else ()
    counts = [item.get("DesiredInstanceCount") for item in variants if item["VariantName"] == variant["VariantName"]]
    return int(next(iter(counts), None) or variant.get("InitialInstanceCount", 1))


def _placed(live: Live) -> Iterator[Placed]:
    """Yield the components of others, without adapters, which take their bases' resources."""
    for item in live.others:
        specification = next((one for one in specifications(item.description) if one), {})
        needs = specification.get("ComputeResourceRequirements", {})
        if "BaseInferenceComponentName" in specification:
            continue
        yield Placed(
            item.name,
            f"{specification.get('ModelName', '')} (of others)".strip(),
            int(item.description.get("RuntimeConfig", {}).get("DesiredCopyCount", 0)),
            int(needs.get("NumberOfAcceleratorDevicesRequired", 0)),
            int(needs.get("MinMemoryRequiredInMb", 0)),
            float(needs.get("NumberOfCpuCoresRequired", 0)),
        )
