"""Lines and server-sent events, whatever pieces they arrive in."""

from __future__ import annotations

import itertools

import pytest

from handler.core.event_stream import EventReader, LineReader, StreamEvent
from tests.one_test import in_one_test

EVENTS = {
    "data": (b"data: a\n\n", [StreamEvent(b"", b"a", b"")]),
    "no space": (b"data:a\n\n", [StreamEvent(b"", b"a", b"")]),
    "a space of the value": (b"data:  a\n\n", [StreamEvent(b"", b" a", b"")]),
    "a name": (b"event: error\ndata: a\n\n", [StreamEvent(b"error", b"a", b"")]),
    "a name alone": (b"event: error\n\n", [StreamEvent(b"error", b"", b"")]),
    "several lines of data": (b"data: a\ndata\ndata: b\n\n", [StreamEvent(b"", b"a\n\nb", b"")]),
    "a comment": (b": alive\n\ndata: a\n\n", [StreamEvent(b"", b"a", b"")]),
    "comments in an event": (b": x\ndata: a\n:y\n\n", [StreamEvent(b"", b"a", b"x y")]),
    "other fields": (b"id: 1\nretry: 2\nmore: 3\ndata: a\n\n", [StreamEvent(b"", b"a", b"")]),
    "empty data": (b"data\n\ndata:\n\n", [StreamEvent(b"", b"", b""), StreamEvent(b"", b"", b"")]),
    "a byte order mark": (
        b"\xef\xbb\xbfdata: a\n\ndata: b\n\n",
        [StreamEvent(b"", b"a", b""), StreamEvent(b"", b"b", b"")],
    ),
    "a byte order mark later": (b"data: a\n\nx\n\xef\xbb\xbfdata: b\n\n", [StreamEvent(b"", b"a", b"")]),
    "CR LF": (
        b"data: a\r\ndata: b\r\n\r\ndata: c\r\n\r\n",
        [StreamEvent(b"", b"a\nb", b""), StreamEvent(b"", b"c", b"")],
    ),
    "CR": (b"data: a\rdata: b\r\rdata: c\r\r", [StreamEvent(b"", b"a\nb", b""), StreamEvent(b"", b"c", b"")]),
    "all line ends": (
        b"data: a\rdata: b\ndata: c\r\n\rdata: d\n\r\n",
        [StreamEvent(b"", b"a\nb\nc", b""), StreamEvent(b"", b"d", b"")],
    ),
    "CR within what looks like one event": (b"data: a\rdata: b\n\n", [StreamEvent(b"", b"a\nb", b"")]),
    "no end": (b"data: a\n\ndata: b\n", [StreamEvent(b"", b"a", b"")]),
}


@in_one_test("name", EVENTS)
def test_events_are_the_same_wherever_they_are_cut(name: str) -> None:
    body, events = EVENTS[name]
    for start, end in itertools.combinations_with_replacement(range(len(body) + 1), 2):
        reader = EventReader(1000)
        assert [
            event for piece in (body[:start], body[start:end], body[end:]) for event in reader.feed(piece)
        ] == events
    bytewise = EventReader(1000)
    assert [event for at in range(len(body)) for event in bytewise.feed(body[at : at + 1])] == events


def test_an_event_is_complete_with_the_first_byte_of_its_last_line_end() -> None:
    reader = EventReader(1000)
    assert reader.feed(b"data: a\r\n\r") == [StreamEvent(b"", b"a", b"")]
    assert reader.feed(b"\n") == []
    assert reader.feed(b"data: b\n\n") == [StreamEvent(b"", b"b", b"")]


@in_one_test("line", [b"data:\n", b": alive\n", b"data: x\n", b"x"])
def test_an_event_without_an_end_is_given_up(line: bytes) -> None:
    reader = EventReader(100)
    for _ in range(100 // len(line)):
        assert reader.feed(line) == []
    with pytest.raises(ValueError, match="an event has more than 100 bytes"):
        reader.feed(line)


def test_comments_between_events_are_not_part_of_one() -> None:
    reader = EventReader(100)
    for _ in range(101):
        assert reader.feed(b": alive\n\n") == []


@pytest.mark.parametrize("before", [b"", b": alive\n\n", b"data: x\n\n"])
@pytest.mark.parametrize("lines", [[b"x" * 93], [b"x" * 43, b"x" * 43]])
def test_a_whole_event_has_the_same_limit(before: bytes, lines: list[bytes]) -> None:
    event = b"".join(b"data: " + line + b"\n" for line in lines)
    assert len(event) == 100
    assert EventReader(100).feed(before + event + b"\n")[-1].data == b"\n".join(lines)
    with pytest.raises(ValueError, match="an event has more than 100 bytes"):
        EventReader(100).feed(before + event[:-1] + b"x\n\n")


@in_one_test("cut", range(16))
def test_lines_are_the_same_wherever_they_are_cut(cut: int) -> None:
    reader, body = LineReader(100), b"\xef\xbb\xbf{}\n\r\n[1]\r2\r\n3"
    assert [*reader.feed(body[:cut]), *reader.feed(body[cut:])] == [b"{}", b"", b"[1]", b"2"]
    assert reader.partial == b"3"


@in_one_test("first", [b"", b"x" * 100, b"a\n" + b"x" * 100, b"\n"])
def test_a_line_has_a_limit(first: bytes) -> None:
    reader = LineReader(100)
    assert reader.feed(100 * b"x" + b"\n") == [100 * b"x"]
    reader.feed(first)
    with pytest.raises(ValueError, match="a line has more than 100 bytes"):
        reader.feed(b"x" * 101 + b"\nb")
