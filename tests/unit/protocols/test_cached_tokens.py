"""What an engine had in its prefix cache, in the counts of the dialects that have a field for it."""

from __future__ import annotations

import json
from typing import Any

from handler.core.values import Delta, Extras
from tests.one_test import in_one_test
from tests.unit.protocols.answers import answer, deltas

CHAT = {"messages": [{"role": "user", "content": "a b"}]}
ASKED: dict[str, dict[str, Any]] = {
    "openai_chat": {**CHAT, "stream_options": {"include_usage": True}},
    "openai_completions": {"prompt": ["a b", "c d"], "stream_options": {"include_usage": True}},
    "openai_responses": {"input": "a b"},
    "anthropic_messages": {**CHAT, "max_tokens": 9},
}


def with_cached(number: int, sequence: int = 0) -> list[Delta]:
    first, *rest = deltas(sequence)
    return [first._replace(extras=Extras(num_cached_tokens=number)), *rest]


def usages(body: bytes) -> list[dict[str, Any]]:
    """All counts in an answer, in order."""
    lines = [line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith((b"data: {", b"{"))]
    found: list[dict[str, Any]] = []
    for value in map(json.loads, lines):
        holders = (value, value.get("message") or {}, value.get("response") or {})
        found += [holder["usage"] for holder in holders if holder.get("usage")]
    return found


@in_one_test("stream", [False, True])
@in_one_test("dialect", [*ASKED])
def test_a_count_of_the_prompts_cached_tokens(dialect: str, stream: bool) -> None:
    body = {**ASKED[dialect], "stream": stream}
    if not stream:
        body.pop("stream_options", None)
    told = usages(answer(dialect, body, with_cached(1)).body)
    assert told
    match dialect:
        case "openai_chat":
            assert told[-1]["prompt_tokens_details"] == {"cached_tokens": 1}
        case "openai_completions":
            assert told[-1]["prompt_tokens_details"] == {"cached_tokens": 2}  # one of each prompt
        case "openai_responses":
            assert told[-1]["input_tokens_details"]["cached_tokens"] == 1
            assert told[-1]["input_tokens"] == 2
        case _:
            assert [(one["input_tokens"], one["cache_read_input_tokens"]) for one in told] == [(1, 1)] * len(told)


def test_samples_of_one_prompt_count_it_once() -> None:
    script = [delta for sequence in range(2) for delta in with_cached(1 + sequence, sequence)]
    for stream in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        told = usages(answer("openai_chat", {**CHAT, "n": 2, "temperature": 1, **stream}, script).body)
        assert told[-1]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_an_engine_that_says_nothing_leaves_the_details_out() -> None:
    (told,) = usages(answer("openai_chat", CHAT).body)
    assert "prompt_tokens_details" not in told
