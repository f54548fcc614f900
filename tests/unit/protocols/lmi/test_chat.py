"""LMI's chat completions: what is read, what is refused, which mode's form and framing an answer has."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from handler.core.errors import InvalidParameter
from handler.core.values import Adapter, Delta, FieldNames, Finish, Request, Sampling, StructuredOutput
from handler.protocols.base import NoAdapters, ParsedRequest
from handler.protocols.lmi.chat import TABLE
from handler.protocols.registry import SCHEMAS
from tests.unit.protocols.answers import CONTEXT, answer, deltas, value

USER = {"role": "user", "content": "hi"}
ASK = {"messages": [USER]}


def parse(schema: str = "lmi", **body: Any) -> ParsedRequest:
    return SCHEMAS[schema].parse({**ASK, **body}, CONTEXT)


def sampling(**body: Any) -> Sampling:
    return parse(**body).requests[0].sampling


def refusal(**body: Any) -> str:
    with pytest.raises(InvalidParameter) as caught:
        parse(**body)
    return str(caught.value)


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


def test_log_probabilities_are_asked_for_where_they_show() -> None:
    assert sampling(logprobs=True).logprobs
    assert not sampling(logprobs=False).logprobs


def test_null_means_absent() -> None:
    names = [*TABLE.parameters, "stream", "inputs"]
    assert [name for name in names if parse(**{name: None}).requests != parse().requests] == []
    assert [name for name in names if parse(**{name: None}).ignored] == []


@pytest.mark.parametrize(
    ("name", "given", "field", "wanted"),
    [
        ("max_tokens", 7, "max_new_tokens", 7),
        ("max_completion_tokens", 7, "max_new_tokens", 7),
        ("temperature", 0, "do_sample", False),
        ("temperature", 0.0, "do_sample", False),
        ("temperature", 2, "temperature", 2.0),
        ("top_p", 0.5, "top_p", 0.5),
        ("n", 3, "n", 3),
        ("seed", 5, "seed", 5),
        ("seed", -1, "seed", (1 << 64) - 1),
        ("top_k", 5, "top_k", 5),
        ("min_tokens", 2, "min_new_tokens", 2),
        ("guided_choice", ["a"], "structured_output", StructuredOutput("choice", '["a"]')),
        ("do_sample", True, "n", 1),
        ("stop", "a", "stop", ("a",)),
        ("stop", ["a", "b"], "stop", ("a", "b")),
        ("frequency_penalty", -2, "frequency_penalty", -2.0),
        ("presence_penalty", 2, "presence_penalty", 2.0),
        ("ignore_eos", True, "ignore_eos", True),
        ("model", "any", "n", 1),
        ("user", "any", "n", 1),
        ("logit_bias", {}, "n", 1),
        ("logit_bias", {"5": 1}, "logit_bias", ((5, 1.0),)),
        ("response_format", {"type": "text"}, "structured_output", None),
        ("response_format", {"type": "json_object"}, "structured_output", StructuredOutput("json_object", "")),
        ("top_logprobs", 0, "top_logprobs", 0),
    ],
)
def test_a_parameter_sets_its_field(name: str, given: Any, field: str, wanted: Any) -> None:
    found = parse(**{name: given})
    assert getattr(found.requests[0].sampling, field) == wanted
    assert not found.ignored


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("max_tokens", 0, "must be an integer from 1"),
        ("max_completion_tokens", 0, "must be an integer from 1"),
        ("stream_options", [], "needs stream=true"),
        ("stream_options", {}, "needs stream=true"),
        ("temperature", 2.1, "at most 2"),
        ("temperature", -0.1, "at least 0"),
        ("temperature", False, "must be a number"),
        ("top_p", 1.1, "at most 1"),
        ("frequency_penalty", -2.1, "at least -2"),
        ("presence_penalty", "1", "must be a number"),
        ("n", 0, "must be an integer from 1"),
        ("n", 33, "must be at most 32"),
        ("seed", 1 << 64, "must be an integer from -9223372036854775808"),
        ("stop", 5, "must be a string or a list"),
        ("stop", False, "must be a string or a list"),
        ("ignore_eos", 1, "must be true or false"),
        ("logprobs", 1, "must be true or false"),
        ("top_logprobs", 21, "from 0 to 20"),
        ("top_logprobs", 1, "needs logprobs=true"),
        ("logit_bias", {"5": 101}, "a number from -100 to 100"),
        ("logit_bias", [1], "must be an object of token ids"),
        ("tool_choice", "required", "needs tools"),
        ("parallel_tool_calls", 1, "must be true or false"),
        ("max_new_tokens", 5, "write max_tokens"),
        ("stop_sequences", ["a"], "write stop"),
        ("do_sample", False, "write temperature=0"),
        ("parameters", {"max_new_tokens": 9}, "write its names at the top level"),
        ("adapter_id", "mine", "write the adapter's name as model"),
        ("response_format", {"type": "yaml"}, "a 'type' that is text, json_object or json_schema"),
        ("response_format", "json", "must be an object"),
        ("model", 5, "must be a string"),
        ("user", [], "must be a string"),
    ],
)
def test_a_wrong_parameter_is_refused_by_its_own_name(name: str, given: Any, wanted: str) -> None:
    found = refusal(**{name: given})
    assert found.startswith(f"{name}=")
    assert wanted in found


def test_alternatives_are_refused_where_the_engine_has_none() -> None:
    context = replace(CONTEXT, unsupported={"top_logprobs": "no alternatives"})
    with pytest.raises(InvalidParameter, match=r"^top_logprobs=2: the engine openvino lacks it"):
        SCHEMAS["lmi"].parse({**ASK, "logprobs": True, "top_logprobs": 2}, context)
    SCHEMAS["lmi"].parse({**ASK, "logprobs": True, "top_logprobs": 1}, context)


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ("hi", "'messages' must be a non-empty list"),
        ([], "'messages' must be a non-empty list"),
        (["hi"], "messages[0] must be an object"),
        ([{"content": "hi"}], "messages[0].role must be one of system, user, assistant"),
        ([USER, {"role": "user\n", "content": "hi"}], "messages[1].role must be one of"),
        ([{"role": ["user"], "content": "hi"}], "messages[0].role must be one of"),
        ([{"role": "tool", "content": None}], "messages[0].content must be a string"),
        ([{"role": "user"}], "messages[0].content must be a string"),
        ([{"role": "assistant", "content": None}], "messages[0].content must be a string"),
        ([{"role": "user", "content": []}], "messages[0].content must be a string or a non-empty list"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0] must be an object"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0] must be an object"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "and a string 'text'"),
        ([{"role": "user", "content": [{"type": ["text"], "text": "a"}]}], "'type': 'text'"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
            "messages[0].content[1]: 'image_url' is not supported",
        ),
    ],
)
def test_wrong_messages_are_refused(messages: Any, wanted: str) -> None:
    found = answer("lmi", {"messages": messages})
    assert (found.status, found.content_type) == (424, "application/json")
    error = json.loads(found.body)
    assert set(error) == {"error", "code"}
    assert wanted in error["error"]


def test_text_parts_become_lines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "zwei ü"}]
    found = parse(messages=[{"role": "user", "content": parts}]).requests[0]
    assert found.messages == ({"role": "user", "content": "one\nzwei ü"},)


def test_unknown_names_are_reported_wherever_they_stand() -> None:
    named = {**USER, "name": "Ann"}
    found = parse(messages=[named, named], other=5, metadata={"a": "b"})
    assert list(found.ignored) == ["other", "messages[].name", "metadata"]
    strict = replace(CONTEXT, refuse_unknown=True)
    error = value("lmi", {**ASK, "messages": [named]}, context=strict)["error"]
    assert "messages[].name" in error


def test_adapters_are_refused() -> None:
    assert "no LoRA adapters" in value("lmi", {**ASK, "adapters": "mine"})["error"]


def test_inputs_win_and_messages_beside_them_are_reported() -> None:
    found = parse(inputs="text")
    assert (found.requests[0].prompt, found.requests[0].messages) == ("text", ())
    assert list(found.ignored) == ["messages"]


@pytest.mark.parametrize("schema", ["lmi", "tgi_compat"])
def test_null_messages_are_none_so_that_another_field_says_whose_a_body_is(schema: str) -> None:
    found = SCHEMAS[schema].parse({"messages": None, "prompt": "x"}, CONTEXT)
    assert (found.requests[0].prompt, list(found.ignored)) == ("x", [])
    assert "has no 'inputs'" in value(schema, {"messages": None})["error"]


def test_what_limits_an_answer_is_named_as_the_client_has_it() -> None:
    assert parse(max_completion_tokens=7).requests[0].names.max_new_tokens == "max_completion_tokens"
    assert sampling(max_tokens=7, max_completion_tokens=7).max_new_tokens == 7
    assert refusal(max_tokens=7, max_completion_tokens=8) == "max_completion_tokens=8 contradicts max_tokens"


@pytest.mark.parametrize("more", [{}, {"logprobs": True}])
@pytest.mark.parametrize(("schema", "num_ends"), [("lmi", 0), ("tgi_compat", 1)])
def test_a_stream_counts_its_tokens_where_asked(schema: str, num_ends: int, more: dict[str, Any]) -> None:
    def lines(**options: bool) -> list[Any]:
        found = answer(schema, {**ASK, **more, "stream": True, "stream_options": options}).body.decode()
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


def test_what_stream_options_hold_is_known() -> None:
    assert refusal(stream=True, stream_options={"x": True}) == "stream_options={\"x\": true}: 'x' is not known"


def test_choices_keep_the_order_of_their_seeds() -> None:
    found = parse(n=2, logprobs=True)
    found.reply.start(0, 2)
    body = b""
    for sequence, shift in ((1, -0.1), (0, -5.0)):  # the second ends first and is the more probable
        for delta in deltas(sequence, shift=shift):
            body += found.reply.feed(0, delta)
    first, second = json.loads(body)["choices"]
    assert first["logprobs"]["content"][0]["logprob"] < second["logprobs"]["content"][0]["logprob"]


@pytest.mark.parametrize(
    ("schema", "option", "stream", "wanted"),
    [
        ("lmi", None, None, "application/json"),
        ("lmi", None, True, "application/jsonlines"),
        ("lmi", "json", True, "application/jsonlines"),
        ("lmi", "json", False, "application/json"),
        ("lmi", "jsonlines", False, "application/jsonlines"),
        ("lmi", "sse", None, "text/event-stream"),
        ("tgi_compat", None, None, "application/json"),
        ("tgi_compat", None, True, "text/event-stream"),
        ("tgi_compat", "jsonlines", True, "application/jsonlines"),
    ],
)
def test_framing(schema: str, option: str | None, stream: bool | None, wanted: str) -> None:
    found = answer(schema, {**ASK, "stream": stream}, context=replace(CONTEXT, output_formatter=option))
    assert found.content_type == wanted
    assert found.body.endswith(b"data: [DONE]\n\n") == (wanted == "text/event-stream")


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
        assert SCHEMAS["lmi"].parse({**ASK, **body}, context).requests[0].adapter == wanted


def test_a_stream_of_several_choices_counts_all() -> None:
    body = {**ASK, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *_, last = [json.loads(line) for line in answer("lmi", body).body.splitlines()]
    assert last["usage"]["completion_tokens"] == 2 * 5
