"""Framings for values (JSON, JSON lines, server-sent events), and templates for encoded events with placeholders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from handler.core.values import Token

dumps = orjson.dumps
"""Encode a value as compact UTF-8 JSON. NaN and infinities are encoded as null, so the result is always valid JSON."""
loads = orjson.loads
"""Decode JSON that `dumps` has written."""


class Framing(NamedTuple):
    """A wire format: each value is sent as `before` + JSON + `after`, and `end` follows the last value."""

    name: str
    content_type: str
    before: bytes
    after: bytes
    end: bytes = b""

    def encode(self, value: Any) -> bytes:
        data = dumps(value)
        return self.before + (data if data.isascii() else _on_one_line(data)) + self.after


def encoded(value: Any, depth: int = 0) -> Any:
    """Encode a value for embedding in another value that is encoded later.

    Args:
        depth: nesting depth of the value in the other value.

    Raises:
        TypeError: the value cannot be encoded, or is nested too deeply.
    """
    for _ in range(depth):
        value = [value]
    data = JSON.encode(value)
    return orjson.Fragment(data[depth : len(data) - depth])


def raw(data: bytes) -> Any:
    """Return JSON for embedding in another value that is encoded later."""
    return orjson.Fragment(data)


def rewritten(text: str) -> Any:
    """Return a compact copy of a JSON document to embed in another value. Integers retain all their digits."""
    return decoded_as_json(json.loads(text))


def decoded_as_json(value: Any) -> Any:
    """Encode a value that was decoded from JSON for embedding in another value. Integers retain all their digits."""
    return orjson.Fragment(dumps_decoded(value))


def dumps_decoded(value: Any) -> bytes:
    """Encode a value that was decoded from JSON. Integers of any size retain all their digits.

    A number such as 1e999, which is decoded as infinity, is encoded as null.
    """
    try:
        return dumps(value)
    except TypeError:  # an integer of more than 64 bits
        return dumps(_with_long_integers(value))


def _with_long_integers(value: Any) -> Any:
    """Return a copy of a decoded value in which integers of more than 64 bits are encoded."""
    if isinstance(value, dict):
        return {name: _with_long_integers(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_with_long_integers(member) for member in value]
    is_long = isinstance(value, int) and not -(1 << 63) <= value < 1 << 64
    return orjson.Fragment(b"%d" % value) if is_long else value


def refuse_constant(name: str) -> None:
    """Raise ValueError for NaN or an infinity. Pass this function to `json.loads` as `parse_constant`."""
    raise ValueError(f"{name} is not a JSON number")


def is_json(text: str) -> bool:
    """Return whether text is a single JSON value in which no number is NaN or infinite."""
    try:
        json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _on_one_line(data: bytes) -> bytes:
    """Escape the three non-ASCII line separators, because some clients (httpx) split lines with `str.splitlines`."""
    return (
        data.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )


JSON = Framing("json", "application/json", b"", b"")
JSONLINES = Framing("jsonlines", "application/jsonlines", b"", b"\n")
JSON_LINE = JSON._replace(after=b"\n")
"""Framing for LMI's async mode, in which every response body ends with a newline."""
SSE = Framing("sse", "text/event-stream", b"data: ", b"\n\n")
SSE_DONE = SSE._replace(end=b"data: [DONE]\n\n")
"""Framing for OpenAI streams, which end with a `[DONE]` event."""


def typed_event(value: Mapping[str, Any]) -> bytes:
    """Encode a server-sent event named after the value's `type`, as in Anthropic's API and OpenAI's Responses API."""
    return b"event: %b\n" % value["type"].encode() + SSE.encode(value)


# -- templates: events that differ in few values -----------------------------------------------------------------

NUMBER: Any = orjson.Fragment(b"\0d")
"""A placeholder for an integer."""

SLOT: Any = orjson.Fragment(b"\0b")
"""A placeholder for a value that is encoded later."""

TOKEN_SLOTS = Token(NUMBER, SLOT, SLOT, False)


def template(data: bytes) -> bytes:
    """Convert an encoded event to a %-format string. The placeholders of the event are replaced by `%d` and `%b`.

    JSON contains no zero bytes, so text from a client cannot be mistaken for a placeholder.
    """
    return data.replace(b"%", b"%%").replace(b"\0", b"%")


class _JsonTexts(dict[str, bytes]):
    """Cache for the JSON encoding of short strings. Tokens repeat, so most strings are encoded only once."""

    _MOST_TEXTS = 16384
    _MOST_CHARACTERS = 64

    def __missing__(self, text: str) -> bytes:
        data = JSON.encode(text)
        if len(text) <= self._MOST_CHARACTERS:
            if len(self) >= self._MOST_TEXTS:
                self.clear()
            self[text] = data = bytes(memoryview(data))  # copied: orjson's buffer has at least 4 KiB
        return data


JSON_TEXTS = _JsonTexts()


def fill(event: bytes, tokens: Sequence[Token]) -> bytes:
    """Return one event for each token. The only `%b` in `event` is replaced by the JSON-encoded text of the token."""
    if len(tokens) == 1:
        return event % JSON_TEXTS[tokens[0].text]
    return b"".join([event % JSON_TEXTS[token.text] for token in tokens])


KEEP_ALIVE = b":\n\n"
"""A comment that keeps the connection of an idle stream of server-sent events open."""

FRAMINGS = {framing.name: framing for framing in (JSON, JSONLINES, SSE)}
"""Maps each value of `option.output_formatter` to its framing. The values are those of LMI."""


# -- maximum nesting of lists and objects in JSON ----------------------------------------------------------------------


MAX_DEPTH = 200
"""Maximum nesting depth of lists and objects. Recursive code, such as chat templates, can still process such values."""


def is_too_deep(value: Any, text: str | bytes) -> bool:
    """Return whether a JSON value has more than MAX_DEPTH levels. The result does not depend on the Python version.

    Args:
        text: the JSON from which the value was decoded.
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
