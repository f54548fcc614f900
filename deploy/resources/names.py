"""Names and tags of resources, by which every run finds them again.

AWS cannot change a model or an endpoint configuration. So their names end in a digest of their content: a change
creates a new one, and an unchanged one is found again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

TAG_DEPLOYMENT = "lmi:deployment"
"""Tag of every resource: the deployment's name, which is the endpoint's, or `NAME@ENDPOINT` (`spec/guest.py`)."""

TAG_SPEC = "lmi:spec"
"""Tag of every resource: the digest of its specification."""

TAG_BEFORE = "lmi:before"
"""Tag of a configuration that puts a shadow beside another owner's endpoint: the one that served before it."""

TAG_STACK = "aws:cloudformation:stack-name"
"""CloudFormation's own tag of what a stack made."""

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
    """Return the name of whose versions the models of batch transform are; it is no version of the deployment's."""
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
    """Whether `other` is a result of `version_name(name, ...)`."""
    stem = stem_of(name)
    tail = other.removeprefix(f"{stem}-")
    return other.startswith(f"{stem}-") and len(tail) == _DIGITS and all(c in "0123456789abcdef" for c in tail)


def tags(deployment: str, spec: str, user_tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the tags for SageMaker's calls."""
    return [
        {"Key": key, "Value": value} for key, value in {**user_tags, TAG_DEPLOYMENT: deployment, TAG_SPEC: spec}.items()
    ]


SHADOW = "Shadow"
"""The name of a variant's shadow; beside another owner's endpoint with a digest behind it."""


def scoped_name(deployment: str, *parts: str) -> str:
    """Return a name for an alarm or scaling policy. The slash separates deployments: no other name may contain one."""
    return "/".join((deployment, *parts))


def tag_map(tag_list: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return SageMaker's list of tags as a mapping, which Application Auto Scaling's calls take."""
    return {tag["Key"]: tag["Value"] for tag in tag_list}
