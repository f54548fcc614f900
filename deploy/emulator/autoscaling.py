"""A replacement for moto's Application Auto Scaling, with inference components, tags and AWS's own errors."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from moto.applicationautoscaling.responses import ApplicationAutoScalingResponse
from moto.cloudwatch.models import cloudwatch_backends
from moto.core.exceptions import ServiceException
from moto.utilities.utils import get_partition

from deploy.emulator.patch import Replacements, json_result, methods
from deploy.emulator.sagemaker import ACCOUNT, Invalid, SageMakerState, page

_DIMENSIONS = {
    "sagemaker:variant:DesiredInstanceCount": "endpoint/",
    "sagemaker:inference-component:DesiredCopyCount": "inference-component/",
}


_NAMESPACE = "sagemaker"
_CONFIGURATIONS = {
    "StepScaling": "StepScalingPolicyConfiguration",
    "TargetTrackingScaling": "TargetTrackingScalingPolicyConfiguration",
}

INSTANCES = "sagemaker:variant:DesiredInstanceCount"


class NotFound(ServiceException):
    code = "ObjectNotFoundException"


@dataclass
class AutoScaling:
    """The state and API operations of Application Auto Scaling.

    Attributes:
        targets: scalable targets by resource ID and scalable dimension.
        policies: scaling policies by resource ID, scalable dimension and policy name.
        tags: tags of scalable targets, by ARN.
        activities: scaling activities by resource ID.
        registered: scalable dimensions that were ever registered, so that their service-linked roles exist.
    """

    sagemaker: SageMakerState
    targets: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    policies: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    tags: dict[str, dict[str, str]] = field(default_factory=dict)
    activities: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    registered: set[str] = field(default_factory=set)

    def endpoint_gone(self, name: str) -> None:
        """Deregister a deleted endpoint's variants, as AWS does."""
        for resource, dimension in list(self.targets):
            if resource.startswith(f"endpoint/{name}/"):
                self._drop(resource, dimension)

    def variants_of(self, endpoint: str) -> set[str]:
        """Return the names of the endpoint's registered variants."""
        head = f"endpoint/{endpoint}/variant/"
        return {resource.removeprefix(head) for resource, _ in self.targets if resource.startswith(head)}

    def register_scalable_target(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        resource, dimension = p["ResourceId"], p["ScalableDimension"]
        if not resource.startswith(_DIMENSIONS.get(dimension, "\0")):
            raise Invalid("Unsupported service namespace, resource type or scalable dimension")
        self._check_resource(resource)
        target = self.targets.get((resource, dimension))
        if target is None:
            target = self._new_target(p, region)
        self._check_limits({**target, **p})
        p.pop("Tags", None)  # registering an existing target again does not change its tags; TagResource does
        self.targets[resource, dimension] = {**target, **p}
        self.registered.add(dimension)
        return {"ScalableTargetARN": target["ScalableTargetARN"]}

    def _check_policy(self, p: dict[str, Any]) -> None:
        """Check that a policy has the configuration of its type, which SageMaker supports."""
        kind = p.get("PolicyType", "StepScaling")
        if kind not in _CONFIGURATIONS:
            raise Invalid(f"The policy type {kind} is not supported for the service namespace sagemaker.")
        if p.get("PredictiveScalingPolicyConfiguration") or _CONFIGURATIONS[kind] not in p:
            raise Invalid(f"A policy of type {kind} requires {_CONFIGURATIONS[kind]}, and no other configuration.")

    def _check_resource(self, resource: str) -> None:
        """Check that the endpoint's variant or the component exists."""
        kind, name, *variant_path = resource.split("/")
        if (kind, name) not in self.sagemaker.things:
            raise Invalid(f"SageMaker {kind} not found: {name}")
        if kind == "endpoint":
            variants = self.sagemaker.get("endpoint", name).served.config["ProductionVariants"]
            if variant_path not in [["variant", variant["VariantName"]] for variant in variants]:
                raise Invalid(f"SageMaker variant not found: {resource}")

    def _check_limits(self, target: dict[str, Any]) -> None:
        """Check that a target has both limits, in order."""
        if "MinCapacity" not in target or "MaxCapacity" not in target:
            raise Invalid("MinCapacity and MaxCapacity are required to register a new scalable target")
        if target["MinCapacity"] > target["MaxCapacity"]:
            raise Invalid("Maximum capacity cannot be less than minimum capacity")

    def _new_target(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        head = f"arn:{get_partition(region)}:application-autoscaling:{region}:{ACCOUNT}"
        arn = f"{head}:scalable-target/{uuid.uuid4().hex}"
        self._check_limits(p)
        self.tags[arn] = dict(p.get("Tags") or {})
        return {"ScalableTargetARN": arn, "CreationTime": time.time(), "RoleARN": "arn:aws:iam::1:role/linked"}

    def describe_scalable_targets(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        targets = [
            target
            for (resource, dimension), target in self.targets.items()
            if resource in (p.get("ResourceIds") or [resource]) and dimension == p.get("ScalableDimension", dimension)
        ]
        targets = targets if p["ServiceNamespace"] == _NAMESPACE else []
        return _page("ScalableTargets", targets, p)

    def deregister_scalable_target(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        self._target(p, "found")
        self._drop(p["ResourceId"], p["ScalableDimension"])
        return {}

    def put_scaling_policy(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        self._target(p, "registered")
        self._check_policy(p)
        key = (p["ResourceId"], p["ScalableDimension"], p["PolicyName"])
        stem = f"arn:{get_partition(region)}:autoscaling:{region}:{ACCOUNT}:scalingPolicy:{uuid.uuid4()}"
        arn = f"{stem}:resource/sagemaker/{p['ResourceId']}:policyName/{p['PolicyName']}"
        before = self.policies.get(key, {"PolicyARN": arn, "CreationTime": time.time(), "Alarms": []})
        self.policies[key] = {**{name: before[name] for name in ("PolicyARN", "CreationTime", "Alarms")}, **p}
        return {"PolicyARN": before["PolicyARN"], "Alarms": []}

    def describe_scaling_policies(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        policies = [
            policy
            for (resource, dimension, name), policy in self.policies.items()
            if resource == p.get("ResourceId", resource)
            and dimension == p.get("ScalableDimension", dimension)
            and name in (p.get("PolicyNames") or [name])
        ]
        policies = policies if p["ServiceNamespace"] == _NAMESPACE else []
        return _page("ScalingPolicies", policies, p)

    def delete_scaling_policy(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        key = (p["ResourceId"], p["ScalableDimension"], p["PolicyName"])
        if key not in self.policies:
            raise NotFound(f"No scaling policy found for {_target_text(p)}, policy name: {p['PolicyName']}")
        del self.policies[key]
        return {}

    def describe_scaling_activities(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        resources = [p["ResourceId"]] if "ResourceId" in p else sorted(self.activities)
        dimension = p.get("ScalableDimension")
        activities = [
            activity
            for resource in resources
            for activity in self.activities.get(resource, ())
            if dimension in (None, activity.get("ScalableDimension", dimension))
        ]
        return _page("ScalingActivities", activities, p)

    def list_tags_for_resource(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        return {"Tags": self._tags(p["ResourceARN"])}

    def tag_resource(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        self._tags(p["ResourceARN"]).update(p["Tags"])
        return {}

    def untag_resource(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        tags = self._tags(p["ResourceARN"])
        for key in p["TagKeys"]:
            tags.pop(key, None)
        return {}

    def wake(self, endpoint: str, region: str) -> None:
        """Scale out an endpoint that has waiting requests but no instance, with the policies of its backlog alarms."""
        for alarm in cloudwatch_backends[ACCOUNT][region].alarms.values():
            dimensions = {dimension.name: dimension.value for dimension in alarm.dimensions or ()}
            if alarm.metric_name == "HasBacklogWithoutCapacity" and dimensions == {"EndpointName": endpoint}:
                assert (alarm.namespace, alarm.comparison_operator) == (
                    "AWS/SageMaker",
                    "GreaterThanOrEqualToThreshold",
                )
                assert alarm.threshold <= 1, "the metric is 1 while requests wait"
                for (resource, _, _), rule in self.policies.items():
                    if rule["PolicyARN"] in alarm.alarm_actions:
                        (step,) = rule["StepScalingPolicyConfiguration"]["StepAdjustments"]
                        maximum = self.targets[resource, INSTANCES]["MaxCapacity"]
                        self.set_count(endpoint, resource, min(step["ScalingAdjustment"], maximum))

    def set_count(self, endpoint: str, resource: str, count: int) -> None:
        """Set the number of instances of a variant."""
        variant = resource.rpartition("/")[2]
        self.sagemaker.get("endpoint", endpoint).request.setdefault("Counts", {})[variant] = count

    def _tags(self, arn: str) -> dict[str, str]:
        if arn not in self.tags:
            raise ServiceException("ResourceNotFoundException", f"The resource doesn't exist: {arn}")
        return self.tags[arn]

    def _target(self, p: dict[str, Any], verb: str) -> None:
        if (p["ResourceId"], p["ScalableDimension"]) not in self.targets:
            raise NotFound(f"No scalable target {verb} for {_target_text(p)}")

    def _drop(self, resource: str, dimension: str) -> None:
        self.tags.pop(self.targets.pop((resource, dimension))["ScalableTargetARN"], None)
        for key in [key for key in self.policies if key[:2] == (resource, dimension)]:
            del self.policies[key]


def _page(name: str, items: list[dict[str, Any]], p: dict[str, Any]) -> dict[str, Any]:
    """Return the requested page of a list, of at most 50 items."""
    page_items, more = page(items, {"MaxResults": 50, **p})
    return {name: page_items, **more}


def _target_text(p: dict[str, Any]) -> str:
    return f"service namespace: sagemaker, resource ID: {p['ResourceId']}, scalable dimension: {p['ScalableDimension']}"


def replacements(scaling: AutoScaling) -> Replacements:
    """Return the operations of `scaling` as replacements for moto's operations."""
    return [
        (
            ApplicationAutoScalingResponse,
            methods(scaling, json_result, "endpoint_gone", "wake", "set_count", "variants_of"),
        )
    ]
