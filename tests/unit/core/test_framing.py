"""Values to bytes: valid JSON always, one line always."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from handler.core.framing import FRAMINGS, JSON, JSONLINES, SSE, around


@given(st.text())
@example("a\x85b\u2028c\u2029d")
def test_what_is_framed_is_one_line_however_lines_are_split(text: str) -> None:
    for framing in (JSONLINES, SSE):
        lines = framing.encode({"text": text}).decode().splitlines()
        found = [line.removeprefix("data: ") for line in lines if line]
        assert [json.loads(line) for line in found] == [{"text": text}]


def test_ordinary_text_is_raw() -> None:
    assert JSONLINES.encode({"text": "é😀"}) == '{"text":"é😀"}\n'.encode()


def test_what_json_cannot_say_is_null() -> None:
    for framing in FRAMINGS.values():
        assert b'{"logprob":null}' in framing.encode({"logprob": float("-inf")})


@given(st.text(), st.sampled_from(["", "\0text\0", '"']))
def test_what_stands_about_a_text_is_the_same_for_every_text(text: str, name: str) -> None:
    def make(text: str) -> bytes:
        return SSE.encode({"model": name, "text": text, "end": None})

    before, after = around(make)
    assert before + JSON.encode(text) + after == make(text)
