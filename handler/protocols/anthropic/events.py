"""The framing of Anthropic's events: server-sent events with a name, which is the value's `type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.framing import SSE

CONTENT_TYPE = SSE.content_type


def encode(value: Mapping[str, Any]) -> bytes:
    return b"event: %b\n" % value["type"].encode() + SSE.encode(value)


PING = encode({"type": "ping"})
"""What a stream sends when it has been silent for a while."""
