"""Values for the resources of a deployment: one `Resource` for each resource in AWS.

`build.py` builds them, `deployer/` compares them with AWS and applies the difference, `export/` writes templates.

They are sorted in the order of their creation, which follows from `needs`. Alarms come before the endpoint, whose
update names them. The alarm that wakes a sleeping component comes after the policy that it starts. A value that AWS
assigns on creation (a policy's ARN) is a `Ref` in a request; apply replaces it before the call.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = Mapping[str, Any]


class Kind(enum.Enum):
    """Kinds of resources, in the order in which they are looked up."""

    MODEL = "model"
    ENDPOINT_CONFIG = "endpoint-config"
    ENDPOINT = "endpoint"
    COMPONENT = "inference-component"
    SCALABLE_TARGET = "scalable-target"
    SCALING_POLICY = "scaling-policy"
    ALARM = "alarm"


DIMENSIONS = {
    Kind.ENDPOINT: "sagemaker:variant:DesiredInstanceCount",
    Kind.COMPONENT: "sagemaker:inference-component:DesiredCopyCount",
}
"""Dimensions that Application Auto Scaling changes, by kind."""

READY = ("InService",)
FAILED = ("Failed", "OutOfService")
"""Statuses of an endpoint or component that only its deletion ends (botocore's EndpointStatus)."""

MIXED = ("UpdateRollbackFailed",)
"""Status of an endpoint whose old and new versions serve side by side, until an update succeeds."""

ENDED = (*READY, *FAILED, *MIXED)
"""Statuses in which AWS is idle."""


@dataclass(frozen=True)
class Ref:
    """A value in a request that AWS assigns to another resource.

    Attributes:
        key: the other resource's key, e.g. `scaling-policy/llama-wake`.
        attribute: its name in boto3's answer, e.g. `PolicyARN`.
    """

    key: str
    attribute: str


@dataclass(frozen=True)
class Resource:
    """One resource in AWS.

    Attributes:
        kind: decides the boto3 calls (`deployer/calls.py`).
        name: its name in AWS, unique among its kind in the account and region.
        request: keyword arguments of the boto3 call that creates it, tags included.
        needs: keys of resources that must exist before.
        update: keyword arguments of the call that changes it; empty: `request` without tags, or it cannot be changed.
    """

    kind: Kind
    name: str
    request: Json
    needs: tuple[str, ...] = ()
    update: Json = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.kind.value}/{self.name}"


def specifications(component: Json) -> tuple[Json, ...]:
    """Return a component's specifications: one, or one for each instance type."""
    return (component.get("Specification", {}), *component.get("Specifications", ()))


def containers(model: Json) -> list[Json]:
    """Return a model's containers."""
    return [one for one in (model.get("PrimaryContainer"), *model.get("Containers", ())) if one]


def refs(value: Any) -> tuple[Ref, ...]:
    """Return the `Ref`s in a request, in order."""
    if isinstance(value, Ref):
        return (value,)
    if isinstance(value, Mapping):
        return tuple(ref for item in value.values() for ref in refs(item))
    if isinstance(value, list | tuple):
        return tuple(ref for item in value for ref in refs(item))
    return ()


def resolved(value: Any, look_up: Callable[[Ref], Any]) -> Any:
    """Return a request with values instead of its `Ref`s."""
    if isinstance(value, Ref):
        return look_up(value)
    if isinstance(value, Mapping):
        return {name: resolved(item, look_up) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [resolved(item, look_up) for item in value]
    return value


# -- names and tags of resources, by which every run finds them again --------------------------------------------------
# AWS cannot change a model or an endpoint configuration. So their names end in a digest of their content: a change
# creates a new one, and an unchanged one is found again.

TAG_DEPLOYMENT = "lmi:deployment"
"""Tag of every resource: the deployment's name, which is the endpoint's, or `NAME@ENDPOINT` (`spec/components.py`)."""

TAG_SPEC = "lmi:spec"
"""Tag of every resource: the digest of its specification."""

TAG_BEFORE = "lmi:before"
"""Tag of a configuration that adds a shadow to another owner's endpoint: the previous configuration."""

TAG_STACK = "aws:cloudformation:stack-name"
"""CloudFormation's own tag on a stack's resources."""

_DIGITS = 8
_LONGEST = 63  # characters of a SageMaker name


def digest(value: object) -> str:
    """Return eight hexadecimal digits of a digest of the value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def version_name(name: str, content: Mapping[str, Any]) -> str:
    """Return a name with the content's digest; cut `name` to SageMaker's 63 characters."""
    return f"{stem_of(name)}-{digest(content)}"


def batch_name(deployment: str) -> str:
    """Return the base name of batch transform's models; they are not versions of the deployment's models."""
    return f"{deployment[:48].rstrip('-')}-batch"


def job_prefix(deployment: str) -> str:
    """Return the beginning of the names of all its transform jobs."""
    return f"{deployment[:48].rstrip('-')}-"


TRANSFORM_LOGS = "/aws/sagemaker/TransformJobs"
"""Log group of all transform jobs; a job's streams begin with its name and a slash."""


def stem_of(name: str) -> str:
    """Return the part before the digest in all versions of `name`."""
    return name[: _LONGEST - _DIGITS - 1].rstrip("-")


def is_version_of(name: str, other: str) -> bool:
    """Return whether `other` is a result of `version_name(name, ...)`."""
    stem = stem_of(name)
    tail = other.removeprefix(f"{stem}-")
    return other.startswith(f"{stem}-") and len(tail) == _DIGITS and all(c in "0123456789abcdef" for c in tail)


def tags(deployment: str, spec: str, user_tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the tags for SageMaker's calls."""
    return [
        {"Key": key, "Value": value} for key, value in {**user_tags, TAG_DEPLOYMENT: deployment, TAG_SPEC: spec}.items()
    ]


SHADOW = "Shadow"
"""The name of a variant's shadow; on another owner's endpoint, with a digest appended."""


def scoped_name(deployment: str, *parts: str) -> str:
    """Return a name for an alarm or scaling policy. The slash separates deployments: no other name may contain one."""
    return "/".join((deployment, *parts))


def tag_map(tag_list: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return SageMaker's list of tags as a mapping, which Application Auto Scaling's calls take."""
    return {tag["Key"]: tag["Value"] for tag in tag_list}


# -- merge the fields of `sagemaker:` into the requests. Pure; `spec/passthrough.py` has checked them ------------------


def merged(request: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request with the fields: mappings are merged, and everything else is replaced."""
    result = dict(request)
    for name, value in fields.items():
        before = result.get(name)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        result[name] = merged(before, value) if both else value  # type: ignore[arg-type]  # `both` says so
    return result


def component_request(
    request: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], types: Sequence[str]
) -> Mapping[str, Any]:
    """Return a component's fields merged with `parts`: `Specification`, or `Specifications`, one for each type.

    Args:
        request: `Specification`.
        parts: fields to merge, one after the other.
        types: the deployment's instance types, the first choice first.
    """
    own: dict[str, Mapping[str, Any]] = {}
    for fields in parts:
        request = merged(request, {name: value for name, value in fields.items() if name != "Specifications"})
        for item in fields.get("Specifications", ()):
            own[item["InstanceType"]] = merged(own.get(item["InstanceType"], {}), item)
    if not own:
        return request
    every = [merged({"InstanceType": name, **request["Specification"]}, own.get(name, {})) for name in types]
    return {"Specifications": every}
