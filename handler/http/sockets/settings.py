"""The settings of realtime sessions and their responses, and the error for a refused event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.errors import InvalidPayload
from handler.core.framing import decoded_as_json


class EventError(InvalidPayload):
    """An event of a realtime session is refused.

    Args:
        code: code of the error in OpenAI's API.
        param: the field that is refused.
    """

    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


REQUEST_SETTINGS = (
    "model", "instructions", "tools", "tool_choice", "max_output_tokens", "parallel_tool_calls", "reasoning",
)  # fmt: skip
"""The fields of a session and of `response.create` that are passed on to /v1/responses."""


_ACCEPTED = {
    "type": ("realtime",),
    "output_modalities": (["text"],),
    "tracing": (None,),
    "prompt": (None,),
    "include": (None, []),
    "truncation": (None, "disabled"),
}
"""Maps further fields to the values that have no effect. Other values are refused."""


def read_settings(fields: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the settings of a session or a response, most of them as JSON.

    Raises:
        EventError: a setting is not supported.
    """
    settings = {}
    for name, value in fields.items():
        at = f"{prefix}{name}"
        if name in REQUEST_SETTINGS:
            is_raw = name == "max_output_tokens" or value in (None, "", [])
            settings[name] = value if is_raw else decoded_as_json(value)
        elif name in _ACCEPTED:
            if value not in _ACCEPTED[name]:
                raise EventError(f"{at}={value!r:.100}: is not supported", "not_supported", at)
        elif name == "audio":
            _check_no_audio(value, at)
        elif name not in ("input", "conversation", "metadata", "id", "object"):
            raise EventError(f"{at}: is not supported", "unknown_parameter", at)
    limit = settings.get("max_output_tokens", "inf")
    if limit != "inf" and (isinstance(limit, bool) or not isinstance(limit, int) or not 0 < limit < 1 << 63):
        at = f"{prefix}max_output_tokens"
        raise EventError(f"{at}={limit!r:.100}: must be a positive integer or inf", "invalid_value", at)
    return settings


def _check_no_audio(value: Any, at: str) -> None:
    """Raise EventError if a text session has an audio setting that is not null."""
    parts = value.values() if isinstance(value, dict) else [value]
    if any(part not in (None, {}) for part in parts):
        raise EventError(f'{at}: the session has no audio; output_modalities is ["text"]', "not_supported", at)


def object_in(event: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the object in a field of an event.

    Raises:
        EventError: the field is missing or has another type.
    """
    value = event.get(name)
    if not isinstance(value, dict):
        raise EventError(f"{name}: must be an object", "invalid_type", name)
    return value
