"""Answers in every dialect: deltas of several tokens, calls that are broken off, and cached tokens."""

from __future__ import annotations

import copy
import copyreg
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import orjson
import pytest

from handler.core.errors import GenerationFailed
from handler.core.framing import is_too_deep
from handler.core.values import NO_EXTRAS, Delta, Extras, Finish, Request, Token
from handler.protocols.anthropic import response as blocks
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import ParsedRequest
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.reply import Reply
from handler.protocols.openai import chat as chat_response
from handler.protocols.openapi import DESCRIPTIONS
from handler.protocols.responses import response
from handler.protocols.responses import response as items
from tests.one_test import in_one_test
from tests.unit.protocols import answers
from tests.unit.protocols.answers import (
    CAPABLE,
    CITY,
    DIALECTS,
    NAME_IT,
    STREAMED,
    TOOLS,
    USER,
    answer,
    deltas,
    saying,
    with_options,
)
from tests.unit.protocols.golden.anthropic import TOOLS as ANTHROPIC_TOOLS
from tests.unit.protocols.golden.responses import TOOLS as RESPONSES_TOOLS

# -- a delta of several tokens is rendered as one delta a token would be, in every dialect and format ------------------


copyreg.pickle(itertools.count, lambda counter: (itertools.count, (int(repr(counter)[6:-1]),)))  # Python 3.14 has none
copyreg.pickle(orjson.Fragment, lambda fragment: "shared")  # a string: copies of a reply have the same one

TENSORS = ["output_ids", "sequence_length", "output_log_probs", "cum_log_probs", "context_logits", "generation_logits"]
EXTRAS = [f"return_{name}" for name in ("finish_reason", "cumulative_logprob", "num_input_tokens", "num_output_tokens")]
ALWAYS = {"include_usage": True, "continuous_usage_stats": True}
BATCHES = with_options(CAPABLE, enable_streaming=True)


def lmi(parameters: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"inputs": "What is", "parameters": parameters or {}, "stream": True, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], "stream": True, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "a b", "stream": True, **fields}


def messages(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], "max_tokens": 20, "stream": True, **fields}


def responses(**fields: Any) -> dict[str, Any]:
    return {"input": "hi", "stream": True, **fields}


def triton(**fields: Any) -> dict[str, Any]:
    return {"text_input": "What is", "stream": True, **fields}


CASES: dict[str, tuple[str, dict[str, Any], ServerContext]] = {
    **{
        f"{schema} {name}": (schema, body, CAPABLE)
        for schema in ("lmi", "tgi_compat")
        for name, body in {
            "lines": lmi(),
            "details": lmi({"details": True, "return_full_text": True}),
            "prefill": lmi({"decoder_input_details": True}),
            "top_tokens": lmi({"top_n_tokens": 2}),
            "tensors": lmi({"outputs": TENSORS}),
            "end_id": lmi({"end_id": 2, "details": True}),
            "whole": lmi({"details": True, "n": 2, "do_sample": True}, stream=False),
            "chat": chat(),
            "chat usage": chat(stream_options=ALWAYS),
            "chat logprobs": chat(logprobs=True, top_logprobs=2),
        }.items()
    },
    "lmi events": ("lmi", lmi({"output_formatter": "sse"}), CAPABLE),
    "tgi": ("tgi", lmi({"details": True}), CAPABLE),
    "tgi top_tokens": ("tgi", lmi({"top_n_tokens": 2, "details": True}), CAPABLE),
    "tgi whole": ("tgi", lmi({"decoder_input_details": True}, stream=False), CAPABLE),
    "tgi_generate_stream": ("tgi_generate_stream", lmi(), CAPABLE),
    "mindie": ("mindie", lmi({"details": True}), CAPABLE),
    "triton": ("triton_generate_stream", triton(), CAPABLE),
    "triton prompt": ("triton_generate_stream", triton(exclude_input_in_output=False, id="%b"), CAPABLE),
    "triton extras": ("triton_generate_stream", triton(**dict.fromkeys(EXTRAS, True)), CAPABLE),
    "triton finish_reason": ("triton_generate_stream", triton(return_finish_reason=True), CAPABLE),
    "triton log_probs": ("triton_generate_stream", triton(return_log_probs=True), CAPABLE),
    "triton whole": ("triton_generate_stream", triton(stream=False), CAPABLE),
    "dynamic_batch": ("dynamic_batch", {"inputs": "What", "parameters": {"return_full_text": True}}, BATCHES),
    "dynamic_batch whole": ("dynamic_batch", {"inputs": ["What", "is"]}, CAPABLE),
    "chat": ("openai_chat", chat(), CAPABLE),
    "chat n": ("openai_chat", chat(n=2, stream_options={"include_usage": True}), CAPABLE),
    "chat usage": ("openai_chat", chat(stream_options=ALWAYS, n=2), CAPABLE),
    "chat logprobs": ("openai_chat", chat(logprobs=True, top_logprobs=2), CAPABLE),
    "chat tgi": ("openai_chat", chat(model="tgi"), replace(CAPABLE, model_names=("tgi",))),
    "chat tools": ("openai_chat", chat(tools=TOOLS), CAPABLE),
    "chat tools usage": ("openai_chat", chat(tools=TOOLS, stream_options=ALWAYS), CAPABLE),
    "chat tools logprobs": ("openai_chat", chat(tools=TOOLS, logprobs=True, n=2), CAPABLE),
    "chat named tool": ("openai_chat", chat(tools=TOOLS, tool_choice=NAME_IT), CAPABLE),
    "messages": ("anthropic_messages", messages(), CAPABLE),
    "messages stops": ("anthropic_messages", messages(stop_sequences=["wo", "é"]), CAPABLE),
    "messages tools": ("anthropic_messages", messages(tools=ANTHROPIC_TOOLS), CAPABLE),
    "responses": ("openai_responses", responses(), CAPABLE),
    "responses tools": ("openai_responses", responses(tools=RESPONSES_TOOLS), CAPABLE),
    "responses whole": ("openai_responses", responses(tools=RESPONSES_TOOLS, stream=False), CAPABLE),
    "messages whole": ("anthropic_messages", messages(tools=ANTHROPIC_TOOLS, stream=False), CAPABLE),
    "completions": ("openai_completions", completion(), CAPABLE),
    "completions n": ("openai_completions", completion(prompt=["a", "b"], n=2, echo=True), CAPABLE),
    "completions usage": ("openai_completions", completion(stream_options=ALWAYS), CAPABLE),
    "completions logprobs": ("openai_completions", completion(logprobs=2), CAPABLE),
    "completions echo": ("openai_completions", completion(echo=True, logprobs=0), CAPABLE),
    "completions prompt only": ("openai_completions", completion(echo=True, logprobs=0, max_tokens=0), CAPABLE),
    **{
        f"{name} example": (name, {**DESCRIPTIONS[name].example, "stream": True}, CAPABLE)
        for name in DIALECTS
        if name in STREAMED
    },
}

CALL = 'Wait. <tool_call>[{"name": "weather", "arguments": {"city": "Köln"}}]</tool_call> So.'
TEXTS = ["", " word", "é😀", "%", "%b%d", "\0b", "\x85\u2028", '"', "<tool_call>", CALL, *CALL.split(" ")]
TRIALS = 30
PLAIN = (
    "lmi lines",
    "lmi events",
    "tgi",
    "mindie",
    "triton",
    "dynamic_batch",
    "chat",
    "completions",
    "messages",
    "responses",
)
"""Cases whose tokens have lines."""


def tokens(rng: random.Random, count: int, alternatives: int = 2) -> list[Token]:
    """Tokens that are often special, or without a log-probability."""
    return [
        Token(
            rng.randrange(6),
            rng.choice(TEXTS),
            rng.choice([None, -rng.random(), float("-inf")]),
            rng.random() < 0.2,
            tokens(rng, alternatives, 0) if alternatives else (),
        )
        for _ in range(count)
    ]


def sequence_deltas(rng: random.Random, request: Request, sequence: int) -> list[Delta]:
    """One sequence, in deltas of several tokens."""
    deltas = [Delta(1, sequence, tokens(rng, rng.randrange(5))) for _ in range(rng.randrange(1, 5))]
    if request.sampling.return_generation_logits:
        rows = [Extras(None, [[float(token.id), 0.25] for token in delta.tokens]) for delta in deltas]
        deltas = [delta._replace(extras=own) for delta, own in zip(deltas, rows, strict=True)]
        deltas[0] = deltas[0]._replace(extras=rows[0]._replace(context_logits=[[0.5, -1.0]]))
    if request.sampling.prompt_logprobs and sequence == 0:
        deltas[0] = deltas[0]._replace(prefill=tokens(rng, 2))
    if rng.random() < 0.2:
        return [*deltas, Delta(1, sequence, (), Finish.ERROR, GenerationFailed("request failed in the engine: no"))]
    return [*deltas[:-1], deltas[-1]._replace(finish=rng.choice([Finish.LENGTH, Finish.EOS, Finish.STOP]))]


def answer_deltas(rng: random.Random, call: ParsedRequest) -> list[tuple[int, Delta]]:
    """The deltas of all sequences of all requests, mixed, each after its request's number."""
    waiting = [
        (index, sequence_deltas(rng, request, sequence))
        for index, request in enumerate(call.requests)
        for sequence in range(request.sampling.num_sequences)
    ]
    deltas: list[tuple[int, Delta]] = []
    while waiting and not (deltas and deltas[-1][1].error):  # a failure ends the whole answer
        index, own = rng.choice(waiting)
        deltas.append((index, own.pop(0)))
        waiting = [(index, own) for index, own in waiting if own]
    return deltas


def one_a_token(delta: Delta) -> list[Delta]:
    """The same tokens in deltas of one token each."""
    extras = delta.extras or NO_EXTRAS
    singles = [
        Delta(delta.id, delta.sequence, (token,), extras=Extras(None, [row]) if row else None)
        for token, row in itertools.zip_longest(delta.tokens, extras.generation_logits or ())
    ]
    if len(singles) < 2:
        return [delta]
    first = singles[0].extras and singles[0].extras._replace(context_logits=extras.context_logits)
    singles[0] = singles[0]._replace(prefill=delta.prefill, extras=first)
    singles[-1] = singles[-1]._replace(finish=delta.finish)
    return singles


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have two answers of the same tokens equal ids and times."""
    monkeypatch.setattr(chat_response, "call_id", lambda: "call_0")
    monkeypatch.setattr(blocks, "tool_use_id", lambda: "toolu_0")
    monkeypatch.setattr(items, "new_id", lambda prefix: f"{prefix}_0")
    monkeypatch.setattr(response, "now", lambda: 0)


def render(reply: Reply, errors: ErrorFormat, deltas: list[tuple[int, Delta]]) -> tuple[bytes, bool]:
    """Return the bytes, and whether the answer is complete; a failure before them is another response."""
    data = b""
    for index, delta in deltas:
        if delta.error is not None and not data:
            data += errors.whole(delta.error).body
        else:
            data += reply.feed(index, delta)
    return data, reply.finished


@in_one_test("name", CASES)
def test_tokens_that_come_at_once_have_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    schema, body, context = CASES[name]
    call = DIALECTS[schema].parse(json.loads(json.dumps(body)), context)
    for index in range(len(call.requests)):
        call.reply.start(index, 2)
    rng = random.Random(name)
    for _ in range(TRIALS):
        deltas = answer_deltas(rng, call)
        singles = [(index, single) for index, delta in deltas for single in one_a_token(delta)]
        one, other = (render(copy.deepcopy(call.reply), call.errors, each) for each in (deltas, singles))
        assert one == other


@in_one_test("name", CASES)
def test_a_line_of_a_token_is_what_feeding_it_returns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    schema, body, context = CASES[name]
    call = DIALECTS[schema].parse(json.loads(json.dumps(body)), context)
    call.reply.start(0, 2)
    rng = random.Random(name)
    for _ in range(TRIALS):
        fed, passed = copy.deepcopy(call.reply), copy.deepcopy(call.reply)
        encode = None
        for token in tokens(rng, 6):
            delta = Delta(1, 0, (token,))
            encode = passed.token_encoder() if encode is None else encode
            assert fed.feed(0, delta) == (passed.feed(0, delta) if encode is None else encode(token))
        last = Delta(1, 0, (), Finish.LENGTH)
        assert fed.feed(0, last) == passed.feed(0, last)  # with the counts and the text of all tokens
        assert encode is not None or name not in PLAIN


# -- no dialect says that a call is whole whose arguments are no JSON object, whole or streamed ------------------------


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


def broken_chat(found: list[dict[str, Any]]) -> Said:
    choices = [chunk["choices"][0] for chunk in found]
    texts: dict[int, str] = {}
    for choice in choices:
        for index, call in enumerate(choice.get("delta", choice.get("message", {})).get("tool_calls") or ()):
            at = call.get("index", index)
            texts[at] = texts.get(at, "") + call["function"]["arguments"]
    reason = choices[-1]["finish_reason"]
    return Said([*texts.values()], reason, reason == "tool_calls")


def broken_messages(found: list[dict[str, Any]]) -> Said:
    if len(found) == 1:
        inputs = [json.dumps(block["input"]) for block in found[0]["content"] if block["type"] == "tool_use"]
        return Said(inputs, found[0]["stop_reason"], found[0]["stop_reason"] == "tool_use")
    texts = {event["index"]: "" for event in found if event.get("content_block", {}).get("type") == "tool_use"}
    for event in found:
        if event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            texts[event["index"]] += event["delta"]["partial_json"]
    reason = found[-2]["delta"]["stop_reason"]
    return Said([*texts.values()], reason, reason == "tool_use")


def broken_responses(found: list[dict[str, Any]]) -> Said:
    response = found[-1].get("response") or found[-1]
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    done = [event["item"] for event in found if event.get("type") == "response.output_item.done"]
    assert len(found) == 1 or done == response["output"]
    assert len(found) == 1 or found[-1]["type"] == f"response.{response['status']}"
    for call in calls:
        assert call["status"] == "incomplete" or isinstance(load(call["arguments"]), dict)
    ended = [event["arguments"] for event in found if event.get("type") == "response.function_call_arguments.done"]
    assert len(found) == 1 or ended == [call["arguments"] for call in calls if call["status"] == "completed"]
    whole = response["status"] == "completed" and all(call["status"] == "completed" for call in calls)
    return Said([call["arguments"] for call in calls], response["status"], whole)


BROKEN_DIALECTS: dict[str, tuple[str, dict[str, Any], Callable[[list[dict[str, Any]]], Said]]] = {
    "openai": ("openai_chat", CHAT, broken_chat),
    "tgi": ("openai_chat", {**CHAT, "model": "tgi"}, broken_chat),
    "lmi": ("lmi", {**CHAT, "max_tokens": 10_000}, broken_chat),
    "tgi_compat": ("tgi_compat", {**CHAT, "max_tokens": 10_000}, broken_chat),
    "responses": ("openai_responses", RESPONSE, broken_responses),
    "messages": ("anthropic_messages", MESSAGE, broken_messages),
}
_each = in_one_test("dialect", BROKEN_DIALECTS)
_both = in_one_test("stream", [False, True], ids=["whole", "stream"])

BEGIN = '<tool_call>{"name": "weather", "arguments": '


def ask(dialect: str, text: str, finish: Finish = Finish.EOS, *, stream: bool, **more: Any) -> Said:
    schema, body, read = BROKEN_DIALECTS[dialect]
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


# -- what an engine had in its prefix cache, in the counts of the dialects that have a field for it --------------------


CACHED_CHAT = {"messages": [{"role": "user", "content": "a b"}]}
ASKED: dict[str, dict[str, Any]] = {
    "openai_chat": {**CACHED_CHAT, "stream_options": {"include_usage": True}},
    "openai_completions": {"prompt": ["a b", "c d"], "stream_options": {"include_usage": True}},
    "openai_responses": {"input": "a b"},
    "anthropic_messages": {**CACHED_CHAT, "max_tokens": 9},
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
        told = usages(answer("openai_chat", {**CACHED_CHAT, "n": 2, "temperature": 1, **stream}, script).body)
        assert told[-1]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_an_engine_that_says_nothing_leaves_the_details_out() -> None:
    (told,) = usages(answer("openai_chat", CACHED_CHAT).body)
    assert "prompt_tokens_details" not in told


# -- whitespace before a call is no text, whole or streamed ------------------------------------------------------------

CALLED = '<tool_call>{"name": "weather", "arguments": {"city": "K"}}</tool_call>'


def shown_text(found: list[dict[str, Any]]) -> str:
    """The text of an answer, whole or streamed, in any of the dialects."""
    texts = []
    for event in found:
        for choice in event.get("choices", ()):
            texts.append(choice.get("delta", choice.get("message", {})).get("content") or "")
        if event.get("type") == "response.output_text.delta":
            texts.append(event["delta"])
        texts.append((event.get("delta") or {}).get("text", "") if event.get("type") == "content_block_delta" else "")
        texts += [block["text"] for block in event.get("content", ()) if block["type"] == "text"]
        items = event.get("output", ()) if event.get("object") == "response" else ()
        texts += [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
    return "".join(texts)


@pytest.mark.parametrize("dialect", BROKEN_DIALECTS)
@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"\n\n{CALLED}", ""),
        (f"\n\n{CALLED}\n{CALLED}\n", ""),
        (f"\n\nWait.\n{CALLED}", "\n\nWait.\n"),
        ("\n\n", "\n\n"),
        ("\n\nNo.", "\n\nNo."),
    ],
)
def test_whitespace_before_a_call_is_no_text(dialect: str, size: int, text: str, shown: str) -> None:
    schema, body, _ = BROKEN_DIALECTS[dialect]
    for stream in (False, True):
        found = answer(schema, {**body, "stream": stream}, saying(text, size), CAPABLE)
        assert shown_text(values(found.body)) == shown, stream


# -- what a reader of calls cannot place is text, in every dialect -----------------------------------------------------

ARGUMENTS_ELSEWHERE = [
    '<tool_call>{"name": "weather", "args": {"city": "K"}}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {}, "city": "K"}</tool_call>',
    '<tool_call>[{"name": "weather", "arguments": {}, {"city": "K"}]</tool_call>',
    '<tool_call>{"name": "weather"} "arguments": {"city": "K"}}</tool_call>',
    '<tool_call>[{"city": "K"}</tool_call>',
]


@_both
@_each
@in_one_test("text", ARGUMENTS_ELSEWHERE)
def test_a_call_whose_arguments_stand_elsewhere_is_text(dialect: str, text: str, stream: bool) -> None:
    schema, body, read = BROKEN_DIALECTS[dialect]
    for size in (1, 5, 1000):
        found = values(answer(schema, {**body, "stream": stream}, saying(text, size), CAPABLE).body)
        assert shown_text(found) == text
        said = read(found)
        assert said.arguments == []
        ends = {"lmi": "eos_token", "tgi_compat": "eos_token", "responses": "completed", "messages": "end_turn"}
        assert said.reason == ends.get(dialect, "stop")


@_both
@_each
def test_a_call_that_breaks_after_its_arguments_is_text_too(dialect: str, stream: bool) -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "K"}, {"name": "weather"}</tool_call>'
    schema, body, read = BROKEN_DIALECTS[dialect]
    found = values(answer(schema, {**body, "stream": stream}, saying(text, 3), CAPABLE).body)
    assert shown_text(found).endswith(text)
    assert not read(found).whole
