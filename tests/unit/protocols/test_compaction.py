"""Summaries of conversations by the model: empty ones, those with reasoning, and engines that fail."""

from __future__ import annotations

from typing import Any

import pytest

from handler.core.errors import GenerationFailed
from handler.core.values import Delta, Finish
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import ParsedRequest
from handler.protocols.registry import ROUTES
from tests.unit.protocols.answers import failing, saying

INPUT = [{"role": "user", "content": "Hello"}, {"type": "compaction_trigger"}]
EMPTY = "the model returned no summary of the conversation"


def parse(path: str = "/v1/responses", **more: Any) -> ParsedRequest:
    input = INPUT if path == "/v1/responses" else INPUT[:1]
    return ROUTES[path].parse({"model": "model", "input": input, **more}, ServerContext("echo"))


def feed(parsed: ParsedRequest, script: list[Delta]) -> str:
    parsed.reply.start(0, 5)
    return b"".join(parsed.reply.feed(0, delta) for delta in script).decode()


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/compact"])
def test_an_empty_summary_is_an_error(path: str) -> None:
    with pytest.raises(GenerationFailed, match=EMPTY):
        feed(parse(path), saying(" \n"))


def test_a_stream_ends_with_the_error_of_an_empty_summary() -> None:
    last = feed(parse(stream=True), saying(" \n", 1)).rpartition("event: ")[2]
    assert last.startswith("response.failed")
    assert f'"message":"{EMPTY}"' in last
    assert '"output":[]' in last


def test_a_stream_whose_engine_fails_has_no_summary() -> None:
    events = feed(parse(stream=True), failing(2))
    assert "response.output_item.done" not in events
    assert '"output":[]' in events.rpartition("event: ")[2]


def test_a_summary_that_is_cut_off_is_used() -> None:
    """It is better than none, without which an agent ends its session."""
    assert '"status":"completed"' in feed(parse(), saying("One, two", 2, Finish.LENGTH))


@pytest.mark.parametrize("stream", [False, True])
def test_the_length_of_a_summary_is_bounded(*, stream: bool) -> None:
    for given, expected in ((None, 8192), (100, 100)):
        [request] = parse(stream=stream, max_output_tokens=given).requests
        assert request.sampling.max_new_tokens == expected
