"""Answers that no server should give."""

from __future__ import annotations

import json
import time

from deploy.client.streaming import AnswerReader, Raw
from tests.one_test import in_one_test

_WRONG = [{"message": 5}, {"delta": [1]}, {"index": [], "text": "a"}]


@in_one_test("choice", [None, 1, "text", [1], *_WRONG])
def test_choices_that_are_none(choice: object) -> None:
    reader = AnswerReader("text/event-stream")
    text = f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
    assert [*reader.feed(text), *reader.finish()] == [Raw({"choices": [choice]})]


def test_details_that_are_no_object() -> None:
    value = {"token": {"text": "a"}, "details": "none"}
    reader = AnswerReader("application/jsonlines")
    assert [*reader.feed(json.dumps(value).encode()), *reader.finish()] == [Raw(value)]


def test_nesting_deeper_than_python_goes_is_text() -> None:
    reader = AnswerReader("application/jsonlines")
    text = 100_000 * "[" + 100_000 * "]"
    assert [*reader.feed(text.encode() + b"\n"), *reader.finish()] == [Raw(text)]


def test_a_long_line_is_looked_through_once() -> None:
    """8 MB in pieces of 4 KB took a minute."""
    reader = AnswerReader("text/event-stream")
    began = time.process_time()
    list(reader.feed(b"data: "))
    for _ in range(2048):
        list(reader.feed(4096 * b"x"))
    list(reader.feed(b"\r"))
    [event] = [*reader.feed(b"\n\n"), *reader.finish()]
    assert event == Raw(2048 * 4096 * "x")
    assert time.process_time() - began < 5
