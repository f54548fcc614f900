"""LMI's async mode and its chat completions: what is read, refused or reported, and an answer's form."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from handler.config.config import Config
from handler.config.lmi_version import NEWEST, read_lmi_version
from handler.core.errors import InvalidParameter, InvalidPayload, ModelNotFound
from handler.core.values import Adapter, Delta, FieldNames, Finish, Request, Sampling
from handler.protocols.kernel.context import Notices, ServerContext
from handler.protocols.kernel.dialect import ParsedRequest
from handler.protocols.lmi.asynchronous import TABLE
from handler.protocols.lmi.chat import TABLE as CHAT_TABLE
from handler.protocols.openai.request import CHAT, COMPLETIONS
from handler.protocols.openai.unsupported import FOREIGN
from handler.protocols.registry import INVOCATIONS, choose
from tests.one_test import in_one_test
from tests.unit.protocols.answers import (
    CAPABLE,
    CONTEXT,
    VOCABULARY,
    answer,
    deltas,
    value,
    with_adapters,
    with_options,
)

# -- LMI's async mode: what of a body is read, and what is refused or reported -----------------------------------------


ASYNC = INVOCATIONS["lmi_async"]
ONE = Adapter("one", 1, "/one")
WITH_ADAPTERS = with_adapters(CAPABLE, ONE)


def parse(context: ServerContext = CAPABLE, /, **body: Any) -> ParsedRequest:
    return ASYNC.parse({"inputs": "a", **body}, context)


def sampling(**parameters: Any) -> Any:
    (request,) = parse(parameters=parameters).requests
    return request.sampling


def test_it_samples_unless_told_otherwise() -> None:
    assert sampling()[:1] == (30,)
    assert (sampling().do_sample, sampling().temperature) == (True, 1.0)
    assert sampling(do_sample=True).do_sample
    assert sampling(top_p=0.5).do_sample
    assert not sampling(do_sample=False, temperature=0.7).do_sample
    assert not sampling(temperature=0).do_sample


def test_lmis_names_and_vllms_set_the_same_fields() -> None:
    lmis = sampling(max_new_tokens=3, stop_sequences=["b"], ignore_eos_token=True)
    assert lmis == sampling(max_tokens=3, stop=["b"], ignore_eos=True)
    found = sampling(min_tokens=2, seed=-3, stop_token_ids=[2])
    assert (found.min_new_tokens, found.signed_seed, found.stop_token_ids) == (2, -3, (2,))
    assert sampling(structured_outputs={"choice": ["a"]}).structured_output.kind == "choice"
    assert sampling(response_format={"type": "json_object"}).structured_output.kind == "json_object"


@in_one_test(
    ("given", "lost"),
    [
        ({"max_tokens": 4, "max_new_tokens": 3}, ["max_new_tokens"]),
        ({"max_new_tokens": "none", "max_tokens": 4}, ["max_new_tokens"]),
        ({"max_new_tokens": 4, "max_tokens": 4}, []),
        ({"max_new_tokens": 4, "max_tokens": None}, []),
        ({"truncate": 5, "truncate_prompt_tokens": 2, "max_tokens": 4}, ["truncate"]),
        ({"return_full_text": True, "echo": False, "max_tokens": 4}, ["return_full_text"]),
        ({"ignore_eos_token": True, "ignore_eos": False, "max_tokens": 4}, ["ignore_eos_token"]),
        ({"stop_sequences": ["b"], "stop": ["c"], "max_tokens": 4}, ["stop_sequences"]),
    ],
)
def test_vllms_name_of_a_parameter_beats_lmis(given: dict[str, Any], lost: list[str]) -> None:
    """LMI adds what it does not know to what it has translated (convert_lmi_schema_to_completion_request)."""
    found, vllms = parse(parameters=given), parse(parameters={k: v for k, v in given.items() if k not in lost})
    assert found.ignored == [f"parameters.{name}" for name in lost]
    (request,), (wanted,) = found.requests, vllms.requests
    assert (request, request.sampling.max_new_tokens) == (wanted, 4)


def test_every_name_of_vllms_completions_is_known() -> None:
    """`best_of` vLLM dropped itself; LMI's other dialects know the foreign ones."""
    assert COMPLETIONS.parameters.keys() - FOREIGN - TABLE.parameters.keys() == {"best_of"}


@in_one_test(
    ("parameters", "names"),
    [
        ({"n": 2, "top_n_tokens": 3, "logprobs": 5}, ["n", "top_n_tokens", "logprobs"]),
        ({"n": 1, "top_n_tokens": 1, "logprobs": 1}, []),
        ({"num_beams": 4, "typical_p": 0.5, "watermark": True, "best_of": 3}, [
            "num_beams", "typical_p", "watermark", "best_of",
        ]),
        ({"decoder_input_details": True}, ["decoder_input_details"]),
        ({"decoder_input_details": True, "details": True}, []),
        ({"output_formatter": "sse"}, ["output_formatter"]),
    ],
)  # fmt: skip
def test_what_lmi_does_not_heed_is_reported(parameters: dict[str, Any], names: list[str]) -> None:
    found = parse(parameters=parameters)
    assert found.ignored == [f"parameters.{name}" for name in names]
    assert (found.requests[0].sampling.n, found.streams) == (1, False)


def test_the_first_field_of_lmis_order_decides() -> None:
    """`prompt`, then `inputs`, then `messages`. The others are reported."""
    chat = [{"role": "user", "content": "b"}]
    completion = ASYNC.parse({"inputs": "a", "prompt": "b", "messages": chat}, CAPABLE)
    assert (completion.requests[0].prompt, list(completion.ignored)) == ("b", ["inputs", "messages"])
    prompt = ASYNC.parse({"messages": chat, "inputs": "a", "prompt": None}, CAPABLE)
    assert (prompt.requests[0].prompt, list(prompt.ignored)) == ("a", ["messages"])


def test_tensorrt_llms_order_has_messages_before_inputs() -> None:
    of_trtllm = choose(Config(async_mode=True, llm_engine="trtllm", lmi_version=NEWEST))
    chat = [{"role": "user", "content": "b"}]
    found = of_trtllm.parse({"inputs": "a", "messages": chat}, CAPABLE)
    assert (bool(found.requests[0].messages), list(found.ignored)) == (True, ["inputs"])
    completion = of_trtllm.parse({"inputs": "a", "messages": chat, "prompt": "b"}, CAPABLE)
    assert completion.requests[0].prompt == "b"
    assert of_trtllm.parse({"inputs": "a"}, CAPABLE).requests[0].prompt == "a"


def test_null_means_absent_in_lmi_async() -> None:
    assert parse(parameters=None, stream=None, model=None, adapters=None).requests == parse().requests
    assert sampling(max_new_tokens=None, do_sample=None) == sampling()


@pytest.mark.parametrize(
    ("inputs", "ids"), [(["a"], None), ([0, 1], (0, 1)), ([[0, 1]], (0, 1)), ("a", None)]
)  # fmt: skip
def test_a_list_of_one_prompt_is_that_prompt(inputs: Any, ids: tuple[int, ...] | None) -> None:
    assert VOCABULARY is not None
    assert parse(inputs=inputs).requests[0].prompt_ids == ids


@in_one_test(
    ("body", "message"),
    [
        ({"inputs": ["a", "b"]}, "'inputs' has 2 prompts; the maximum is 1; to send several prompts, use 'prompt'"),
        ({"inputs": ""}, "'inputs' must not be empty"),
        ({"inputs": 3}, "'inputs' must be"),
        ({"parameters": []}, "'parameters' must be an object"),
        ({"stream": 2}, "'stream' must be true or false"),
    ],
)
def test_a_wrong_body_is_refused_by_name(body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidPayload, match=message):
        parse(**body)


@in_one_test(
    "parameters",
    [
        {"max_new_tokens": 0},
        {"do_sample": "maybe"},
        {"details": 2},
        {"truncate": 0},
        {"n": 0},
        {"use_beam_search": True},
    ],
)
def test_a_wrong_parameter_is_refused_by_name(parameters: dict[str, Any]) -> None:
    (name,) = parameters
    with pytest.raises(InvalidParameter, match=rf"parameters\.{name}="):
        parse(parameters=parameters)


@pytest.mark.parametrize("field", [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}])
@pytest.mark.parametrize("name", sorted(FOREIGN.keys() - {"adapters", "grammar"}))
def test_lmis_names_have_no_effect_in_vllms_bodies(
    name: str, field: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """LMI's documented input formatters add `parameters` to every body; vLLM drops them."""
    context = replace(CAPABLE, notices=Notices())
    given = {"max_new_tokens": 3} if name == "parameters" else 3
    plain = ASYNC.parse(field, context)
    assert not caplog.messages
    for _ in range(2):
        found = ASYNC.parse({**field, name: given}, context)
        assert (found.requests, list(found.ignored)) == (plain.requests, [name])
    (told,) = caplog.messages
    assert told.startswith(f"{name} has no effect in bodies with messages or prompt, as in LMI")
    with pytest.raises(InvalidPayload, match=f"unknown names: {name} "):
        ASYNC.parse({**field, name: given}, with_options(context, unknown_parameters="refuse"))


def test_a_stream_has_no_prefill_in_lmi_async() -> None:
    with pytest.raises(InvalidParameter, match="prompt_logprobs: not available when streaming"):
        parse(parameters={"details": True, "decoder_input_details": True}, stream=True)


@pytest.mark.parametrize("field", [{"inputs": "a"}, {"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}])
def test_the_model_is_lmi_unless_it_has_another_name(field: dict[str, Any]) -> None:
    named = with_options(WITH_ADAPTERS, served_model_name=("abc", "*"))
    for body in (
        {},
        {"model": "lmi"},
        {"model": "one"},
        {"model": "model"},
        {"adapters": "one"},
        {"adapters": ["one"]},
    ):
        assert ASYNC.parse({**field, **body}, WITH_ADAPTERS).requests[0].adapter is (
            ONE if "one" in str(body) else None
        )
    with pytest.raises(ModelNotFound, match="Model not found: other; served here: lmi, model, one"):
        ASYNC.parse({**field, "model": "other"}, WITH_ADAPTERS)
    with pytest.raises(ModelNotFound, match="Model not found: lmi; served here: abc, model, one"):
        ASYNC.parse({**field, "model": "lmi"}, named)
    with pytest.raises(InvalidPayload, match="'adapters': 'two': no adapter with that name"):
        ASYNC.parse({**field, "adapters": "two"}, WITH_ADAPTERS)


def test_answers_have_the_models_name() -> None:
    named = with_options(CAPABLE, served_model_name=("abc",))
    assert value("lmi_async", {"prompt": "a"})["model"] == "lmi"
    assert value("lmi_async", {"prompt": "a"}, context=named)["model"] == "abc"
    for body in (
        {"adapters": "one"},
        {"adapters": "one", "model": "lmi"},
        {"adapters": "one", "model": "other"},  # LMI replaces it
        {"model": "one"},
    ):
        assert value("lmi_async", {"prompt": "a", **body}, context=WITH_ADAPTERS).get("model") == "one", body


def test_no_error_has_a_line_feed_in_a_status() -> None:
    """As LMI's had: what a wrong type of a field said became the status 500."""
    found = answer("lmi_async", {"inputs": "a", "parameters": {"temperature": "hot\r\ncold"}})
    assert (found.status, found.content_type) == (424, "application/json")


# -- LMI's chat completions: what is read, what is refused, which mode's form and framing an answer has ----------------


USER = {"role": "user", "content": "hi"}
ASK = {"messages": [USER]}


def parse_chat(schema: str = "lmi", /, **body: Any) -> ParsedRequest:
    return INVOCATIONS[schema].parse({**ASK, **body}, CONTEXT)


def test_defaults_are_lmis_in_lmi_async() -> None:
    found = parse_chat().requests[0]
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


def test_null_means_absent_in_lmis_chats() -> None:
    names = [*CHAT_TABLE.parameters, "stream", "inputs"]
    assert [name for name in names if parse_chat(**{name: None}).requests != parse_chat().requests] == []
    assert [name for name in names if parse_chat(**{name: None}).ignored] == []


def test_parameters_are_openais_except_for_model_and_adapter_names() -> None:
    assert CHAT_TABLE.parameters.keys() - CHAT.parameters.keys() == {"model", "user"}
    assert CHAT.parameters.keys() - CHAT_TABLE.parameters.keys() == FOREIGN.keys()
    assert all(
        CHAT_TABLE.parameters[name] is CHAT.parameters[name] for name in CHAT_TABLE.parameters.keys() & CHAT.parameters
    )
    assert not parse_chat(model="any", user="any").ignored


@in_one_test(
    ("body", "wanted"),
    [
        ({"temperature": 2.1}, "temperature=2.1: must be a number of at least 0 and at most 2"),
        ({"model": 5}, "model=5: must be a string"),
        ({"user": []}, "user=[]: must be a string"),
        ({"tool_choice": "required"}, 'tool_choice="required": requires tools'),
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
    found = parse_chat(messages=[{"role": "user", "content": parts}]).requests[0]
    assert found.messages == ({"role": "user", "content": "one\nzwei ü"},)


def test_unknown_names_are_reported_wherever_they_stand() -> None:
    named = {**USER, "mood": "Ann"}
    found = parse_chat(messages=[named, named], other=5, metadata={"a": "b"})
    assert list(found.ignored) == ["other", "messages[].mood", "metadata"]
    strict = with_options(CONTEXT, unknown_parameters="refuse")
    error = value("lmi", {**ASK, "messages": [named]}, context=strict)["error"]
    assert "messages[].mood" in error


def test_what_lmis_input_formatters_add_to_chats_is_reported() -> None:
    found = parse_chat(parameters={"max_new_tokens": 256})
    assert (found.requests, list(found.ignored)) == (parse_chat().requests, ["parameters"])


def test_inputs_win_and_messages_beside_them_are_reported() -> None:
    found = parse_chat(inputs="text")
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
    found = parse_chat(n=2, logprobs=True)
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
    context = with_adapters(CONTEXT, mine)
    for body, wanted in (({"model": "mine"}, mine), ({"adapters": "mine"}, mine), ({"model": "any"}, None)):
        assert INVOCATIONS["lmi"].parse({**ASK, **body}, context).requests[0].adapter == wanted


def test_a_stream_of_several_choices_counts_all() -> None:
    body = {**ASK, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *_, last = [json.loads(line) for line in answer("lmi", body).body.splitlines()]
    assert last["usage"]["completion_tokens"] == 2 * 5
