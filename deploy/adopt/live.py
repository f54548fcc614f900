"""Read an endpoint from AWS, using only the Describe, List and GetObject calls that `reading_policy` allows."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deploy.aws import Aws, components_of
from deploy.deployer.calls import CALLS, Identity, call, show, tags_of
from deploy.errors import NotThere, Refused
from deploy.iam.policies import Policy, allow, policy
from deploy.resources.resource import DIMENSIONS, READY, TAG_DEPLOYMENT, TAG_STACK, Json, Kind, containers, user_tags
from deploy.s3.archive import OPTIONS_FILE, Artifact, read_artifact
from deploy.s3.prefix import ARCHIVE


@dataclass(frozen=True)
class Source:
    """The parts of an endpoint, each with the fields of AWS's Describe responses.

    Attributes:
        name: name of the endpoint, or "" if the source is a file that does not name an endpoint.
        origin: phrase in the first line of the specification that says where the settings come from.
        region: region of the endpoint, or "" if it is unknown.
        endpoint: response of DescribeEndpoint, or {} if there is no endpoint.
        config: response of DescribeEndpointConfig, or arguments of CreateEndpointConfig.
        models: responses of DescribeModel or arguments of CreateModel, by model name ("" for the only model of a file).
        components: responses of DescribeInferenceComponent.
        targets, policies: scalable targets and scaling policies of Application Auto Scaling.
        tags: tags of the endpoint, and the tags of its parts that neither AWS nor lmi deploy set.
        artifacts: contents of the model data, by URI.
        notes: pairs `(field, reason or advice)` for fields that are not read.
    """

    name: str
    origin: str
    region: str = ""
    endpoint: Json = field(default_factory=dict)
    config: Json = field(default_factory=dict)
    models: Mapping[str, Json] = field(default_factory=dict)
    components: Sequence[Json] = ()
    targets: Sequence[Json] = ()
    policies: Sequence[Json] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)
    notes: Sequence[tuple[str, str]] = ()

    @property
    def bases(self) -> list[Json]:
        """Return the components that are not adapters."""
        return [item for item in self.components if "BaseInferenceComponentName" not in item.get("Specification", {})]

    @property
    def user_tags(self) -> dict[str, str]:
        """Return the tags that were set neither by AWS nor by lmi deploy."""
        return user_tags(self.tags)

    def instances(self, variant: str | None) -> Any:
        """Return the desired number of instances of a variant, or None if the endpoint has no such variant."""
        variants = {item["VariantName"]: item for item in self.endpoint.get("ProductionVariants", ())}
        return variants.get(variant, {}).get("DesiredInstanceCount")

    def model(self, name: str) -> Json:
        """Return the model with this name. If the source has only one model, its name does not matter."""
        model = self.models.get(name) or (next(iter(self.models.values())) if len(self.models) == 1 else None)
        if model is None:
            raise Refused(f"the model {name} was not found", "Pass its CreateModel request with --file.")
        return model


def container_of(model: Json, name: str) -> dict[str, Any]:
    """Return the only container of a model.

    Raises:
        Refused: the model does not have exactly one container, is multi-model, or refers to a model package.
    """
    candidates = containers(model)
    whose = f"model {name}" if name else "the model"
    if not candidates:
        raise Refused(
            f"{whose} has neither PrimaryContainer nor Containers",
            "Write the fields as AWS's API names them: PrimaryContainer, not primary_container.",
        )
    if len(candidates) != 1:
        raise Refused(
            f"{whose} has {len(candidates)} containers, but lmi deploy supports only one",
            "Adopt an endpoint with one container, and run a pipeline's other steps elsewhere.",
        )
    (container,) = candidates
    if container.get("Mode") == "MultiModel" or container.get("MultiModelConfig"):
        raise Refused(
            f"{whose} belongs to a multi-model endpoint, whose container loads many models by name",
            "Declare a component for each model (components:), or serve LoRA adapters (components[].adapters).",
        )
    if (package := container.get("ModelPackageName")) is not None and not container.get("Image"):
        raise Refused(
            f"{whose} refers to the model package {package}, which defines its container and weights",
            "Save the output of `aws sagemaker describe-model-package` to a file, and pass it with --file.",
        )
    return dict(container)


def data_of(container: Json) -> tuple[str, bool]:
    """Return the URI of the container's model data, and whether it is a prefix. A prefix ends in a slash."""
    data = container.get("ModelDataSource", {}).get("S3DataSource", {})
    uri = _in_s3(str(container.get("ModelDataUrl") or container.get("ArtifactUrl") or data.get("S3Uri") or ""))
    is_prefix = data.get("CompressionType") == "None" and data.get("S3DataType") == "S3Prefix" and bool(uri)
    return (uri if uri.endswith("/") else f"{uri}/") if is_prefix else uri, is_prefix


_URL = re.compile(r"https://(?:([^/]+)\.)?s3(?:[.-](?:dualstack\.)?[a-z0-9-]+)?\.amazonaws\.com(?:\.cn)?/(.+)")


def _in_s3(url: str) -> str:
    """Return the s3:// URI of an https URL of S3, in virtual-hosted or path style. Return other URLs unchanged."""
    if (match := _URL.fullmatch(url)) is None:
        return url
    return f"s3://{'/'.join(urllib.parse.unquote(part) for part in match.groups() if part)}"


def read_endpoint(aws: Aws, name: str) -> Source:
    """Read an endpoint with its configuration, models, components, scaling, tags and model data.

    Raises:
        NotThere: the endpoint or its configuration does not exist.
    """
    endpoint = show(aws, Kind.ENDPOINT, (name,))
    if endpoint is None:
        raise NotThere(f"there is no endpoint {name} in {aws.region}", "Run `aws sagemaker list-endpoints`.")
    config_name = str(endpoint["EndpointConfigName"])
    config = show(aws, Kind.ENDPOINT_CONFIG, (config_name,))
    if config is None:
        raise NotThere(
            f"{name}'s configuration {config_name} was deleted, so its settings cannot be read",
            "Write its CreateModel and CreateEndpointConfig requests to a file, and pass the file with --file.",
        )
    components = [*_components(aws, name)]
    models = {id: model for id in _models(config, components) if (model := show(aws, Kind.MODEL, (id,))) is not None}
    source = Source(
        name,
        f"endpoint {name} in {aws.region} (configuration {config_name})",
        aws.region,
        endpoint,
        config,
        models,
        components,
        *_scaling(aws, name, config, components),
        _tags(aws, endpoint, config, models.values(), components),
    )
    return with_data(aws, source)


def _tags(aws: Aws, endpoint: Json, config: Json, models: Iterable[Json], components: Iterable[Json]) -> dict[str, str]:
    """Return the endpoint's tags and its parts' own tags. The endpoint's tags override those of its parts.

    Tags of AWS and of lmi deploy show who owns a resource, so those of the parts are omitted.
    """
    parts = [(Kind.MODEL, model) for model in models]
    parts += [(Kind.ENDPOINT_CONFIG, config), *((Kind.COMPONENT, component) for component in components)]
    merged: dict[str, str] = {}
    for kind, description in parts:
        merged |= user_tags(tags_of(aws, kind, description))
    return merged | tags_of(aws, Kind.ENDPOINT, endpoint)


def with_data(aws: Aws, source: Source) -> Source:
    """Return the source with the contents of its model data."""
    served = [container for model in source.models.values() for container in containers(model)]
    served += [item.get("Specification", {}).get("Container", {}) for item in source.bases]
    uris = {data_of(part)[0] for part in served}
    return replace(source, artifacts={uri: read_artifact(aws, uri) for uri in uris if uri})


def _components(aws: Aws, endpoint: str) -> Iterator[Json]:
    for name in components_of(aws, endpoint):
        if (component := show(aws, Kind.COMPONENT, (name,))) is not None:
            yield component


def _models(config: Json, components: list[Json]) -> list[str]:
    variants = config.get("ProductionVariants", ())
    specifications = [component.get("Specification", {}) for component in components]
    return [*dict.fromkeys(str(part["ModelName"]) for part in (*variants, *specifications) if "ModelName" in part)]


def _scaling(aws: Aws, name: str, config: Json, components: list[Json]) -> tuple[list[Json], list[Json]]:
    """Return the scalable targets of the endpoint's variants and components, and their policies."""
    ids = [f"endpoint/{name}/variant/{variant['VariantName']}" for variant in config.get("ProductionVariants", ())]
    ids += [f"inference-component/{component['InferenceComponentName']}" for component in components]
    targets: list[Json] = []
    policies: list[Json] = []
    for resource_id in ids:
        which = ("sagemaker", DIMENSIONS[Kind(resource_id.partition("/")[0])], resource_id)
        if (target := show(aws, Kind.SCALABLE_TARGET, which)) is not None:
            targets.append(target)
            policies += _policies(aws, which)
    return targets, policies


def _policies(aws: Aws, target: Identity) -> list[Json]:
    calls = CALLS[Kind.SCALING_POLICY]
    request = dict(zip(CALLS[Kind.SCALABLE_TARGET].identity, target, strict=True))
    return list(call(aws, calls.service, calls.describe, request)["ScalingPolicies"])


_PARTS = {"EndpointConfig": "endpoint-config", "Model": "model", "InferenceComponent": "inference-component"}
"""Maps the name of each part of an endpoint in Describe calls to its resource type in ARNs."""


def reading_policy(name: str, region: str, partition: str = "aws") -> Policy:
    """Return the read-only IAM policy for adopting the endpoint.

    It covers all configurations, models, components and archives, because their names are not known in advance.
    """
    head = f"arn:{partition}:sagemaker:{region}:*"
    endpoints = [f"{head}:endpoint/{spelling}" for spelling in dict.fromkeys((name, name.lower()))]
    data = [f"arn:{partition}:s3:::*/{path}" for path in (f"*{ARCHIVE}", OPTIONS_FILE)]
    general = [
        "sagemaker:ListInferenceComponents",
        "application-autoscaling:DescribeScalableTargets",
        "application-autoscaling:DescribeScalingPolicies",
    ]
    return policy([
        allow("Endpoint", ["sagemaker:DescribeEndpoint", "sagemaker:ListTags"], endpoints),
        allow("Parts", [*(f"sagemaker:Describe{part}" for part in _PARTS), "sagemaker:ListTags"],
              [f"{head}:{kind}/*" for kind in _PARTS.values()]),
        allow("ModelData", ["s3:GetObject"], data),
        allow("General", general, ["*"]),
    ])  # fmt: skip


# -- refuse an endpoint that somebody else manages, or that is not in service ------------------------------------------


_BESIDE = "--name ANOTHER writes a file for a separate endpoint."


def refuse_owned(source: Source) -> None:
    """Raise Refused if lmi deploy or CloudFormation manages the endpoint."""
    deployment, stack = source.tags.get(TAG_DEPLOYMENT), source.tags.get(TAG_STACK)
    if deployment == source.name:
        raise Refused(f"{source.name} was created by lmi deploy, so it already has a specification", _BESIDE)
    if deployment is not None:
        raise Refused(f"{source.name} belongs to another deployment of lmi deploy, {deployment}", _BESIDE)
    if stack is not None:
        raise Refused(
            f"{source.name} belongs to the CloudFormation stack {stack}, which would undo changes by lmi deploy",
            f"Remove it from the stack first (DeletionPolicy: Retain). Or: {_BESIDE}",
        )


def refuse_unsettled(source: Source) -> None:
    """Raise Refused unless the endpoint is in service."""
    status = source.endpoint.get("EndpointStatus", READY[0])
    if status not in READY:
        wait = "Delete or repair it first." if status == "Failed" else "Wait until it is InService."
        raise Refused(f"{source.name} is {status}: it must be in service to be adopted", f"{wait} Or: {_BESIDE}")
