"""Calls about stateful sessions in the API's document (docs/sessions.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.protocols.kernel.schema.shapes import TEXT, Shape, record, ref
from handler.protocols.kernel.schema.types import components_of
from handler.protocols.openapi.answers import SessionAnswer

COMPONENTS: Mapping[str, Shape] = {
    "SessionCall": record(
        {"requestType": {"enum": ["NEW_SESSION", "CLOSE"]}},
        description="Opens or closes a session; it has no other fields",
        additionalProperties=False,
    ),
    **components_of([SessionAnswer]),
}

PARAMETER: Mapping[str, Any] = {
    "name": "X-Amzn-SageMaker-Session-Id",
    "in": "header",
    "schema": TEXT,
    "description": "The session of the request; NEW_SESSION beside the call that opens one",
}
"""The header that all requests for inference may have."""

_ID = {"description": "The session that was opened, as `ID; Expires=2026-11-22T01:30:39Z` (UTC)", "schema": TEXT}

_HEADERS: Mapping[str, Shape] = {
    "x-amzn-sagemaker-new-session-id": _ID,
    "x-amzn-sagemaker-session-id": _ID,
    "x-amzn-sagemaker-closed-session-id": {"description": "The session that was closed", "schema": TEXT},
}

_EXAMPLE = {"result": "Session 6a1f4c2f-0d0c-4c7e-9d5a-3b1e2f4a5c6d created"}


def add_calls(operation: dict[str, Any]) -> None:
    """Add the calls about sessions, and their answers, to an operation for inference."""
    answer = operation["responses"]["200"]
    answer["headers"] = {**answer["headers"], **_HEADERS}
    _add(operation["requestBody"]["content"], "SessionCall", {"requestType": "NEW_SESSION"})
    _add(answer["content"], "SessionAnswer", _EXAMPLE)


def _add(content: dict[str, Any], name: str, example: Any) -> None:
    media = content.setdefault("application/json", {"schema": {"anyOf": []}, "examples": {}})
    shape = media["schema"]
    media["schema"] = {"anyOf": [*shape.get("anyOf", [shape]), ref(name)]}
    media["examples"]["Session"] = {"value": example}
