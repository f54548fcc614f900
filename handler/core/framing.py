"""Framings: values as JSON, JSON lines or server-sent events; and templates of events that differ in few values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from handler.core.values import Token

dumps = orjson.dumps
"""Compact UTF-8 JSON, non-ASCII raw; NaN and infinities become null, so every body is valid JSON."""
loads = orjson.loads
"""Decode JSON that `dumps` has written."""


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


def encoded(value: Any, depth: int = 0) -> Any:
    """Encode a value now, for embedding in another value that is encoded later.

    Args:
        depth: nesting levels of the other value around it.

    Raises:
        TypeError: it cannot be encoded, or is nested too deeply.
    """
    for _ in range(depth):
        value = [value]
    data = JSON.encode(value)
    return orjson.Fragment(data[depth : len(data) - depth])


def rewritten(text: str) -> Any:
    """Return a fragment that puts a JSON text into another value: compact, with all digits of its
    integers.
    """
    return orjson.Fragment(dumps_decoded(json.loads(text)))


def dumps_decoded(value: Any) -> bytes:
    """Encode a value that was decoded from JSON, with all digits of its integers."""
    try:
        return dumps(value)
    except TypeError:  # an integer of more than 64 bits
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def refuse_constant(name: str) -> None:
    """Raise ValueError for NaN and infinities, which Python's `json` reads: its `parse_constant`."""
    raise ValueError(f"{name} is not a JSON number")


def _one_line(data: bytes) -> bytes:
    """Escape the three non-ASCII characters at which str.splitlines splits, as some clients (httpx) use it."""
    return (
        data.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )


JSON = Framing("json", "application/json", b"", b"")
JSONLINES = Framing("jsonlines", "application/jsonlines", b"", b"\n")
JSON_LINE = JSON._replace(after=b"\n")
"""A whole answer of LMI's async mode, whose bodies all end like this."""
SSE = Framing("sse", "text/event-stream", b"data: ", b"\n\n")
SSE_DONE = SSE._replace(end=b"data: [DONE]\n\n")
"""OpenAI's chat events, with its end mark."""


def named_event(value: Mapping[str, Any]) -> bytes:
    """Encode a server-sent event whose name is the value's `type`, as Anthropic's and OpenAI's Responses have it."""
    return b"event: %b\n" % value["type"].encode() + SSE.encode(value)


# -- templates: events that differ in few values -----------------------------------------------------------------

NUMBER: Any = orjson.Fragment(b"\0d")
"""A placeholder for an integer."""

SLOT: Any = orjson.Fragment(b"\0b")
"""A placeholder for a value that is encoded later."""

TOKEN_SLOTS = Token(NUMBER, SLOT, SLOT, False)


def template(data: bytes) -> bytes:
    """Return a format for `%` from an encoded event with slots: integers and JSON take their places in order.

    JSON contains no zero byte, so that no client's text is mistaken for a slot.
    """
    return data.replace(b"%", b"%%").replace(b"\0", b"%")


class _JsonTexts(dict[str, bytes]):
    """The JSON of short texts. Tokens repeat, so that most texts are encoded once."""

    _MOST_TEXTS = 16384
    _MOST_CHARACTERS = 64

    def __missing__(self, text: str) -> bytes:
        data = JSON.encode(text)
        if len(text) <= self._MOST_CHARACTERS:
            if len(self) >= self._MOST_TEXTS:
                self.clear()
            self[text] = data = bytes(memoryview(data))  # a copy: orjson's own bytes take 4 KiB, however few they are
        return data


JSON_TEXTS = _JsonTexts()


def fill(event: bytes, tokens: Sequence[Token]) -> bytes:
    """Write one event for each token: `event` is bytes with one `%b`, for the token's text as JSON."""
    if len(tokens) == 1:
        return event % JSON_TEXTS[tokens[0].text]
    return b"".join([event % JSON_TEXTS[token.text] for token in tokens])


KEEP_ALIVE = b":\n\n"
"""A comment among server-sent events, which keeps the connection open."""

FRAMINGS = {framing.name: framing for framing in (JSON, JSONLINES, SSE)}
"""Framings by their names in `option.output_formatter`, which are LMI's."""


# -- how deeply lists and objects of JSON may be nested ----------------------------------------------------------------


MAX_DEPTH = 200
"""Levels of lists and objects. Templates and everything else that follows them recursively allow more."""


def is_too_deep(value: Any, text: str | bytes) -> bool:
    """Return whether a JSON value has more than MAX_DEPTH levels, whatever this version of Python can decode.

    Args:
        text: what the value was decoded from.
    """
    text = text if isinstance(text, str) else str(text, "latin-1")  # brackets are ASCII
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            member
            for item in level
            for member in (item.values() if isinstance(item, dict) else item)
            if isinstance(member, dict | list)
        ]
        if not level:
            return False
    return True
