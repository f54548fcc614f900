"""Values to bytes: valid JSON always, one line always."""

from __future__ import annotations

import json
import tracemalloc

from hypothesis import example, given
from hypothesis import strategies as st

from handler.core.framing import FRAMINGS, JSON, JSON_TEXTS, JSONLINES, NUMBER, SLOT, SSE, fill, template
from handler.core.values import Token


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


@given(st.text(), st.integers(-1, 1 << 40), st.sampled_from(["", "\0b", "\0d", '"', "%", "%b", "%%d", "\u2028"]))
def test_a_template_makes_the_same_event(text: str, number: int, name: str) -> None:
    def encode(text: str, number: int) -> bytes:
        return SSE.encode({"model": name, "text": text, "number": number, name: None})

    assert template(encode(SLOT, NUMBER)) % (JSON.encode(text), number) == encode(text, number)


@given(st.lists(st.text()))
def test_each_text_fills_an_event_of_its_own(texts: list[str]) -> None:
    tokens = [Token(1, text, None, False) for text in texts]
    expected = b"".join([SSE.encode(["%", text]) for text in texts])
    assert fill(template(SSE.encode(["%", SLOT])), tokens) == expected


def test_few_texts_are_kept() -> None:
    for number in range(20_000):
        assert JSON_TEXTS[f"{number}"] == b'"%d"' % number
    assert 0 < len(JSON_TEXTS) <= 16384
    long = "x" * 1000
    assert JSON_TEXTS[long] == JSON.encode(long)
    assert long not in JSON_TEXTS


def test_texts_are_kept_at_their_size() -> None:
    tracemalloc.start()
    texts = [f"text {number}" for number in range(1000)]
    assert all(JSON_TEXTS[text] == JSON.encode(text) for text in texts)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size < 500 * len(texts)
