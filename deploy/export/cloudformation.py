"""A CloudFormation template: the same requests, as its properties are those of the API but for tags and updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deploy.export.logical import logical_words
from deploy.resources.resource import Kind, Ref, Resource, resolved

_TYPES = {
    Kind.MODEL: "AWS::SageMaker::Model",
    Kind.ENDPOINT_CONFIG: "AWS::SageMaker::EndpointConfig",
    Kind.ENDPOINT: "AWS::SageMaker::Endpoint",
    Kind.COMPONENT: "AWS::SageMaker::InferenceComponent",
    Kind.SCALABLE_TARGET: "AWS::ApplicationAutoScaling::ScalableTarget",
    Kind.SCALING_POLICY: "AWS::ApplicationAutoScaling::ScalingPolicy",
    Kind.ALARM: "AWS::CloudWatch::Alarm",
}
_NAMED = {"ModelName": Kind.MODEL, "EndpointConfigName": Kind.ENDPOINT_CONFIG, "EndpointName": Kind.ENDPOINT}
"""Properties that name another resource; each is an attribute of that resource by the same name."""

_OF_UPDATES = ("DeploymentConfig", "RetainAllVariantProperties")
"""In the API they belong to the update; a template says once what every update will be like."""


def template(resources: Sequence[Resource]) -> dict[str, Any]:
    """The template of a deployment, as `deploy.resources.build.resources` gives it.

    Names stay what they are, so `lmi deploy status` and its like find what a stack has made.
    """
    words = logical_words(resources)
    names = {key: "".join(word[0].upper() + word[1:] for word in found) for key, found in words.items()}
    endpoint = next(one for one in resources if one.kind is Kind.ENDPOINT)
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"SageMaker endpoint {endpoint.name} (written by lmi deploy export).",
        "Resources": {names[one.key]: _resource(one, names) for one in resources},
        "Outputs": {
            "EndpointName": {
                "Description": "For invoke_endpoint.",
                "Value": {"Fn::GetAtt": [names[endpoint.key], "EndpointName"]},
            }
        },
    }


def _resource(resource: Resource, names: Mapping[str, str]) -> dict[str, Any]:
    content = {**resource.request, **{name: resource.update[name] for name in _OF_UPDATES if name in resource.update}}
    if isinstance(tags := content.get("Tags"), Mapping):
        content["Tags"] = [{"Key": key, "Value": value} for key, value in tags.items()]
    properties, seen = _referring(content, resource, names)
    made: dict[str, Any] = {"Type": _TYPES[resource.kind], "Properties": properties}
    # Where a name is a part of a text, CloudFormation cannot see an order by itself.
    if needs := [names[key] for key in resource.needs if key not in seen]:
        made["DependsOn"] = needs
    return made


def _referring(content: Any, resource: Resource, names: Mapping[str, str]) -> tuple[Any, set[str]]:
    """The properties with references for what they name, and the keys of what these refer to."""
    seen: set[str] = set()

    def reference(ref: Ref) -> dict[str, str]:
        if ref.attribute != "PolicyARN":  # a policy's Ref is its ARN, and nothing else is referred to
            raise KeyError(ref.attribute)
        seen.add(ref.key)
        return {"Ref": names[ref.key]}

    def walked(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: named(name, one) for name, one in value.items()}
        return [walked(one) for one in value] if isinstance(value, list) else value

    def named(name: str, value: Any) -> Any:
        kind = _NAMED.get(name)
        key = f"{kind.value}/{value}" if kind is not None and kind is not resource.kind else None
        if key not in resource.needs:
            return walked(value)
        seen.add(str(key))
        return {"Fn::GetAtt": [names[str(key)], name]}

    return walked(resolved(content, reference)), seen
