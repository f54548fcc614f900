"""Triton's generate extension: what is read, in which words it is refused, and what a response holds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from handler.core.errors import (
    InternalError,
    InvalidPayload,
    MethodNotAllowed,
    ModelNotFound,
    Overloaded,
    ServingError,
    TooLarge,
    TooSlow,
    Unavailable,
    UnsupportedMedia,
)
from handler.core.values import Adapter, Request, Sampling, StructuredOutput
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import ParsedRequest
from handler.protocols.triton.request import INPUTS, Route, Triton
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, CONTEXT, value, with_adapters, with_options

GENERATE, STREAM, SHAPE = (Triton(route) for route in Route)


def call(body: dict[str, Any], context: ServerContext = CAPABLE, schema: Triton = SHAPE) -> ParsedRequest:
    return schema.parse({"text_input": "a", **body}, context)


def request(context: ServerContext = CAPABLE, /, **names: Any) -> Request:
    return call(names, context).requests[0]


def sampling(context: ServerContext = CAPABLE, /, **names: Any) -> Sampling:
    return request(context, **names).sampling


def refused(body: Any, context: ServerContext = CAPABLE, schema: Triton = GENERATE) -> str:
    with pytest.raises(ServingError) as caught:
        schema.parse(body, context)
    answer = schema.errors_of(body, context).whole(caught.value)
    assert (answer.status, answer.content_type) == (400, "application/json")
    error = json.loads(answer.body)
    assert error.keys() == {"error"}
    return str(error["error"])


# -- names ---------------------------------------------------------------------------------------------------------


@in_one_test(
    ("names", "fields"),
    [
        ({"max_tokens": 7}, {"max_new_tokens": 7}),
        ({"max_tokens": [7]}, {"max_new_tokens": 7}),
        ({"sampling_param_max_tokens": 7}, {"max_new_tokens": 7}),
        ({}, {"max_new_tokens": 30, "do_sample": False}),
        (
            {"max_tokens": "7", "temperature": "0.5", "top_k": "-1"},
            {"max_new_tokens": 7, "temperature": 0.5, "top_k": 0},
        ),
        ({"ignore_eos": "true", "top_p": "0", "seed": "3"}, {"ignore_eos": True, "top_p": 1.0, "seed": 3}),
        ({"n": 2, "stop_token_ids": [3], "end_id": 4}, {"n": 2, "stop_token_ids": (3, 4)}),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, {"include_stop": True}),
        ({"structured_outputs": '{"regex": "a+"}'}, {"structured_output": StructuredOutput("regex", "a+")}),
        (
            {"guided_decoding": '{"json": {"type": "object"}, "backend": "auto"}'},
            {"structured_output": StructuredOutput("json_schema", '{"type": "object"}')},
        ),
        ({"stop_words": "x"}, {"stop": ("x",)}),
        ({"stop_words": ["x", "", "y"]}, {"stop": ("x", "y")}),
        ({"stop_words": "", "bad_words": [""]}, {"stop": (), "bad_sequences": ()}),
        ({"bad_words": ["x"]}, {"bad_sequences": ("x",)}),
        ({"sampling_param_stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["x"]}, {"stop": ("x",)}),
        ({"stop": False}, {"stop": ()}),
        ({"repetition_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": -1}, {"repetition_penalty": 1.5}),
        ({"min_length": 3}, {"min_new_tokens": 3}),
        ({"min_tokens": 3}, {"min_new_tokens": 3}),
        ({"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 3}),
        ({"random_seed": 3, "top_k": 2}, {"seed": 3, "top_k": 2, "do_sample": True}),
        ({"seed": [3]}, {"seed": 3}),
        ({"sampling_param_seed": 3}, {"seed": 3}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"end_id": -1, "pad_id": 2}, {"ignore_eos": True}),
        ({"end_id": 4}, {"ignore_eos": True, "stop_token_ids": (4,)}),
        ({"num_return_sequences": 2}, {"n": 2}),
        ({"sampling_param_best_of": 3, "top_k": 4}, {"best_of": 3}),
        ({"beam_width": 2, "length_penalty": 2.0, "early_stopping": 1}, {"num_beams": 2, "length_penalty": 2.0}),
        ({"return_context_logits": True}, {"return_context_logits": True}),
        ({"lora_weights": [], "lora_config": [[]], "image_url": "", "return_perf_metrics": False}, {}),
    ],
)
def test_each_name_sets_its_field_flat_and_under_parameters(names: dict[str, Any], fields: dict[str, Any]) -> None:
    for body in (names, {"parameters": names}):
        found = call(body).requests[0].sampling
        assert {name: getattr(found, name) for name in fields} == fields


@in_one_test(
    ("named", "fields"),
    [
        ({"temperature": "0.1", "top_p": "0.95", "max_tokens": "100"}, {"temperature": 0.1, "max_new_tokens": 100}),
        ({}, {"do_sample": True, "temperature": 1.0, "max_new_tokens": 16}),
        ({"temperature": 0, "max_tokens": None}, {"do_sample": False, "max_new_tokens": 16}),
        ({"stop": ["x", "y"], "min_tokens": "2", "ignore_eos": True}, {"stop": ("x", "y"), "min_new_tokens": 2}),
        ({"guided_decoding": {"choice": ["a"]}}, {"structured_output": StructuredOutput("choice", '["a"]')}),
    ],
)
def test_vllms_sampling_parameters_are_an_object_in_a_text(named: dict[str, Any], fields: dict[str, Any]) -> None:
    text = json.dumps(named)
    for body in ({"sampling_parameters": text}, {"parameters": {"sampling_parameters": [text]}}):
        found = call(body).requests[0].sampling
        assert {name: getattr(found, name) for name in fields} == fields


def test_they_replace_the_others_and_what_has_no_effect_is_listed() -> None:
    named = json.dumps({"temperature": "0.5", "logprobs": 2, "stream": True, "sampling_parameters": "{}"})
    others = {"temperature": "0.5", "top_k": 4, "return_finish_reason": True, "x": 1}
    found = call({"sampling_parameters": named, "parameters": others})
    assert found.requests[0].sampling.top_k == 0
    assert found.ignored == [
        *("parameters.x", "sampling_parameters.logprobs", "sampling_parameters.stream"),
        *("sampling_parameters.sampling_parameters", "top_k"),
    ]
    assert not found.streams


@in_one_test(
    ("names", "drawn"),
    [
        ({}, False),
        ({"temperature": 0.7}, True),
        ({"temperature": 1.0}, True),
        ({"temperature": 0.0, "top_p": 0.9}, False),
        ({"temperature": 0.7, "top_k": 1}, False),
        ({"temperature": [0], "top_k": 5}, False),
        ({"top_k": 5}, True),
        ({"top_k": 0}, False),
        ({"top_p": 0.5}, True),
        ({"top_p": 0}, False),
        ({"random_seed": 7}, False),
        ({"beam_width": 2, "temperature": 1.0, "top_p": 1.0}, False),
        ({"sampling_param_temperature": 0.7}, True),
        ({"sampling_param_top_k": 3}, True),
        ({"sampling_param_top_p": 0.3}, True),
    ],
)
def test_three_names_say_whether_tokens_are_drawn(names: dict[str, Any], drawn: bool) -> None:
    assert sampling(**names).do_sample is drawn


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p"])
def test_beams_do_not_draw(name: str) -> None:
    assert "beam search does not sample" in refused(
        {"text_input": "a", "beam_width": 2, name: {"top_k": 3}.get(name, 0.5)}
    )


def test_top_p_of_0_is_off() -> None:
    assert sampling(top_p=0, top_k=4).top_p == 1.0


@in_one_test(
    ("kind", "structured_output", "wanted"),
    [
        ("json", "", StructuredOutput("json_object", "")),
        ("json_schema", '{"type": "object"}', StructuredOutput("json_schema", '{"type": "object"}')),
        ("regex", "a+", StructuredOutput("regex", "a+")),
        (["ebnf_grammar"], ["root ::= x"], StructuredOutput("grammar", "root ::= x")),
        ("", "", None),
    ],
)
def test_guided_decoding(kind: Any, structured_output: Any, wanted: StructuredOutput | None) -> None:
    names = {"guided_decoding_guide_type": kind, "guided_decoding_guide": structured_output}
    assert sampling(**names).structured_output == wanted
    if kind == "json":
        assert sampling(guided_decoding_guide_type="json").structured_output == wanted


@in_one_test(
    ("names", "says"),
    [
        ({"guided_decoding_guide": "a+"}, 'guided_decoding_guide="a+": needs guided_decoding_guide_type'),
        ({"guided_decoding_guide_type": "xml"}, 'guided_decoding_guide_type="xml": must be one of json, json_schema'),
        ({"guided_decoding_guide_type": 7}, "guided_decoding_guide_type=7: must be one of"),
        ({"guided_decoding_guide_type": "regex"}, "must be a regular expression as a non-empty string"),
        ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": 5}, "must be a regular expression"),
        ({"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "{"}, "its text is not JSON"),
        ({"guided_decoding_guide_type": "json", "guided_decoding_guide": "x"}, "must be omitted"),
    ],
)
def test_guides_are_checked_before_an_engine_sees_them(names: dict[str, Any], says: str) -> None:
    assert says in refused({"text_input": "a", **names})


def test_an_engine_without_guides_refuses_them_by_name() -> None:
    lacking = replace(CONTEXT, unsupported={"structured_output": "it has no grammars"})
    body = {"text_input": "a", "guided_decoding_guide_type": "regex", "guided_decoding_guide": "a+"}
    found = refused(body, lacking)
    assert found == 'guided_decoding_guide={"regex": "a+"}: the engine openvino does not support it: it has no grammars'


def test_adapters_by_number_and_by_name() -> None:
    sql = Adapter("sql", 3, "/x")
    having = with_adapters(CAPABLE, sql)
    assert request(having, lora_task_id=3).adapter is request(having, lora_name="sql").adapter is sql
    assert "no adapter with that number" in refused({"text_input": "a", "lora_task_id": 4}, having)


def test_log_probabilities_are_computed_where_they_are_wanted() -> None:
    assert not sampling().logprobs
    assert sampling(return_log_probs=True).logprobs
    assert sampling(return_cumulative_logprob=True).logprobs
    assert sampling(num_return_sequences=2).logprobs


# -- refusals ------------------------------------------------------------------------------------------------------

_KINDS = "has invalid type. It should be either 'int', 'bool', or 'string'."


@in_one_test(
    ("body", "says"),
    [
        ([], "attempt to get members for non-object"),
        ("a", "attempt to get members for non-object"),
        ({"text_input": 1}, "Unable to parse 'text_input': attempt to access JSON non-string as string"),
        ({"text_input": [1]}, "Unable to parse 'text_input': attempt to access JSON non-string as string"),
        ({"text_input": ["a", "b"]}, "The schema can not convert input 'text_input' to tensor with proper shape"),
        ({"text_input": []}, "The schema can not convert input 'text_input' to tensor with proper shape"),
        ({"text_input": None}, f"parameter 'text_input' {_KINDS}"),
        ({"text_input": "a", "id": 7}, "Unable to parse 'id': attempt to access JSON non-string as string"),
        ({"text_input": "a", "id": None}, "Unable to parse 'id': attempt to access JSON non-string as string"),
        ({"text_input": "a", "parameters": 7}, "Expected JSON object for keyword: 'parameters'"),
        ({"text_input": "a", "parameters": None}, "Expected JSON object for keyword: 'parameters'"),
        ({"text_input": "a", "arr": [1]}, f"parameter 'arr' {_KINDS}"),
        ({"text_input": "a", "x": None}, f"parameter 'x' {_KINDS}"),
        ({"text_input": "a", "max_tokens": None}, f"parameter 'max_tokens' {_KINDS}"),
        ({"text_input": "a", "max_tokens": {}}, f"parameter 'max_tokens' {_KINDS}"),
        (
            {"text_input": "a", "parameters": {"nested": {"x": 1}}},
            f"Converting keyword: 'parameters': parameter 'nested' {_KINDS}",
        ),
        ({"text_input": "a", "parameters": {"text_input": "b"}}, "input 'text_input' already exists in request"),
        ({"text_input": "a", "top_k": 1, "parameters": {"top_k": 1}}, "input 'top_k' already exists in request"),
        ({"text_input": "a", "max_tokens": "x"}, 'max_tokens="x": must be an integer from 1 to 2147483647'),
        ({"text_input": "a", "max_tokens": "1.5"}, 'max_tokens="1.5": must be an integer from 1 to 2147483647'),
        ({"text_input": "a", "temperature": "nan"}, "temperature=NaN: must be a number of at least 0"),
        ({"text_input": "a", "ignore_eos": "no"}, 'ignore_eos="no": must be true or false'),
        (
            {"text_input": "a", "sampling_parameters": "{"},
            'sampling_parameters="{": must be a JSON object in a string',
        ),
        ({"text_input": "a", "sampling_parameters": "[1]"}, "must be a JSON object in a string"),
        ({"text_input": "a", "sampling_parameters": 1}, "must be a JSON object in a string"),
        ({"text_input": "a", "sampling_parameters": '{"top_p": "x"}'}, 'top_p="x": must be a number'),
        ({"text_input": "a", "guided_decoding": "x"}, "must be a JSON object in a string"),
        (
            {"text_input": "a", "structured_outputs": '{"json": 1, "regex": "a"}'},
            "must be an object with exactly one of",
        ),
        ({"text_input": "a", "max_tokens": 1.5}, "max_tokens=1.5: must be an integer from 1 to 2147483647"),
        ({"text_input": "a", "max_tokens": [1, 2]}, "[1, 2]: must be a single value or a tensor of shape [1]"),
        ({"text_input": "a", "max_tokens": 1, "sampling_param_max_tokens": 2}, "contradicts max_tokens"),
        ({"text_input": "a", "stream": 1}, "stream=1: must be true or false"),
        ({"text_input": "a", "stop": True}, "to cancel a request, close its connection"),
        ({"text_input": "a", "end_id": 4, "ignore_eos": True}, "end_id=4: contradicts ignore_eos=true"),
        ({"text_input": "a", "end_id": 9}, "end_id=9: 9 is not in the vocabulary of 6 tokens"),
        ({"text_input": "a", "image_url": "http://x"}, 'image_url="http://x": is not supported: prompts must be text'),
        ({"text_input": "a", "prompt_vocab_size": 7}, "prompt_vocab_size=7: is not supported"),
        ({"text_input": "a", "embedding_bias_words": ["x"]}, "send logit_bias to /invocations"),
        ({"text_input": "a", "return_stop_reason": True}, "return_stop_reason=true: is not supported"),
        ({"text_input": "a", "lora_task_id": 1}, "serves no LoRA adapters"),
        ({"text_input": "a", "min_length": 9, "max_tokens": 8}, "min_length=9: must be at most max_tokens=8"),
        (
            {"text_input": "a", "beam_width": 2, "num_return_sequences": 3},
            "beam_width=2: must be at least num_return_sequences=3",
        ),
        ({"text_input": "a", "length_penalty": 2}, "length_penalty=2: has an effect only with beam_width > 1"),
    ],
)
def test_what_a_request_must_not_be(body: Any, says: str) -> None:
    assert says in refused(body)
    assert says in refused(body, schema=STREAM)


def test_a_missing_prompt_is_told_in_tritons_words() -> None:
    found = refused({"id": "7", "top_k": 1, "max_tokens": 3})
    most = len(INPUTS) + 1
    assert found == (
        f"[request id: 7] expected number of inputs between 1 and {most} but got 2 inputs for model 'model'. "
        "Got input(s) ['max_tokens', 'top_k'], but missing required input(s) ['text_input']. "
        "Please provide all required input(s)."
    )


@pytest.mark.parametrize("field", ["num_return_sequences", "sampling_param_best_of", "beam_width"])
def test_a_stream_has_one_sequence_in_triton(field: str) -> None:
    says = f"{field}=2: must be 1 when streaming"
    assert refused({"text_input": "a", field: 2}, schema=STREAM) == says
    assert refused({"text_input": "a", field: 2, "stream": True}, schema=SHAPE) == says
    assert not call({field: 2, "stream": False}, schema=STREAM).reply.finished


@in_one_test(
    ("error", "status", "says"),
    [
        (ModelNotFound("x"), 404, "Request for unknown model: 'x' is not found"),
        (ModelNotFound("m", "1"), 404, "Request for unknown model: 'm' is not found"),
        (ModelNotFound("m", "9"), 404, "Request for unknown model: 'm' version 9 is not found"),
        (ModelNotFound("m", "x9"), 404, "Not Found"),
        (MethodNotAllowed("no"), 405, "Method Not Allowed"),
        (UnsupportedMedia("gzip"), 400, "gzip"),
        (TooLarge("large"), 400, "large"),
        (TooSlow("slow"), 408, "slow"),
        (Overloaded("full"), 503, "full"),
        (Unavailable("down"), 503, "down"),
        (InternalError("bug"), 500, "bug"),
        (InvalidPayload("header x"), 400, "header x"),
    ],
)
def test_every_error_has_tritons_form(error: ServingError, status: int, says: str) -> None:
    answer = GENERATE.errors.whole(error)
    assert (answer.status, json.loads(answer.body)) == (status, {"error": says})
    for body in ({"stream": True}, {"stream": False}):
        answer = call(body, schema=STREAM).errors.whole(error)
        assert (answer.status, answer.content_type) == (status, "application/json")  # before the model: no event


# -- unknown names -------------------------------------------------------------------------------------------------


def test_unknown_primitives_are_taken_and_reported() -> None:
    body = {"accumulate_tokens": True, "s": "x", "parameters": {"f": 1.5, "id": 7, "x": 1}, "x": 1}
    assert call(body).ignored == ["accumulate_tokens", "s", "x", "parameters.f", "parameters.id", "parameters.x"]


def test_unknown_names_are_refused_where_that_is_wanted() -> None:
    strict = with_options(CAPABLE, unknown_parameters="refuse")
    assert "unknown names: x" in refused({"text_input": "a", "x": 1}, strict)


# -- how many responses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stream", "streaming"])
@pytest.mark.parametrize("nested", [False, True])
def test_generate_gives_one_response(name: str, nested: bool) -> None:
    names = {name: True}
    body = {"text_input": "a", **({"parameters": names} if nested else names)}
    found = value("triton_generate", body, context=CAPABLE)
    assert found["error"].startswith("generate expects model to produce exactly 1 response")
    assert value("triton_generate", {"text_input": "a", name: False}, context=CAPABLE)["text_output"]


def test_one_route_for_both_goes_by_the_body() -> None:
    assert not call({}).streams
    assert call({"stream": True}).streams
    assert call({"parameters": {"streaming": [True]}}).streams
    assert call({}, schema=STREAM).streams


# -- the text ------------------------------------------------------------------------------------------------------


@in_one_test(
    ("names", "echoed"),
    [
        ({}, True),
        ({"exclude_input_in_output": False}, True),
        ({"exclude_input_in_output": True}, False),
        ({"sampling_param_max_tokens": 3}, False),
        ({"streaming": False}, False),
        ({"sampling_param_exclude_input_from_output": False}, True),
    ],
)
def test_whether_the_text_begins_with_the_prompt(names: dict[str, Any], echoed: bool) -> None:
    found = value("triton_generate", {"text_input": "Ask: ", **names}, context=CAPABLE)
    assert found["text_output"] == ("Ask: " if echoed else "") + 'Deep "Learning" 😀\n'


def test_several_sequences_are_a_list_the_best_of_more_by_probability() -> None:
    base = {"text_input": "a", "top_k": 5, "exclude_input_in_output": True, "return_cumulative_logprob": True}
    found = value("triton_generate", {**base, "num_return_sequences": 3}, context=CAPABLE)
    assert len(found["text_output"]) == 3
    assert found["cumulative_logprob"] != sorted(found["cumulative_logprob"], reverse=True)
    all_three = {**base, "num_return_sequences": 3, "sampling_param_best_of": 3}
    assert value("triton_generate", all_three, context=CAPABLE) == found
    best = value("triton_generate", {**base, "sampling_param_best_of": 3}, context=CAPABLE)
    assert isinstance(best["text_output"], str)
    assert best["cumulative_logprob"] == max(found["cumulative_logprob"])
    two = {**base, "num_return_sequences": 2, "sampling_param_best_of": 3}
    assert (
        value("triton_generate", two, context=CAPABLE)["cumulative_logprob"]
        == sorted(found["cumulative_logprob"], reverse=True)[:2]
    )


def test_names_for_what_is_checked_later() -> None:
    names = request(sampling_param_max_tokens=3, return_context_logits=True).names
    assert (names.prompt, names.max_new_tokens, names.logits) == (
        "text_input",
        "sampling_param_max_tokens",
        "return_context_logits",
    )
    assert request().names.max_new_tokens == "max_tokens"
