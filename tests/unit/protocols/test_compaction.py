"""Summaries of conversations by the model: empty ones, those with reasoning, failures, and what they replace."""

from __future__ import annotations

import json
from typing import Any

import pytest

from handler.core.errors import GenerationFailed, InvalidPayload
from handler.core.text import Prompt, Vocabulary
from handler.core.values import Delta, Extras, Finish, Request
from handler.protocols.assistant.answer import ResponseForm
from handler.protocols.assistant.summary import BEFORE, PROMPT, Summarizing, SummaryRequest
from handler.protocols.kernel.context import RequestContext, ServerContext
from handler.protocols.kernel.dialect import FollowUp, ParsedRequest
from handler.protocols.kernel.stored import Recalled
from handler.protocols.registry import ROUTES
from handler.protocols.responses.chat import InputReader
from handler.protocols.responses.compaction import after_compaction
from tests.unit.protocols.answers import VOCABULARY, failing, saying

INPUT = [{"role": "user", "content": "Hello"}, {"type": "compaction_trigger"}]
EMPTY = "the model returned no summary of the conversation"


QUOTING = "The model's image is <image>, its end <|im_end|>."
ECHO = ServerContext("echo")
NOTATION = ServerContext("vllm", vocabulary=Vocabulary([b"a", b"<image>", b"<|im_end|>"], special={1, 2}))


def parse(path: str = "/v1/responses", **more: Any) -> ParsedRequest:
    input = INPUT if path == "/v1/responses" else INPUT[:1]
    return ROUTES[path].parse({"model": "model", "input": input, **more}, ECHO)


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


# -- a summary before the response -----------------------------------------------------------------------------------


def above_threshold(context: ServerContext = ECHO, **more: Any) -> ParsedRequest:
    """A request whose prompt exceeds its threshold, as the engine gets it."""
    management = [{"type": "compaction", "compact_threshold": 1}]
    input = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    parsed = ROUTES["/v1/responses"].parse(
        {"model": "model", "input": input, "context_management": management, **more}, context
    )
    [request] = parsed.requests
    assert request.edit is not None
    asked, _ = request.edit(request, lambda _: Prompt("Hello", [1, 2, 3], VOCABULARY))
    assert PROMPT in asked.messages[-1]["content"]
    return parsed._replace(requests=(asked,))


def cached(number: int, script: list[Delta]) -> list[Delta]:
    """A script in which the engine had some tokens of the prompt in its cache."""
    first, *rest = script
    return [first._replace(extras=Extras(num_cached_tokens=number)), *rest]


def test_an_empty_summary_is_an_error_and_no_response() -> None:
    parsed = above_threshold()
    with pytest.raises(GenerationFailed, match=EMPTY):
        feed(parsed, saying(" \n"))
    assert isinstance(parsed.course, FollowUp)
    assert parsed.course.next() is None


def test_a_response_is_not_finished_by_its_summary() -> None:
    for stream in (False, True):
        parsed = above_threshold(stream=stream)
        feed(parsed, cached(2, saying("So far.")))
        assert not parsed.reply.finished
        assert isinstance(parsed.course, FollowUp)
        after = parsed.course.next()
        assert after is not None
        assert [message["content"] for message in after.messages] == [f"Hello\n{BEFORE}So far."]
        assert after.edit is None
        parsed.reply.start(1, 7)
        text = b"".join(parsed.reply.feed(1, delta) for delta in cached(3, saying("Yes."))).decode()
        assert parsed.reply.finished
        last = json.loads(text.rpartition("data: ")[2] if stream else text)
        response = last["response"] if stream else last
        assert [item["type"] for item in response["output"]] == ["compaction", "message"]
        assert (response["status"], response["usage"]["input_tokens"]) == ("completed", 5 + 7)
        assert response["usage"]["input_tokens_details"]["cached_tokens"] == 2 + 3


def test_a_prompt_is_summarized_again_if_its_response_does_not_fit() -> None:
    """If it just fits, the prompt must first grow by a quarter."""
    [request] = parse().requests
    request = request._replace(min_free_tokens=None, fill_context=False)

    def render(one: Request) -> Prompt:
        return Prompt("", [0] * (110 if one.messages else 100), VOCABULARY)

    for num_tokens, due in ((890, False), (891, True)):
        summarizing = Summarizing(
            1,
            lambda: 1000,
            lambda: SummaryRequest(request, ResponseForm()),
            lambda _: request._replace(messages=()),
            "So far.",
        )
        sampling = request.sampling._replace(max_new_tokens=num_tokens)
        summarizing.edit(request._replace(sampling=sampling), render)
        assert summarizing.due is due


def as_text(messages: Any) -> None:
    """Assert that a summary is in the messages, without special tokens."""
    [content] = [message["content"] for message in messages if BEFORE in message["content"]]
    assert not any(mark in content for mark in ("<image>", "<|im_end|>"))
    assert content.replace("\u200b", "").endswith(QUOTING)


def test_special_tokens_that_a_summary_quotes_are_text_in_later_requests() -> None:
    """The response after the summary, and a request with its item: the client cannot change what the item says."""
    parsed = above_threshold(NOTATION)
    feed(parsed, saying(QUOTING))
    assert isinstance(parsed.course, FollowUp)
    after = parsed.course.next()
    assert after is not None
    as_text(after.messages)
    parsed.reply.start(1, 7)
    item = json.loads(b"".join(parsed.reply.feed(1, delta) for delta in saying("Yes.")))["output"][0]
    body = {"model": "model", "input": [item, {"role": "assistant", "content": "Yes."}, INPUT[0]]}
    as_text(ROUTES["/v1/responses"].parse(body, NOTATION).requests[0].messages)
    block = {"type": "compaction", "content": QUOTING}
    talk = [{"role": "assistant", "content": [block]}, {"role": "assistant", "content": "Yes."}, INPUT[0]]
    as_text(ROUTES["/v1/messages"].parse({"max_tokens": 9, "messages": talk}, NOTATION).requests[0].messages)


def test_below_its_threshold_a_request_has_the_response_alone() -> None:
    management = [{"type": "compaction", "compact_threshold": 3}]
    input = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    for stream in (False, True):
        body = {"model": "model", "input": input, "stream": stream, "context_management": management}
        parsed = ROUTES["/v1/responses"].parse(body, ServerContext("echo"))
        [request] = parsed.requests
        assert request.edit is not None
        assert request.edit(request, lambda _: Prompt("Hello", [1, 2, 3], VOCABULARY))[0] is request
        text = feed(parsed, saying("Yes."))
        assert parsed.reply.finished
        last = json.loads(text.rpartition("data: ")[2] if stream else text)
        response = last["response"] if stream else last
        assert [item["type"] for item in response["output"]] == ["message"]
        assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


def test_a_stream_whose_engine_fails_in_the_summary_has_none() -> None:
    events = feed(above_threshold(stream=True), failing(2))
    assert "response.output_item.done" not in events
    assert '"output":[]' in events.rpartition("event: ")[2]


def test_a_summary_calls_no_tools_and_has_no_format() -> None:
    tools = [{"type": "function", "name": "clock", "parameters": {"type": "object"}}]
    format = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}
    more: dict[str, Any] = {"tools": tools, "tool_choice": "required", "max_output_tokens": 3, "stop": ["x"]}
    for shaped in (above_threshold(**more), above_threshold(text=format, structured_outputs=None)):
        [asked] = shaped.requests
        assert asked.sampling.structured_output is None
        assert asked.sampling.stop == ()
        assert asked.sampling.max_new_tokens > 1000


@pytest.mark.parametrize(
    ("before", "read"),
    [
        ("u1 u2", "u1 u2"),  # as /compact returns them
        ("s d u1 u2", "s d u1 u2"),  # as Codex sends them
        ("d u1 a u2 u3", "d u2 u3"),
        ("d u1 d a u2 s a", "d d u2 s"),
        ("u1 call output call output", "u1"),
        ("u1 a u2 call output", "u2"),
        ("u1 item u2 a", "u2"),
        ("a call output", ""),
        ("", ""),
    ],
)
def test_which_items_before_the_last_summary_are_read(before: str, read: str) -> None:
    roles = {"u": "user", "a": "assistant", "s": "system", "d": "developer"}
    types = {"call": "function_call", "output": "function_call_output", "item": "compaction"}

    def item(name: str) -> dict[str, str]:
        return {"type": types[name]} if name in types else {"role": roles[name[0]]}

    after = ["item", "u4", "a"]
    items = [(name, item(name)) for name in [*before.split(), *after]]
    assert [name for name, _ in after_compaction(items)] == [*read.split(), *after]


@pytest.mark.parametrize("status", ["incomplete", "completed"])
def test_a_call_that_was_cut_off_is_nothing_to_summarize(status: str) -> None:
    """The model does not read it, so that both messages stay beside a summary."""
    call = {"type": "function_call", "status": status, "call_id": "a", "name": "f", "arguments": "{"}
    recalled = Recalled(history=[{"type": "message", "role": "user", "content": "a"}, call])
    reader = InputReader(ServerContext("echo"), RequestContext(recalled=recalled))
    output = {"type": "function_call_output", "call_id": "a", "output": "b"}
    reader.read({"input": [*([output] if status == "completed" else []), {"role": "user", "content": "c"}]})
    assert reader.may_compact is (status == "completed")


def test_unknown_names_of_stored_items_are_reported_as_those_of_sent_items() -> None:
    """The words for a stored item may also be in the name of one of its fields."""
    name = "previous_response_id: item 0"
    recalled = Recalled(history=[{"type": "message", "role": "user", "content": "a", name: 1}])
    reader = InputReader(ServerContext("echo"), RequestContext(recalled=recalled))
    reader.read({"input": [{"role": "user", "content": "b", "x": 1}]})
    assert [*reader.unknown] == [f"input[].{name}", "input[].x"]


@pytest.mark.parametrize("lost", [None, 5, "a", ["a"], {"type": 5}])
def test_an_item_that_a_summary_replaces_is_an_item(lost: Any) -> None:
    """It is stored, although the model does not read it."""
    reader = InputReader(ServerContext("echo"), RequestContext())
    summary = reader.summaries.item("cmp_1", "a")
    with pytest.raises(
        InvalidPayload, match=r"^input\[0\] must be an object with 'type', or with 'role' and 'content'$"
    ):
        reader.read({"input": [lost, summary, INPUT[0]]})
