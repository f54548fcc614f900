"""Encode `application/vnd.amazon.eventstream`, the framing of InvokeEndpointWithResponseStream.

A message has a prelude (its length, its headers' length, their CRC-32), headers, a payload, and the CRC-32 of all
before it. Numbers are big-endian.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping

CONTENT_TYPE = "application/vnd.amazon.eventstream"
_STRING = 7  # type "string" of a header's value; SageMaker uses no other
_PRELUDE = struct.Struct("!III")
_CRC = struct.Struct("!I")


def encode(headers: bytes, payload: bytes) -> bytes:
    """Encode one message.

    Args:
        headers: from `encode_headers`.
    """
    lengths = struct.pack("!II", _PRELUDE.size + len(headers) + len(payload) + _CRC.size, len(headers))
    message = lengths + _CRC.pack(zlib.crc32(lengths)) + headers + payload
    return message + _CRC.pack(zlib.crc32(message))


def encode_headers(headers: Mapping[str, str]) -> bytes:
    parts = []
    for name, value in headers.items():
        key, text = name.encode(), value.encode()
        parts.append(struct.pack("!B", len(key)) + key + struct.pack("!BH", _STRING, len(text)) + text)
    return b"".join(parts)


_PART = encode_headers(
    {":event-type": "PayloadPart", ":content-type": "application/octet-stream", ":message-type": "event"}
)


def payload_part(data: bytes) -> bytes:
    """Encode the event `PayloadPart{Bytes}`."""
    return encode(_PART, data)


def model_stream_error(code: str, message: str) -> bytes:
    """Encode the exception `ModelStreamError`; code is ModelInvocationTimeExceeded or StreamBroken."""
    return _exception("ModelStreamError", {"Message": message, "ErrorCode": code})


def internal_stream_failure(message: str) -> bytes:
    """Encode the exception `InternalStreamFailure`: SageMaker's own fault."""
    return _exception("InternalStreamFailure", {"Message": message})


def _exception(kind: str, body: Mapping[str, str]) -> bytes:
    headers = {":exception-type": kind, ":content-type": "application/json", ":message-type": "exception"}
    return encode(encode_headers(headers), json.dumps(body).encode())
