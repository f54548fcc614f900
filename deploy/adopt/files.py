"""Read a model's configuration from a JSON file, and write a specification as YAML.

The JSON file contains AWS API requests or responses, a JumpStart document, or a job's recommendations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from botocore import xform_name

from deploy.adopt.jumpstart import listed, prefix_data, read_jumpstart
from deploy.adopt.live import Source
from deploy.adopt.specification import Adopted, checked
from deploy.adopt.variables import escaped_line
from deploy.errors import Refused, SpecError
from deploy.resources.resource import Content
from deploy.service_model import sagemaker
from handler.core.text_files import decode

_MOST = 4 << 20  # maximum size of a file, in bytes


def read_file(path: Path, number: int = 1, region: str = "") -> Source:
    """Read a model's configuration from a file.

    Args:
        number: 1-based number of the recommendation to read from a job.
        region: region to use if the file does not name a region.

    Raises:
        SpecError: the file cannot be read, or its format is not supported.
    """
    content = _json(path)
    for has, operation, read in _FORMS:
        if has(content):
            section = operation.removeprefix("Describe")
            unknown = checked(path.name, section, operation, content) if operation else []
            source = read(content, path.name, number, region)
            return replace(source, notes=[*source.notes, *unknown])
    raise SpecError(
        f"{path}: adopt does not support this format",
        "It supports the fields of CreateModel or DescribeModel, alone or under Model: next to EndpointConfig:, "
        "Endpoint:, Components: and Tags:; JumpStart's specifications; and the output of DescribeModelPackage, "
        "DescribeHubContent, DescribeInferenceRecommendationsJob or DescribeAIRecommendationJob.",
    )


def _json(path: Path) -> Content:
    try:
        with path.open("rb") as file:
            text = file.read(_MOST + 1)
        if len(text) > _MOST:
            raise SpecError(f"{path}: is larger than {_MOST >> 20} MiB")
        content = json.loads(decode(text))
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path}: is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise SpecError(f"{path}: must be a JSON object")
    return content


def _parts(content: Content, file: str, number: int, region: str) -> Source:
    """Read a file with the fields Endpoint, EndpointConfig, Model or Models, Components and Tags.

    Each part of the endpoint is the response of a Describe call or the request of a Create call.
    """
    if unknown := sorted(content.keys() - _PARTS):
        raise SpecError(f"{file}: unknown fields: {', '.join(unknown)}", f"Known fields: {', '.join(sorted(_PARTS))}.")
    endpoint, config = content.get("Endpoint", {}), content.get("EndpointConfig", {})
    models = listed(content.get("Models", [content["Model"]] if "Model" in content else []), file, "Models")
    components = listed(content.get("Components"), file, "Components")
    notes = [
        *checked(file, "Endpoint", "DescribeEndpoint", endpoint),
        *checked(file, "EndpointConfig", "DescribeEndpointConfig", config),
        *checked(file, "", "ListTags", {"Tags": content.get("Tags", [])}),
        *_checked_all(file, "Model", "DescribeModel", models),
        *_checked_all(file, "Components", "DescribeInferenceComponent", components),
    ]
    arns = [str(part.get(f"{kind}Arn", "")) for kind, part in (("Endpoint", endpoint), ("EndpointConfig", config))]
    arns += [str(model.get("ModelArn", "")) for model in models]
    return Source(
        str(endpoint.get("EndpointName", "")),
        file,
        next(filter(None, map(_region, arns)), ""),
        endpoint,
        config,
        {str(model.get("ModelName", "")): model for model in models},
        components,
        tags=_tags(*models, config, *components, endpoint, content),
        notes=notes,
    )


def _checked_all(file: str, part: str, operation: str, items: Sequence[Content]) -> Iterator[tuple[str, str]]:
    for item in items:
        yield from checked(file, part, operation, item)


_PARTS = {"Endpoint", "EndpointConfig", "Model", "Models", "Components", "Tags"}


def _tags(*requests: Content) -> dict[str, str]:
    """Merge the tags of several requests. Later tags override earlier tags."""
    return {str(tag["Key"]): str(tag["Value"]) for request in requests for tag in request.get("Tags", ())}


def _region(arn: str) -> str:
    match = re.match(r"arn:[a-z-]+:[a-z-]+:([a-z0-9-]+):", arn)
    return match[1] if match else ""


def _model(content: Content, file: str, number: int, region: str) -> Source:
    return replace(_source(content, "ModelArn", file, {}, content), tags=_tags(content))


def _package(content: Content, file: str, number: int, region: str) -> Source:
    """Read the response of DescribeModelPackage for a package in a model registry. Marketplace packages are refused."""
    package = content["InferenceSpecification"]
    _refuse_product(package["Containers"], file)
    names = [*sagemaker().shape_for("ContainerDefinition").members]  # packages have further fields
    containers = [{name: item[name] for name in names if item.get(name)} for item in package["Containers"]]
    types = package.get("SupportedRealtimeInferenceInstanceTypes", ())
    config = _variant({"InstanceType": types[0]}) if len(types) == 1 else {}
    return _source(content, "ModelPackageArn", file, config, {"Containers": containers})


def _refuse_product(containers: Sequence[Content], file: str) -> None:
    if product := next(filter(None, (container.get("ProductId") for container in containers)), None):
        raise Refused(
            f"{file}: is the Marketplace product {product}, whose container and weights belong to the seller",
            "Deploy it from the Marketplace; lmi deploy serves only weights that you can access (model.s3, model.id).",
        )


def _variant(fields: Content) -> Content:
    return {"ProductionVariants": [{"VariantName": "AllTraffic", **fields}]}


def _numbered(documents: list[Any], file: str, number: int) -> Any:
    if not 1 <= number <= len(documents):
        raise SpecError(
            f"{file}: --recommendation {number}: the job has {len(documents)} recommendations", "Numbers start at 1."
        )
    return documents[number - 1]


def _recommended(content: Content, file: str, number: int, region: str) -> Source:
    """Read one recommendation from the response of DescribeInferenceRecommendationsJob."""
    chosen = _numbered(content["InferenceRecommendations"], file, number)
    endpoint, model = chosen.get("EndpointConfiguration", {}), chosen.get("ModelConfiguration", {})
    model_fields = dict(content.get("Model", {}))
    container = dict(model_fields.pop("PrimaryContainer", {}))
    tuned = {parameter["Key"]: str(parameter["Value"]) for parameter in model.get("EnvironmentParameters", ())}
    container["Environment"] = {**container.get("Environment", {}), **tuned}
    return _of_job(
        content, "JobArn", f"{file}, recommendation {number}", endpoint, {**model_fields, "PrimaryContainer": container}
    )


def _ai_recommended(content: Content, file: str, number: int, region: str) -> Source:
    """Read one recommendation from the response of DescribeAIRecommendationJob."""
    chosen = _numbered(content["Recommendations"], file, number)
    advice = chosen.get("DeploymentConfiguration", {})
    uri = next((item["Uri"] for item in advice.get("S3", ()) if item.get("ChannelName", "model") == "model"), None)
    uri = uri or content.get("ModelSource", {}).get("S3", {}).get("S3Uri")
    container = {"Image": advice.get("ImageUri", ""), "Environment": advice.get("EnvironmentVariables", {})}
    if uri:
        container |= prefix_data(uri)
    fields = {"InstanceType": advice.get("InstanceType"), "InitialInstanceCount": advice.get("InstanceCount")}
    origin = f"{file}, recommendation {number}"
    return _of_job(content, "AIRecommendationJobArn", origin, fields, {"PrimaryContainer": container})


_RECOMMENDED = ("InstanceType", "InitialInstanceCount", "ServerlessConfig")
"""Fields of a variant that a job may recommend."""


def _of_job(content: Content, arn: str, origin: str, fields: Content, model: Content) -> Source:
    """Return a source with the settings that a job recommends.

    Args:
        arn: name of the field with the job's ARN.
        fields: recommended settings. Those in `_RECOMMENDED` are copied to the variant, unless they are empty.
        model: fields of the model. The job's role is added unless they already include a role.
    """
    role = {"ExecutionRoleArn": content["RoleArn"]} if content.get("RoleArn") else {}
    config = _variant({name: fields[name] for name in _RECOMMENDED if fields.get(name)})
    return _source(content, arn, origin, config, {**role, **model})


def _source(content: Content, arn: str, origin: str, config: Content, model: Content) -> Source:
    """Return a source with one model, in the region from the content's ARN."""
    return Source("", origin, _region(str(content.get(arn, ""))), config=config, models={"": model})


def _hub_content(content: Content, file: str, number: int, region: str) -> Source:
    """Read the response of DescribeHubContent, in which the document is a JSON string."""
    try:
        document = json.loads(content["HubContentDocument"])
    except (ValueError, TypeError, RecursionError) as error:
        raise SpecError(f"{file}: HubContentDocument is not JSON: {error}") from None
    region = _region(str(content.get("HubContentArn", ""))) or region
    return read_jumpstart(document if isinstance(document, dict) else {}, file, region)


def _has(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda content: any(name in content for name in names)


_OF_JUMPSTART = ("InferenceEnvironmentVariables", "HostingEcrUri", "HostingEcrSpecs", "InferenceConfigs")

_FORMS: tuple[tuple[Callable[[Mapping[str, Any]], bool], str, Callable[[Content, str, int, str], Source]], ...] = (
    (_has("InferenceRecommendations"), "DescribeInferenceRecommendationsJob", _recommended),
    (_has("Recommendations"), "DescribeAIRecommendationJob", _ai_recommended),
    (_has("HubContentDocument"), "DescribeHubContent", _hub_content),
    (
        _has(*(name for member in _OF_JUMPSTART for name in (member, xform_name(member)))),
        "",
        lambda content, file, _, region: read_jumpstart(content, file, region),
    ),
    (_has("InferenceSpecification"), "DescribeModelPackage", _package),
    (_has("EndpointConfig", "Model", "Models"), "", _parts),
    (_has("PrimaryContainer", "Containers"), "DescribeModel", _model),
)
"""Supported formats: a test that recognizes the format, the AWS call that returns it, and its reader."""


# -- write an adopted specification as YAML, with comments for what does not map ---------------------------------------


_NOTES = {
    "image": "The endpoint's own image is not used: write your image here.",
    "instance": "The model already runs on this instance type, so whether it fits is not checked.",
    "alarms": "Without this line `up` adds alarms, which roll back a bad update.",
    "sagemaker": "Fields that are passed to SageMaker unchanged.",
}


def written(adopted: Adopted, command: str) -> str:
    """Return the specification as YAML, with comments.

    Args:
        command: command line to name in the first comment.
    """
    lines = [_comment(f"Written by `{command}` {sentence}. Nothing was changed.") for sentence in adopted.head]
    for name, value in adopted.content.items():
        if (note := _NOTES.get(name)) is not None:
            lines.append(_comment(note))
        if name == "instance" and "ami" in value:
            lines.append(_comment("This is the endpoint's AMI; for another CUDA version, write ami: auto."))
        lines.append(yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=120).rstrip("\n"))
    lines += _listed("Defaults on which the original endpoint relied", adopted.defaults)
    lines += _listed("Cannot be mapped", adopted.unmapped)
    lines += _listed("Mapped, with another effect here", adopted.differences)
    lines += _listed("Omitted, because they have no effect here", adopted.idle)
    return "\n".join(lines) + "\n"


def _listed(title: str, items: Sequence[tuple[str, str]]) -> Iterator[str]:
    if items:
        yield f"\n# {title}:"
        yield from (_comment(f"  {setting}: {reason}") for setting, reason in items)


def _comment(text: str) -> str:
    return f"# {escaped_line(text)}"
