"""Export a deployment as a CloudFormation template, or as a Terraform configuration that contains that template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from deploy.errors import Refused
from deploy.resources.resource import TAG_DEPLOYMENT, Kind, Ref, Resource, resolved, tag_list, tag_map
from deploy.spec.components import name_and_endpoint

LACKING: Mapping[Kind, Mapping[str, bool]] = {
    Kind.MODEL: {
        "PrimaryContainer.AdditionalModelDataSources": True,
        "PrimaryContainer.ContainerMetricsConfig": False,
        "PrimaryContainer.ModelDataSource.S3DataSource.ETag": True,
        "PrimaryContainer.ModelDataSource.S3DataSource.ManifestEtag": True,
        "PrimaryContainer.ModelDataSource.S3DataSource.ManifestS3Uri": True,
    },
    Kind.ENDPOINT_CONFIG: {
        "CrossRegionTrafficConfig": True,
        "ProductionVariants.AcceleratorPartitionLayouts": True,
        "ProductionVariants.AcceleratorType": False,
        "ShadowProductionVariants.AcceleratorPartitionLayouts": True,
        "ShadowProductionVariants.AcceleratorType": False,
    },
    Kind.COMPONENT: {
        "Specification.ComputeResourceRequirements.AcceleratorPartitionType": True,
        "Specifications.ComputeResourceRequirements.AcceleratorPartitionType": True,
    },
}
"""Fields that CloudFormation does not support, and whether omitting them would be harmful."""


def without_lacking(resource: Resource, content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the properties that CloudFormation supports, and the paths of the properties that it does not support.

    Raises:
        Refused: omitting a property would be harmful.
    """
    lacking = LACKING.get(resource.kind, {})
    lost: list[str] = []
    properties = _without(content, "", lacking, lost)
    if harm := [path for path in lost if lacking[path]]:
        raise Refused(
            f"CloudFormation does not support {', '.join(harm)} of {resource.key}",
            "Remove these fields from the specification, or create the endpoint with `lmi deploy up`.",
        )
    return properties, lost


def _without(value: Any, path: str, lacking: Mapping[str, bool], lost: list[str]) -> Any:
    if isinstance(value, Mapping):
        properties = {}
        for name, item in value.items():
            full_path = f"{path}.{name}".removeprefix(".")
            if full_path in lacking:
                lost.append(full_path)
            else:
                properties[name] = _without(item, full_path, lacking, lost)
        return properties
    return [_without(item, path, lacking, lost) for item in value] if isinstance(value, list) else value


TYPES = {
    Kind.MODEL: "AWS::SageMaker::Model",
    Kind.ENDPOINT_CONFIG: "AWS::SageMaker::EndpointConfig",
    Kind.ENDPOINT: "AWS::SageMaker::Endpoint",
    Kind.COMPONENT: "AWS::SageMaker::InferenceComponent",
    Kind.SCALABLE_TARGET: "AWS::ApplicationAutoScaling::ScalableTarget",
    Kind.SCALING_POLICY: "AWS::ApplicationAutoScaling::ScalingPolicy",
    Kind.ALARM: "AWS::CloudWatch::Alarm",
}
_UNIQUE = (Kind.MODEL, Kind.ENDPOINT_CONFIG, Kind.ENDPOINT)
"""Kinds whose logical name is the kind itself, so that a new version replaces the old version.
If components use several models, the component name is appended for each model after the first.
"""

_NAME_PROPERTIES = {
    "ModelName": (Kind.MODEL, "ModelName"),
    "ModelNameOverride": (Kind.MODEL, "ModelName"),
    "EndpointConfigName": (Kind.ENDPOINT_CONFIG, "EndpointConfigName"),
    "EndpointName": (Kind.ENDPOINT, "EndpointName"),
}
"""Maps each property that names another resource to that resource's kind and the attribute with its name."""

_UPDATE_PROPERTIES = ("DeploymentConfig", "ExcludeRetainedVariantProperties", "RetainAllVariantProperties")
"""Arguments of UpdateEndpoint in the API that are properties of the endpoint in a template."""

_MAX_INLINE_TEMPLATE = 51_200
"""Maximum size of CreateStack's TemplateBody, in bytes (CloudFormation API reference)."""

_STACK = "endpoint"


def cloudformation_template(resources: Sequence[Resource]) -> dict[str, Any]:
    """Return the CloudFormation template of a deployment.

    Names in AWS are the same as with `lmi deploy up`, so commands such as `lmi deploy status` find a stack's resources.
    """
    names = _logical_names(resources)
    # There is no endpoint if it belongs to another deployment.
    endpoint = next((resource for resource in resources if resource.kind is Kind.ENDPOINT), None)
    name, shared = _deployment(resources)
    subject = f"SageMaker endpoint {name}" if endpoint is not None else f"{name}, on the SageMaker endpoint {shared}"
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"{subject} (written by lmi deploy export).",
        "Resources": {names[resource.key]: _template_resource(resource, names) for resource in resources},
        "Outputs": {
            "EndpointName": {
                "Description": "Name of the endpoint, for invoke_endpoint.",
                "Value": {"Fn::GetAtt": [names[endpoint.key], "EndpointName"]} if endpoint is not None else shared,
            }
        },
    }


def template_notes(resources: Sequence[Resource]) -> list[str]:
    """Return a sentence for each field that the template omits because CloudFormation does not support it."""
    return [
        f"{path} of {resource.key}: CloudFormation does not support it."
        for resource in resources
        for path in without_lacking(resource, resource.request)[1]
    ]


def terraform_configuration(resources: Sequence[Resource], region: str) -> dict[str, Any]:
    """Return the content of a main.tf.json with an `aws_cloudformation_stack` (hashicorp/aws) for the template.

    Raises:
        Refused: the template is too large to be inline, or lacks a property that cannot be omitted.
    """
    body = json.dumps(cloudformation_template(resources), separators=(",", ":"))
    if (size := len(body.encode())) > _MAX_INLINE_TEMPLATE:
        raise Refused(
            f"the template has {size:,} bytes, but an inline template may have at most {_MAX_INLINE_TEMPLATE:,}",
            "Export for CloudFormation, upload the template to S3, and set the stack's template_url to its URL.",
        )
    stack = {
        "name": f"lmi-{_deployment(resources)[0]}",  # unlike an endpoint's, a stack's name must begin with a letter
        "template_body": body.replace("${", "$${").replace("%{", "%%{"),  # Terraform would interpret them
        # The provider's default of 30 minutes is too short.
        "timeouts": {"create": "3h", "update": "9h", "delete": "3h"},
    }
    return {
        "terraform": {"required_providers": {"aws": {"source": "hashicorp/aws", "version": ">= 5.0"}}},
        "provider": {"aws": {"region": region}},
        "resource": {"aws_cloudformation_stack": {_STACK: stack}},
        "output": {"endpoint_name": {"value": f'${{aws_cloudformation_stack.{_STACK}.outputs["EndpointName"]}}'}},
    }


def _deployment(resources: Sequence[Resource]) -> tuple[str, str]:
    """Return the names of the deployment and its endpoint, according to the tags that all resources have."""
    return name_and_endpoint(tag_map(resources[0].request["Tags"])[TAG_DEPLOYMENT])


def _logical_names(resources: Sequence[Resource]) -> Mapping[str, str]:
    """Map each resource's key to its logical name in the template, which is the same for all of its versions."""
    deployment, _ = _deployment(resources)
    names: dict[str, str] = {}
    models = _components_of_models(resources)
    for resource in resources:
        text = _words_of(resource, deployment)
        if (component := models.get(resource.key)) is not None:
            text = f"{text}-{component}"
        name = "".join(word[0].upper() + word[1:] for word in re.findall("[A-Za-z0-9]+", text))
        while name in names.values():  # such as for a-b and a/b
            name += "X"
        names[resource.key] = name
    return names


def _words_of(resource: Resource, deployment: str) -> str:
    """Return the kind of a resource and what its name says beside the deployment."""
    if resource.kind in _UNIQUE:
        return resource.kind.value
    suffix = resource.name.removeprefix("inference-component/").removeprefix("endpoint/")
    return f"{resource.kind.value}-{suffix.removeprefix(f'{deployment}/')}"


def _components_of_models(resources: Sequence[Resource]) -> Mapping[str, str]:
    """Map the key of each model except the first to the first component that uses it."""
    components: dict[str, str] = {}
    for component in resources:
        if component.kind is Kind.COMPONENT:
            for key in component.needs:
                if key.startswith(f"{Kind.MODEL.value}/"):
                    components.setdefault(key, component.name)
    return dict(list(components.items())[1:])


def _template_resource(resource: Resource, names: Mapping[str, str]) -> dict[str, Any]:
    updates = {name: resource.update[name] for name in _UPDATE_PROPERTIES if name in resource.update}
    content = without_lacking(resource, {**resource.request, **updates})[0]
    if isinstance(tags := content.get("Tags"), Mapping):
        content["Tags"] = tag_list(tags)
    properties, references = _with_references(content, resource, names)
    # CloudFormation derives no dependency from a name that is only part of a string.
    depends_on = [names[key] for key in resource.needs if key not in references]
    return {"Type": TYPES[resource.kind], "Properties": properties, **({"DependsOn": depends_on} if depends_on else {})}


def _with_references(content: Any, resource: Resource, names: Mapping[str, str]) -> tuple[Any, set[str]]:
    """Return the properties with the names of other resources replaced by references, and those resources' keys."""
    references: set[str] = set()

    def policy_arn(ref: Ref) -> dict[str, str]:
        if ref.attribute != "PolicyARN":  # `Ref` of a scaling policy returns its ARN, the only attribute in use
            raise KeyError(ref.attribute)
        references.add(ref.key)
        return {"Ref": names[ref.key]}

    def convert(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: convert_property(name, item) for name, item in value.items()}
        return [convert(item) for item in value] if isinstance(value, list) else value

    def convert_property(name: str, value: Any) -> Any:
        kind, attribute = _NAME_PROPERTIES.get(name, (None, name))
        key = f"{kind.value}/{value}" if kind is not None and kind is not resource.kind else None
        if key is None or key not in resource.needs:
            return convert(value)
        references.add(key)
        return {"Fn::GetAtt": [names[key], attribute]}

    return convert(resolved(content, policy_arn)), references
