"""The golden cases of transcriptions and translations; those of chats and completions are in `test_golden.py`."""

from __future__ import annotations

from typing import Any

from handler.core.errors import Overloaded
from handler.core.values import Delta
from tests.unit.protocols.answers import failing, refused

WAV = "UklGRjQAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YRAAAAAAAAAAAAAAAAAAAAAAAAAA"  # eight samples of silence

_CASES: dict[str, tuple[Any, Any]] = {
    "json": ({"file": WAV, "language": "en"}, None),
    "text": ({"file": WAV, "response_format": "text"}, None),
    "no_file": ({"language": "en"}, None),
    "wrong": ({"file": WAV, "response_format": "srt"}, None),
    "busy": ({"file": WAV}, refused(Overloaded("the queue is full"))),
    "fails": ({"file": WAV}, failing(0)),
}

CASES: dict[str, tuple[str, Any, list[Delta] | None]] = {
    **{f"audio/transcription_{name}": ("openai_transcriptions", *case) for name, case in _CASES.items()},
    "audio/translation_json": ("openai_translations", {"file": WAV}, None),
}
