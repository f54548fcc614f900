"""Turn Application Auto Scaling's targets and policies into `scaling`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deploy.adopt.source import Source
from deploy.resources.resource import Json

_BY_CONCURRENCY = (
    "SageMakerVariantConcurrentRequestsPerModelHighResolution",
    "SageMakerInferenceComponentConcurrentRequestsPerCopyHighResolution",
)
_COOLDOWN = 300  # seconds: Application Auto Scaling's own, of SageMaker's targets


def scaling_of(
    source: Source, variant: Json, bases: Sequence[Json], unmapped: list[tuple[str, str]]
) -> dict[str, Any] | None:
    """Return `scaling`; None: there is none, or it does not map.

    Args:
        unmapped: gets what does not map, and why.
    """
    places = [f"inference-component/{one['InferenceComponentName']}" for one in bases]
    if not places:
        places = [f"endpoint/{source.name}/variant/{variant.get('VariantName')}"]
    targets = [one for one in source.targets if one["ResourceId"] in places]
    found = [made for target in targets if (made := _scaling(source, target, unmapped)) is not None]
    if not found:
        return None
    if len(found) < len(places) or any(made != found[0] for made in found):
        unmapped.append(("scaling", "components scale differently; lmi deploy scales all of them alike"))
        return None
    return found[0]


def _scaling(source: Source, target: Json, unmapped: list[tuple[str, str]]) -> dict[str, Any] | None:
    made: dict[str, Any] | None = None
    for policy in [one for one in source.policies if one["ResourceId"] == target["ResourceId"]]:
        name, tracking = policy["PolicyName"], policy.get("TargetTrackingScalingPolicyConfiguration", {})
        metric = tracking.get("PredefinedMetricSpecification", {}).get("PredefinedMetricType")
        if metric in _BY_CONCURRENCY and target["MinCapacity"] >= 1:
            made = {
                "min": target["MinCapacity"],
                "max": target["MaxCapacity"],
                "concurrency": tracking["TargetValue"],
                "scale_in_cooldown": tracking.get("ScaleInCooldown", _COOLDOWN),
                "scale_out_cooldown": tracking.get("ScaleOutCooldown", _COOLDOWN),
            }
            why = "scaling has the same rule under a name of its own: delete this policy after `up`"
        else:
            why = (
                f"it stays as it is, by {metric or policy.get('PolicyType', 'its own rule')}; scaling would replace it"
            )
        unmapped.append((f"scaling policy {name} of {target['ResourceId']}", why))
    return made
