"""SageMaker forwards to one route; of a request that names another there, which dialect that has.

The embedded server does it with its router (`http.py`); this is for DJL, whose front end has no such routes and makes
properties of SageMaker's custom attributes.
"""

from __future__ import annotations

from collections.abc import Mapping

from handler.core.errors import InvalidPayload
from handler.protocols.base import Schema
from handler.serving.preprocess import Headers

INVOKE = ("/invocations", "/predictions/{model}", "/predictions/{model}/{version}", "/models/{model}/invoke")
"""The configured dialect's routes."""


def named_dialect(headers: Headers, mode: str, model_name: str, routes: Mapping[str, Schema]) -> Schema | None:
    """The dialect of the route that the property `route` names; None where it is the configured one.

    Args:
        mode: the configured dialect's name.
        routes: the other dialects', by path.

    Raises:
        InvalidPayload: there is no such route, or it is not available in this mode.
    """
    path = headers.get("route")
    if path is None:
        return None
    where = {"model": model_name, "version": "1"}
    if path in {one.format(**where) for one in INVOKE}:
        return None
    found = {one.format(**where): schema for one, schema in routes.items()}.get(path)
    if found is None:
        raise InvalidPayload(f"route={path[:64]} is no route for inference")
    if mode == "dynamic_batch":  # whose answers have one type for all of a batch
        raise InvalidPayload(f"route={path[:64]} is not available for dynamic batching; it needs rolling batch")
    return found
