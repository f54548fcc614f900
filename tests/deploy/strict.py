"""Checks requests as AWS would: botocore's own validation, and rules of its model beyond that."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import botocore.session
from botocore.validate import ParamValidator

from deploy.resources.resource import Kind, Resource, resolved

OPERATIONS = {
    Kind.MODEL: ("sagemaker", "CreateModel", None),
    Kind.ENDPOINT_CONFIG: ("sagemaker", "CreateEndpointConfig", None),
    Kind.ENDPOINT: ("sagemaker", "CreateEndpoint", "UpdateEndpoint"),
    Kind.COMPONENT: ("sagemaker", "CreateInferenceComponent", "UpdateInferenceComponent"),
    Kind.SCALABLE_TARGET: ("application-autoscaling", "RegisterScalableTarget", None),
    Kind.SCALING_POLICY: ("application-autoscaling", "PutScalingPolicy", None),
    Kind.ALARM: ("cloudwatch", "PutMetricAlarm", None),
}


def plain(value: Any) -> Any:
    """The value with words in place of what AWS assigns."""
    return resolved(value, lambda ref: f"<{ref.attribute} of {ref.key}>")


@functools.cache
def input_of(service: str, operation: str) -> Any:
    """botocore's shape of a request."""
    return botocore.session.get_session().get_service_model(service).operation_model(operation).input_shape


def report(shape: Any, value: Any) -> str:
    """botocore's own report; empty if it takes the value."""
    return str(ParamValidator().validate(plain(value), shape).generate_report())


def wrong_in(resource: Resource) -> Iterator[str]:
    """What AWS would not take of a resource's requests."""
    service, create, update = OPERATIONS[resource.kind]
    for operation, request in ((create, resource.request), (update, resource.update)):
        if operation is not None and request:
            shape = input_of(service, operation)
            if told := report(shape, request):
                yield f"{resource.key}: {told}"
            else:
                yield from wrong_words(shape, plain(request), resource.key)


def wrong_words(shape: Any, value: Any, place: str = "") -> Iterator[str]:
    """Texts and numbers within that the model of the API does not take, though botocore lets them pass."""
    if shape.type_name == "structure":
        for name, one in value.items():
            yield from wrong_words(shape.members[name], one, f"{place}.{name}")
    elif shape.type_name == "list":
        if not takes(shape, value):
            yield f"{place}: {len(value)} entries"
        for one in value:
            yield from wrong_words(shape.member, one, place)
    elif shape.type_name == "map":
        for name, one in value.items():
            yield from wrong_words(shape.key, name, place)
            yield from wrong_words(shape.value, one, f"{place}.{name}")
    elif not takes(shape, value):
        yield f"{place}: {value}"


def takes(shape: Any, value: Any) -> bool:
    """Whether the model takes a text, a number, or a list of that length."""
    rules = shape.metadata
    size = value if isinstance(value, int | float) else len(value)
    if not rules.get("min", size) <= size <= rules.get("max", size):
        return False
    if not isinstance(value, str):
        return True
    pattern = rules.get("pattern", "")
    return (not shape.enum or value in shape.enum) and (
        not pattern or r"\p{" in pattern or r"\u" in pattern or bool(re.fullmatch(pattern, value, re.DOTALL))
    )
