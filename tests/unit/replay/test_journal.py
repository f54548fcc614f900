"""A run of `lmi replay`: its journal, and a server's bytes as an answer."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest

from handler.core.errors import ConfigError
from proof.bench.client import MAX_HEAD, BodyReader, Pool, address
from proof.conform.exchange import Recorder
from proof.replay.comparison import Class
from proof.replay.journal import Journal, Outcome
from proof.replay.targets import HttpTarget, ResponseReader, check_name

# -- the journal of a run, and what keeps it whole ---------------------------------------------------------------------


RUN = {"requests": "requests.jsonl"}
EQUAL = Outcome(0, Class.EQUAL, (), (None, None), (0, 0))


def test_a_directory_has_one_run_at_a_time(tmp_path: Path) -> None:
    first = Journal(tmp_path, RUN)
    first.add(EQUAL)
    for restart in (False, True):
        with pytest.raises(ConfigError, match="another lmi replay is using it"):
            Journal(tmp_path, RUN, restart=restart)
    first.close()
    second = Journal(tmp_path, RUN)
    assert second.num_done == 1
    second.close()


@pytest.mark.parametrize("restart", [False, True])
def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path, restart: bool) -> None:
    (tmp_path / "journal.jsonl").write_text("dear diary\n")
    with pytest.raises(ConfigError, match=r"contains a journal\.jsonl of another program"):
        Journal(tmp_path, RUN, restart=restart)
    assert (tmp_path / "journal.jsonl").read_text() == "dear diary\n"


def test_a_first_line_that_a_full_disk_cut_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text('{"ru')
    journal = Journal(tmp_path, RUN)
    journal.close()
    assert (tmp_path / "journal.jsonl").read_text() == '{"run":{"requests":"requests.jsonl"}}\n'


class Full:
    """A file on a full disk."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        self._file.close()


def test_a_full_disk_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, RUN)
    monkeypatch.setattr(journal, "_file", Full(journal._file))
    with pytest.raises(ConfigError, match=f"--output {tmp_path}: No space left on device"):
        journal.add(EQUAL)
    journal.close()


def test_what_is_volatile_is_known_when_a_run_goes_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {"to": "a"})
    journal.keep_volatile({"/generate: value $.id": "text"})
    journal.keep_volatile({"/generate: value $.id": "text", "/chat: value $.created": "text"})
    journal.close()
    journal = Journal(tmp_path, {"to": "a"})
    journal.close()
    assert journal.summary.volatile == {"/generate: value $.id": "text", "/chat: value $.created": "text"}


# -- how a server's bytes become an answer -----------------------------------------------------------------------------


HEAD = b"HTTP/1.1 200 OK\r\n"


def read(*pieces: bytes, closed: bool = True) -> ResponseReader:
    reader = ResponseReader()
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
