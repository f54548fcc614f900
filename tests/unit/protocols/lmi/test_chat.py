"""LMI's chat completions: what is read, what is refused, which mode's form and framing an answer has."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from handler.config.lmi_version import read_lmi_version
from handler.core.values import Adapter, Delta, FieldNames, Finish, Request, Sampling
from handler.protocols.kernel.dialect import NoAdapters, ParsedRequest
from handler.protocols.lmi.chat import TABLE
from handler.protocols.openai.request import CHAT, FOREIGN
from handler.protocols.registry import INVOCATIONS
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CONTEXT, answer, deltas, value, with_options

USER = {"role": "user", "content": "hi"}
ASK = {"messages": [USER]}


def parse(schema: str = "lmi", /, **body: Any) -> ParsedRequest:
    return INVOCATIONS[schema].parse({**ASK, **body}, CONTEXT)


def test_defaults_are_lmis() -> None:
    found = parse().requests[0]
    assert found == Request(
        "",
        Sampling(do_sample=True, logprobs=False),
        messages=(USER,),
        names=FieldNames(
            "messages",
            "max_tokens",
            "stop_token_ids",
            "bad_words",
            logit_bias="logit_bias",
            structured_output="response_format",
        ),
    )
    assert (found.sampling.max_new_tokens, found.sampling.temperature) == (30, 1.0)


def test_null_means_absent() -> None:
    names = [*TABLE.parameters, "stream", "inputs"]
    assert [name for name in names if parse(**{name: None}).requests != parse().requests] == []
    assert [name for name in names if parse(**{name: None}).ignored] == []


def test_parameters_are_openais_but_for_the_name_of_the_model_and_of_adapters() -> None:
    assert TABLE.parameters.keys() - CHAT.parameters.keys() == {"model", "user"}
    assert CHAT.parameters.keys() - TABLE.parameters.keys() == FOREIGN.keys()
    assert all(TABLE.parameters[name] is CHAT.parameters[name] for name in TABLE.parameters.keys() & CHAT.parameters)
    assert not parse(model="any", user="any").ignored


@in_one_test(
    ("body", "wanted"),
    [
        ({"temperature": 2.1}, "temperature=2.1: must be a number of at least 0 and at most 2"),
        ({"model": 5}, "model=5: must be a string"),
        ({"user": []}, "user=[]: must be a string"),
        ({"tool_choice": "required"}, 'tool_choice="required": needs tools'),
        ({"messages": []}, "'messages' must be a non-empty list"),
        ({"messages": [{"role": "critic"}]}, "messages[0].role must be one of system, user, assistant"),
        ({"adapters": "mine"}, "no LoRA adapters"),
    ],
)
def test_what_is_wrong_is_refused_in_lmis_form(body: dict[str, Any], wanted: str) -> None:
    found = answer("lmi", {**ASK, **body})
    assert (found.status, found.content_type) == (424, "application/json")
    error = json.loads(found.body)
    assert error["code"] == 424
    assert wanted in error["error"]


def test_text_parts_become_lines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "zwei ü"}]
    found = parse(messages=[{"role": "user", "content": parts}]).requests[0]
    assert found.messages == ({"role": "user", "content": "one\nzwei ü"},)


def test_unknown_names_are_reported_wherever_they_stand() -> None:
    named = {**USER, "name": "Ann"}
    found = parse(messages=[named, named], other=5, metadata={"a": "b"})
    assert list(found.ignored) == ["other", "messages[].name", "metadata"]
    strict = with_options(CONTEXT, unknown_parameters="refuse")
    error = value("lmi", {**ASK, "messages": [named]}, context=strict)["error"]
    assert "messages[].name" in error


def test_what_lmis_input_formatters_add_to_chats_is_reported() -> None:
    found = parse(parameters={"max_new_tokens": 256})
    assert (found.requests, list(found.ignored)) == (parse().requests, ["parameters"])


def test_inputs_win_and_messages_beside_them_are_reported() -> None:
    found = parse(inputs="text")
    assert (found.requests[0].prompt, found.requests[0].messages) == ("text", ())
    assert list(found.ignored) == ["messages"]


@pytest.mark.parametrize("schema", ["lmi", "tgi_compat"])
def test_null_messages_are_none_so_that_another_field_says_whose_a_body_is(schema: str) -> None:
    found = INVOCATIONS[schema].parse({"messages": None, "prompt": "x"}, CONTEXT)
    assert (found.requests[0].prompt, list(found.ignored)) == ("x", [])
    assert "has no 'inputs'" in value(schema, {"messages": None})["error"]


@pytest.mark.parametrize("more", [{}, {"logprobs": True}])
@pytest.mark.parametrize(("version", "num_ends"), [("0.28", 0), ("0.37", 1)])
def test_a_stream_counts_its_tokens_where_asked(version: str, num_ends: int, more: dict[str, Any]) -> None:
    context = with_options(CONTEXT, lmi_version=read_lmi_version(version))

    def lines(**options: bool) -> list[Any]:
        asked = {**ASK, **more, "stream": True, "stream_options": options}
        found = answer("lmi", asked, context=context).body.decode()
        parts = [line.removeprefix("data: ") for line in found.splitlines() if line]
        assert parts.count("[DONE]") == num_ends
        return [json.loads(part) for part in parts[: len(parts) - num_ends]]

    def count(num_tokens: int) -> dict[str, int]:
        return {"prompt_tokens": 2, "completion_tokens": num_tokens, "total_tokens": 2 + num_tokens}

    plain, told, always = lines(), lines(include_usage=True), lines(include_usage=True, continuous_usage_stats=True)
    assert all("usage" not in value for value in plain)
    assert [value["usage"] for value in told] == [None] * 5 + [count(5)]
    assert [value["usage"] for value in always] == [count(n) for n in (1, 2, 3, 4, 5, 5)]
    assert (told[-1]["choices"], told[-1]["object"]) == ([], "chat.completion.chunk")
    assert [value["choices"] for value in told[:-1]] == [value["choices"] for value in plain]


def test_choices_keep_the_order_of_their_seeds() -> None:
    found = parse(n=2, logprobs=True)
    found.reply.start(0, 2)
    body = b""
    for sequence, shift in ((1, -0.1), (0, -5.0)):  # the second ends first and is the more probable
        for delta in deltas(sequence, shift=shift):
            body += found.reply.feed(0, delta)
    first, second = json.loads(body)["choices"]
    assert first["logprobs"]["content"][0]["logprob"] < second["logprobs"]["content"][0]["logprob"]


@in_one_test("option", [None, "json", "jsonlines", "sse", "mine"])
@in_one_test(
    ("schema", "stream", "wanted"),
    [
        ("lmi", None, "application/json"),
        ("lmi", False, "application/json"),
        ("lmi", True, "application/jsonlines"),
        ("dynamic_batch", None, "application/json"),
        ("dynamic_batch", True, "application/jsonlines"),
        ("tgi_compat", None, "application/json"),
        ("tgi_compat", True, "application/jsonlines"),
    ],
)
def test_only_stream_makes_a_stream_whatever_the_output_formatter(
    schema: str, option: str | None, stream: bool | None, wanted: str
) -> None:
    found = answer(schema, {**ASK, "stream": stream}, context=with_options(CONTEXT, output_formatter=option))
    assert found.content_type == wanted


def test_every_answer_has_its_own_id_and_every_chunk_of_it_the_same() -> None:
    chunks = [json.loads(line) for line in answer("lmi", {**ASK, "stream": True}).body.splitlines()]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert value("lmi", ASK)["id"] != chunks[0]["id"] != value("lmi", ASK)["id"]


def test_a_stream_may_end_without_a_last_token() -> None:
    script = [*deltas()[:2], Delta(1, 0, (), Finish.STOP)]
    body = {**ASK, "stream": True, "logprobs": True}
    *_, last = [json.loads(line) for line in answer("lmi", body, script).body.splitlines()]
    wanted = {"index": 0, "delta": {"content": ""}, "logprobs": {"content": []}, "finish_reason": "stop_sequence"}
    assert last["choices"] == [wanted]
    assert value("lmi", ASK, script)["usage"]["completion_tokens"] == 2


def test_a_models_name_may_be_an_adapters() -> None:
    mine = Adapter("mine", 1, "/nowhere")

    class Registered(NoAdapters):
        def find(self, name: str) -> Adapter | None:
            return mine if name == "mine" else None

    context = replace(CONTEXT, no_adapters="", adapters=Registered())
    for body, wanted in (({"model": "mine"}, mine), ({"adapters": "mine"}, mine), ({"model": "any"}, None)):
        assert INVOCATIONS["lmi"].parse({**ASK, **body}, context).requests[0].adapter == wanted


def test_a_stream_of_several_choices_counts_all() -> None:
    body = {**ASK, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *_, last = [json.loads(line) for line in answer("lmi", body).body.splitlines()]
    assert last["usage"]["completion_tokens"] == 2 * 5
