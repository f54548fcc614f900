"""Components of several deployments on one endpoint: whether all of them have room on its instances."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from deploy.deployer.live import Live
from deploy.errors import SpecError
from deploy.resolve.components import Placed, Sums, without_room
from deploy.resources.resource import specifications
from deploy.spec import Spec


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
