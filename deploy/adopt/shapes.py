"""Check what a file holds by the types of AWS's own shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deploy.errors import SpecError
from deploy.service_model import sagemaker

_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "structure": ((dict,), "an object"),
    "map": ((dict,), "an object"),
    "list": ((list,), "an array"),
    "string": ((str,), "a text"),
    "integer": ((int,), "a whole number"),
    "long": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "double": ((int, float), "a number"),
    "boolean": ((bool,), "true or false"),
}
"""JSON's types. Timestamps may be anything: nothing reads them."""


def check(file: str, place: str, operation: str, content: Any) -> None:
    """Check an answer of SageMaker's, or the request of the call that creates the same.

    Raises:
        SpecError: a field has another type; names the first.
    """
    service = sagemaker()
    shapes = [service.operation_model(operation).output_shape]
    if operation in _CREATED:
        shapes.append(service.operation_model(operation.replace("Describe", "Create")).input_shape)
    wrong = [next(_wrong(shape, content, place), None) for shape in shapes]
    if all(line is not None for line in wrong):
        raise SpecError(f"{file}: {wrong[0]}")


def _wrong(shape: Any, value: Any, place: str) -> Iterator[str]:
    types, words = _TYPES.get(shape.type_name, ((), ""))
    if types and type(value) not in types:
        yield f"{place}: must be {words}"
    elif shape.type_name == "structure":
        for name in shape.required_members:
            if name in _NEEDED and name not in value:
                yield f"{place}.{name}: must be given".removeprefix(".")
        for name, item in value.items():
            if name in shape.members:
                yield from _wrong(shape.members[name], item, f"{place}.{name}".removeprefix("."))
    elif shape.type_name == "list":
        for number, item in enumerate(value):
            yield from _wrong(shape.member, item, f"{place}[{number}]")
    elif shape.type_name == "map":
        for name, item in value.items():
            yield from _wrong(shape.value, item, f"{place}.{name}")


_CREATED = ("DescribeEndpoint", "DescribeEndpointConfig", "DescribeInferenceComponent", "DescribeModel")
"""What a request creates with the same fields as its description has, so that a file may hold either."""

_NEEDED = ("InferenceComponentName", "Subnets", "SecurityGroupIds", "InstanceType", "Key", "Value")
"""Required fields that are read without asking whether they are there."""
