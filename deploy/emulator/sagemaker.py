"""SageMaker's control plane in memory: the parts that moto 5.2 does not support, or does not validate.

It has models, endpoint configurations, endpoints and inference components, which cause the same conflicts as on AWS.
A creation, update or deletion advances with every poll: the first `polls` polls show the busy state, and the next
poll shows the outcome. `fate` and `fate_of` decide whether it succeeds.
"""

from __future__ import annotations

import copy
import datetime
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import moto.sagemaker.models
from moto.cloudwatch.models import cloudwatch_backends
from moto.core.exceptions import ServiceException
from moto.sagemaker.responses import SageMakerResponse
from moto.utilities.utils import get_partition

from deploy.emulator.patch import Replacements, methods, result

ACCOUNT = "123456789012"


class Invalid(ServiceException):
    code = "ValidationException"


class Missing(ServiceException):
    code = "ResourceNotFound"


class TooMany(ServiceException):
    code = "ResourceLimitExceeded"


@dataclass(frozen=True)
class Fate:
    """The outcome of a creation or an update.

    Attributes:
        status: `InService`, `Failed`, `RolledBack` (the update failed, and the previous state is in service again) or
            `UpdateRollbackFailed`.
        reason: the FailureReason, or None.
        polls: number of polls that show the busy state first, or None for `SageMakerState.polls`.
    """

    status: str
    reason: str | None = None
    polls: int | None = None


def now() -> datetime.datetime:
    """Return the current time with millisecond precision, as in AWS's responses."""
    at = datetime.datetime.now(datetime.timezone.utc)
    return at.replace(microsecond=at.microsecond // 1000 * 1000)


@dataclass
class Change:
    """A creation, update or deletion in progress.

    Attributes:
        left: number of remaining polls that show the busy state.
        end: function that ends the busy state.
        config: name of the new endpoint configuration, or None if the configuration stays.
    """

    left: int
    end: Callable[[], None]
    config: str | None = None


@dataclass(frozen=True)
class ServedConfig:
    """The configuration and the CreateModel requests that an endpoint serves, all of which may have been deleted since.

    Attributes:
        models: requests of the models in `config`, by name.
    """

    config: dict[str, Any] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Thing:
    """A resource and its state.

    Attributes:
        request: parameters of the create request, updated by later requests.
        reason: the FailureReason, or None.
        change: the change in progress, or None if the resource is not busy.
        before: during an update, `request` before the update.
        changed: time of the last change.
        served: what an endpoint serves.
    """

    kind: str
    name: str
    arn: str
    request: dict[str, Any]
    created: datetime.datetime
    tags: dict[str, str]
    status: str = "InService"
    reason: str | None = None
    change: Change | None = None
    before: dict[str, Any] | None = None
    changed: datetime.datetime = field(default_factory=now)
    served: ServedConfig = field(default_factory=ServedConfig)

    def look(self) -> None:
        """Count one poll, which ends the busy state if no polls are left."""
        change = self.change
        if change is None:
            return
        if change.left > 0:
            change.left -= 1
            return
        self.change = None
        change.end()
        self.changed = now()

    @property
    def reference(self) -> dict[str, str]:
        """The response to a creation or an update."""
        return {f"{_words(self.kind)}Arn": self.arn}

    @property
    def modified(self) -> datetime.datetime:
        return max(self.created, self.changed)


KIND_NAMES = {
    "model": "model",
    "endpoint-config": "endpoint configuration",
    "endpoint": "endpoint",
    "inference-component": "inference component",
    "transform-job": "requested job with name",
}
"""Maps each kind of resource to its name in AWS's messages."""


@dataclass
class SageMakerState:
    """The state of SageMaker.

    Attributes:
        polls: number of polls that show a busy state.
        things: resources by kind and name.
        fates: outcomes that were set with `fate`, by resource name.
        on_endpoint_gone: callback for the name of each deleted endpoint.
        scaled_of: function that returns the names of an endpoint's variants that are registered for automatic scaling.
        may_take: function that returns whether SageMaker may assume a role, given the role ARN.
        quota_of: function that returns the quota of an instance type, given the type and the CreateModel request.
        fate_of: function that returns the outcome of a creation or update for which `fate` was not called.
    """

    polls: int = 1
    things: dict[tuple[str, str], Thing] = field(default_factory=dict)
    fates: dict[str, list[Fate]] = field(default_factory=dict)
    on_endpoint_gone: Callable[[str], None] = lambda name: None
    scaled_of: Callable[[str], set[str]] = lambda name: set()
    may_take: Callable[[str], bool] = lambda role: True
    quota_of: Callable[[str, Mapping[str, Any]], float] = lambda instance_type, model: math.inf
    fate_of: Callable[[Thing, Mapping[str, Any]], Fate] = lambda thing, request: Fate("InService")
    _last: datetime.datetime = field(default_factory=now)

    def fate(self, name: str, status: str, reason: str | None = None, polls: int | None = None) -> None:
        """Set the outcome of the next creation or update of an endpoint or component.

        Further calls set the outcomes of later creations or updates, in order.
        """
        self.fates.setdefault(name, []).append(Fate(status, reason, polls))

    def names(self, kind: str) -> list[str]:
        """Return the sorted names of all resources of a kind."""
        return sorted(name for of, name in self.things if of == kind)

    def get(self, kind: str, name: str) -> Thing:
        thing = self.things.get((kind, name))
        if thing is None:
            raise Invalid(f'Could not find {KIND_NAMES[kind]} "{arn(kind, name)}".')
        return thing

    def create(self, kind: str, name: str, request: dict[str, Any], region: str) -> Thing:
        if (kind, name) in self.things:
            raise Invalid(f'Cannot create already existing {KIND_NAMES[kind]} "{arn(kind, name, region)}".')
        tags = {tag["Key"]: tag["Value"] for tag in request.pop("Tags", None) or ()}
        thing = Thing(kind, name, arn(kind, name, region), request, self._now(), tags)
        self.things[kind, name] = thing
        return thing

    def check_role(self, role: str) -> None:
        if not self.may_take(role):
            raise Invalid(
                f"Could not assume role {role}. Please ensure that the role exists and allows principal "
                "'sagemaker.amazonaws.com' to assume the role."
            )

    def begin(
        self,
        thing: Thing,
        status: str,
        done: Callable[[], None] | None = None,
        request: Mapping[str, Any] = MappingProxyType({}),
    ) -> dict[str, str]:
        """Begin a creation or an update. Its outcome comes from `fate` or `fate_of`.

        Args:
            status: status while it is in progress.
            done: function to call if it succeeds, or None.
            request: parameters of the request, for `fate_of`.

        Returns:
            The response, which contains the resource's ARN.
        """
        queue = self.fates.get(thing.name, [])
        fate = queue.pop(0) if queue else self.fate_of(thing, request)
        thing.status, thing.reason = status, None

        def end() -> None:
            thing.status, thing.reason = fate.status, fate.reason
            if fate.status == "RolledBack":
                thing.status = "InService"
            if fate.status in ("RolledBack", "UpdateRollbackFailed") and thing.before is not None:
                thing.request = thing.before
            elif fate.status == "InService" and done is not None:
                done()

        polls = self.polls if fate.polls is None else fate.polls
        thing.change = Change(polls, end, request.get("EndpointConfigName"))
        return thing.reference

    def begin_deletion(self, thing: Thing, gone: Callable[[], None]) -> None:
        thing.status, thing.reason = "Deleting", None

        def end() -> None:
            self.delete(thing.kind, thing.name)
            gone()

        thing.change = Change(self.polls, end)

    def delete(self, kind: str, name: str) -> None:
        self.get(kind, name)
        del self.things[kind, name]

    def look(self, kind: str, name: str) -> Thing:
        """Count one poll of a resource, and return the resource.

        Raises:
            Invalid: the resource does not exist, or this poll has completed its deletion.
        """
        self.get(kind, name).look()
        return self.get(kind, name)

    def components_of(self, endpoint: str) -> list[Thing]:
        return [
            thing
            for (kind, _), thing in self.things.items()
            if kind == "inference-component" and thing.request["EndpointName"] == endpoint
        ]

    def serve(self, endpoint: Thing, config_name: str) -> None:
        """Keep the configuration and the models of an endpoint, which can be deleted while they serve."""
        config = self.get("endpoint-config", config_name).request
        names = {variant["ModelName"] for variant in _variants(config) if "ModelName" in variant}
        models = {name: self.things.get(("model", name)) for name in names}
        endpoint.served = ServedConfig(
            config, {name: model.request for name, model in models.items() if model is not None}
        )

    def by_arn(self, arn: str) -> Thing:
        for thing in self.things.values():
            if thing.arn == arn:
                return thing
        raise Invalid(f"Could not find resource {arn}")

    def _now(self) -> datetime.datetime:
        """Return the current time, at least 1 ms after the previous result, so that the newest resource is known."""
        self._last = max(now(), self._last + datetime.timedelta(milliseconds=1))
        return self._last


def page(things: list[Any], p: Mapping[str, Any]) -> tuple[list[Any], dict[str, str]]:
    """Return the requested page of a list, and a dict with the NextToken if more pages follow.

    Raises:
        Invalid: the request's NextToken is not valid.
    """
    token = p.get("NextToken") or "0"
    if not re.fullmatch("[0-9]{1,9}", token):
        raise Invalid("The NextToken is not valid.")
    last = int(token) + int(p.get("MaxResults") or 10)
    return things[int(token) : last], {"NextToken": str(last)} if last < len(things) else {}


def listed(things: Iterable[Thing], p: Mapping[str, Any]) -> list[Thing]:
    """Return the resources that a List operation's filters accept, sorted as it asks. The newest is first by default.

    The filters are NameContains, StatusEquals, and the times of creation and of the last change.
    """
    matching = [
        thing
        for thing in things
        if p.get("NameContains", "").lower() in thing.name.lower()
        and p.get("StatusEquals", thing.status) == thing.status
        and _is_between(thing.created, p.get("CreationTimeAfter"), p.get("CreationTimeBefore"))
        and _is_between(thing.modified, p.get("LastModifiedTimeAfter"), p.get("LastModifiedTimeBefore"))
    ]
    keys: dict[str, Callable[[Thing], Any]] = {
        "Name": lambda thing: thing.name,
        "Status": lambda thing: (thing.status, thing.created),
    }
    key = keys.get(p.get("SortBy", ""), lambda thing: thing.created)
    return sorted(matching, key=key, reverse=p.get("SortOrder", "Descending") == "Descending")


def _is_between(at: datetime.datetime, after: Any, before: Any) -> bool:
    """Return whether a time is between two times of a request, of which each may be None."""
    first, last = _seconds(after), _seconds(before)
    return (first is None or at.timestamp() > first) and (last is None or at.timestamp() < last)


def _seconds(value: Any) -> float | None:
    """Return a request's timestamp in seconds since 1970. JSON has a number, but moto may have converted it already."""
    if isinstance(value, str):
        value = datetime.datetime.fromisoformat(value.replace("Z", "+00:00"))
    return value.timestamp() if isinstance(value, datetime.datetime) else value


def arn(kind: str, name: str, region: str = "us-east-1") -> str:
    return f"arn:{get_partition(region)}:sagemaker:{region}:{ACCOUNT}:{kind}/{name}"


# -- SageMaker's API operations, which replace moto's ------------------------------------------------------------------


_KINDS = ("model", "endpoint-config", "endpoint", "inference-component")


def _words(kind: str) -> str:
    """Return the prefix of a kind's field names, e.g. `EndpointConfig`."""
    return "".join(word.capitalize() for word in kind.split("-"))


_LIVE = ("Counts", "Weights")
"""Fields of an endpoint that override the instance counts and weights of its configuration's variants."""
_DESCRIBED_WITH_ENDPOINT = ("AsyncInferenceConfig", "CrossRegionTrafficConfig", "ExplainerConfig", "MetricsConfig")


class Operations:
    """SageMaker's operations, each named as in boto3. `p` contains the operation's parameters, and may be modified."""

    def __init__(self, state: SageMakerState) -> None:
        self._state = state

    # Models and configurations are created at once, cannot be changed, and can be deleted while in use, as on AWS.

    def create_model(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        if not p.get("PrimaryContainer") and not p.get("Containers"):
            raise Invalid("Either PrimaryContainer or Containers must be given.")
        self._state.check_role(p["ExecutionRoleArn"])
        for container in (p.get("PrimaryContainer", {}), *p.get("Containers", ())):
            sources = (container.get("ModelDataSource", {}), *container.get("AdditionalModelDataSources", ()))
            for source in (item.get("S3DataSource", {}) for item in sources):
                if source.get("S3DataType") == "S3Prefix" and not source["S3Uri"].endswith("/"):
                    raise Invalid(f"S3Uri {source['S3Uri']} must end with a forward slash if S3DataType is S3Prefix.")
        p.get("PrimaryContainer", {}).setdefault("Mode", "SingleModel")
        p.setdefault("EnableNetworkIsolation", False)
        return self._state.create("model", p["ModelName"], p, region).reference

    def create_endpoint_config(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        if "ExecutionRoleArn" in p:
            self._state.check_role(p["ExecutionRoleArn"])
        if len(p.get("ShadowProductionVariants", ())) > 1 or (
            len(p["ProductionVariants"]) > 1 and "ShadowProductionVariants" in p
        ):
            raise Invalid("One variant for ProductionVariants and one for ShadowProductionVariants.")
        if "ShadowProductionVariants" in p and (
            "AsyncInferenceConfig" in p
            or any("ModelName" not in variant or "ServerlessConfig" in variant for variant in p["ProductionVariants"])
        ):
            raise Invalid(
                "Shadow variants cannot be combined with asynchronous or serverless inference, or with components."
            )
        names = Counter(variant["VariantName"] for variant in _variants(p))
        if repeated := [name for name, number in names.items() if number > 1]:
            raise Invalid(f"Variant names must be unique, and {repeated[0]} occurs {names[repeated[0]]} times.")
        for variant in _variants(p):
            self._check_types(variant)
            self._check_managed(variant.get("ManagedInstanceScaling", {}))
            self._check_routing(variant.get("RoutingConfig", {}))
            if "ModelName" in variant:
                self._state.get("model", variant["ModelName"])
                if variant.get("ManagedInstanceScaling", {}).get("Status") == "ENABLED":
                    raise Invalid("ManagedInstanceScaling is only supported for inference component endpoints.")
            elif "ExecutionRoleArn" not in p:
                raise Invalid("ExecutionRoleArn is required if a variant has no model.")
            variant.setdefault("InitialVariantWeight", 1.0)
        p.setdefault("EnableNetworkIsolation", False)
        return self._state.create("endpoint-config", p["EndpointConfigName"], p, region).reference

    def _check_managed(self, managed: dict[str, Any]) -> None:
        """Check that a variant's minimum number of instances is not above the maximum."""
        minimum, maximum = managed.get("MinInstanceCount", 0), managed.get("MaxInstanceCount", math.inf)
        if minimum > maximum:
            raise Invalid(f"MinInstanceCount {minimum} must not be greater than MaxInstanceCount {maximum}.")

    def _check_routing(self, routing: dict[str, Any]) -> None:
        """Check that prefix-aware routing has both of its fields, which the API model itself does not require."""
        prefix = routing.get("PrefixAwareRoutingConfig", {})
        aware = routing.get("RoutingStrategy") == "PREFIX_AWARE"
        if set(prefix) != ({"PrefixLength", "ConcurrencyThreshold"} if aware else set()):
            raise Invalid("PREFIX_AWARE requires PrefixLength and ConcurrencyThreshold; no other strategy allows them.")

    def _check_types(self, variant: dict[str, Any]) -> None:
        """Check that a variant has either one instance type or pools of different types and priorities."""
        if "ServerlessConfig" in variant:
            raise Invalid("Serverless endpoints are not emulated, as they have no GPU.")
        pools = variant.get("InstancePools")
        if (pools is None) == ("InstanceType" not in variant):
            raise Invalid("Exactly one of InstanceType and InstancePools must be given.")
        if pools is None:
            return
        types, priorities = [pool["InstanceType"] for pool in pools], [pool["Priority"] for pool in pools]
        if len(set(types)) < len(types) or len(set(priorities)) < len(priorities):
            raise Invalid("InstancePools must have different instance types and different priorities.")
        for pool in pools:
            if "ModelNameOverride" in pool:
                self._state.get("model", pool["ModelNameOverride"])

    def delete_model(self, p: dict[str, Any], region: str) -> None:
        self._state.delete("model", p["ModelName"])

    def delete_endpoint_config(self, p: dict[str, Any], region: str) -> None:
        self._state.delete("endpoint-config", p["EndpointConfigName"])

    # Endpoints

    def create_endpoint(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        self._check_quota(self._state.get("endpoint-config", p["EndpointConfigName"]).request, p["EndpointName"])
        thing = self._state.create("endpoint", p["EndpointName"], p, region)
        self._state.serve(thing, p["EndpointConfigName"])
        return self._state.begin(thing, "Creating", request=p)

    def update_endpoint(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        endpoint = self._idle("endpoint", p["EndpointName"])
        if endpoint.status == "Failed":
            raise Invalid(f'Cannot update failed endpoint "{endpoint.arn}".')
        self._state.get("endpoint-config", endpoint.request["EndpointConfigName"])  # terraform-provider-aws#40048
        retained = _retained(p)
        counts = endpoint.request.get("Counts", {}) if "Counts" in retained else {}
        if p.get("RetainDeploymentConfig") and "LastDeploymentConfig" in endpoint.request:
            p.setdefault("DeploymentConfig", endpoint.request["LastDeploymentConfig"])
        config = self._state.get("endpoint-config", p["EndpointConfigName"])
        self._check_quota(config.request, endpoint.name, counts)
        for alarm in p.get("DeploymentConfig", {}).get("AutoRollbackConfiguration", {}).get("Alarms", ()):
            if alarm["AlarmName"] not in cloudwatch_backends[ACCOUNT][region].alarms:
                raise Invalid(f"CloudWatch alarm {alarm['AlarmName']} does not exist.")
        self._check_batch(endpoint, p.get("DeploymentConfig", {}).get("RollingUpdatePolicy", {}))
        self._check_scaled(endpoint, config.request)
        endpoint.before = dict(endpoint.request)

        def done() -> None:
            endpoint.request = {**endpoint.request, "EndpointConfigName": p["EndpointConfigName"]}
            if ("endpoint-config", config.name) in self._state.things:
                self._state.serve(endpoint, config.name)
            gone = set(_LIVE) - retained
            endpoint.request = {name: value for name, value in endpoint.request.items() if name not in gone}
            if "DeploymentConfig" in p:
                endpoint.request["LastDeploymentConfig"] = p["DeploymentConfig"]

        return self._state.begin(endpoint, "Updating", done, p)

    def _check_quota(self, config: dict[str, Any], name: str, counts: Mapping[str, int] = MappingProxyType({})) -> None:
        """Check that the instances of an endpoint's configuration and of all other endpoints are within the quotas.

        Additional instances that run only during an update are not counted.

        Args:
            counts: numbers of instances that override those in the configuration, by variant.
        """
        used = self._used_instances(name)
        for variant in _variants(config):
            model = self._state.things.get(("model", variant.get("ModelName", "")))
            for instance, count in _instances({"ProductionVariants": [variant]}, counts).items():
                quota = self._state.quota_of(instance, model.request if model else {})
                if used[instance] + count > quota:
                    raise TooMany(
                        f"The account-level service limit '{instance} for endpoint usage' is {quota:g} Instances, with "
                        f"current utilization of {used[instance]} Instances and a request delta of {count} Instances. "
                        "Please contact AWS support to request an increase for this limit."
                    )
                used[instance] += count

    def _used_instances(self, name: str) -> Counter[str]:
        """Return the number of instances of each type that the endpoints other than `name` use."""
        used = Counter[str]()
        for (kind, other), endpoint in self._state.things.items():
            if kind == "endpoint" and other != name and endpoint.status not in ("Failed", "Deleting"):
                used += _instances(self._config_of(endpoint), endpoint.request.get("Counts", {}))
        return used

    def _check_batch(self, endpoint: Thing, rolling: dict[str, Any]) -> None:
        """Check that a rolling update's batch is 5 to 50 % of the variant's instances."""
        size = rolling.get("MaximumBatchSize")
        if size is None:
            return
        for variant in self._variants(endpoint):
            count = variant["CurrentInstanceCount"]
            percent = size["Value"] if size["Type"] == "CAPACITY_PERCENT" else 100 * size["Value"] / max(count, 1)
            if not 5 <= percent <= 50:
                raise Invalid(f"MaximumBatchSize must be 5 to 50 % of {count} instances, not {percent:g} %.")

    def _check_scaled(self, endpoint: Thing, config: Mapping[str, Any]) -> None:
        """Check that the variants that are registered for automatic scaling keep their names and instance types."""
        before, after = (
            {variant["VariantName"]: _types_of(variant) for variant in request["ProductionVariants"]}
            for request in (self._config_of(endpoint), config)
        )
        changed = [name for name in sorted(before) if before[name] != after.get(name)]
        if refused := [name for name in changed if name in self._state.scaled_of(endpoint.name)]:
            raise Invalid(
                f'The variant(s) "{json.dumps(refused)}" must be deregistered as scalable targets with AutoScaling '
                "before they can be removed or have their instance type updated."
            )

    def update_endpoint_weights_and_capacities(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        endpoint = self._idle("endpoint", p["EndpointName"])
        config, changes = self._config_of(endpoint), p["DesiredWeightsAndCapacities"]
        unknown = {item["VariantName"] for item in changes} - {item["VariantName"] for item in _variants(config)}
        if config and unknown:
            raise Invalid(f'Could not find variant "{min(unknown)}" of endpoint "{endpoint.arn}".')
        if counts := _by_variant(changes, "DesiredInstanceCount"):
            self._check_quota(config, endpoint.name, {**endpoint.request.get("Counts", {}), **counts})

        def done() -> None:
            for name, values in (("Counts", counts), ("Weights", _by_variant(changes, "DesiredWeight"))):
                if values:
                    endpoint.request[name] = {**endpoint.request.get(name, {}), **values}

        return self._state.begin(endpoint, "Updating", done, p)

    def delete_endpoint(self, p: dict[str, Any], region: str) -> None:
        endpoint = self._idle("endpoint", p["EndpointName"])
        if self._state.components_of(endpoint.name):
            raise Invalid(f'Cannot delete endpoint "{endpoint.arn}" with inference components.')
        self._state.begin_deletion(endpoint, lambda: self._state.on_endpoint_gone(endpoint.name))

    # Inference components

    def create_inference_component(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        endpoint = self._state.get("endpoint", p["EndpointName"])
        if endpoint.status != "InService":
            raise Invalid(f'Endpoint "{endpoint.arn}" is not InService.')
        self._check_host(p, endpoint)
        for specification in specifications_of(p):
            if "ModelName" in specification:
                self._state.get("model", specification["ModelName"])
            if "BaseInferenceComponentName" in specification:
                base = self._state.get("inference-component", specification["BaseInferenceComponentName"])
                if base.status != "InService":
                    raise Invalid(f'Base inference component "{base.arn}" is not InService.')
        p["RuntimeConfig"] = _copies(p.get("RuntimeConfig", {"CopyCount": 1}))
        if not p["RuntimeConfig"]["DesiredCopyCount"] and any("ModelName" in item for item in specifications_of(p)):
            raise Invalid("Inference components copy count an integer larger than 0")
        thing = self._state.create("inference-component", p["InferenceComponentName"], p, region)
        return self._state.begin(thing, "Creating", request=p)

    def _check_host(self, p: dict[str, Any], endpoint: Thing) -> None:
        """Check that the endpoint has the component's variant, and that it has no model of its own."""
        if any("BaseInferenceComponentName" in item for item in specifications_of(p)):
            return  # an adapter is where its base component is
        variants = {variant["VariantName"]: variant for variant in self._config_of(endpoint)["ProductionVariants"]}
        variant = variants.get(p.get("VariantName", ""))
        if variant is None:
            raise Invalid(f'Could not find variant "{p.get("VariantName")}" of endpoint "{endpoint.arn}".')
        if "ModelName" in variant:
            raise Invalid(
                f'Inference components cannot be created on variant "{p["VariantName"]}" of endpoint '
                f'"{endpoint.arn}", because it has a model.'
            )
        types = {item["InstanceType"] for item in p.get("Specifications", ()) if "InstanceType" in item}
        if unknown := types - _types_of(variant):
            raise Invalid(f'Variant "{p["VariantName"]}" has no instance type {min(unknown)}.')

    def update_inference_component(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        component = self._idle("inference-component", p["InferenceComponentName"])
        component.before = dict(component.request)

        def done() -> None:
            request = component.request
            changes: dict[str, Any] = {name: p[name] for name in ("Specification", "Specifications") if name in p}
            if changes:  # either form replaces both
                request = {name: request[name] for name in request if not name.startswith("Specification")}
            component.request = {**request, **changes}
            if "RuntimeConfig" in p:
                component.request["RuntimeConfig"] = _copies(p["RuntimeConfig"])

        return self._state.begin(component, "Updating", done, p)

    def update_inference_component_runtime_config(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        component = self._idle("inference-component", p["InferenceComponentName"])

        def done() -> None:
            component.request["RuntimeConfig"] = _copies(p["DesiredRuntimeConfig"])

        return self._state.begin(component, "Updating", done, p)

    def delete_inference_component(self, p: dict[str, Any], region: str) -> None:
        component = self._idle("inference-component", p["InferenceComponentName"])
        for other in self._state.components_of(component.request["EndpointName"]):
            if component.name in [item.get("BaseInferenceComponentName") for item in specifications_of(other.request)]:
                raise Invalid(f'Cannot delete inference component "{component.arn}": adapter "{other.arn}" uses it.')
        self._state.begin_deletion(component, lambda: None)

    # Training plans, which are put into `things` directly: they cannot be bought here

    def describe_training_plan(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        plan = self._state.things.get(("training-plan", p["TrainingPlanName"]))
        if plan is None:
            raise Missing(f"Could not find training plan {p['TrainingPlanName']}.")
        return {**plan.request, "TrainingPlanName": plan.name, "TrainingPlanArn": plan.arn}

    # All kinds of resources

    def _idle(self, kind: str, name: str) -> Thing:
        """Return a resource if it may be updated or deleted now.

        Raises:
            Invalid: the resource does not exist, or another change is in progress.
        """
        thing = self._state.get(kind, name)
        if thing.change is not None:
            thing.look()
            raise Invalid(f'Cannot update in-progress {kind.replace("-", " ")} "{thing.arn}".')
        return thing

    def describe(self, kind: str, p: dict[str, Any], region: str) -> dict[str, Any]:
        words = _words(kind)
        thing = self._state.look(kind, p[f"{words}Name"])
        description = {
            **copy.deepcopy(thing.request),
            f"{words}Arn": thing.arn,
            "CreationTime": thing.created,
            "LastModifiedTime": thing.modified,
        }
        if kind in ("endpoint", "inference-component"):
            description[f"{words}Status"] = thing.status
            if thing.reason is not None:
                description["FailureReason"] = thing.reason
        if kind == "endpoint":
            description["ProductionVariants"] = self._variants(thing)
            if shadows := self._variants(thing, "ShadowProductionVariants"):
                description["ShadowProductionVariants"] = shadows
            description |= self._of_configuration(thing)
            if thing.status == "Updating" and thing.change is not None and thing.change.config is not None:
                description["PendingDeploymentSummary"] = {"EndpointConfigName": thing.change.config}
        if kind == "inference-component":
            description["EndpointArn"] = self._state.get("endpoint", thing.request["EndpointName"]).arn
            for specification in specifications_of(description):
                if container := specification.get("Container"):
                    specification["Container"] = {
                        **{name: value for name, value in container.items() if name != "Image"},
                        **({"DeployedImage": {"SpecifiedImage": container["Image"]}} if "Image" in container else {}),
                    }
        return description

    def list_kind(self, kind: str, p: dict[str, Any], region: str) -> dict[str, Any]:
        for (of, _), thing in list(self._state.things.items()):
            if of == kind and not self._state.polls:  # without delays, a list shows the end too
                thing.look()
        things = listed((thing for (of, _), thing in self._state.things.items() if of == kind), p)
        for filtered, name in (("EndpointNameEquals", "EndpointName"), ("VariantNameEquals", "VariantName")):
            if filtered in p:
                things = [thing for thing in things if thing.request.get(name) == p[filtered]]
        page_things, more = page(things, p)
        return {f"{_words(kind)}s": [self._summary(kind, thing) for thing in page_things], **more}

    def _summary(self, kind: str, thing: Thing) -> dict[str, Any]:
        words = _words(kind)
        summary = {
            f"{words}Name": thing.name,
            f"{words}Arn": thing.arn,
            "CreationTime": thing.created,
            "LastModifiedTime": thing.modified,
            f"{words}Status": thing.status,
        }
        for name in ("EndpointName", "VariantName") if kind == "inference-component" else ():
            summary[name] = thing.request.get(name, "")  # an adapter has no variant of its own
        return summary

    def _variants(self, endpoint: Thing, field: str = "ProductionVariants") -> list[dict[str, Any]]:
        variants = self._config_of(endpoint).get(field, [])
        counts, weights = (endpoint.request.get(name, {}) for name in _LIVE)
        return [
            {
                "VariantName": variant["VariantName"],
                **dict.fromkeys(("CurrentInstanceCount", "DesiredInstanceCount"), _count(variant, counts)),
                **dict.fromkeys(
                    ("CurrentWeight", "DesiredWeight"),
                    weights.get(variant["VariantName"], variant["InitialVariantWeight"]),
                ),
                **_in_pools(variant, counts),
            }
            for variant in variants
        ]

    def _config_of(self, endpoint: Thing) -> dict[str, Any]:
        """Return the request of an endpoint's configuration, which may have been deleted."""
        config = self._state.things.get(("endpoint-config", endpoint.request["EndpointConfigName"]))
        return endpoint.served.config if config is None else config.request

    def _of_configuration(self, endpoint: Thing) -> dict[str, Any]:
        """Return the fields of an endpoint's configuration that DescribeEndpoint shows."""
        request = self._config_of(endpoint)
        fields = {name: request[name] for name in _DESCRIBED_WITH_ENDPOINT if name in request}
        if (capture := request.get("DataCaptureConfig")) is not None:
            fields["DataCaptureConfig"] = {
                "EnableCapture": capture.get("EnableCapture", True),
                "CaptureStatus": "Started",
                "CurrentSamplingPercentage": capture["InitialSamplingPercentage"],
                "DestinationS3Uri": capture["DestinationS3Uri"],
                "KmsKeyId": capture.get("KmsKeyId", ""),
            }
        return fields

    # Tags

    def list_tags(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        tags = self._state.by_arn(p["ResourceArn"]).tags
        return {"Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}

    def add_tags(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        self._state.by_arn(p["ResourceArn"]).tags.update({tag["Key"]: tag["Value"] for tag in p["Tags"]})
        return self.list_tags(p, region)

    def delete_tags(self, p: dict[str, Any], region: str) -> None:
        for key in p["TagKeys"]:
            self._state.by_arn(p["ResourceArn"]).tags.pop(key, None)


def specifications_of(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a component's specifications: one for all instance types, or one for each type."""
    single, several = request.get("Specification"), request.get("Specifications", [])
    if (single is None) == (not several):
        raise Invalid("Exactly one of Specification and Specifications must be given.")
    return several or [single]


def weights_of(config: Mapping[str, Any], endpoint: Mapping[str, Any]) -> dict[str, float]:
    """Return the weights of an endpoint's production variants by name."""
    weights = endpoint.get("Weights", {})
    names = {variant["VariantName"]: variant["InitialVariantWeight"] for variant in config["ProductionVariants"]}
    return {name: weights.get(name, initial) for name, initial in names.items()}


def _retained(p: Mapping[str, Any]) -> set[str]:
    """Return those fields of an endpoint in `_LIVE` that an update keeps."""
    if not p.get("RetainAllVariantProperties"):
        return set()
    kinds = {item["VariantPropertyType"] for item in p.get("ExcludeRetainedVariantProperties", ())}
    fields = {"DesiredInstanceCount": "Counts", "DesiredWeight": "Weights"}
    return {field for kind, field in fields.items() if kind not in kinds}


def _types_of(variant: Mapping[str, Any]) -> set[str]:
    """Return the instance types of a variant."""
    types = {pool["InstanceType"] for pool in variant.get("InstancePools", ())}
    return types | ({variant["InstanceType"]} if "InstanceType" in variant else set())


def _by_variant(changes: list[dict[str, Any]], field: str) -> dict[str, Any]:
    """Return the values of a field of DesiredWeightsAndCapacities, by variant name."""
    return {item["VariantName"]: item[field] for item in changes if field in item}


def _instances(config: dict[str, Any], counts: Mapping[str, int]) -> Counter[str]:
    """Return the number of instances of each type. All instances of a variant with pools are in its first pool."""
    totals = Counter[str]()
    for variant in _variants(config):
        pools = _pools(variant)
        instance = pools[0]["InstanceType"] if pools else variant.get("InstanceType")
        if instance is not None and "ServerlessConfig" not in variant:
            totals[instance] += _count(variant, counts)
    return totals


def _pools(variant: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pools of a variant, the highest priority first."""
    return sorted(variant.get("InstancePools", ()), key=lambda pool: int(pool["Priority"]))


def _count(variant: dict[str, Any], counts: Mapping[str, int]) -> int:
    """Return the number of instances of a variant, which `counts` may override by its name."""
    return int(counts.get(variant["VariantName"], variant.get("InitialInstanceCount", 1)))


def _in_pools(variant: dict[str, Any], counts: dict[str, int]) -> dict[str, Any]:
    """Return the instances of a variant in each pool. All instances are in the pool with the highest priority."""
    pools = [
        {"InstanceType": pool["InstanceType"], "CurrentInstanceCount": 0 if index else _count(variant, counts)}
        for index, pool in enumerate(_pools(variant))
    ]
    return {"InstancePools": pools} if pools else {}


def _copies(runtime: dict[str, Any]) -> dict[str, Any]:
    count = runtime["CopyCount"]
    return {"DesiredCopyCount": count, "CurrentCopyCount": count}


def replacements(state: SageMakerState) -> Replacements:
    """Return SageMaker's operations as replacements for moto's operations."""
    operations = Operations(state)
    replaced = methods(operations, result, "describe", "list_kind")
    for kind in _KINDS:
        name = kind.replace("-", "_")
        replaced[f"describe_{name}"] = result(partial(operations.describe, kind))
        replaced[f"list_{name}s"] = result(partial(operations.list_kind, kind))
    any_type = {"validate_instance_type": lambda self, instance_type: None}
    return [(SageMakerResponse, replaced), (moto.sagemaker.models.FakeEndpointConfig, any_type)]


def _variants(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [*config.get("ProductionVariants", ()), *config.get("ShadowProductionVariants", ())]
