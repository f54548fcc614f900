"""A client that relays the container's responses whole, as event stream messages, or unchanged in pieces."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
import struct
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from deploy.emulator.protocol import TIMED_OUT, model_error

# -- `application/vnd.amazon.eventstream`, the framing of InvokeEndpointWithResponseStream -----------------------------
# A message consists of a prelude (total length, length of the headers, CRC-32 of both), the headers, the payload, and
# the CRC-32 of all preceding bytes. Numbers are big-endian.

CONTENT_TYPE = "application/vnd.amazon.eventstream"
_STRING = 7  # header value type "string", the only type that SageMaker uses
_PRELUDE = struct.Struct("!III")
_CRC = struct.Struct("!I")


def encode(headers: bytes, payload: bytes) -> bytes:
    """Encode one message.

    Args:
        headers: headers encoded by `encode_headers`.
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
    """Encode the exception `ModelStreamError`, whose code is ModelInvocationTimeExceeded or StreamBroken."""
    return _exception("ModelStreamError", {"Message": message, "ErrorCode": code})


def internal_stream_failure(message: str) -> bytes:
    """Encode the exception `InternalStreamFailure`, which reports an error in SageMaker itself."""
    return _exception("InternalStreamFailure", {"Message": message})


def _exception(kind: str, body: Mapping[str, str]) -> bytes:
    headers = {":exception-type": kind, ":content-type": "application/json", ":message-type": "exception"}
    return encode(encode_headers(headers), json.dumps(body).encode())


log = logging.getLogger("deploy.emulator")

STALLED = "Your model primary did not complete sending the inference response in the allotted time."
BROKEN = "The connection to your model primary was reset or closed before the inference response was complete."
_OURS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # headers that aiohttp would add
MOST = 128 * 2**20
"""Maximum size of a response body held in memory, in bytes. It guards against a container that never stops sending."""
TOO_LARGE = f"The inference response of your model primary is larger than {MOST} bytes."
_FAILURE = 2**16  # maximum bytes to read from the body of an error response
_LARGE = 2**19  # bytes; larger bodies are wrapped in a file object, as aiohttp warns about large bytes objects


class Relay:
    """An HTTP client of one container.

    Args:
        container: the URL of the container, without a path.
    """

    def __init__(self, container: str) -> None:
        self._container = container.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    def to(self, container: str | None) -> Relay:
        """Return a relay to another container, using the same session. If `container` is None, return this relay."""
        if container is None:
            return self
        other = Relay(container)
        other._session = self._session
        return other

    async def open(self) -> None:
        # Every call opens a new connection: a kept-alive connection that the container has just closed would look
        # like a dead container.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), auto_decompress=False, skip_auto_headers=_OURS
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str], seconds: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the container's response without reading its body.

        If the body is not read to the end, the connection is closed, so that the container notices the disconnection.

        Raises:
            aiohttp.ClientError: the container cannot be reached, or closed the connection before it responded.
            asyncio.TimeoutError: the container did not respond, or the body was not read, within `seconds`.
        """
        assert self._session is not None, "open() comes first"
        timeout = aiohttp.ClientTimeout(total=seconds)
        data = io.BytesIO(body) if len(body) > _LARGE else body
        async with self._session.post(
            self._container + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
        ) as reply:
            yield reply

    async def whole(
        self, body: bytes, headers: Mapping[str, str], seconds: float, log_stream: str
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """Return the response to an invocation, and its body.

        Raises:
            ApiError: the response status is not 2xx, its body is too large, or it did not arrive completely in time.
        """
        try:
            async with self.post("/invocations", body, headers, seconds) as reply:
                await raise_for_status(reply, log_stream)
                data = await _read(reply, MOST + 1)
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            log.warning("the container did not respond: %s", error or "timed out")
            raise model_error(0, TIMED_OUT, log_stream) from error
        if len(data) > MOST:
            raise model_error(0, TOO_LARGE, log_stream)
        return reply, data


async def raise_for_status(reply: aiohttp.ClientResponse, log_stream: str) -> None:
    """Raise an error unless the response status is 2xx.

    Raises:
        ApiError: the status is not 2xx.
        aiohttp.ClientError: the connection was closed in the middle of the error body.
        asyncio.TimeoutError: the error body did not arrive in time.
    """
    if not 200 <= reply.status < 300:
        raise model_error(reply.status, (await _read(reply, _FAILURE)).decode("utf-8", "replace"), log_stream)


async def _read(reply: aiohttp.ClientResponse, maximum: int) -> bytes:
    data = bytearray()
    while len(data) < maximum and (piece := await reply.content.readany()):
        data += piece
    return bytes(data[:maximum])


def reset_when_closed(connection: Any) -> None:
    """Make a connection send RST when it is closed, so that an HTTP/1.0 client notices an incomplete response.

    Args:
        connection: a socket, or the socket of an asyncio transport.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def messages(
    reply: aiohttp.ClientResponse, part_bytes: int | None, pieces: list[bytes] | None = None
) -> AsyncIterator[bytes]:
    """Yield the response body as event stream messages, as it arrives.

    If the body is cut off, the last message is an exception.

    Args:
        part_bytes: maximum payload of a message, in bytes, or None to encode each piece of the body as one message.
        pieces: a list to which the body's bytes are also appended, or None if they are not needed.
    """
    try:
        while data := await reply.content.readany():
            if pieces is not None:
                pieces.append(data)
            if part_bytes is None:
                yield payload_part(data)
            else:
                yield b"".join(payload_part(data[i : i + part_bytes]) for i in range(0, len(data), part_bytes))
    except asyncio.TimeoutError:
        yield model_stream_error("ModelInvocationTimeExceeded", STALLED)
    except aiohttp.ClientError:
        yield model_stream_error("StreamBroken", BROKEN)
    except Exception:
        log.exception("the stream could not be relayed")
        yield internal_stream_failure("The stream processing failed.")
