"""The requests in an Input (contract djl.md, sections 1.3 and 1.4)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from djl_python import Input

from handler.serving.slots import Item

_BATCH_KEY = re.compile(r"batch_(\d{3})\.(.*)", re.DOTALL)

_OF_HTTP = frozenset(
    {"host", "connection", "content-length", "content-type", "user-agent", "x-request-id", "requestid"}
)
"""Properties of a client's own; in a batch, Java puts its prefix before them."""


def is_batch(inputs: Input) -> bool:
    """Whether Java made this Input of several requests, or is stepping a rolling batch.

    A request that is alone has its client's headers for properties and its query's names for keys, before its body:
    they may be called `batch_size` and `batch_000.data`.
    """
    properties, keys = inputs.get_properties(), inputs.get_content().get_keys()
    return (
        "batch_size" in properties
        and bool(keys)
        and keys[0].startswith("batch_")
        and keys[-1].startswith("batch_")
        and not is_of_http(properties)
    )


def is_of_http(properties: Mapping[str, Any]) -> bool:
    """Whether they are a client's headers, not Java's own words."""
    return not _OF_HTTP.isdisjoint(map(str.lower, properties))


def single(inputs: Input) -> Item:
    """A request that is alone in its Input; query parameters lie beside its body."""
    headers = {str(key).lower(): str(value) for key, value in inputs.get_properties().items()}
    content = inputs.get_content()
    body = content.get("data")
    if body is None:
        body = content.value_at(0) if content.size() else b""
    return Item(bytes(body), headers)


def batched(inputs: Input) -> dict[int, Item]:
    """The requests of a batch that say anything, by their place.

    In a rolling batch those are the new ones, which come with their headers and a seed: of the others the Java side
    sends nothing but an empty body.
    """
    content = inputs.get_content()
    keys, values = content.get_keys(), content.get_values()
    properties = inputs.get_properties()
    bodies: dict[int, bytes] = {}
    headers: dict[int, dict[str, str]] = {}
    if len(keys) > int(properties["batch_size"]) or any(values):
        for key, value in zip(keys, values, strict=True):
            if found := _BATCH_KEY.fullmatch(key):
                index, name = int(found[1]), found[2]
                if name == "data" and value:
                    bodies.setdefault(index, bytes(value))
                elif name == "seed":
                    headers.setdefault(index, {})
    for key, value in properties.items():
        if found := _BATCH_KEY.fullmatch(key):
            headers.setdefault(int(found[1]), {})[found[2].lower()] = value
    return {index: Item(bodies.get(index, b""), headers.get(index, {})) for index in bodies.keys() | headers.keys()}
