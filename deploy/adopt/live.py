"""Read an endpoint from AWS. Only Describe and List calls, which `reading_policy` allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deploy.adopt.source import Source
from deploy.aws import Aws, components_of
from deploy.deployer.calls import call, show, tags_of
from deploy.errors import NotThere
from deploy.iam.statements import Policy, allow, policy
from deploy.resources.resource import DIMENSIONS, Json, Kind


def read_endpoint(aws: Aws, name: str) -> Source:
    """Read an endpoint with everything that belongs to it.

    Raises:
        NotThere: it does not exist.
    """
    endpoint = show(aws, Kind.ENDPOINT, (name,))
    if endpoint is None:
        raise NotThere(f"there is no endpoint {name} in {aws.region}", "`aws sagemaker list-endpoints` lists them.")
    config_name = str(endpoint["EndpointConfigName"])
    config = show(aws, Kind.ENDPOINT_CONFIG, (config_name,))
    if config is None:
        raise NotThere(
            f"{name}'s configuration {config_name} was deleted, so what it serves cannot be read",
            "Write its CreateModel and CreateEndpointConfig into a file, and give it by --file.",
        )
    components = [*_components(aws, name)]
    models = {one: model for one in _models(config, components) if (model := show(aws, Kind.MODEL, (one,))) is not None}
    targets, policies = _scaling(aws, name, config, components)
    origin = f"endpoint {name} in {aws.region} (configuration {config_name})"
    tags = tags_of(aws, Kind.ENDPOINT, endpoint)
    return Source(name, origin, aws.region, endpoint, config, models, components, targets, policies, tags)


def _components(aws: Aws, endpoint: str) -> Iterator[Json]:
    for name in components_of(aws, endpoint):
        if (found := show(aws, Kind.COMPONENT, (name,))) is not None:
            yield found


def _models(config: Json, components: list[Json]) -> list[str]:
    variants = config.get("ProductionVariants", ())
    specifications = [one.get("Specification", {}) for one in components]
    return [*dict.fromkeys(str(one["ModelName"]) for one in (*variants, *specifications) if "ModelName" in one)]


def _scaling(aws: Aws, name: str, config: Json, components: list[Json]) -> tuple[list[Json], list[Json]]:
    """Return the scalable targets of the endpoint's variants and components, and their policies."""
    places = [f"endpoint/{name}/variant/{one['VariantName']}" for one in config.get("ProductionVariants", ())]
    places += [f"inference-component/{one['InferenceComponentName']}" for one in components]
    targets: list[Json] = []
    policies: list[Json] = []
    for place in places:
        where = {"ServiceNamespace": "sagemaker", "ScalableDimension": DIMENSIONS[Kind(place.partition("/")[0])]}
        asked: dict[str, Any] = {**where, "ResourceIds": [place]}
        found = call(aws, "application-autoscaling", "describe_scalable_targets", asked)["ScalableTargets"]
        targets += found
        if found:
            asked = {**where, "ResourceId": place}
            policies += call(aws, "application-autoscaling", "describe_scaling_policies", asked)["ScalingPolicies"]
    return targets, policies


def reading_policy(name: str, region: str, partition: str = "aws") -> Policy:
    """Return what somebody needs to be allowed who adopts the endpoint: to read it, and nothing else.

    The configuration, the model and the components have names that only the endpoint tells.
    """
    head = f"arn:{partition}:sagemaker:{region}:*"
    endpoints = [f"{head}:endpoint/{one}" for one in dict.fromkeys((name, name.lower()))]
    kinds = {"EndpointConfig": "endpoint-config", "Model": "model", "InferenceComponent": "inference-component"}
    general = [
        "sagemaker:ListInferenceComponents",
        "application-autoscaling:DescribeScalableTargets",
        "application-autoscaling:DescribeScalingPolicies",
    ]
    return policy([
        allow("Endpoint", ["sagemaker:DescribeEndpoint", "sagemaker:ListTags"], endpoints),
        allow("Parts", [f"sagemaker:Describe{kind}" for kind in kinds], [f"{head}:{one}/*" for one in kinds.values()]),
        allow("General", general, ["*"]),
    ])  # fmt: skip
