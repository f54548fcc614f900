"""Settings of realtime sessions: a value of any type is taken or refused, and is never a bug of the server."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from handler.http.sockets.settings import EventError, read_settings
from handler.http.sockets.transcription import Transcriber, audio_settings

VALUES: tuple[Any, ...] = (None, True, 5, 0.5, "a", [], ["a"], {}, {"a": 1}, [{"a": [1]}])
TEXT = {
    "type": "realtime", "model": "m", "instructions": "a", "tools": [], "tool_choice": "auto", "max_output_tokens": 5,
    "output_modalities": ["text"], "tracing": None, "prompt": None, "include": [], "truncation": "disabled",
    "audio": {"input": None, "output": {}}, "metadata": {}, "conversation": "auto",
}  # fmt: skip
AUDIO = {
    "type": "transcription", "include": [], "model": "m",
    "audio": {
        "input": {
            "format": {"type": "audio/pcm", "rate": 24000}, "turn_detection": None, "noise_reduction": None,
            "transcription": {"model": "m", "language": "en", "prompt": "a"},
        },
    },
}  # fmt: skip


def spoilt(settings: Any) -> Iterator[Any]:
    """Yield the settings with each member, at any depth, replaced by each value."""
    for name, item in settings.items() if isinstance(settings, dict) else ():
        for value in (*VALUES, *spoilt(item)):
            yield {**copy.deepcopy(settings), name: value}


@pytest.mark.parametrize("settings", [TEXT, AUDIO], ids=["text", "audio"])
def test_a_setting_of_any_type_is_taken_or_refused(settings: dict[str, Any]) -> None:
    refusals = []
    for session in spoilt(settings):
        try:
            if settings is AUDIO:
                audio_settings(session, Transcriber())
            else:
                read_settings(session, "session.")
        except EventError as error:
            refusals.append(str(error))
    assert len(refusals) > 50
    assert all(text.startswith("session.") for text in refusals)
