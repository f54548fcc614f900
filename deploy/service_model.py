"""AWS APIs as described by the installed botocore, and validation of requests against these descriptions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from botocore.exceptions import UnknownServiceError
from botocore.loaders import Loader
from botocore.model import OperationNotFoundError, ServiceModel

_MODELS = {"monitoring": "cloudwatch", "servicequotas": "service-quotas"}
"""Maps the service name that requests are signed with to botocore's name if the two differ."""


@cache
def service(name: str) -> ServiceModel:
    """Return botocore's description of a service.

    Args:
        name: service name that requests are signed with.

    Raises:
        UnknownServiceError: the service is unknown to botocore.
    """
    name = _MODELS.get(name, name)
    return ServiceModel(Loader().load_service_model(name, "service-2"), service_name=name)


def sagemaker() -> ServiceModel:
    """Return the description of SageMaker's operations and shapes."""
    return service("sagemaker")


def instance_types(shape: str) -> tuple[str, ...]:
    """Return the instance types of an enumeration, e.g. `TransformInstanceType`."""
    enumeration: Any = sagemaker().shape_for(shape)
    return tuple(enumeration.enum)


class Malformed(ValueError):
    """The error for a value of the wrong type. AWS checks all types before any constraint."""


def wrong_with(signed_for: str, operation: str, values: Mapping[str, Any]) -> str:
    """Return AWS's message about the constraints that a request violates, or "" if it is valid.

    boto3 itself checks only a few of these constraints.

    Args:
        signed_for: service name that the request is signed with. A service unknown to botocore is not checked.

    Raises:
        Malformed: a value has the wrong type. The message is that of AWS.
    """
    try:
        shape = service(signed_for).operation_model(operation).input_shape
    except (UnknownServiceError, OperationNotFoundError):
        return ""
    violations = [] if shape is None else list(_violations(shape, values, ""))
    count = f"{len(violations)} validation error{'s' if len(violations) > 1 else ''} detected: "
    return count + "; ".join(violations) if violations else ""


_TYPES: Mapping[str, Any] = {
    "structure": (Mapping,),
    "map": (Mapping,),
    "list": (list,),
    "string": (str,),
    "integer": (int,),
    "long": (int,),
    "float": (int, float),
    "double": (int, float),
    "boolean": (bool,),
}
"""Maps AWS types to Python types of JSON values. The encoding of timestamps and blobs depends on the protocol."""


def _violations(shape: Any, value: Any, at: str) -> Iterator[str]:
    """Yield the violations of a value and of the values nested in it.

    Raises:
        Malformed: a value has the wrong type.
    """
    kind = shape.type_name
    if kind not in _TYPES or getattr(shape, "is_document_type", False):
        return
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        raise Malformed(f"{type(value).__name__} at '{at or 'the body'}' can not be converted to a {kind}")
    yield from (
        f"Value '{value}' at '{at}' failed to satisfy constraint: {rule}" for rule in _constraints(shape, value)
    )
    if kind == "structure":
        for name, member in shape.members.items():
            path = f"{at}.{name[0].lower()}{name[1:]}".lstrip(".")
            if value.get(name) is not None:
                yield from _violations(member, value[name], path)
            elif name in shape.required_members:
                yield f"Value null at '{path}' failed to satisfy constraint: Member must not be null"
    elif kind == "list":
        for number, item in enumerate(value, 1):
            yield from _violations(shape.member, item, f"{at}.{number}.member")
    elif kind == "map":
        for name, item in value.items():
            yield from _violations(shape.key, name, f"{at}.key")
            yield from _violations(shape.value, item, f"{at}.{name}.member")


def _constraints(shape: Any, value: Any) -> Iterator[str]:
    """Yield AWS's message for each constraint that a value violates: bounds, pattern or enumeration."""
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    size, quantity = (value, "value") if isinstance(value, (int, float)) else (len(value), "length")
    if least is not None and size < least:
        yield f"Member must have {quantity} greater than or equal to {least}"
    if most is not None and size > most:
        yield f"Member must have {quantity} less than or equal to {most}"
        return  # without matching an oversized value against the pattern
    pattern, allowed = shape.metadata.get("pattern"), getattr(shape, "enum", ())
    if pattern is not None and (compiled := compiled_pattern(pattern)) is not None and not compiled.fullmatch(value):
        yield f"Member must satisfy regular expression pattern: {pattern}"
    if allowed and value not in allowed:
        yield f"Member must satisfy enum value set: [{', '.join(allowed)}]"


@cache
def compiled_pattern(pattern: str) -> re.Pattern[str] | None:
    """Return the compiled pattern, or None if Python does not support its Java syntax."""
    try:
        return re.compile(pattern)
    except re.error:
        return None
