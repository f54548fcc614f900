"""No dialect says that a call is whole whose arguments are no JSON object, whole or streamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from handler.core.framing import is_too_deep
from handler.core.values import Finish
from tests.one_test import in_one_test
from tests.unit.protocols import answers
from tests.unit.protocols.answers import CAPABLE, answer
from tests.unit.protocols.openai.requests import CITY, saying

TALK = [{"role": "user", "content": "hi"}]
CHAT = {"messages": TALK, "tools": [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]}
RESPONSE = {"input": "hi", "tools": [{"type": "function", "name": "weather", "parameters": CITY}]}
MESSAGE = {"messages": TALK, "max_tokens": 10_000, "tools": [{"name": "weather", "input_schema": CITY}]}


class Said(NamedTuple):
    """Each call's arguments as far as they came, the word for the answer's end, and whether it says they are whole."""

    arguments: list[str]
    reason: str
    whole: bool


def values(body: bytes) -> list[dict[str, Any]]:
    """A stream's values, or the one of a whole answer."""
    lines = [line.removeprefix("data: ") for line in body.decode().splitlines() if not line.startswith("event:")]
    return [json.loads(line) for line in lines if line and line != "[DONE]"]


def chat(found: list[dict[str, Any]]) -> Said:
    choices = [chunk["choices"][0] for chunk in found]
    texts: dict[int, str] = {}
    for choice in choices:
        for index, call in enumerate(choice.get("delta", choice.get("message", {})).get("tool_calls") or ()):
            at = call.get("index", index)
            texts[at] = texts.get(at, "") + call["function"]["arguments"]
    reason = choices[-1]["finish_reason"]
    return Said([*texts.values()], reason, reason == "tool_calls")


def messages(found: list[dict[str, Any]]) -> Said:
    if len(found) == 1:
        inputs = [json.dumps(block["input"]) for block in found[0]["content"] if block["type"] == "tool_use"]
        return Said(inputs, found[0]["stop_reason"], found[0]["stop_reason"] == "tool_use")
    texts = {event["index"]: "" for event in found if event.get("content_block", {}).get("type") == "tool_use"}
    for event in found:
        if event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            texts[event["index"]] += event["delta"]["partial_json"]
    reason = found[-2]["delta"]["stop_reason"]
    return Said([*texts.values()], reason, reason == "tool_use")


def responses(found: list[dict[str, Any]]) -> Said:
    response = found[-1].get("response") or found[-1]
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    done = [event["item"] for event in found if event.get("type") == "response.output_item.done"]
    assert len(found) == 1 or done == response["output"]
    assert len(found) == 1 or found[-1]["type"] == f"response.{response['status']}"
    for call in calls:
        assert call["status"] == ("completed" if isinstance(load(call["arguments"]), dict) else "incomplete")
    ended = [event["arguments"] for event in found if event.get("type") == "response.function_call_arguments.done"]
    assert len(found) == 1 or ended == [call["arguments"] for call in calls if call["status"] == "completed"]
    whole = response["status"] == "completed" and all(call["status"] == "completed" for call in calls)
    return Said([call["arguments"] for call in calls], response["status"], whole)


DIALECTS: dict[str, tuple[str, dict[str, Any], Callable[[list[dict[str, Any]]], Said]]] = {
    "openai": ("openai_chat", CHAT, chat),
    "tgi": ("openai_chat", {**CHAT, "model": "tgi"}, chat),
    "lmi": ("lmi", {**CHAT, "max_tokens": 10_000}, chat),
    "tgi_compat": ("tgi_compat", {**CHAT, "max_tokens": 10_000}, chat),
    "responses": ("openai_responses", RESPONSE, responses),
    "messages": ("anthropic_messages", MESSAGE, messages),
}
_each = in_one_test("dialect", DIALECTS)
_both = in_one_test("stream", [False, True], ids=["whole", "stream"])

BEGIN = '<tool_call>{"name": "weather", "arguments": '


def ask(dialect: str, text: str, finish: Finish = Finish.EOS, *, stream: bool, **more: Any) -> Said:
    schema, body, read = DIALECTS[dialect]
    return read(values(answer(schema, {**body, **more, "stream": stream}, saying(text, 3, finish), CAPABLE).body))


def load(text: str) -> Any:
    """Return the JSON of a text; None where it is none, or nested deeper than anyone can send it back."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        value = json.loads(text, parse_constant=refuse)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return None if is_too_deep(value, text) else value


@_both
@_each
def test_a_raw_line_end_in_a_string_is_a_line_end(dialect: str, stream: bool) -> None:
    said = ask(dialect, BEGIN + '{"city": "a\nb\tc"}}</tool_call>', stream=stream)
    assert said.whole
    assert [load(text) for text in said.arguments] == [{"city": "a\nb\tc"}]


@_both
@_each
def test_the_end_token_closes_what_is_open(dialect: str, stream: bool) -> None:
    said = ask(dialect, BEGIN + '{"city": ["a", "b', stream=stream)
    assert said.whole
    assert [load(text) for text in said.arguments] == [{"city": ["a", "b"]}]


BROKEN = {
    "half a string": ('{"city": "K', Finish.LENGTH),
    "half a string at a stop string": ('{"city": "K', Finish.STOP),
    "half a number": ('{"city": 12', Finish.EOS),
    "half a word": ('{"city": tru', Finish.EOS),
    "half a key": ('{"city": 1, "days', Finish.EOS),
    "an escape that is none": ('{"city": "\\x"}}</tool_call>', Finish.EOS),
    "single quotes": ("{'city': 'K'}}</tool_call>", Finish.EOS),
    "NaN": ('{"city": NaN}}</tool_call>', Finish.EOS),
    "a number beyond all floats": ('{"city": 1e999}}</tool_call>', Finish.EOS),
    "half a surrogate pair": ('{"city": "\\ud800"}}</tool_call>', Finish.EOS),
    "a trailing comma": ('{"city": "K",}}</tool_call>', Finish.EOS),
    "depth": ('{"city": ' + "[" * 5000 + "]" * 5000 + "}}</tool_call>", Finish.EOS),
    "a mark amid the arguments": ('{"city": \n</tool_call> so', Finish.EOS),
    "a whole call before it": ('{"city": "K"}}</tool_call>' + BEGIN + '{"city": "K', Finish.LENGTH),
    "a whole call after it": ('{"city": \n</tool_call>' + BEGIN + '{"city": "K"}}</tool_call>', Finish.EOS),
}


@_both
@_each
@in_one_test("broken", BROKEN)
def test_what_is_no_json_is_not_said_to_be_whole(dialect: str, broken: str, stream: bool) -> None:
    text, finish = BROKEN[broken]
    said = ask(dialect, BEGIN + text, finish, stream=stream)
    assert not said.whole
    assert [load(text) for text in said.arguments if load(text) is not None] in ([], [{"city": "K"}])
    ends = {"openai": "stop", "tgi": "stop", "lmi": finish.value, "tgi_compat": finish.value}
    end = {**ends, "responses": "incomplete", "messages": "end_turn"}[dialect]
    if finish is Finish.LENGTH:
        end = {"responses": "incomplete", "messages": "model_context_window_exceeded"}.get(dialect, "length")
    assert said.reason == end


@_both
@_each
def test_a_cut_before_the_arguments_is_no_call(dialect: str, stream: bool) -> None:
    said = ask(dialect, "<tool_call>", Finish.LENGTH, stream=stream)
    assert said.arguments == []


@_both
@in_one_test("dialect", ["openai", "tgi", "lmi", "tgi_compat"])
def test_a_named_function_ends_with_stop_only_where_it_is_whole(dialect: str, stream: bool) -> None:
    named: dict[str, Any] = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
    whole = ask(dialect, '{"city": "a"}', stream=stream, **named)
    assert whole.reason == ("eos_token" if dialect in ("lmi", "tgi_compat") else "stop")
    cut = ask(dialect, '{"city": "a', Finish.STOP, stream=stream, **named)
    assert cut.reason == "length"


@_both
def test_a_call_that_is_not_shown_breaks_none(stream: bool) -> None:
    two = BEGIN + '{"city": "K"}}</tool_call>' + BEGIN + '{"city": NaN}}</tool_call>'
    assert ask("openai", two, stream=stream, parallel_tool_calls=False).whole


def test_what_came_of_a_broken_call_is_the_text_of_a_whole_message() -> None:
    found = answer("anthropic_messages", MESSAGE, saying(BEGIN + '{"city": "Kö', 3, Finish.LENGTH), CAPABLE)
    assert json.loads(found.body)["content"] == [{"type": "text", "text": 'weather {"city": "Kö'}]


@_both
@_each
def test_a_long_number_arrives_with_all_its_digits(dialect: str, stream: bool) -> None:
    said = ask(dialect, BEGIN + f'{{"city": {"7" * 30}}}}}</tool_call>', stream=stream)
    assert said.whole
    assert [load(text) for text in said.arguments] == [{"city": int("7" * 30)}]


@in_one_test("city", ["1e999", '"\\ud800"'])
def test_an_input_that_many_readers_refuse_is_text(city: str) -> None:
    said = BEGIN + '{"city": %s}}</tool_call>' % city  # noqa: UP031 braces
    value = json.loads(answer("anthropic_messages", MESSAGE, saying(said), CAPABLE).body)
    assert (value["stop_reason"], value["content"][0]["text"]) == ("end_turn", f'weather {{"city": {city}}}')


@in_one_test("text", ['{"city": "Kö', "[]", "{'city': 1}", '{"city": "\\ud800"}', "[" * 5000])
def test_a_broken_call_in_the_history_ends_no_conversation(text: str) -> None:
    """A client sends back what it got, with the error that it met."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": text}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "no JSON"}]
    items = [
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": text},
        {"type": "function_call_output", "call_id": "c", "output": "no JSON"},
    ]
    for dialect, body, name in (
        ("openai_chat", {**CHAT, "messages": [*TALK, *turns]}, "messages[].tool_calls[].function.arguments"),
        ("lmi", {**CHAT, "messages": [*TALK, *turns]}, "messages[].tool_calls[].function.arguments"),
        ("openai_responses", {**RESPONSE, "input": [*TALK, *items]}, "input[].arguments"),
    ):
        context = replace(CAPABLE, chat_template="{{ tools }} <tool_call> {{ tool_calls }}")
        parsed = answers.DIALECTS[dialect].parse(body, context)
        assert list(parsed.ignored) == [name]
        (said,) = [message for message in parsed.requests[0].messages or () if "tool_calls" in message]
        assert said["tool_calls"][0]["function"] == {"name": "weather", "arguments": {}}
