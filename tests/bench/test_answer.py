"""Counting tokens: the same however the bytes are cut."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from proof.bench.client import AnswerReader, BodyReader, Connections, Target

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


JSONLINES = HEAD % b"application/jsonlines" + chunked(
    b'{"token":{"text":"a"}}\n',
    b'{"token":{"text":"b"}}\n{"token":{"te',  # a chunk need not end where a line does
    b'xt":"}\\n"}}\n{"token":{"text":"d"},"generated_text":"abcd"}\n',
)
EVENTS = HEAD % b"text/event-stream" + chunked(
    b": hello\n\n",
    b'data: {"token":{"text":"a"}}\n\nda',
    b'ta: {"token":{"text":"b"},"generated_text":"ab"}\n\n',
    b"data: [DONE]\n\n",
)


def read(answer: bytes, size: int) -> AnswerReader:
    reader = AnswerReader()
    for at in range(0, len(answer), size):
        assert not reader.complete
        reader.feed(answer[at : at + size], float(at))
    return reader


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
@pytest.mark.parametrize(("answer", "tokens"), [(JSONLINES, 4), (EVENTS, 2)])
def test_tokens_are_counted_in_any_pieces(answer: bytes, tokens: int, size: int) -> None:
    reader = read(answer, size)
    assert reader.complete
    assert len(reader.arrivals) == tokens
    assert list(reader.arrivals) == sorted(reader.arrivals)
    assert reader.verdict(tokens) == ""
    assert reader.verdict(tokens + 1) == "wrong number of tokens"


def test_an_error_line_and_a_status_are_errors() -> None:
    failing = HEAD % b"application/jsonlines" + chunked(b'{"token":{"text":"a"}}\n', b'{"error":"no","code":424}\n')
    assert read(failing, 5).verdict(2) == "failed in the stream"
    refusing = b'HTTP/1.1 503 Service Unavailable\r\ncontent-length: 14\r\n\r\n{"error":"no"}'
    assert read(refusing, 5).verdict(2) == "status 503"
    assert read(HEAD % b"application/jsonlines" + chunked(b"<html>\n"), 5).verdict(1) == "not JSON"


def test_an_answer_that_ends_early_is_not_complete() -> None:
    assert not read(JSONLINES[:-3], 10).complete


def test_an_errors_lines_are_no_tokens() -> None:
    reader = AnswerReader()
    body = b"<html>\n<p>no\n</html>\n"
    reader.feed(b"HTTP/1.1 501 Unsupported\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body), 1.0)
    assert (reader.complete, len(reader.arrivals), reader.verdict(4)) == (True, 0, "status 501")


@pytest.mark.parametrize("answers", [2, 1])
def test_a_request_is_sent_again_where_its_idle_connection_was_closed(answers: int) -> None:
    """The server closes each connection after an answer, and does not say so before; then it answers nobody."""
    left = answers
    served: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        served.append(asyncio.current_task())
        with contextlib.closing(writer):
            await reader.readuntil(b"}}")
            if left:
                left -= 1
                line = b'{"token":{}}\n'
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(line), line))
                await reader.read(1)

    async def run() -> list[str]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connections = Connections(Target(f"http://127.0.0.1:{port}", tokens=1))
        results = [await connections.ask(number) for number in range(2)]
        connections.close()
        server.close()
        await asyncio.gather(*filter(None, served))
        await asyncio.sleep(0.05)  # the transports' own ends
        return [result.error for result in results]

    assert asyncio.run(run()) == ["", "" if answers == 2 else "connection cut"]


def test_the_times_of_tiny_pieces_are_bounded() -> None:
    reader = BodyReader()
    reader.feed(HEAD % b"text/plain", 0.0)
    for _ in range(40):
        reader.feed(b"1\r\na\r\n" * 5_000, 0.0)
    assert (len(reader.body), len(reader.pieces)) == (200_000, 1 << 17)
