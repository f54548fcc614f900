"""The cases of RFC 6455, section by section, byte by byte: frames, fragments, UTF-8, control frames and closing.

Each case is what a client sends on a new connection, and what it gets. test_frames.py has the most common ones.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Sequence
from typing import Any

import pytest

from tests.app.sockets.client import Wire, wire
from tests.servers import LiveServer

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
FIN = 0x80
PROTOCOL_ERROR, NOT_UTF8, TOO_BIG = 1002, 1007, 1009
KEY = bytes.fromhex("37fa213d")

Frames = Sequence[bytes]


def frame(opcode: int, data: bytes = b"", *, fin: bool = True, bits: int = 0, key: bytes | None = KEY) -> bytes:
    """A frame with the shortest form of its length.

    Args:
        bits: reserved bits.
        key: key of the mask, or None for no mask.
    """
    size, mask = len(data), 0 if key is None else 0x80
    head = bytes([(FIN if fin else 0) | bits | opcode])
    if size < 126:
        head += bytes([mask | size])
    elif size < 1 << 16:
        head += struct.pack("!BH", mask | 126, size)
    else:
        head += struct.pack("!BQ", mask | 127, size)
    if key is None:
        return head + data
    return head + key + bytes(byte ^ letter for byte, letter in zip(data, itertools.cycle(key)))


def fragments(opcode: int, *parts: bytes) -> list[bytes]:
    *_, last = range(len(parts))
    return [frame(CONTINUATION if index else opcode, part, fin=index == last) for index, part in enumerate(parts)]


def asked(word: str = "word", size: int = 0) -> bytes:
    """A request whose response is the word.

    Args:
        size: bytes of the request, if it is to have more than it needs.
    """
    body = {"inputs": word, "parameters": {"max_new_tokens": 1}}
    return json.dumps(body, ensure_ascii=False).encode().ljust(size)


def response(word: str = "word") -> tuple[int, Any]:
    return FIN | TEXT, {"generated_text": f" {word}"}


def pong(data: bytes) -> tuple[int, bytes]:
    return FIN | PONG, data


def closed(code: int | None, reason: str = "") -> bytes:
    """A close frame of the client's."""
    return frame(CLOSE, b"" if code is None else struct.pack("!H", code) + reason.encode())


def exchange(server: LiveServer, frames: Frames, number: int, *, cut: int = 0) -> list[Any]:
    """Send frames, and return as many of those that come.

    Args:
        cut: number of bytes that are sent at once, or 0 for all of them.
    """
    data = b"".join(frames)
    with wire(server) as client:
        for start in range(0, len(data), cut or len(data)):
            client.socket.sendall(data[start : start + (cut or len(data))])
        return [_read(client) for _ in range(number)]


def _read(client: Wire) -> Any:
    first, data = client.read()
    return (first, json.loads(data)) if first == FIN | TEXT else (first, data)


def close_code(server: LiveServer, frames: Frames) -> int | None:
    """The code with which the server closes a connection, or None for a close frame without one."""
    with wire(server) as client:
        client.socket.sendall(b"".join(frames))
        first, data = client.read()
        assert first == FIN | CLOSE, (first, data)
        client.socket.sendall(closed(1000))
        assert client.read() == (0, b"")  # the server ends the connection
    return int.from_bytes(data[:2], "big") if data else None


# -- 5.2 to 5.4: frames and fragments ----------------------------------------------------------------------------------

HALF = len(asked()) // 2
FIRST, SECOND = asked()[:HALF], asked()[HALF:]
ACCEPTED: dict[str, tuple[Frames, list[Any]]] = {
    **{f"a message of {size} bytes": ([frame(TEXT, asked(size=size))], [response()])
       for size in (125, 126, 127, 128, 65_535, 65_536, 65_537, 1 << 20)},
    "a binary message": ([frame(BINARY, asked())], [response()]),
    "fragments": (fragments(TEXT, FIRST, SECOND), [response()]),
    "fragments of a binary message": (fragments(BINARY, FIRST, SECOND), [response()]),
    "an empty first fragment": (fragments(TEXT, b"", asked()), [response()]),
    "an empty last fragment": (fragments(TEXT, asked(), b""), [response()]),
    "empty fragments between others": (fragments(TEXT, FIRST, b"", b"", SECOND), [response()]),
    "a fragment for each byte": (fragments(TEXT, *(bytes([byte]) for byte in asked())), [response()]),
    "a ping before the last fragment": (
        [frame(TEXT, FIRST, fin=False), frame(PING, b"1"), frame(CONTINUATION, SECOND)], [pong(b"1"), response()]
    ),
    "pings between all fragments": (
        [frame(PING, b"0"), frame(TEXT, FIRST, fin=False), frame(PING, b"1"), frame(CONTINUATION, b"", fin=False),
         frame(PING, b"2"), frame(CONTINUATION, SECOND), frame(PING, b"3")],
        [pong(b"0"), pong(b"1"), pong(b"2"), pong(b"3"), response()],
    ),
    "a pong between fragments": (
        [frame(TEXT, FIRST, fin=False), frame(PONG, b"unasked"), frame(CONTINUATION, SECOND)], [response()]
    ),
    "two messages of fragments": (
        [*fragments(TEXT, FIRST, SECOND), *fragments(BINARY, FIRST, SECOND)], [response(), response()]
    ),
    "an empty ping": ([frame(PING)], [pong(b"")]),
    "the longest ping": ([frame(PING, bytes(range(125)))], [pong(bytes(range(125)))]),
    "a ping that is not UTF-8": ([frame(PING, b"\xff\xfe\x00")], [pong(b"\xff\xfe\x00")]),
    "ten pings": ([frame(PING, bytes([number])) for number in range(10)], [pong(bytes([n])) for n in range(10)]),
    "a pong that nobody asked for": ([frame(PONG, b"unasked"), frame(PING, b"1")], [pong(b"1")]),
    "the longest pong": ([frame(PONG, bytes(125)), frame(TEXT, asked())], [response()]),
    "a mask of zeros": ([frame(TEXT, asked(), key=bytes(4))], [response()]),
    "a mask of ones": ([frame(TEXT, asked(), key=b"\xff" * 4)], [response()]),
    "another mask for each fragment": (
        [frame(TEXT, FIRST, fin=False, key=b"\x01\x02\x03\x04"), frame(CONTINUATION, SECOND, key=b"\xa0\xb0\xc0\xd0")],
        [response()],
    ),
}  # fmt: skip
"""What the client sends, and what the server sends. A pong may come before an earlier message's response."""


@pytest.mark.parametrize("cut", [0, 1], ids=["at once", "byte by byte"])
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_allowed(echo_server: LiveServer, name: str, cut: int) -> None:
    frames, expected = ACCEPTED[name]
    if cut and sum(map(len, frames)) > 1000:
        cut = 997
    received = exchange(echo_server, frames, len(expected), cut=cut)
    assert [item for item in received if item[0] == FIN | PONG] == [item for item in expected if item[0] == FIN | PONG]
    assert [item for item in received if item[0] == FIN | TEXT] == [item for item in expected if item[0] == FIN | TEXT]


RESERVED_OPCODES = (*range(3, 8), *range(11, 16))
FORBIDDEN: dict[str, Frames] = {
    **{f"reserved opcode {opcode}": [frame(opcode)] for opcode in RESERVED_OPCODES},
    **{f"reserved opcode {opcode} in a message": [frame(TEXT, FIRST, fin=False), frame(opcode, b"x")]
       for opcode in (3, 15)},
    **{f"reserved bits {bits:#x} of opcode {opcode}": [frame(opcode, bits=bits)]
       for bits in (0x40, 0x20, 0x10, 0x70) for opcode in (BINARY, PING, PONG, CLOSE)},
    "reserved bits of a continuation": [frame(TEXT, FIRST, fin=False), frame(CONTINUATION, SECOND, bits=0x40)],
    **{f"no mask on opcode {opcode}": [frame(opcode, key=None)] for opcode in (BINARY, PING, PONG, CLOSE)},
    "no mask on a continuation": [frame(TEXT, FIRST, fin=False), frame(CONTINUATION, SECOND, key=None)],
    **{f"126 bytes of opcode {opcode}": [frame(opcode, bytes(126))] for opcode in (PONG, CLOSE)},
    **{f"a fragment of opcode {opcode}": [frame(opcode, fin=False)] for opcode in (PONG, CLOSE)},
    "a continuation of nothing that goes on": [frame(CONTINUATION, b"x", fin=False)],
    "a continuation after the end": [*fragments(BINARY, b"", b""), frame(CONTINUATION, b"x")],
    "a binary message within a text": [frame(TEXT, FIRST, fin=False), frame(BINARY, SECOND)],
    "a text within a binary message": [frame(BINARY, FIRST, fin=False), frame(TEXT, SECOND, fin=False)],
    "a message after a pong within a message": [frame(TEXT, FIRST, fin=False), frame(PONG), frame(TEXT, SECOND)],
}  # fmt: skip


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_is_forbidden(echo_server: LiveServer, name: str) -> None:
    frames = FORBIDDEN[name]
    if name == "a continuation after the end":  # the empty message before it gets an error event
        received = exchange(echo_server, frames, 2)
        assert PROTOCOL_ERROR in [int.from_bytes(item[1][:2], "big") for item in received if item[0] == FIN | CLOSE]
    else:
        assert close_code(echo_server, frames) == PROTOCOL_ERROR


def test_the_highest_bit_of_a_length_is_zero(echo_server: LiveServer) -> None:
    announced = bytes([FIN | TEXT, 0x80 | 127]) + b"\xff" * 8 + KEY
    assert close_code(echo_server, [announced]) in (PROTOCOL_ERROR, TOO_BIG)


def test_the_server_does_not_mask(echo_server: LiveServer) -> None:
    with wire(echo_server) as client:
        client.socket.sendall(frame(TEXT, asked()))
        assert client.socket.recv(2)[1] & 0x80 == 0


# -- 8.1: UTF-8 --------------------------------------------------------------------------------------------------------

CHARACTERS = [chr(code) for code in (0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFD, 0xFFFF, 0x10000, 0x10FFFF)]


@pytest.mark.parametrize("character", CHARACTERS, ids=lambda character: f"U+{ord(character):04X}")
def test_a_character_may_be_cut_anywhere(echo_server: LiveServer, character: str) -> None:
    word = f"a{character}b"
    data = asked(word)
    start = data.index(character.encode())
    for cut in range(start, start + len(character.encode()) + 1):
        assert exchange(echo_server, fragments(TEXT, data[:cut], data[cut:]), 1) == [response(word)]


NO_UTF8 = {
    "a lone continuation": b"\x80", "two continuations": b"\xbf\xbf", "a start without continuation": b"\xc3 ",
    "a start at the end": b"\xc3", "two of three bytes": b"\xe2\x82", "three of four bytes": b"\xf0\x9f\x99",
    "a long form of /": b"\xc0\xaf", "a long form of three bytes": b"\xe0\x80\xaf",
    "a long form of four bytes": b"\xf0\x80\x80\xaf", "the longest long form": b"\xe0\x9f\xbf",
    "a long form of zero": b"\xc0\x80", "the first surrogate": b"\xed\xa0\x80", "the last surrogate": b"\xed\xbf\xbf",
    "a pair of surrogates": b"\xed\xa0\xbd\xed\xb9\x82", "above U+10FFFF": b"\xf4\x90\x80\x80",
    "five bytes": b"\xf8\x88\x80\x80\x80", "six bytes": b"\xfc\x84\x80\x80\x80\x80", "0xFE": b"\xfe", "0xFF": b"\xff",
    "a mark of UTF-16": b"\xff\xfeh\x00",
}  # fmt: skip


@pytest.mark.parametrize("name", NO_UTF8)
def test_a_text_that_is_not_utf8_closes_the_connection(echo_server: LiveServer, name: str) -> None:
    data = b'"' + NO_UTF8[name]
    assert close_code(echo_server, [frame(TEXT, data)]) == NOT_UTF8
    assert close_code(echo_server, fragments(TEXT, data[:2], data[2:], b"")) == NOT_UTF8
    received = exchange(echo_server, [frame(BINARY, data)], 1)  # binary data may be any bytes
    assert received[0][1]["status"] == 424


@pytest.mark.parametrize("name", NO_UTF8)
def test_a_reason_that_is_not_utf8_is_an_error(echo_server: LiveServer, name: str) -> None:
    assert close_code(echo_server, [frame(CLOSE, struct.pack("!H", 1000) + NO_UTF8[name])]) == NOT_UTF8


# -- 5.5.1 and 7: closing ----------------------------------------------------------------------------------------------

VALID_CODES = (1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014, 3000, 3999, 4000, 4999)
INVALID_CODES = (0, 1, 999, 1004, 1005, 1006, 1015, 1016, 1100, 2000, 2999, 5000, 65_535)


@pytest.mark.parametrize("code", VALID_CODES)
def test_a_close_code_comes_back(echo_server: LiveServer, code: int) -> None:
    assert close_code(echo_server, [closed(code)]) == code
    assert close_code(echo_server, [closed(code, "ü" * 61)]) == code  # 122 bytes


@pytest.mark.parametrize("code", INVALID_CODES)
def test_an_invalid_close_code_is_an_error(echo_server: LiveServer, code: int) -> None:
    assert close_code(echo_server, [closed(code)]) == PROTOCOL_ERROR
    assert close_code(echo_server, [closed(code, "reason")]) == PROTOCOL_ERROR


def test_a_close_frame_may_have_no_code(echo_server: LiveServer) -> None:
    assert close_code(echo_server, [closed(None)]) in (None, 1000)


@pytest.mark.parametrize(
    "later",
    [frame(TEXT, asked()), frame(PING, b"late"), frame(CLOSE, struct.pack("!H", 1001)), frame(3), b"\xff" * 100],
    ids=["a message", "a ping", "another close frame", "a forbidden frame", "no frame"],
)
def test_what_comes_after_the_close_frame_is_ignored(echo_server: LiveServer, later: bytes) -> None:
    """The first close frame decides (7.1.5)."""
    assert close_code(echo_server, [closed(4000, "first"), later]) == 4000


def test_a_connection_may_be_closed_within_a_message(echo_server: LiveServer) -> None:
    """The `websockets` package answers with an error, since the message is never complete."""
    assert close_code(echo_server, [frame(TEXT, FIRST, fin=False), closed(1001)]) in (1001, PROTOCOL_ERROR)


def test_what_comes_after_an_error_is_ignored(echo_server: LiveServer) -> None:
    frames = [frame(3), closed(4000), frame(TEXT, asked()), frame(PING)]
    assert close_code(echo_server, frames) == PROTOCOL_ERROR
    assert echo_server.ping() == 200
