"""Anthropic's context editing: what the model reads after each edit, and what the response says was removed."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from handler.core.errors import InvalidParameter, PromptTooLong
from handler.core.text import Prompt
from handler.core.values import Delta, Request
from handler.protocols.anthropic.api import CompactionUnavailable
from handler.protocols.anthropic.edits import CLEARED
from handler.protocols.kernel.dialect import FollowUp, ParsedRequest, WithoutEngine
from tests.one_test import in_one_test
from tests.unit.protocols.answers import VOCABULARY, failing, saying
from tests.unit.protocols.test_anthropic import HERMES, THOUGHT, parse, talk, text

WORDS = 10 - len(CLEARED.split())
"""The number of words by which clearing shortens a result."""

_OF_THOUGHT = 6  # words of a message's reasoning, which templates find under three names

THINKING, TOOL_USES = "clear_thinking_20251015", "clear_tool_uses_20250919"


def use(number: int, name: str = "read") -> dict[str, Any]:
    return {"type": "tool_use", "id": f"t{number}", "name": name, "input": {"path": f"path{number}"}}


def result(number: int, content: Any = None) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"t{number}", "content": content or " ".join([f"{number}"] * 10)}


def calls(*names: str) -> list[Any]:
    """The contents of a talk in which the model calls a tool once for each name."""
    contents: list[Any] = ["go"]
    for number, name in enumerate(names):
        contents += [[use(number, name)], [result(number)]]
    return contents


def render(request: Request) -> Prompt:
    """Render the messages as JSON, and count its words as tokens."""
    rendered = json.dumps(request.messages)
    return Prompt(rendered, [*range(len(rendered.split()))], VOCABULARY)


def edited(parsed: ParsedRequest, rendering: Any = render) -> list[Any]:
    """The messages that the model reads."""
    (request,) = parsed.requests
    prompt = rendering(request) if request.edit is None else request.edit(request, rendering)[1]
    messages: list[Any] = json.loads(prompt.text)
    return messages


def shown(parsed: ParsedRequest) -> Any:
    """The field `context_management` of the response."""
    parsed.reply.start(0, 5)
    return json.loads(b"".join(parsed.reply.feed(0, delta) for delta in saying("ok")))["context_management"]


def clearing(*contents: Any, **edit: Any) -> ParsedRequest:
    return parse(talk(*contents, context_management={"edits": [{"type": TOOL_USES, **edit}]}))


def tokens(value: int) -> dict[str, Any]:
    return {"type": "input_tokens", "value": value}


def uses(value: int) -> dict[str, Any]:
    return {"type": "tool_uses", "value": value}


def results_of(parsed: ParsedRequest) -> list[bool]:
    """Whether each result is still there."""
    return [message["content"] != CLEARED for message in edited(parsed) if message["role"] == "tool"]


@in_one_test(
    ("edit", "kept"),
    [
        ({"keep": "all"}, [True, True, True]),
        ({"keep": {"type": "all"}}, [True, True, True]),
        ({"keep": {"type": "thinking_turns", "value": 2}}, [False, True, True]),
        ({"keep": {"type": "thinking_turns", "value": 9}}, [True, True, True]),
        ({}, [False, False, True]),
    ],
)
def test_thoughts_are_cleared_but_the_last(edit: dict[str, Any], kept: list[bool]) -> None:
    turns = ["a", [THOUGHT, text("A")], "b", [THOUGHT, text("B")], "c", "C", "d", [THOUGHT, text("D")], "e"]
    parsed = parse(talk(*turns, context_management={"edits": [{"type": THINKING, **edit}]}))
    said = edited(parsed)
    assert ["reasoning_content" in message for message in said if message["content"] in ("A", "B", "D")] == kept
    assert [message["content"] for message in said] == [*"aAbBcCdDe"]
    [applied] = shown(parsed)["applied_edits"] or [None]
    if all(kept):
        assert applied is None
        assert parsed.requests[0].edit is None, "nothing is counted"
    else:
        words = kept.count(False) * _OF_THOUGHT
        assert applied == {"type": THINKING, "cleared_input_tokens": words, "cleared_thinking_turns": kept.count(False)}


@in_one_test(
    ("edit", "kept"),
    [
        ({}, [True] * 5),
        ({"trigger": tokens(10)}, [False, False, True, True, True]),
        ({"trigger": uses(5)}, [True] * 5),
        ({"trigger": uses(4)}, [False, False, True, True, True]),
        ({"trigger": uses(4), "keep": uses(1)}, [False, False, False, False, True]),
        ({"trigger": uses(4), "keep": uses(0)}, [False] * 5),
        ({"trigger": uses(4), "keep": uses(9)}, [True] * 5),
        ({"trigger": tokens(10), "exclude_tools": ["a"]}, [True, False, True, True, True]),
        ({"trigger": tokens(10), "exclude_tools": ["a", "b"]}, [True] * 5),
        ({"trigger": tokens(10), "clear_at_least": tokens(2 * WORDS)}, [False, False, *[True] * 3]),
        ({"trigger": tokens(10), "clear_at_least": tokens(2 * WORDS + 1)}, [True] * 5),
    ],
)  # fmt: skip
def test_the_oldest_results_of_tools_are_cleared(edit: dict[str, Any], kept: list[bool]) -> None:
    parsed = clearing(*calls("a", "b", "a", "b", "a"), **edit)
    assert results_of(parsed) == kept
    num = kept.count(False)
    expected = [{"type": TOOL_USES, "cleared_input_tokens": num * WORDS, "cleared_tool_uses": num}] if num else []
    assert shown(parsed) == {"applied_edits": expected}


@in_one_test(
    ("inputs", "kept"),
    [(None, [1, 1, 1]), (False, [1, 1, 1]), (True, [0, 0, 1]), (["b"], [1, 0, 1]), ([], [1, 1, 1])],
)
def test_arguments_are_cleared_with_the_results(inputs: Any, kept: list[int]) -> None:
    parsed = clearing(*calls("a", "b", "a"), trigger=uses(1), keep=uses(1), clear_tool_inputs=inputs)
    arguments = [call["function"]["arguments"] for message in edited(parsed) for call in message.get("tool_calls", ())]
    assert [len(argument) for argument in arguments] == kept


def test_a_threshold_is_compared_with_the_rendered_prompt() -> None:
    """It must be exceeded."""
    contents = calls("a", "b", "a", "b")
    num_tokens = len(render(clearing(*contents).requests[0]).ids)
    for value, kept in ((num_tokens, True), (num_tokens - 1, False)):
        assert results_of(clearing(*contents, trigger=tokens(value))) == [kept, True, True, True]


def test_below_its_threshold_a_prompt_is_rendered_once() -> None:
    rendered = []

    def rendering(request: Request) -> Prompt:
        rendered.append(request)
        return render(request)

    parsed = clearing(*calls("a", "b", "a", "b"))
    edited(parsed, rendering)
    assert rendered == [parsed.requests[0]]
    for nothing in (clearing(*calls("a", "b", "a"), trigger=tokens(1)), clearing(*calls("a"), trigger=uses(1))):
        assert nothing.requests[0].edit is None


def test_an_edited_prompt_is_that_of_a_client_which_clears() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aQ=="}}
    other = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "ag=="}}

    def contents(first: Any) -> list[Any]:
        seen = [[image], [use(0), use(1)], [result(0, first), result(1, [text("b"), other])]]
        return [*seen, [text("so"), use(2)], [result(2)]]

    edits = {"edits": [{"type": TOOL_USES, "trigger": uses(1), "keep": uses(2)}]}
    sighted = replace(HERMES, no_media={"image": ""})
    parsed = parse(talk(*contents([text("a"), other, image]), context_management=edits), context=sighted)
    expected = parse(talk(*contents(CLEARED)), context=sighted)
    assert edited(parsed) == [*expected.requests[0].messages]
    rendered: list[Request] = []

    def rendering(request: Request) -> Prompt:
        rendered.append(request)
        return render(request)

    edited(parsed, rendering)
    assert rendered[-1].media == expected.requests[0].media
    assert len(rendered[0].media) == len(rendered[-1].media) + 2


def test_both_edits_apply_in_their_order() -> None:
    contents = calls("a", "b")
    for index in (1, 3):
        contents[index] = [THOUGHT, *contents[index]]
    whole = len(render(parse(talk(*contents)).requests[0]).ids)
    for trigger, applied in ((whole - _OF_THOUGHT, [THINKING]), (whole - _OF_THOUGHT - 1, [THINKING, TOOL_USES])):
        edits = [{"type": THINKING}, {"type": TOOL_USES, "trigger": tokens(trigger), "keep": uses(1)}]
        parsed = parse(talk(*contents, context_management={"edits": edits}))
        prompt = edited(parsed)
        shows = shown(parsed)["applied_edits"]
        assert [edit["type"] for edit in shows] == applied
        removed = sum(edit["cleared_input_tokens"] for edit in shows)
        assert len(json.dumps(prompt).split()) == whole - removed


def test_results_that_load_tools_are_kept() -> None:
    found = [{"type": "tool_reference", "tool_name": "read"}]
    contents = ["go", [use(0, "search"), use(1)], [result(0, found), result(1)]]
    parsed = clearing(*contents, trigger=uses(1), keep=uses(0))
    assert results_of(parsed) == [True, False]


def test_a_prompt_that_is_too_long_to_be_tokenized_is_edited() -> None:
    """Its number of tokens is known only at least."""

    def rendering(request: Request) -> Prompt:
        prompt = render(request)
        if len(prompt.ids) > most:
            raise PromptTooLong("messages", most + 1, most, exact=False)
        return prompt

    contents = calls(*"abcdef")
    most = len(render(clearing(*contents).requests[0]).ids) - 5 * WORDS
    parsed = clearing(*contents, trigger=tokens(50), keep=uses(0))
    messages = edited(parsed, rendering)
    assert [message["content"] for message in messages if message["role"] == "tool"] == [CLEARED] * 6
    removed = most + 1 - len(json.dumps(messages).split())
    assert shown(parsed)["applied_edits"][0]["cleared_input_tokens"] == removed > 0
    for edit in ({"trigger": tokens(most + 1)}, {"trigger": tokens(50), "keep": uses(5)}):
        with pytest.raises(PromptTooLong):
            edited(clearing(*contents, **edit), rendering)


def test_a_count_says_what_it_was_before_the_edits() -> None:
    for trigger, cleared in ((10, True), (1000, False)):
        edits = {"edits": [{"type": TOOL_USES, "trigger": tokens(trigger), "keep": uses(0)}]}
        parsed = parse(talk(*calls("a", "b"), context_management=edits), "anthropic_count")
        (request,) = parsed.requests
        assert request.edit is not None
        assert isinstance(parsed.course, WithoutEngine)
        original = len(render(request).ids)
        parsed.course.take(request.edit(request, render)[1])
        count = json.loads(parsed.reply.feed(0, saying("")[-1]))
        assert count["context_management"] == {"original_input_tokens": original}
        assert count["input_tokens"] == original - cleared * 2 * WORDS


def test_a_stream_says_what_was_removed_at_its_end() -> None:
    edits = {"edits": [{"type": TOOL_USES, "trigger": uses(1), "keep": uses(1)}]}
    parsed = parse(talk(*calls("a", "b"), context_management=edits, stream=True))
    edited(parsed)
    parsed.reply.start(0, 5)
    stream = b"".join(parsed.reply.feed(0, delta) for delta in saying("ok")).decode()
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    [told] = [event for event in events if "context_management" in event]
    assert told["type"] == "message_delta"
    assert told["context_management"]["applied_edits"][0]["cleared_tool_uses"] == 1
    assert "context_management" not in events[0]["message"]


@in_one_test(
    ("edits", "message"),
    [
        ([{"type": "compact_2"}], "the available edits are"),
        ([{"type": TOOL_USES}, {"type": THINKING}], f"must begin with the edit of the type {THINKING}"),
        ([{"type": TOOL_USES}] * 2, f"may have only one edit of the type {TOOL_USES}"),
        ([{"type": TOOL_USES, "trigger": 5}], "'trigger' must be an object with 'type': 'input_tokens' or 'tool_uses'"),
        ([{"type": TOOL_USES, "trigger": tokens(0)}], "trigger.value=0: must be an integer from 1"),
        ([{"type": TOOL_USES, "trigger": tokens(True)}], "trigger.value=true: must be an integer"),
        ([{"type": TOOL_USES, "keep": tokens(1)}], "'keep' must be an object with 'type': 'tool_uses'"),
        ([{"type": TOOL_USES, "keep": uses(-1)}], "keep.value=-1: must be an integer from 0"),
        ([{"type": TOOL_USES, "clear_at_least": uses(1)}], "'clear_at_least' must be an object with 'type': 'input_"),
        ([{"type": TOOL_USES, "exclude_tools": "a"}], 'exclude_tools="a": must be a list of tool names'),
        ([{"type": TOOL_USES, "clear_tool_inputs": [1]}], "clear_tool_inputs=[1]: must be a list of tool names"),
        ([{"type": TOOL_USES, "kept": 1}], "has an unknown name 'kept'; the names are type, trigger, keep, "),
    ],
)
def test_refusals_name_what_is_wrong_in_an_edit(edits: list[Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(message)):
        parse(talk("a", context_management={"edits": edits}))


# -- summaries that the model does not write ---------------------------------------------------------------------------


def compacting(**more: Any) -> ParsedRequest:
    """A request whose conversation is summarized, as the engine gets it."""
    edit = {"type": "compact_20260112", "trigger": tokens(1), **more.pop("edit", {})}
    parsed = parse(talk("a", "b", "c", context_management={"edits": [edit]}, **more))
    [request] = parsed.requests
    assert request.edit is not None
    first, _ = request.edit(request, render)
    parsed.reply.start(0, 5)
    return parsed._replace(requests=(first,))


def feed(parsed: ParsedRequest, index: int, script: list[Delta]) -> str:
    return b"".join(parsed.reply.feed(index, delta) for delta in script).decode()


def test_without_a_summary_the_model_responds_to_the_conversation() -> None:
    """It does not pause either."""
    for stream, edit in itertools.product((False, True), ({}, {"pause_after_compaction": True})):
        parsed = compacting(stream=stream, edit=edit)
        events = feed(parsed, 0, saying(" \n"))
        assert isinstance(parsed.course, FollowUp)
        following = parsed.course.next()
        assert following is not None
        assert [message["content"] for message in following.messages] == ["a", "b", "c"]
        assert not parsed.reply.finished
        parsed.reply.start(1, 7)
        events += feed(parsed, 1, saying("ok"))
        assert parsed.reply.finished
        assert '"content":null' in events
        assert '"stop_reason":"end_turn"' in events
        if not stream:
            message = json.loads(events)
            assert message["content"][0] == {"type": "compaction", "content": None}
            assert [each["type"] for each in message["usage"]["iterations"]] == ["compaction", "message"]
            assert message["usage"]["input_tokens"] == 7


def test_an_engine_that_fails_in_a_summary_fails_the_response() -> None:
    parsed = compacting(stream=True)
    events = feed(parsed, 0, failing(2))
    assert events.rpartition("event: ")[2].startswith("error")
    assert "content_block_delta" not in events


@in_one_test("stream", [False, True])
def test_a_summary_on_request_that_is_empty_is_unavailable(stream: bool) -> None:
    parsed = parse(talk("a", "b", "c", compaction={"type": "summarize"}, stream=stream))
    parsed.reply.start(0, 5)
    if stream:
        last = json.loads(feed(parsed, 0, saying(" ", 1)).rpartition("data: ")[2])
    else:
        with pytest.raises(CompactionUnavailable) as raised:
            feed(parsed, 0, saying(" ", 1))
        response = parsed.errors.whole(raised.value)
        assert response.status == 529
        last = json.loads(response.body)
    error = last["error"]
    assert (error["type"], error["details"]) == ("overloaded_error", {"error_code": "compaction_unavailable"})


def test_a_summary_calls_no_tools_and_has_no_format() -> None:
    tools = [{"name": "read", "input_schema": {"type": "object"}}]
    format = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    more: dict[str, Any] = {"tools": tools, "tool_choice": {"type": "any"}, "stop_sequences": ["x"]}
    summarize = {"compaction": {"type": "summarize"}}
    for shaped in (
        compacting(**more),
        compacting(output_config=format),
        parse(talk("a", **more, **summarize)),
        parse(talk("a", output_config=format, **summarize)),
    ):
        sampling = shaped.requests[0].sampling
        assert (sampling.structured_output, sampling.stop) == (None, ())
    assert compacting(**more).requests[0].sampling.max_new_tokens == 8192
