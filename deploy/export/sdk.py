"""Export a deployment as a program that uses SageMaker's Python SDK 3, and boto3 for scaling and alarms."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from botocore import xform_name

from deploy.resources.resource import Kind, Ref, Resource, refs
from deploy.service_model import sagemaker

OLDEST = "2.27"
"""The oldest supported version of sagemaker-core, which the tests use."""

_CLASSES = {
    Kind.MODEL: ("model", "Model"),
    Kind.ENDPOINT_CONFIG: ("config", "EndpointConfig"),
    Kind.ENDPOINT: ("endpoint", "Endpoint"),
    Kind.COMPONENT: ("component", "InferenceComponent"),
}
"""Maps each kind to a variable and a class of `sagemaker.core.resources`. `create` takes arguments in snake case."""

_BOTO3 = {
    Kind.SCALABLE_TARGET: ("target", "scaling", "register_scalable_target"),
    Kind.SCALING_POLICY: ("policy", "scaling", "put_scaling_policy"),
    Kind.ALARM: ("alarm", "alarms", "put_metric_alarm"),
}
"""Maps each kind to a variable for the response, a variable for a boto3 client, and a method of that client."""

_CLIENTS = {"control": "sagemaker", "scaling": "application-autoscaling", "alarms": "cloudwatch"}
_WAITED_FOR = (Kind.ENDPOINT, Kind.COMPONENT)
_WIDTH = 120


@dataclass(frozen=True)
class _Expression:
    """A Python expression, which consists of `opening`, items with their prefixes, and `closing`."""

    opening: str
    items: tuple[tuple[str, _Expression], ...] = ()
    closing: str = ""

    @property
    def line(self) -> str:
        return self.opening + ", ".join(name + item.line for name, item in self.items) + self.closing

    def after(self, before: str, indent: int = 0) -> str:
        """Return `before` and the expression, on one line if they fit and otherwise with one line per item."""
        if not self.items or indent + len(before) + len(self.line) < _WIDTH:
            return before + self.line
        space = " " * indent
        items = "".join(f"{space}    {item.after(name, indent + 4)},\n" for name, item in self.items)
        return f"{before}{self.opening}\n{items}{space}{self.closing}"


def sdk_program(resources: Sequence[Resource], region: str) -> str:
    """Return the source of a program that creates the resources.

    The program first builds all requests for SageMaker, so that the SDK checks their fields before anything is created.
    Requests that the SDK would change are sent with boto3.
    """
    names = _variables(resources)
    shapes: set[str] = set()
    built, created = [], []
    for resource in resources:
        name = names[resource.key]
        if resource.kind not in _CLASSES:
            created.append(_call(resource, *_BOTO3[resource.kind][1:], resources, names))
        elif dropped := sorted(set(_dropped(resource.request))):
            created.append(
                f"# Sent with boto3, as sagemaker-core {OLDEST} drops values of 0 and False: {', '.join(dropped)}"
            )
            operation = f"create_{xform_name(_CLASSES[resource.kind][1])}"
            created += [_call(resource, "control", operation, resources, names), *_waiting(resource)]
        else:
            built.append(_request(resource, shapes).after(f"{name} = "))
            created += [f"{_CLASSES[resource.kind][1]}.create(**{name}, region=REGION)", *_waiting(resource)]
    clients = [client for client in _CLIENTS if any(f"{client}." in line for line in created)]
    classes = sorted({name for _, name in _CLASSES.values() if any(f"{name}." in line for line in created)})
    return "\n".join(
        [
            f"# Written by `lmi deploy export --format sdk`. It needs: pip install 'sagemaker-core>={OLDEST}'",
            *(["import boto3"] if clients else []),
            _import("resources", classes),
            *([_import("shapes", sorted(shapes))] if shapes else []),
            "",
            f"REGION = {_scalar(region)}",
            *(f"{client} = boto3.client({_scalar(_CLIENTS[client])}, REGION)" for client in clients),
            "",
            *built,
            "",
            *created,
        ]
    )


def _dropped(value: Any) -> Iterator[str]:
    """Yield the fields that the SDK would drop because their values are falsy in Python."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not item:
                yield name
            yield from _dropped(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _dropped(item)


def _waiting(resource: Resource) -> list[str]:
    """Return a line that waits until a resource is in service, or [] for kinds that need no waiting."""
    if resource.kind not in _WAITED_FOR:
        return []
    return [f'{_CLASSES[resource.kind][1]}.get({_scalar(resource.name)}, region=REGION).wait_for_status("InService")']


def _variables(resources: Sequence[Resource]) -> Mapping[str, str]:
    """Map each resource's key to its variable in the program, such as `model` and `model_2`."""
    seen: Counter[Kind] = Counter()
    variables = {}
    for resource in resources:
        seen[resource.kind] += 1
        name = {**_CLASSES, **_BOTO3}[resource.kind][0]
        variables[resource.key] = name if seen[resource.kind] == 1 else f"{name}_{seen[resource.kind]}"
    return variables


def _import(module: str, names: Sequence[str]) -> str:
    opening = f"from sagemaker.core.{module} import "
    line = opening + ", ".join(names)
    return line if len(line) < _WIDTH else f"{opening}(\n" + "".join(f"    {name},\n" for name in names) + ")"


def _request(resource: Resource, shapes: set[str]) -> _Expression:
    """Return the arguments of `create` as an expression. Add the names of SDK shapes that it uses to `shapes`."""
    operation = sagemaker().operation_model(f"Create{_CLASSES[resource.kind][1]}")
    return _structure("dict", operation.input_shape, resource.request, shapes)


def _structure(function: str, shape: Any, values: Mapping[str, Any], shapes: set[str]) -> _Expression:
    items = ((f"{xform_name(name)}=", _value(shape.members[name], value, shapes)) for name, value in values.items())
    return _Expression(f"{function}(", tuple(items), ")")


def _value(shape: Any, value: Any, shapes: set[str]) -> _Expression:
    """Return a Python expression for a value that the SDK accepts, with objects of the SDK's shapes for structures."""
    match shape.type_name:
        case "structure":
            shapes.add(shape.name)
            return _structure(shape.name, shape, value, shapes)
        case "list":
            return _Expression("[", tuple(("", _value(shape.member, item, shapes)) for item in value), "]")
        case "map":
            pairs = ((f"{_scalar(name)}: ", _value(shape.value, item, shapes)) for name, item in value.items())
            return _Expression("{", tuple(pairs), "}")
    return _Expression(_scalar(value))


def _call(resource: Resource, client: str, method: str, resources: Sequence[Resource], names: Mapping[str, str]) -> str:
    """Return a call to a boto3 method, which is assigned to a variable if another call needs its response."""
    items = tuple((f"{name}=", _plain(value, names)) for name, value in resource.request.items())
    needed = {ref.key for other in resources for ref in refs(other.request)}
    before = f"{names[resource.key]} = " if resource.key in needed else ""
    return _Expression(f"{client}.{method}(", items, ")").after(before)


def _plain(value: Any, names: Mapping[str, str]) -> _Expression:
    """Return a Python expression for a value that boto3 accepts, in which each `Ref` is read from a variable."""
    if isinstance(value, Ref):
        return _Expression(f"{names[value.key]}[{_scalar(value.attribute)}]")
    if isinstance(value, Mapping):
        pairs = ((f"{_scalar(name)}: ", _plain(item, names)) for name, item in value.items())
        return _Expression("{", tuple(pairs), "}")
    if isinstance(value, list | tuple):
        return _Expression("[", tuple(("", _plain(item, names)) for item in value), "]")
    return _Expression(_scalar(value))


def _scalar(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
