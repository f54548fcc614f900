"""How a server's bytes become an answer."""

from __future__ import annotations

import asyncio
import ssl

import pytest

from handler.core.errors import ConfigError
from proof.bench.client import MAX_HEAD, BodyReader, Pool, address
from proof.conform.exchange import Recorder
from proof.replay.targets import HttpTarget, _Reader, check_name

HEAD = b"HTTP/1.1 200 OK\r\n"


def read(*pieces: bytes, closed: bool = True) -> _Reader:
    reader = _Reader()
    for piece in pieces:
        reader.feed(piece, 0.0)
    if closed:
        reader.closed()
    return reader


def test_an_informational_answer_is_not_the_answer() -> None:
    hints = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\ncontent-length: 9\r\n\r\n"
    assert not read(hints).complete
    reader = read(hints, hints + HEAD + b"content-length: 2\r\n\r\n{}", closed=False)
    assert (reader.complete, reader.status, bytes(reader.body), reader.headers) == (
        True,
        200,
        b"{}",
        {"content-length": "2"},
    )


@pytest.mark.parametrize(
    ("sent", "complete"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\n", True),
        (b"HTTP/1.0 200 OK\r\n\r\n{}", True),
        (b"HTTP/1.0 200 OK\r\nx: y\r\n", False),
        (HEAD + b"content-length: 3\r\n\r\n{}", False),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", False),
    ],
)
def test_a_connection_that_closes_ends_an_answer_of_unknown_length(sent: bytes, complete: bool) -> None:
    assert read(sent).complete is complete


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"x: ", b"y" * 65536),
        (b"", b"x: y\r\n" * 10000),
        (b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: ", b"y" * 65536),
        (b"transfer-encoding: chunked\r\n\r\n1;x=", b"y" * 65536),
    ],
)
@pytest.mark.parametrize("reader", [BodyReader, Recorder])
def test_headers_have_an_end(reader: type[BodyReader | Recorder], begin: bytes, more: bytes) -> None:
    one = reader()
    one.feed(HEAD + begin, 0.0)
    sent = 0
    while not one.refused and sent < 2 * MAX_HEAD:
        one.feed(more, 0.0)
        sent += len(more)
    assert one.refused == "more than 256 KiB of headers"


@pytest.mark.parametrize("reader", [BodyReader, Recorder])
def test_a_body_may_be_longer_than_headers(reader: type[BodyReader | Recorder]) -> None:
    one = reader()
    one.feed(HEAD + b"transfer-encoding: chunked\r\n\r\n", 0.0)
    for _ in range(MAX_HEAD // 60000 + 2):
        one.feed(b"1\r\na\r\n" * 10000, 0.0)
    one.feed(b"0\r\n\r\n", 0.0)
    assert (one.complete, one.refused) == (True, "")


def test_a_certificate_that_is_not_trusted_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_message = "self-signed certificate"

    async def refuse(self: Pool[BodyReader]) -> None:
        raise error

    monkeypatch.setattr(Pool, "open", refuse)
    with pytest.raises(ConfigError, match="https://h: self-signed certificate: SSL_CERT_FILE names"):
        asyncio.run(HttpTarget("https://h").open())


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://127.0.0.1:port", "http://[::1"])
def test_a_url_that_is_none_is_told(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the URL of a server"):
        address(url)


@pytest.mark.parametrize("url", ["http://user:pass@h:1", "http://h:1/?key=pass", "https://h/#pass"])
def test_a_key_in_a_url_is_refused_without_naming_it(url: str) -> None:
    """Reports and the journal name their targets."""
    with pytest.raises(ValueError, match="--key-to") as refused:
        check_name(url)
    assert "pass" not in str(refused.value)
