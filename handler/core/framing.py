"""Framings: values as JSON, JSON lines or server-sent events. Dialects make values, framings make bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

dumps = orjson.dumps
"""Compact UTF-8 JSON, non-ASCII raw; NaN and infinities become null, so every body is valid JSON."""


class Framing(NamedTuple):
    """`before` + JSON + `after` for each value; `end` once, after the last one."""

    name: str
    content_type: str
    before: bytes
    after: bytes
    end: bytes = b""

    def encode(self, value: Any) -> bytes:
        data = dumps(value)
        return self.before + (data if data.isascii() else _one_line(data)) + self.after


def _one_line(data: bytes) -> bytes:
    """Escape the three non-ASCII characters at which str.splitlines splits, as some clients (httpx) use it."""
    return (
        data.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )


JSON = Framing("json", "application/json", b"", b"")
JSONLINES = Framing("jsonlines", "application/jsonlines", b"", b"\n")
SSE = Framing("sse", "text/event-stream", b"data: ", b"\n\n")
SSE_DONE = SSE._replace(end=b"data: [DONE]\n\n")
"""Chat's events, as OpenAI ends them."""

_MARK = "\0text\0"


def around(make: Callable[[str], bytes]) -> tuple[bytes, bytes]:
    """Split an encoded chunk into the bytes before and after its text, so that later chunks only encode the text.

    The bytes after the text must be fixed; those before it may hold clients' text, even the mark itself.
    """
    before, _, after = make(_MARK).rpartition(JSON.encode(_MARK))
    return before, after


KEEP_ALIVE = b":\n\n"
"""A comment among server-sent events, which keeps the connection open."""

FRAMINGS = {framing.name: framing for framing in (JSON, JSONLINES, SSE)}
"""Framings by their names in `option.output_formatter`, which are LMI's."""
