"""Terraform's JSON syntax, for the providers hashicorp/aws and, for inference components, hashicorp/awscc.

The tables say what an argument is called there. What has no place in them is refused by name: a template that leaves
something out would make another endpoint than `lmi deploy up`. No Terraform has run these (docs/deploy.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from deploy.errors import Refused
from deploy.export.logical import logical_words
from deploy.export.terraform_arguments import ARGUMENTS, MAP, Arguments
from deploy.resources.resource import Kind, Ref, Resource

_TYPES = {
    Kind.MODEL: "aws_sagemaker_model",
    Kind.ENDPOINT_CONFIG: "aws_sagemaker_endpoint_configuration",
    Kind.ENDPOINT: "aws_sagemaker_endpoint",
    Kind.COMPONENT: "awscc_sagemaker_inference_component",
    Kind.SCALABLE_TARGET: "aws_appautoscaling_target",
    Kind.SCALING_POLICY: "aws_appautoscaling_policy",
    Kind.ALARM: "aws_cloudwatch_metric_alarm",
}
_RENEWED = (Kind.MODEL, Kind.ENDPOINT_CONFIG)  # in use until what uses them has been changed
_LONGEST_UPDATE = 14400  # seconds: the provider's own limit, half of the API's


class _Place(NamedTuple):
    """Where in a request a value stands, for what is said of it."""

    key: str
    path: tuple[str, ...] = ()

    def below(self, name: str) -> _Place:
        return _Place(self.key, (*self.path, name))


def configuration(resources: Sequence[Resource], region: str) -> dict[str, Any]:
    """A whole configuration (main.tf.json) of a deployment.

    Raises:
        Refused: the providers have no argument for something that the deployment needs.
    """
    words = {key: "_".join(found).lower() for key, found in logical_words(resources).items()}
    kinds = {resource.key: resource.kind for resource in resources}
    addresses = {key: f"{_TYPES[kinds[key]]}.{name}" for key, name in words.items()}
    found: dict[str, dict[str, Any]] = {}
    for resource in resources:
        found.setdefault(_TYPES[resource.kind], {})[words[resource.key]] = _resource(resource, addresses)
    providers = {"aws": {"source": "hashicorp/aws", "version": ">= 6.0"}}
    if any(resource.kind is Kind.COMPONENT for resource in resources):
        providers["awscc"] = {"source": "hashicorp/awscc", "version": ">= 1.0"}
    endpoint = next(resource for resource in resources if resource.kind is Kind.ENDPOINT)
    return {
        "terraform": {"required_providers": providers},
        "provider": {name: {"region": region} for name in providers},
        "resource": found,
        "output": {"endpoint_name": {"value": f"${{{addresses[endpoint.key]}.name}}"}},
    }


def _resource(resource: Resource, addresses: Mapping[str, str]) -> dict[str, Any]:
    request = dict(resource.request)
    if "DeploymentConfig" in resource.update:
        request["DeploymentConfig"] = resource.update["DeploymentConfig"]
    body = _converted(request, ARGUMENTS[resource.kind], _Place(resource.key), addresses)
    assert isinstance(body, dict)
    if needs := [addresses[key] for key in resource.needs]:
        body["depends_on"] = needs
    if resource.kind in _RENEWED:
        body["lifecycle"] = {"create_before_destroy": True}
    if resource.update.get("RetainAllVariantProperties"):
        body["//"] = (
            "The provider cannot keep the instances that scaling has come to: an update begins at the first number."
        )
    return body


def _converted(value: Any, arguments: Arguments, place: _Place, addresses: Mapping[str, str]) -> Any:
    if isinstance(value, list):
        return [_converted(one, arguments, place, addresses) for one in value]
    found: dict[str, Any] = {}
    for name, one in value.items():
        if name not in arguments:
            raise Refused(
                f"{place.key}: Terraform's provider has no argument for {'.'.join(place.below(name).path)}",
                "Export CloudFormation, which has it, or leave out of the specification what asks for it.",
            )
        argument, below = arguments[name]
        if below is MAP:
            found[argument] = {key: _escaped(text) for key, text in _pairs(one).items()}
        elif below is not None:
            found[argument] = _converted(one, below, place.below(name), addresses)
        else:
            found[argument] = _scalar(one, place.below(name), addresses)
    return found


def _pairs(value: Any) -> Mapping[str, str]:
    """The API's lists of names and values, which are maps to Terraform."""
    if isinstance(value, Mapping):
        return value
    return {one.get("Key", one.get("Name")): one["Value"] for one in value}


def _scalar(value: Any, place: _Place, addresses: Mapping[str, str]) -> Any:
    if isinstance(value, Ref):
        return f"${{{addresses[value.key]}.arn}}"
    if isinstance(value, list):
        return [_scalar(one, place, addresses) for one in value]
    name = place.path[-1]
    if name == "KmsKeyId" and not str(value).startswith("arn:"):
        raise Refused(
            f"{place.key}: Terraform's provider takes a key by its ARN only (given: {value})",
            "Write encryption.volume_key and encryption.output_key as ARNs.",
        )
    if name == "MaximumExecutionTimeoutInSeconds":
        return min(value, _LONGEST_UPDATE)
    return _escaped(value)


def _escaped(value: Any) -> Any:
    """Text as it is: `${` and `%{` would begin an expression."""
    return value.replace("${", "$${").replace("%{", "%%{") if isinstance(value, str) else value
