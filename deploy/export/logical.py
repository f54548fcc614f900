"""Names within a template: of the same thing the same in every version, though AWS's own name ends in a digest."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from deploy.resources.resource import Kind, Resource

_ONE = {Kind.MODEL: "model", Kind.ENDPOINT_CONFIG: "endpoint-config", Kind.ENDPOINT: "endpoint"}
_WORD = re.compile(r"[A-Za-z0-9]+")


def logical_words(resources: Sequence[Resource]) -> Mapping[str, tuple[str, ...]]:
    """Keys of resources, and the words that name them here.

    What there is one of is called by its kind, so that a new version takes the old one's place.
    """
    found: dict[str, tuple[str, ...]] = {}
    for resource in resources:
        name = _ONE.get(resource.kind, f"{resource.kind.value}-{_own(resource, resources)}")
        words = tuple(_WORD.findall(name))
        while words in found.values():  # a-b and a/b
            words = (*words, "x")
        found[resource.key] = words
    return found


def _own(resource: Resource, resources: Sequence[Resource]) -> str:
    """Its name without the deployment's, which all share."""
    deployment = next(one.name for one in resources if one.kind is Kind.ENDPOINT)
    name = resource.name.removeprefix("inference-component/").removeprefix("endpoint/")
    return name.removeprefix(f"{deployment}/")
