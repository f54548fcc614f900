"""The events of a client's event stream, and their signatures.

See https://docs.aws.amazon.com/AmazonS3/latest/developerguide/RESTSelectObjectAppendix.html for the messages, and
the section on event streams of Signature Version 4 for the signatures.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator
from datetime import datetime, timezone

from botocore.eventstream import EventStreamBuffer, EventStreamMessage, ParserError

from deploy.emulator.access import SERVICE, RequestSignature
from deploy.emulator.protocol import ApiError, validation_error

_LENGTH = struct.Struct("!I")
_SHORTEST = 16  # bytes; a message without headers and payload
_LONGEST = 25 << 20  # bytes; the SDK's maximum of 24 MiB, with the headers of both messages
_SIGNATURE = hashlib.sha256().digest_size


class EventReader:
    """A reader of messages that arrive in pieces of any size."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def is_within_event(self) -> bool:
        """Return whether the last message is incomplete."""
        return bool(self._data)

    def add(self, data: bytes) -> Iterator[EventStreamMessage]:
        """Add data, and yield the messages that are complete now.

        Raises:
            ApiError: a message is invalid.
        """
        self._data += data
        while len(self._data) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._data)
            if not _SHORTEST <= size <= _LONGEST:
                raise validation_error(f"The event stream is invalid: a message has {size} bytes.")
            if len(self._data) < size:
                return
            message = decode(bytes(self._data[:size]))
            del self._data[:size]
            yield message


def decode(data: bytes) -> EventStreamMessage:
    """Return the one message that `data` contains.

    Raises:
        ApiError: `data` is not a message.
    """
    buffer = EventStreamBuffer()
    buffer.add_data(data)
    try:
        message: EventStreamMessage = next(buffer)
    except (ParserError, StopIteration, KeyError, ValueError, struct.error) as error:
        # botocore does not convert errors in the types, lengths and characters of headers
        raise validation_error(f"The event stream is invalid: {error or 'a message is incomplete'}") from error
    if message.prelude.total_length != len(data):
        raise validation_error("The event stream is invalid: an event contains more than one message.")
    return message


class EventSignature:
    """The signatures of a client's events, each of which covers the one before.

    Args:
        request: signature of the request, which the first event's signature covers.
        secret: secret key that belongs to the access key, or None to check only the form.
    """

    def __init__(self, request: RequestSignature, secret: str | None) -> None:
        self._scope = (request.region, SERVICE, "aws4_request")
        self._previous = request.value
        self._secret = secret

    def check(self, message: EventStreamMessage) -> None:
        """Raise ApiError if a message is not signed as the next one."""
        milliseconds, signature = message.headers.get(":date"), message.headers.get(":chunk-signature")
        is_signed = isinstance(signature, bytes) and len(signature) == _SIGNATURE
        if not isinstance(milliseconds, int) or not is_signed:
            raise ApiError(403, "IncompleteSignature", "An event has no :date or no :chunk-signature.")
        if self._secret is None:
            return
        expected = self._signature(self._secret, milliseconds, message.payload)
        if not hmac.compare_digest(expected, signature):
            raise ApiError(403, "InvalidSignatureException", "The signature of an event does not match.")
        self._previous = expected.hex()

    def _signature(self, secret: str, milliseconds: int, payload: bytes) -> bytes:
        try:
            time = datetime.fromtimestamp(milliseconds / 1000, timezone.utc)
        except (ValueError, OverflowError, OSError) as error:
            raise ApiError(403, "IncompleteSignature", f"The :date of an event is invalid: {error}") from error
        scope = [time.strftime("%Y%m%d"), *self._scope]  # AWS's SDK uses the date of the event, not of the request
        header = b"\x05:date\x08" + struct.pack("!q", milliseconds)
        lines = (
            "AWS4-HMAC-SHA256-PAYLOAD",
            time.strftime("%Y%m%dT%H%M%SZ"),
            "/".join(scope),
            self._previous,
            hashlib.sha256(header).hexdigest(),
            hashlib.sha256(payload).hexdigest(),
        )
        key = f"AWS4{secret}".encode()
        for part in (*scope, "\n".join(lines)):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        return key
