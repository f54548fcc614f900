"""System messages within Anthropic's conversations: how long they are shown, and the effort that they set.

The rules are those of "Turn-scoped system messages" and "Per-message effort" in Anthropic's documentation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from handler.core.errors import ServingError
from handler.protocols.kernel.dialect import ParsedRequest
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, DIALECTS
from tests.unit.protocols.golden.anthropic import body

ABLE = replace(CAPABLE, chat_template="{{ tools }} <tool_call> {{ tool_calls }} {{ reasoning_effort }}")
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "12 °C"}]}
CALL = {"role": "assistant", "content": [USE]}
ASK, REPLY = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def note(content: Any = "Note.", **more: Any) -> dict[str, Any]:
    return {"role": "system", "content": content, **more}


def once(content: Any = "Note.", **more: Any) -> dict[str, Any]:
    return note(content, clear_at="next_user_message", **more)


def effort(level: str | None, content: Any = ()) -> dict[str, Any]:
    return note([*content], output_config={"effort": level})


def parse(*messages: dict[str, Any], schema: str = "anthropic_messages", **more: Any) -> ParsedRequest:
    return DIALECTS[schema].parse(body(messages=[*messages], **more), ABLE)


NOTE = "<system>\nNote.\n</system>"


@in_one_test(
    ("messages", "texts"),
    [
        ((ASK, once()), [f"a\n{NOTE}"]),
        ((ASK, once(), once([{"type": "text", "text": "Then."}])), [f"a\n{NOTE}\n<system>\nThen.\n</system>"]),
        ((ASK, once(), REPLY), [f"a\n{NOTE}", "b"]),
        ((ASK, once(), REPLY, ASK), ["a", "b", "a"]),
        ((ASK, once(), REPLY, ASK, once()), ["a", "b", f"a\n{NOTE}"]),
        ((ASK, CALL, RESULT, once(), CALL, RESULT), ["a", "", "12 °C", "", "12 °C"]),
        ((ASK, note(clear_at="never"), REPLY, ASK), [f"a\n{NOTE}", "b", "a"]),
        ((ASK, note(clear_at=None), REPLY, ASK), [f"a\n{NOTE}", "b", "a"]),
    ],
)
def test_the_next_message_of_the_user_clears_a_message(messages: Any, texts: list[str]) -> None:
    for schema in ("anthropic_messages", "anthropic_count"):
        parsed = parse(*messages, schema=schema)
        assert [message["content"] for message in parsed.requests[0].messages] == texts
        assert parsed.ignored == []


@in_one_test(
    ("messages", "level"),
    [
        ((ASK,), "high"),
        ((ASK, effort("low")), "low"),
        ((ASK, effort("low"), REPLY, ASK), "low"),
        ((ASK, REPLY, effort("low"), ASK), "low"),
        ((ASK, REPLY, effort("low"), ASK, REPLY, effort("max"), ASK), "max"),
        ((ASK, REPLY, effort("low"), ASK, effort(None, [{"type": "text", "text": "c"}])), "low"),
        ((ASK, REPLY, effort("low")), "high"),
        ((ASK, CALL, RESULT, effort("low")), "high"),
        ((ASK, CALL, effort("low"), RESULT), "high"),
        ((ASK, CALL, effort("low"), RESULT, REPLY, ASK), "low"),
        ((ASK, effort("low"), CALL, RESULT), "low"),
        ((ASK, CALL, {"role": "user", "content": [*RESULT["content"], {"type": "text", "text": "c"}]}, effort("low")),
         "low"),
    ],
)  # fmt: skip
def test_a_message_sets_the_effort_from_the_next_input_on(messages: Any, level: str) -> None:
    parsed = parse(*messages, output_config={"effort": "high"})
    assert dict(parsed.requests[0].template.arguments)["reasoning_effort"] == level
    assert parsed.ignored == []


def test_a_message_that_only_sets_the_effort_shows_nothing() -> None:
    (request,) = parse(ASK, REPLY, effort("low"), ASK, effort("max", [{"type": "text", "text": "Note."}])).requests
    assert [message["content"] for message in request.messages] == ["a", "b", f"a\n{NOTE}"]


def test_an_effort_that_the_template_does_not_read_is_reported() -> None:
    silent = replace(ABLE, chat_template="")
    parsed = DIALECTS["anthropic_messages"].parse(body(messages=[ASK, effort("low")]), silent)
    assert parsed.ignored == ["output_config.effort"]


@in_one_test(
    ("messages", "error"),
    [
        ((ASK, once(), ASK), "messages[1].clear_at: the next message clears this one before the model sees it"),
        ((ASK, note(clear_at="soon")), 'messages[1].clear_at="soon": must be next_user_message or never'),
        ((ASK, once([USE])), "messages[1].content: a message with clear_at must contain only text"),
        ((ASK, once(output_config={})), "messages[1].output_config is not allowed with clear_at"),
        (({**ASK, "clear_at": "never"},), "messages[0].clear_at is allowed only in messages with the role system"),
        (({**ASK, "output_config": {}},), "messages[0].output_config is allowed only in messages with the role system"),
        ((ASK, effort("huge")), "must have an 'effort' that is one of low, medium, high, xhigh, max"),
        ((ASK, note(output_config={"format": {}})), "has an unknown name 'format'; the names are effort"),
        ((ASK, note(output_config=3)), "messages[1].output_config=3: must be an object with 'effort'"),
        ((effort("low"),), "'messages' must contain text for the model"),
    ],
)
def test_invalid_fields_are_named(messages: Any, error: str) -> None:
    with pytest.raises(ServingError) as caught:
        parse(*messages)
    assert error in caught.value.message
