"""Paths and query strings, compared with the standard library, and their limits."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, unquote

import pytest

from handler.core.errors import BadRequest
from handler.http.urls import query_of, unquoted


@pytest.mark.parametrize(
    "text",
    ["", "a", "%", "%%", "%4", "%41", "%4g", "%%41", "%2541", "a%20b", "%C3%A4", "%c3", "%c3x%a4", "%E2%82%AC%", "+"],
)
def test_a_text_is_unquoted_as_by_the_standard_library(text: str) -> None:
    assert unquoted(text.encode()) == unquote(text)
    query: Any = {"query_string": f"a={text}&{text}=b&&c".encode()}
    assert query_of(query) == parse_qsl(query["query_string"].decode(), keep_blank_values=True)


def test_bytes_that_are_not_utf_8_can_be_kept() -> None:
    assert unquoted(b"%ff", "surrogateescape").encode(errors="surrogateescape") == b"\xff"


def test_a_query_has_at_most_1000_parameters() -> None:
    assert len(query_of({"query_string": b"&".join([b"a=b"] * 1000)})) == 1000
    with pytest.raises(BadRequest, match=r"^the query has more than 1000 parameters$"):
        query_of({"query_string": b"&" * 1000})
