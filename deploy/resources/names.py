"""Names and tags of what a deployment makes: how it is found again, by any run of the program and by people.

A model and an endpoint configuration cannot be changed in AWS: their names end in a digest of what they hold, so that a
changed one is a new one, and the same one is found again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

TAG_DEPLOYMENT = "lmi:deployment"
"""On everything that is made: the deployment's name, which is the endpoint's."""

TAG_SPEC = "lmi:spec"
"""On everything that is made: the digest of the specification that it was made from."""

_DIGITS = 8
_LONGEST = 63  # of SageMaker's names


def digest(value: object) -> str:
    """Eight hexadecimal digits of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def versioned(name: str, content: Mapping[str, Any]) -> str:
    """The name of something that cannot be changed; `name` is cut where SageMaker's 63 characters would not do."""
    return f"{stem_of(name)}-{digest(content)}"


def stem_of(name: str) -> str:
    """What all versions of `name` begin with, before their hyphen."""
    return name[: _LONGEST - _DIGITS - 1].rstrip("-")


def is_version_of(name: str, found: str) -> bool:
    """Whether `found` is one of `versioned(name, ...)`."""
    stem = stem_of(name)
    tail = found.removeprefix(f"{stem}-")
    return found.startswith(f"{stem}-") and len(tail) == _DIGITS and all(c in "0123456789abcdef" for c in tail)


def tags(deployment: str, spec: str, own: Mapping[str, str]) -> list[dict[str, str]]:
    """As SageMaker's calls take them; `own` are the user's."""
    return [{"Key": key, "Value": value} for key, value in {**own, TAG_DEPLOYMENT: deployment, TAG_SPEC: spec}.items()]


VARIANT = "AllTraffic"
"""The one variant of an endpoint; it stays the same over all versions, or SageMaker refuses a rolling update."""


def beside(deployment: str, *parts: str) -> str:
    """Of an alarm or a scaling policy: no other deployment's can be called so, as no other name holds a slash."""
    return "/".join((deployment, *parts))


def tag_map(tag_list: list[dict[str, str]]) -> dict[str, str]:
    """The same tags as Application Auto Scaling takes them."""
    return {tag["Key"]: tag["Value"] for tag in tag_list}
