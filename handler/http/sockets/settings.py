"""The settings of realtime sessions and their responses, and the error for a refused event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.errors import InvalidPayload
from handler.core.framing import decoded_as_json
from handler.protocols.kernel.readers import show


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


_TRANSCRIPT = "item.input_audio_transcription.logprobs"
_ACCEPTED = {
    "type": ("realtime",),
    "output_modalities": (["text"],),
    "include": ([], [_TRANSCRIPT]),
    "truncation": ("auto", "disabled"),
}
"""Maps further fields to the values that change nothing about text. Other values are refused."""

_SHOWN = ("audio", "tracing", "include", "truncation")
"""The fields without effect that clients send with all others, and that a session shows as they were sent."""


def read_settings(fields: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the settings of a session or a response, most of them as JSON.

    Raises:
        EventError: a setting is not supported.
    """
    settings = {}
    for name, value in fields.items():
        at = f"{prefix}{name[:64]}"
        if name in REQUEST_SETTINGS:
            is_raw = name == "max_output_tokens" or value in (None, "", [])
            settings[name] = value if is_raw else decoded_as_json(value)
        elif value is not None and name in _ACCEPTED and value not in _ACCEPTED[name]:
            raise EventError(f"{at}={show(value)}: is not supported", "not_supported", at)
        elif name in _SHOWN:
            if name == "audio" and value is not None:
                _check_audio(value, at)
            settings[name] = decoded_as_json(value)
        elif value is not None and name not in (*_ACCEPTED, "input", "conversation", "metadata", "id", "object"):
            raise EventError(f"{at}: is not supported", "unknown_parameter", at)
    limit = settings.get("max_output_tokens")
    if limit not in (None, "inf") and (
        isinstance(limit, bool) or not isinstance(limit, int) or not 0 < limit < 1 << 63
    ):
        at = f"{prefix}max_output_tokens"
        raise EventError(f"{at}={show(limit)}: must be a positive integer or inf", "invalid_value", at)
    return settings


def _check_audio(value: Any, at: str) -> None:
    """Raise EventError if the settings of audio, which have no effect on text, have another form."""
    if not isinstance(value, dict):
        raise EventError(f"{at}: must be an object", "invalid_type", at)
    for name, part in value.items():
        if part is not None and not isinstance(part, dict):
            where = f"{at}.{name[:64]}"
            raise EventError(f"{where}: must be an object", "invalid_type", where)


def object_in(event: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the object in a field of an event.

    Raises:
        EventError: the field is missing or has another type.
    """
    value = event.get(name)
    if not isinstance(value, dict):
        raise EventError(f"{name}: must be an object", "invalid_type", name)
    return value
