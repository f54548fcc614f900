"""The `Resource` value, which describes an AWS resource of a deployment, with its name, tags and requests.

`build.py` builds the resources, `deployer/` compares them with AWS and applies the difference, and `export/` writes
templates.

Resources are sorted by the order of their creation, which follows from `needs`. Alarms come before the endpoint,
because its updates refer to them. The alarm that scales a component from zero comes after the policy that it triggers.
In requests, a `Ref` stands for a value that AWS assigns on creation, such as the ARN of a policy. It is replaced before
the call.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = Mapping[str, Any]
Content = dict[str, Any]  # a JSON object that is not complete yet


class Kind(enum.Enum):
    """Kinds of resources, in the order in which they are read from AWS."""

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
"""Scalable dimensions of Application Auto Scaling, by kind of resource."""

READY = ("InService",)
FAILED = ("Failed", "OutOfService")
"""Statuses of an endpoint or component that cannot be updated, only deleted (botocore's EndpointStatus)."""

MIXED = ("UpdateRollbackFailed",)
"""Status of an endpoint whose rollback failed. The old and new versions both serve until an update succeeds."""

ENDED = (*READY, *FAILED, *MIXED)
"""Statuses in which no creation, update or deletion is in progress."""


@dataclass(frozen=True)
class Ref:
    """A reference, in a request, to a value that AWS assigns to another resource.

    Attributes:
        key: key of the other resource, e.g. `scaling-policy/llama-wake`.
        attribute: name of the value in boto3's response, e.g. `PolicyARN`.
    """

    key: str
    attribute: str


@dataclass(frozen=True)
class Resource:
    """One resource in AWS.

    Attributes:
        kind: kind of the resource, which determines the boto3 calls (`deployer/calls.py`).
        name: name of the resource in AWS. It is unique for its kind in the account and region.
        request: keyword arguments of the boto3 call that creates the resource, tags included.
        needs: keys of the resources that must exist before this resource is created.
        update: keyword arguments of the boto3 call that updates the resource. If empty, the call uses `request` without
            tags, or the resource cannot be updated.
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
    """Return a component's specifications: one for all instance types, or one for each type."""
    return (component.get("Specification", {}), *component.get("Specifications", ()))


def containers(model: Json) -> list[Json]:
    """Return the containers in a CreateModel request."""
    return [container for container in (model.get("PrimaryContainer"), *model.get("Containers", ())) if container]


def refs(request: Any) -> tuple[Ref, ...]:
    """Return the `Ref`s in a request, in order."""
    references: list[Ref] = []
    resolved(request, references.append)
    return tuple(references)


def resolved(value: Any, look_up: Callable[[Ref], Any]) -> Any:
    """Return a request in which each `Ref` is replaced by the result of `look_up`."""
    if isinstance(value, Ref):
        return look_up(value)
    if isinstance(value, Mapping):
        return {name: resolved(item, look_up) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [resolved(item, look_up) for item in value]
    return value


# -- names and tags of resources, which later runs use to find them ----------------------------------------------------
# AWS cannot change models and endpoint configurations, so their names end in a digest of their content. Changed content
# results in a new resource, unchanged content in the existing resource.

TAG_DEPLOYMENT = "lmi:deployment"
"""Tag of every resource with the deployment name, which is the endpoint name or `NAME@ENDPOINT`."""

TAG_SPEC = "lmi:spec"
"""Tag of every resource with the digest of its specification."""

TAG_BEFORE = "lmi:before"
"""Tag of an endpoint configuration that adds a shadow variant to another owner's endpoint. It names the previous
configuration."""

TAG_STACK = "aws:cloudformation:stack-name"
"""Tag that CloudFormation sets on the resources of a stack."""

_DIGITS = 8
_LONGEST = 63  # maximum length of names in SageMaker


def digest(value: object) -> str:
    """Return the first eight hexadecimal digits of the SHA-256 of the canonical JSON of a value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def version_name(name: str, content: Json) -> str:
    """Return `name` and the digest of the content. The name is cut so that the result has at most 63 characters."""
    return f"{stem_of(name)}-{digest(content)}"


def batch_name(deployment: str) -> str:
    """Return the base name of models for batch transform. The deployment's other models have a different base name."""
    return f"{deployment[:48].rstrip('-')}-batch"


def job_prefix(deployment: str) -> str:
    """Return the prefix of the names of a deployment's transform jobs."""
    return f"{deployment[:48].rstrip('-')}-"


TRANSFORM_LOGS = "/aws/sagemaker/TransformJobs"
"""Log group of all transform jobs. The names of a job's log streams start with the job name and a slash."""


def stem_of(name: str) -> str:
    """Return the part before the digest in the results of `version_name(name, ...)`."""
    return name[: _LONGEST - _DIGITS - 1].rstrip("-")


def is_version_of(name: str, other: str) -> bool:
    """Return whether `other` is a result of `version_name(name, ...)`."""
    stem = stem_of(name)
    tail = other.removeprefix(f"{stem}-")
    return other.startswith(f"{stem}-") and len(tail) == _DIGITS and all(c in "0123456789abcdef" for c in tail)


def tags(deployment: str, spec: str, user_tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the tags of a deployment's resources, as SageMaker's API expects them.

    Args:
        spec: digest of the specification.
        user_tags: tags from the specification.
    """
    return tag_list({**user_tags, TAG_DEPLOYMENT: deployment, TAG_SPEC: spec})


def user_tags(all_tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags that were set neither by AWS nor by lmi deploy."""
    return {key: value for key, value in all_tags.items() if not key.lower().startswith(("aws:", "lmi:"))}


SHADOW = "Shadow"
"""Name of the shadow variant. On another owner's endpoint, a digest is appended."""


def scoped_name(deployment: str, *parts: str) -> str:
    """Return a name for an alarm or scaling policy, with slashes between its parts.

    Names of deployments cannot contain slashes, so names of different deployments never collide.
    """
    return "/".join((deployment, *parts))


def tag_map(pairs: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Convert SageMaker's list of tags to a mapping, as Application Auto Scaling expects it."""
    return {tag["Key"]: tag["Value"] for tag in pairs}


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Convert a mapping of tags to SageMaker's list."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


# -- merge the fields of `sagemaker:`, which `spec/passthrough.py` has checked, into the requests ----------------------


def merged(request: Json, fields: Json) -> Content:
    """Return a request merged with fields. Nested mappings are merged, and other values are replaced."""
    result = dict(request)
    for name, value in fields.items():
        before = result.get(name)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        result[name] = merged(before, value) if both else value  # type: ignore[arg-type]  # `both` says so
    return result


def component_request(request: Json, parts: Sequence[Json], types: Sequence[str]) -> Json:
    """Return a component's request merged with the user's fields.

    The result contains Specification or, if the user's fields contain Specifications, a list Specifications with one
    item for each instance type.

    Args:
        request: request with the field Specification.
        parts: the user's fields, which are merged in order.
        types: the deployment's instance types, in order of priority.
    """
    by_type: dict[str, Json] = {}
    for fields in parts:
        request = merged(request, {name: value for name, value in fields.items() if name != "Specifications"})
        for item in fields.get("Specifications", ()):
            by_type[item["InstanceType"]] = merged(by_type.get(item["InstanceType"], {}), item)
    if not by_type:
        return request
    every = [merged({"InstanceType": name, **request["Specification"]}, by_type.get(name, {})) for name in types]
    return {"Specifications": every}
