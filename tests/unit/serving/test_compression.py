"""Compressed request bodies: gzip, deflate and zstd, in any pieces, within limits."""

from __future__ import annotations

import gzip
import itertools
import random
import re
import struct
import sys
import zlib
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.core.errors import NotJson, TooLarge, UnsupportedMedia
from handler.serving.compression import Inflater, check_encoding, content_encoding, inflate
from tests.one_test import in_one_test

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    import backports.zstd as zstd

MIB = 1 << 20
LETTERS = bytes(range(256)) * 100


def streamed(body: bytes, **options: int) -> bytes:
    """Compress a body as a stream: its frame announces no size."""
    compressor = zstd.ZstdCompressor(
        options={getattr(zstd.CompressionParameter, name): value for name, value in options.items()}
    )
    return bytes(compressor.compress(body) + compressor.flush())


SKIPPED = struct.pack("<II", 0x184D2A50, 4) + b"note"
"""A skippable frame, such as pzstd writes before each of its frames."""

FORMS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("x-gzip", gzip.compress),
    "zlib": ("deflate", zlib.compress),
    "zstd": ("zstd", zstd.compress),
    "zstd without its size": ("zstd", streamed),
    "zstd with a checksum": ("zstd", lambda body: streamed(body, checksum_flag=1)),
    "gzip members": ("gzip", lambda body: gzip.compress(body[:7]) + gzip.compress(body[7:])),
    "zstd frames": ("zstd", lambda body: zstd.compress(body[:7]) + SKIPPED + streamed(body[7:]) + SKIPPED),
}


def fed(pieces: Iterable[bytes], encoding: str, limit: int = 1 << 30) -> bytes:
    inflater = Inflater(encoding, limit)
    found = b"".join(part for piece in pieces for part in inflater.feed(piece))
    inflater.end()
    return found


@in_one_test("form", FORMS)
@given(body=st.binary(max_size=300) | st.integers(0, 200_000).map(bytes), cuts=st.lists(st.floats(0, 1), max_size=8))
def test_any_pieces_of_a_stream_give_the_same_body(form: str, body: bytes, cuts: list[float]) -> None:
    encoding, compress = FORMS[form]
    packed = compress(body)
    places = [0, *sorted(int(cut * len(packed)) for cut in cuts), len(packed)]
    pieces = [packed[start:end] for start, end in itertools.pairwise(places)]
    assert fed(pieces, encoding) == body
    assert b"".join(inflate(packed, encoding, len(body))) == body


@in_one_test("form", FORMS)
def test_a_body_is_inflated_byte_by_byte_and_in_bounded_parts(form: str) -> None:
    encoding, compress = FORMS[form]
    packed = compress(LETTERS)
    assert fed((packed[at : at + 1] for at in range(len(packed))), encoding) == LETTERS
    large = random.Random(1).randbytes(MIB) + bytes(4 * MIB)
    parts = list(inflate(compress(large), encoding, len(large)))
    assert b"".join(parts) == large
    assert max(map(len, parts)) <= MIB


@in_one_test("form", [form for form in FORMS if "members" not in form and "frames" not in form])
def test_a_body_is_cut_off_at_every_byte(form: str) -> None:
    encoding, compress = FORMS[form]
    whole = compress(b"a, b" * 10)
    for end in range(len(whole)):
        with pytest.raises(NotJson, match=r"^the compressed body is cut off before its end$"):
            list(inflate(whole[:end], encoding, MIB))


@in_one_test("form", FORMS)
@in_one_test("more", [b"x", b"\0", b"{}" * 99_999, bytes(300_000)])
def test_other_data_after_the_end_is_refused(form: str, more: bytes) -> None:
    encoding, compress = FORMS[form]
    with pytest.raises(NotJson, match=r"^the compressed body has further data after its end$"):
        list(inflate(compress(LETTERS) + more, encoding, MIB))


@in_one_test("form", FORMS)
def test_a_bomb_is_noticed_before_it_is_in_memory(form: str) -> None:
    encoding, compress = FORMS[form]
    packed, limit = compress(bytes(9 * MIB)), 3 * MIB
    inflating, taken = inflate(packed, encoding, limit, " (max_request_size)"), list[int]()
    with pytest.raises(TooLarge, match=r"^the decompressed body has more than 3145728 bytes \(max_request_size\)$"):
        taken.extend(map(len, inflating))
    assert sum(taken) <= limit
    assert b"".join(inflate(compress(bytes(limit)), encoding, limit)) == bytes(limit)
    with pytest.raises(TooLarge):
        list(inflate(compress(bytes(limit + 1)), encoding, limit))


def _flipped(body: bytes) -> bytes:
    return body[:-1] + bytes((body[-1] ^ 1,))


SAMPLES = [b'{"state": "hello %d", "questions": {}}' % number for number in range(2000)]
BAD: dict[str, tuple[str, bytes, str]] = {
    "plain": ("gzip", b"{}", "it must begin with a gzip or zlib header"),
    "plain zstd": ("zstd", b'{"a": 1}', "Unknown frame descriptor"),
    "another form": ("zstd", gzip.compress(LETTERS), "Unknown frame descriptor"),
    "a wrong checksum": ("zstd", _flipped(streamed(LETTERS, checksum_flag=1)), "checksum"),
    "a huge window": ("zstd", streamed(LETTERS * 10, window_log=27), "Frame requires too much memory"),
    "a dictionary": (
        "zstd",
        zstd.compress(SAMPLES[0], zstd_dict=zstd.train_dict(SAMPLES, 4000)),
        "Windows above 8 MiB and dictionaries are not supported",
    ),
}


@in_one_test("cause", BAD)
def test_a_body_that_is_not_as_its_encoding_says_is_refused_with_the_cause(cause: str) -> None:
    encoding, body, words = BAD[cause]
    with pytest.raises(NotJson, match=r"^the body is not compressed as its Content-Encoding says: ") as raised:
        list(inflate(body, encoding, 1 << 30))
    assert words in raised.value.message


def test_a_window_of_8_mib_is_read() -> None:
    assert b"".join(inflate(streamed(bytes(9 * MIB), window_log=23), "zstd", 9 * MIB)) == bytes(9 * MIB)


@in_one_test(("encoding", "frame"), [("gzip", gzip.compress(b"")), ("zstd", streamed(b"")), ("zstd", SKIPPED)])
def test_the_number_of_frames_is_bounded(encoding: str, frame: bytes) -> None:
    assert list(inflate(1000 * frame, encoding, 0)) == []
    with pytest.raises(NotJson, match=r"^the compressed body has more than 1000 frames$"):
        list(inflate(1001 * frame, encoding, 0))


@in_one_test("encoding", ["gzip", "deflate", "zstd"])
def test_an_empty_body_is_not_compressed(encoding: str) -> None:
    with pytest.raises(NotJson, match=r"^the compressed body is cut off before its end$"):
        list(inflate(b"", encoding, 1))


@in_one_test(
    ("value", "encoding"),
    [
        ("gzip", "gzip"), (" GZIP ", "gzip"), ("X-Gzip", "x-gzip"), ("identity", ""), ("Identity ", ""), ("", ""),
        ("identity, zstd", "zstd"), ("zstd,identity,", "zstd"), ("gzip,ZSTD", "gzip, zstd"),
        ("gzip, gzip", "gzip, gzip"),
    ],
)  # fmt: skip
def test_an_encoding_is_what_is_not_identity(value: str, encoding: str) -> None:
    assert content_encoding({"content-encoding": value}) == encoding
    assert content_encoding({}) == ""


@in_one_test("encoding", ["br", "compress", "gzip, zstd", "gzip, gzip", "aws-chunked"])
def test_other_encodings_are_refused_with_what_to_send(encoding: str) -> None:
    message = f"content-encoding '{encoding}' is not supported; accepted: gzip, deflate, zstd, one at a time"
    with pytest.raises(UnsupportedMedia, match=f"^{re.escape(message)}$"):
        check_encoding(encoding)
    for good in ("", "gzip", "x-gzip", "deflate", "zstd"):
        check_encoding(good)


def test_a_python_without_zstd_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("backports", "backports.zstd", "compression", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedMedia, match=r"^content-encoding 'zstd' is not supported: this Python has no zstd"):
        list(inflate(zstd.compress(b"a"), "zstd", 1))
