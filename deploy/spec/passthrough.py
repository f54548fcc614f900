"""The `sagemaker` section, whose fields are passed unchanged in requests to SageMaker's API.

Their names, types and values are checked against botocore's service model. A field that another setting of the
specification determines is rejected, and the message names that setting (`OWNED`).
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field, ValidationInfo

from deploy.service_model import sagemaker
from deploy.spec.values import Section

Fields = Mapping[str, Any]

_SHAPES: dict[str, tuple[str, str]] = {
    "endpoint_config": ("CreateEndpointConfig", ""),
    "variant": ("CreateEndpointConfig", "ProductionVariants"),
    "component": ("CreateInferenceComponent", ""),
    "model": ("CreateModel", ""),
    "endpoint": ("UpdateEndpoint", ""),
}
"""Maps each part of `sagemaker` to its API operation, and to the request member that holds its fields ("" if none)."""

_TIMES = {
    "ModelDataDownloadTimeoutInSeconds": "timeouts.download",
    "ContainerStartupHealthCheckTimeoutInSeconds": "timeouts.startup",
}
_NETWORK = {
    "VpcConfig": "network.subnets and network.security_groups",
    "EnableNetworkIsolation": "network.isolated",
    "ExecutionRoleArn": "role",
    "Tags": "tags",
}
_CONTAINER = "image, options and environment; set other fields of the container in sagemaker.model"
_VARIANT_NAME = "instance.variant"
_VERSION_NAME = "lmi deploy (the name ends in a digest of the content)"

OWNED: Mapping[str, Mapping[str, str]] = {
    "endpoint_config": {
        "EndpointConfigName": _VERSION_NAME,
        "ProductionVariants": "instance, timeouts and routing; set other fields of the variant in sagemaker.variant",
        "KmsKeyId": "encryption.volume_key",
        "AsyncInferenceConfig.ClientConfig": "async.concurrency",
        "AsyncInferenceConfig.OutputConfig.S3OutputPath": "async.output",
        "AsyncInferenceConfig.OutputConfig.S3FailurePath": "async.failures",
        "AsyncInferenceConfig.OutputConfig.KmsKeyId": "encryption.output_key",
        "AsyncInferenceConfig.OutputConfig.NotificationConfig.SuccessTopic": "async.notify_success",
        "AsyncInferenceConfig.OutputConfig.NotificationConfig.ErrorTopic": "async.notify_error",
        **_NETWORK,
    },
    "variant": {
        "VariantName": _VARIANT_NAME,
        "ModelName": "model",
        "InitialInstanceCount": "instance.count",
        "InstanceType": "instance.type",
        "InstancePools": "instance.pools",
        "InitialVariantWeight": "lmi deploy (the endpoint has only one variant)",
        "ServerlessConfig": "instance (serverless endpoints have no GPUs)",
        "VolumeSizeInGB": "instance.volume_gb",
        "InferenceAmiVersion": "instance.ami",
        "VariantInstanceProvisionTimeoutInSeconds": "timeouts.provision",
        "ManagedInstanceScaling.Status": "instance.managed",
        "ManagedInstanceScaling.MinInstanceCount": "instance.managed.min",
        "ManagedInstanceScaling.MaxInstanceCount": "instance.managed.max",
        "RoutingConfig": "routing",
        **_TIMES,
    },
    "component": {
        "InferenceComponentName": "components[].name",
        "EndpointName": "name",
        "VariantName": _VARIANT_NAME,
        "RuntimeConfig": "components[].copies",
        "DeploymentConfig": "update",
        "Tags": "tags",
        "Specification.InstanceType": "instance.type",
        "Specification.ModelName": "model",
        "Specification.Container": _CONTAINER,
        "Specification.BaseInferenceComponentName": "components[].adapters",
        "Specification.DataCacheConfig": "components[].cache",
        "Specification.ComputeResourceRequirements.NumberOfCpuCoresRequired": "components[].cpus",
        "Specification.ComputeResourceRequirements.NumberOfAcceleratorDevicesRequired": "components[].accelerators",
        "Specification.ComputeResourceRequirements.MinMemoryRequiredInMb": "components[].memory_mb",
        **{f"Specification.StartupParameters.{name}": owner for name, owner in _TIMES.items()},
        "Specifications.ModelName": "model",
        "Specifications.Container": _CONTAINER,
        "Specifications.BaseInferenceComponentName": "components[].adapters",
        "Specifications.DataCacheConfig": "components[].cache",
    },
    "model": {
        "ModelName": _VERSION_NAME,
        "Containers": "image (the model has only one container)",
        "InferenceExecutionConfig": "image (the model has only one container)",
        "PrimaryContainer.Image": "image",
        "PrimaryContainer.ModelPackageName": "image",
        "PrimaryContainer.InferenceSpecificationName": "image",
        "PrimaryContainer.Environment": "options and environment",
        "PrimaryContainer.Mode": "model (the container has only one model)",
        "PrimaryContainer.MultiModelConfig": "model (the container has only one model)",
        "PrimaryContainer.ModelDataUrl": "model.s3",
        "PrimaryContainer.ModelDataSource.S3DataSource.S3Uri": "model.s3",
        "PrimaryContainer.ModelDataSource.S3DataSource.S3DataType": "model.s3",
        "PrimaryContainer.ModelDataSource.S3DataSource.CompressionType": "model.s3",
        **_NETWORK,
    },
    "endpoint": {
        "EndpointName": "name",
        "EndpointConfigName": _VERSION_NAME,
        "Tags": "tags",
        "RetainAllVariantProperties": "scaling and instance.managed",
        "RetainDeploymentConfig": "update",
        "DeploymentConfig.BlueGreenUpdatePolicy": "update",
        "DeploymentConfig.RollingUpdatePolicy.MaximumBatchSize": "update.batch_percent",
        "DeploymentConfig.RollingUpdatePolicy.WaitIntervalInSeconds": "update.wait",
        "DeploymentConfig.RollingUpdatePolicy.MaximumExecutionTimeoutInSeconds": "timeouts",
        "DeploymentConfig.AutoRollbackConfiguration": "alarms",
    },
}
"""Maps the dotted names of the fields in each part, without list indices, to the settings that determine them."""

_FILLED = ("Specifications.ComputeResourceRequirements.MinMemoryRequiredInMb",)
"""Required fields that are taken from the specification if they are missing."""

_IN_PROSE = {"MetricPublishFrequencyInSeconds": (10, 30, 60, 120, 180, 240, 300)}
"""Valid values that are listed only in the API documentation, by field."""

TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "structure": ((dict,), "a mapping of names to values"),
    "map": ((dict,), "a mapping of names to values"),
    "list": ((list, tuple), "a list"),
    "string": ((str,), "a string (put it in quotes)"),
    "integer": ((int,), "a whole number"),
    "long": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "double": ((int, float), "a number"),
    "boolean": ((bool,), "true or false"),
}
"""Maps botocore's type names to Python types and their names in messages. There are no fields with timestamps."""


class _Field(NamedTuple):
    """A field in one part of `sagemaker`.

    Attributes:
        part: name of the part.
        name: dotted name with list indices, or "" for the whole part. Messages start with it.
        path: dotted name without list indices and keys of maps, as in `OWNED`.
    """

    part: str
    name: str = ""
    path: str = ""

    def member(self, name: object) -> _Field:
        return _Field(self.part, f"{self.name}.{name}", f"{self.path}.{name}".removeprefix("."))

    def item(self, suffix: str) -> _Field:
        """Return the field for an item of this list or map."""
        return self._replace(name=f"{self.name}{suffix}")


def problems(part: str, content: Fields) -> Iterator[str]:
    """Yield a line for each error in one part of `sagemaker`. Each line starts with the dotted field name."""
    return _structure(_Field(part), shape_of(part), content)


def _checked(content: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    """Check the fields of the part that `info` names. The field `sagemaker` contains a component's own fields."""
    part = "component" if info.field_name == "sagemaker" else str(info.field_name)
    if lines := [*problems(part, content)]:
        raise ValueError("\n".join(lines))
    return content


PassedFields = Annotated[dict[str, Any], AfterValidator(_checked)]


class SageMaker(Section):
    """Fields of SageMaker's API that have no setting in the specification. They are merged into the requests last."""

    endpoint_config: PassedFields = Field(default_factory=dict, description="Fields of CreateEndpointConfig.")
    variant: PassedFields = Field(
        default_factory=dict, description="Fields of the production variant in CreateEndpointConfig."
    )
    component: PassedFields = Field(default_factory=dict, description="Fields of CreateInferenceComponent.")
    model: PassedFields = Field(default_factory=dict, description="Fields of CreateModel.")
    endpoint: PassedFields = Field(default_factory=dict, description="Fields of UpdateEndpoint.")


@functools.cache
def shape_of(part: str) -> Any:
    """Return botocore's shape for the fields of one part of `sagemaker`."""
    operation, member = _SHAPES[part]
    shape = sagemaker().operation_model(operation).input_shape
    return shape.members[member].member if member else shape


def _value(field: _Field, shape: Any, value: Any) -> Iterator[str]:
    types, words = TYPES.get(shape.type_name, ((str,), "a string (put it in quotes)"))
    if type(value) not in types:  # `isinstance` would accept booleans as numbers
        yield f"{field.name}: must be {words}{_actual(value)}"
    elif shape.type_name == "structure":
        yield from _structure(field, shape, value)
    elif shape.type_name == "list":
        yield from _bounds(shape, len(value), field.name, "entries")
        for number, item in enumerate(value):
            yield from _value(field.item(f"[{number}]"), shape.member, item)
    elif shape.type_name == "map":
        yield from _bounds(shape, len(value), field.name, "entries")
        for name, item in value.items():
            yield from _value(field, shape.key, name)
            yield from _value(field.item(f".{name}"), shape.value, item)
    else:
        yield from _scalar(shape, value, field.name)


def _structure(field: _Field, shape: Any, content: Fields) -> Iterator[str]:
    owned = OWNED[field.part]
    for name, value in content.items():
        member = field.member(name)
        if member.path in owned:
            yield f"{member.name}: is set by {owned[member.path]}"
        elif name not in shape.members:
            yield f"{member.name}: there is no such field{_suggestion(field.part, shape, str(name))}"
        else:
            yield from _value(member, shape.members[name], value)
    for name in shape.required_members:
        path = field.member(name).path
        ours = any(f"{setting}.".startswith(f"{path}.") for setting in (*owned, *_FILLED))
        if name not in content and not ours:
            yield f"{field.name}.{name}: is required"


def _scalar(shape: Any, value: Any, where: str) -> Iterator[str]:
    if isinstance(value, bool):
        return
    limits, size = shape.metadata, len(value) if isinstance(value, str) else value
    wrong = [*_bounds(shape, size, where, "characters" if isinstance(value, str) else "")]
    name = re.sub(r"\[[0-9]+\]", "", where).rpartition(".")[2]
    if not isinstance(value, str):
        if not wrong and value not in _IN_PROSE.get(name, (value,)):
            wrong.append(f"{where}: must be {_either(_IN_PROSE[name])}{_actual(value)}")
    elif shape.enum:
        if value not in shape.enum:
            wrong = [f"{where}: {_no_such_word(value, shape.enum)}{_actual(value)}"]
    elif not wrong and (pattern := limits.get("pattern")) and not re.fullmatch(pattern, value, re.DOTALL):
        wrong.append(f"{where}: must match {pattern}{_actual(value)}")
    elif not wrong and pattern and "|s3)://" in pattern and not value.startswith("s3://"):
        wrong.append(
            f"{where}: must start with s3://{_actual(value)}"
        )  # for https://, policies could not name a bucket
    yield from wrong


def _bounds(shape: Any, size: float, where: str, noun: str) -> Iterator[str]:
    minimum, maximum = shape.metadata.get("min"), shape.metadata.get("max")
    unit = f" {noun}" if noun else ""
    verb = "have" if noun else "be"
    if minimum is not None and size < minimum:
        yield f"{where}: must {verb} at least {minimum:g}{unit} (given: {size:g})"
    elif maximum is not None and size > maximum:
        yield f"{where}: must {verb} at most {maximum:g}{unit} (given: {size:g})"


_MAX_LISTED = 12  # maximum number of an enumeration's values to list in a message


def _no_such_word(value: str, words: list[str]) -> str:
    if len(words) <= _MAX_LISTED:
        return f"must be {_either(words)}"
    near = difflib.get_close_matches(value, words, n=1, cutoff=0.0)
    return f"is not one of the {len(words)} values that SageMaker accepts; did you mean {near[0]}?"


def _either(values: Any) -> str:
    *items, last = map(str, values)
    return f"{', '.join(items)} or {last}" if items else last


def _actual(value: Any) -> str:
    if value is None:
        return "; omit it, or set a value"
    return f" (given: {json.dumps(value, ensure_ascii=False)})" if isinstance(value, str | int | float) else ""


def _suggestion(part: str, shape: Any, name: str) -> str:
    """Return text such as `; did you mean sagemaker.variant.EnableSSMAccess?`, or "" if there is no similar name."""
    lowered = {member.lower(): member for member in shape.members}
    if name.lower() in lowered:
        return f"; did you mean {lowered[name.lower()]}?"
    for other in (part, *_SHAPES):
        if (path := _shortest_paths(other).get(name)) is not None:
            return f"; did you mean sagemaker.{other}.{path}?"
    near = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.5)
    return f"; did you mean {lowered[near[0]]}?" if near else ""


@functools.cache
def _shortest_paths(part: str) -> Mapping[str, str]:
    """Return the shortest dotted name of each field in a part, by field name, except for fields in `OWNED`."""
    paths: dict[str, str] = {}
    structures = [("", shape_of(part))]
    for path, shape in structures:  # the list grows level by level, so the first path of a name is the shortest
        for name, member in shape.members.items():
            full_path = f"{path}.{name}".removeprefix(".")
            if full_path in OWNED[part] or path.count(".") > 5:
                continue
            paths.setdefault(name, full_path)
            inner = member.member if member.type_name == "list" else member
            if inner.type_name == "structure":
                structures.append((full_path, inner))
    return paths
