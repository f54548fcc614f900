"""Events of InvokeEndpointWithBidirectionalStream: messages, signatures, and the frames that they stand for."""

from __future__ import annotations

import contextlib
import random

import pytest
from botocore.eventstream import EventStreamMessage
from websockets.frames import Frame, Opcode

from deploy.emulator.access import read_signature
from deploy.emulator.container_socket import read_frame, write_event
from deploy.emulator.protocol import ApiError
from deploy.emulator.signed_events import EventReader, EventSignature, decode
from tests.deploy.doubles.bidirectional import AUTHORIZATION, SECRET, Signing, header, message, part

REQUEST = read_signature(AUTHORIZATION, None)
BY_THE_SDK = (
    "000000dc00000043c6f25d1b053a6461746508000001a229c04d2a103a6368756e6b2d7369676e617475726506002062636537b0a63d9b8b"
    "1971fd6f72ed52f0a951a1a23be70141e0aa5dc42ea66c0000008900000069edbad4760d3a6d6573736167652d747970650700056576656e"
    "740b3a6576656e742d7479706507000b5061796c6f616450617274084461746154797065070004555446380d3a636f6e74656e742d747970"
    "650700186170706c69636174696f6e2f6f637465742d73747265616d7b22696e70757473223a20224869227d9989bc513f6bfc8b",
    "000000ce00000043dcd299f9053a6461746508000001a229c0501f103a6368756e6b2d7369676e617475726506002099a1e835cf1da14567"
    "e67a3afa9b041fc474c95bb47d899def1d278f5a6766e00000007b00000069df4ed74b0d3a6d6573736167652d747970650700056576656e"
    "740b3a6576656e742d7479706507000b5061796c6f616450617274084461746154797065070004555446380d3a636f6e74656e742d747970"
    "650700186170706c69636174696f6e2f6f637465742d73747265616d00ff5513e8d8fd22d777",
    "0000005300000043f5447a58053a6461746508000001a229c0547b103a6368756e6b2d7369676e61747572650600206c5c1f9df7248b191d"
    "f5da6de4a7dc5e7b02dc5ca31cfbf3a295ad176cbf72c9f88cfe2d",
)
"""Three messages of aws-sdk-signers 0.4.0 with SECRET, after a request with the signature of AUTHORIZATION. The last
one is empty, and of the next day."""


def received(*pieces: bytes) -> list[EventStreamMessage]:
    reader = EventReader()
    return [item for piece in pieces for item in reader.add(piece)]


def test_signatures_of_aws_s_sdk_are_right_across_midnight() -> None:
    signature = EventSignature(REQUEST, SECRET)
    payloads = []
    for item in received(*(bytes.fromhex(text) for text in BY_THE_SDK)):
        signature.check(item)
        payloads.append(decode(item.payload).payload if item.payload else b"")
    assert payloads == [b'{"inputs": "Hi"}', b"\x00\xff", b""]


def test_the_double_signs_as_aws_s_sdk() -> None:
    first = bytes.fromhex(BY_THE_SDK[0])
    assert Signing(milliseconds=int.from_bytes(first[19:27], "big"))(decode(first).payload) == first


@pytest.mark.parametrize("order", [(1,), (0, 0), (0, 2)])
def test_an_event_is_refused_out_of_order(order: tuple[int, ...]) -> None:
    signature = EventSignature(REQUEST, SECRET)
    *right, wrong = received(*(bytes.fromhex(BY_THE_SDK[index]) for index in order))
    for item in right:
        signature.check(item)
    with pytest.raises(ApiError, match="does not match") as raised:
        signature.check(wrong)
    assert (raised.value.status, raised.value.code) == (403, "InvalidSignatureException")


def test_an_event_of_another_key_is_refused() -> None:
    [item] = received(Signing("another")(part(b"{}")))
    with pytest.raises(ApiError, match="does not match"):
        EventSignature(REQUEST, SECRET).check(item)


@pytest.mark.parametrize(
    "headers",
    [
        b"",
        header(":date", 1),
        header(":chunk-signature", bytes(32)),
        header(":date", 1) + header(":chunk-signature", bytes(31)),
        header(":date", "1") + header(":chunk-signature", bytes(32)),
        header(":date", 2**62) + header(":chunk-signature", bytes(32)),  # in the year 146 million
    ],
)
def test_an_event_without_a_signature_is_refused(headers: bytes) -> None:
    with pytest.raises(ApiError) as raised:
        EventSignature(REQUEST, SECRET).check(decode(message(headers, part(b"{}"))))
    assert raised.value.code == "IncompleteSignature"


def test_without_the_secret_only_the_form_is_checked() -> None:
    signature = EventSignature(REQUEST, None)
    signature.check(decode(Signing("another")(part(b"{}"))))
    with pytest.raises(ApiError, match="no :date"):
        signature.check(decode(message(b"", part(b"{}"))))


# -- messages -------------------------------------------------------------------------------------------------------


def test_messages_arrive_in_pieces_of_any_size() -> None:
    stream = b"".join(part(bytes([index]) * index) for index in range(20))
    whole = [item.payload for item in received(stream)]
    assert whole == [bytes([index]) * index for index in range(20)]
    for size in (1, 3, 50):
        pieces = [stream[index : index + size] for index in range(0, len(stream), size)]
        assert [item.payload for item in received(*pieces)] == whole


def test_a_message_that_is_incomplete_is_known() -> None:
    reader = EventReader()
    data = part(b"x")
    assert not list(reader.add(data[:-1]))
    assert reader.is_within_event
    assert len(list(reader.add(data[-1:]))) == 1
    assert not reader.is_within_event


@pytest.mark.parametrize("size", [0, 15, 26_214_401, 2**32 - 1])
def test_a_message_of_impossible_size_is_refused_at_its_length(size: int) -> None:
    with pytest.raises(ApiError, match=f"a message has {size} bytes"):
        received(size.to_bytes(4, "big"))


@pytest.mark.parametrize(
    "data",
    [
        part(b"x")[:-1] + b"\x00",
        message(b"\x01a\x0a"),  # no such type
        message(b"\x01\xff\x00"),  # not UTF-8
        message(b"\x01a\x00\x01a\x01"),  # the same name twice
        message(b"\x01a\x08\x00"),
        part(b"x") + part(b"y"),
        part(b"x")[:20],
        b"",
    ],
)
def test_an_invalid_message_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(ApiError, match="event stream is invalid"):
        decode(data)


def test_random_messages_are_read_or_refused() -> None:
    source = random.Random(7)
    data = part(b"hello")
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(source.randint(1, 4)):
            changed[source.randrange(len(changed))] = source.randrange(256)
        head = message(bytes(changed[12:-9]), b"hello")  # with right checksums
        for item in (bytes(changed), head):
            with contextlib.suppress(ApiError):
                assert decode(item).prelude.total_length == len(item)


# -- frames ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "state", "continues", "opcode", "fin"),
    [
        ("UTF8", "COMPLETE", False, Opcode.TEXT, True),
        ("UTF8", None, False, Opcode.TEXT, True),
        ("BINARY", None, False, Opcode.BINARY, True),
        (None, None, False, Opcode.BINARY, True),
        ("UTF8", "PARTIAL", False, Opcode.TEXT, False),
        (None, "PARTIAL", False, Opcode.BINARY, False),
        ("UTF8", "PARTIAL", True, Opcode.CONT, False),
        ("BINARY", "COMPLETE", True, Opcode.CONT, True),
    ],
)
def test_an_event_is_one_frame(kind: str | None, state: str | None, continues: bool, opcode: Opcode, fin: bool) -> None:
    event = decode(part(b"\xf0\x9f", kind, state))
    assert read_frame(event, continues=continues) == Frame(opcode, b"\xf0\x9f", fin=fin)


@pytest.mark.parametrize(
    "event", [part(b"", "TEXT"), part(b"", state="DONE"), part(b"", event="Other"), message(b"", b"{}")]
)
def test_other_events_are_refused(event: bytes) -> None:
    with pytest.raises(ApiError) as raised:
        read_frame(decode(event), continues=False)
    assert raised.value.status == 400


@pytest.mark.parametrize(("fin", "state"), [(True, "COMPLETE"), (False, "PARTIAL")])
def test_a_frame_is_one_event(fin: bool, state: str) -> None:
    event = decode(write_event(Frame(Opcode.TEXT, b"\xc3", fin=fin), "UTF8"))
    assert event.payload == b"\xc3"
    assert event.headers == {
        ":message-type": "event",
        ":event-type": "PayloadPart",
        ":content-type": "application/octet-stream",
        "DataType": "UTF8",
        "CompletionState": state,
    }
