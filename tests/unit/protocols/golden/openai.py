"""The golden cases of transcriptions and translations; those of chats and completions are in `test_golden.py`."""

from __future__ import annotations

from typing import Any

from handler.core.errors import Overloaded
from handler.core.values import Delta, Extras, Finish, Heard, Token
from tests.unit.protocols.answers import failing, refused

WAV = "UklGRjQAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YRAAAAAAAAAAAAAAAAAAAAAAAAAA"  # eight samples of silence


def _time(seconds: float) -> Token:
    return Token(50364 + round(seconds * 50), f"<|{seconds:.2f}|>", -0.01, True)


TIMED = [
    Delta(1, 0, (_time(0), Token(2205, " Good", -0.25, False)), extras=Extras(heard=Heard(0.0, 29.4, "en"))),
    Delta(1, 0, (Token(2446, " morning.", -0.75, False), _time(1.5), _time(2.04))),
    Delta(
        1, 0, (Token(316, " 1 --> 2", -0.5, False), Token(198, "\n\n", -1.0, False), Token(1, "<b> & c", None, False))
    ),
    Delta(1, 0, (_time(28), _time(28.5))),
    Delta(1, 0, (Token(4621, " Ünd so", -0.5, False),), extras=Extras(heard=Heard(29.4, 33.125, "en"))),
    Delta(1, 0, (Token(0, "", None, True),), Finish.EOS),
]
"""Two pieces of a clip: one with times, one without."""

_CASES: dict[str, tuple[Any, Any]] = {
    "verbose": ({"file": WAV, "response_format": "verbose_json", "timestamp_granularities": ["segment"]}, TIMED),
    "srt": ({"file": WAV, "response_format": "srt"}, TIMED),
    "vtt": ({"file": WAV, "response_format": "vtt"}, TIMED),
    "stream": ({"file": WAV, "stream": True}, None),
    "stream_fails": ({"file": WAV, "stream": True}, failing(2)),
    "stream_of_times": ({"file": WAV, "stream": True, "response_format": "vtt"}, None),
    "words": ({"file": WAV, "response_format": "verbose_json", "timestamp_granularities": ["word"]}, None),
    "json": ({"file": WAV, "language": "en"}, None),
    "text": ({"file": WAV, "response_format": "text"}, None),
    "no_file": ({"language": "en"}, None),
    "wrong": ({"file": WAV, "response_format": "diarized_json"}, None),
    "busy": ({"file": WAV}, refused(Overloaded("the queue is full"))),
    "fails": ({"file": WAV}, failing(0)),
}

CASES: dict[str, tuple[str, Any, list[Delta] | None]] = {
    **{f"audio/transcription_{name}": ("openai_transcriptions", *case) for name, case in _CASES.items()},
    "audio/translation_json": ("openai_translations", {"file": WAV}, None),
}
