"""Resolve `route=` in X-Amzn-SageMaker-Custom-Attributes: SageMaker itself forwards to /invocations only."""

from __future__ import annotations

import re
from collections.abc import Mapping

from handler.core.errors import InvalidPayload
from handler.protocols.base import Schema
from handler.serving.preprocess import Headers

INVOKE = ("/invocations", "/predictions/{model}", "/predictions/{model}/{version}", "/models/{model}/invoke")
"""The configured dialect's routes."""

ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
_ROUTE = re.compile(r"(?:^|[\s,;])route=([^\s,;]*)")


def route_in_attributes(headers: Headers) -> str | None:
    """Return the path that SageMaker's custom attributes name; None where they name none.

    DJL's front end reads them itself and hands `route` over as a property of the request.
    """
    match = _ROUTE.search(headers.get(ATTRIBUTES, ""))
    return None if match is None else match[1]


class InferenceRoutes:
    """The routes for inference of one model: path templates with `{model}` and `{version}`, each with its dialect.

    Args:
        model: the model's name.
        mode: the configured dialect's name.
        schemas: the other dialects, by template.
    """

    def __init__(self, model: str, mode: str, schemas: Mapping[str, Schema]) -> None:
        self.schemas = schemas
        self._model = model
        self._mode = mode
        templates: dict[str, Schema | None] = {**dict.fromkeys(INVOKE), **schemas}
        self._patterns = [(re.compile(_pattern(template)), schema) for template, schema in templates.items()]

    def has(self, path: str) -> bool:
        """Whether a route for inference matches, whatever model the path names."""
        return any(pattern.fullmatch(path) for pattern, _ in self._patterns)

    def schema(self, path: str) -> Schema | None:
        """Return the dialect of a path; None stands for the configured one.

        Raises:
            InvalidPayload: there is no such route, or it is not available in this mode.
        """
        for pattern, schema in self._patterns:
            match = pattern.fullmatch(path)
            if match is None or not self._is_served(match.groupdict()):
                continue
            if schema is not None and self._mode == "dynamic_batch":  # a batch's answers have one content type
                raise InvalidPayload(f"route={path[:64]} is not available for dynamic batching; it needs rolling batch")
            return schema
        raise InvalidPayload(f"route={path[:64]} is no route for inference")

    def _is_served(self, names: Mapping[str, str]) -> bool:
        return names.get("model", self._model) == self._model and names.get("version", "1") == "1"


def _pattern(template: str) -> str:
    return re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", template)
