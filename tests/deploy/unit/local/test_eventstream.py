"""The event stream's bytes: one message written out, and all of them as botocore reads them."""

from __future__ import annotations

import json
import random

import pytest
from botocore.eventstream import EventStreamBuffer

from deploy.emulator.relay import internal_stream_failure, model_stream_error, payload_part

HEADERS = (
    b"\x0b:event-type\x07\x00\x0bPayloadPart"
    b"\x0d:content-type\x07\x00\x18application/octet-stream"
    b"\x0d:message-type\x07\x00\x05event"
)


def read(data: bytes) -> list[tuple[dict[str, str], bytes]]:
    buffer = EventStreamBuffer()
    buffer.add_data(data)
    return [(dict(message.headers), message.payload) for message in buffer]


def test_a_part_is_these_bytes() -> None:
    message = payload_part(b"hi")
    assert message[:8] == b"\x00\x00\x00\x6b\x00\x00\x00\x59"  # 107 bytes, 89 of them headers
    assert message[8:12] == bytes.fromhex("99777065")
    assert message[12:-6] == HEADERS
    assert message[-6:-4] == b"hi"
    assert message[-4:] == bytes.fromhex("f0e10a16")


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\xf0\x9f", bytes(range(256)) * 300], ids=["empty", "nul", "half", "long"]
)
def test_botocore_reads_a_part_as_it_was(data: bytes) -> None:
    [(headers, payload)] = read(payload_part(data))
    assert payload == data
    assert headers == {
        ":event-type": "PayloadPart",
        ":content-type": "application/octet-stream",
        ":message-type": "event",
    }


def test_parts_one_after_another_and_cut_anywhere() -> None:
    random_ = random.Random(7)
    parts = [random_.randbytes(random_.randrange(40)) for _ in range(50)]
    stream = b"".join(map(payload_part, parts))
    buffer, got = EventStreamBuffer(), []
    while stream:
        size = random_.randrange(1, 90)
        buffer.add_data(stream[:size])
        stream = stream[size:]
        got += [message.payload for message in buffer]
    assert got == parts


def test_exceptions_name_their_kind_and_carry_json() -> None:
    [(headers, payload)] = read(model_stream_error("StreamBroken", "cut “off”"))
    assert headers == {
        ":exception-type": "ModelStreamError",
        ":content-type": "application/json",
        ":message-type": "exception",
    }
    assert json.loads(payload) == {"Message": "cut “off”", "ErrorCode": "StreamBroken"}
    [(headers, payload)] = read(internal_stream_failure("boom"))
    assert headers[":exception-type"] == "InternalStreamFailure"
    assert json.loads(payload) == {"Message": "boom"}
