"""Merge the fields of `sagemaker:` into the requests. Pure; `spec/passthrough.py` has checked them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


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
    """Return what a component is made of, with the fields: `Specification`, or `Specifications`, one for each type.

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
