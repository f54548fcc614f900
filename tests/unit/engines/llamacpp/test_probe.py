"""A server's tokenizer is compared with that of the model's files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from handler.engines.llamacpp.probe import Probe
from handler.engines.remote.servers import Busy, Failed, Lasting, Refused

PROBE = Probe("some text", [4, 5, 6, 7], "some text")


def difference(ids: Any, text: Any = "some text") -> str:
    """Ask a server that has these token ids and this text, or fails with them."""
    asked: list[Mapping[str, Any]] = []

    def responding(name: str, value: Any) -> Any:
        async def respond(body: Mapping[str, Any]) -> bytes:
            asked.append(body)
            if isinstance(value, Exception):
                raise value
            return value if isinstance(value, bytes) else json.dumps({name: value}).encode()

        return respond

    found = asyncio.run(PROBE.difference(responding("tokens", ids), responding("content", text)))
    assert asked[0] == {"content": PROBE.text, "add_special": False, "parse_special": True}
    assert asked[1:] in ([], [{"tokens": list(PROBE.ids)}])
    return found


def test_the_same_ids_are_no_difference() -> None:
    assert difference([4, 5, 6, 7], Failed("is not asked")) == ""


def test_another_division_is_told_from_the_first_other_token() -> None:
    assert difference([4, 5, 9, 7, 1]) == "it has [9, 7, 1] instead of [6, 7]"
    assert difference([9] * 20) == f"it has {[9] * 8} instead of [4, 5, 6, 7]"


def test_another_vocabulary_is_a_failure_that_lasts() -> None:
    for text in ("other text", Failed("answered 500")):
        with pytest.raises(Lasting, match=r"has another tokenizer than option\.model_id") as failed:
            difference([1, 2], text)
        assert "it reads the token ids [4, 5, 6, 7], …" in failed.value.detail


def test_a_server_that_cannot_be_asked_has_no_known_difference() -> None:
    assert difference(Lasting("has no such route")) == ""
    assert difference([1], Lasting("has no such route")) == ""


@pytest.mark.parametrize(
    ("ids", "text", "words"),
    [
        (Busy("is busy"), "", "is busy"),
        ([1], Busy("is busy"), "is busy"),
        (Refused(400, "no"), "", "refused the request with 400"),
        ("4", "", "sent token ids that cannot be read"),
        ([1], b"{}", "sent a text that cannot be read"),
        ([1], b"[]", "sent a text that cannot be read"),
        ([1], b"?", "sent a text that cannot be read"),
    ],
)
def test_other_failures_are_told(ids: Any, text: Any, words: str) -> None:
    with pytest.raises(Failed) as failed:
        difference(ids, text)
    assert failed.value.plain == words
