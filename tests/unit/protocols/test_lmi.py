"""LMI's request: what is read, what is refused, and how the refusal says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.framing import JSONLINES
from handler.core.values import Delta, Finish, Request, Sampling, Token
from handler.protocols.kernel.body import decode
from handler.protocols.kernel.context import RequestContext, ServerContext
from handler.protocols.kernel.dialect import Dialect, ParsedRequest
from handler.protocols.kernel.parameters import PARAMETERS
from handler.protocols.lmi.dynamic_batch import LmiDynamicBatch
from handler.protocols.registry import INVOCATIONS
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, CONTEXT, answer, deltas, value, with_options


def parse(parameters: dict[str, Any] | None = None, *, schema: str = "lmi", **body: Any) -> ParsedRequest:
    full = {"inputs": "hi", **({} if parameters is None else {"parameters": parameters}), **body}
    return INVOCATIONS[schema].parse(full, CONTEXT)


def request(**parameters: Any) -> Request:
    return parse(parameters).requests[0]


def refusal(**parameters: Any) -> str:
    with pytest.raises(InvalidParameter) as caught:
        parse(parameters)
    return str(caught.value)


def test_defaults_are_the_seeds() -> None:
    found = parse().requests[0]
    assert found == Request("hi", Sampling())
    assert (found.sampling.max_new_tokens, found.sampling.do_sample, found.details) == (30, False, False)


@pytest.mark.parametrize("schema", ["lmi", "tgi_compat"])
def test_another_prompt_with_equal_values_is_read_as_the_first(schema: str) -> None:
    """Plain values are remembered. Values that are only equal in Python, and refusals, are read again."""
    shared, dialect = replace(CONTEXT), INVOCATIONS[schema]
    values: list[dict[str, Any]] = [
        {}, {"max_new_tokens": 1}, {"max_new_tokens": 1.0}, {"max_new_tokens": True}, {"max_new_tokens": 0},
        {"max_new_tokens": "7"}, {"details": True}, {"details": False, "temperature": 0.5}, {"temperature": 0},
        {"do_sample": True, "seed": 1}, {"seed": 1}, {"seed": None}, {"return_full_text": True}, {"truncate": 2},
        {"n": 2}, {"unknown": 1}, {"stop": ["a"]}, {"input_ids": [1]}, {"stream": True}, {"output_formatter": "sse"},
    ]  # fmt: skip
    for parameters in values + values:
        for stream in ({}, {"stream": True}, {"stream": False}, {"stream": 1}):
            for prompt in ("one", "another", ""):
                body = {"inputs": prompt, "parameters": parameters, **stream}
                found, wanted = told(dialect, body, shared), told(dialect, body, replace(CONTEXT))
                assert found == wanted, body


def told(dialect: Dialect, body: dict[str, Any], context: ServerContext) -> Any:
    """Return what a body is parsed to, and the response to it."""
    response = answer(dialect, body, context=context)
    if response.status != 200:
        return response
    parsed = dialect.parse(body, context)
    return parsed.requests, parsed.ignored, parsed.streams, parsed.errors.whole(InvalidPayload("x")), response


def test_log_probabilities_are_read_only_for_a_response_or_a_formatter() -> None:
    context = replace(CONTEXT)
    found = []
    for parameters in ({"max_new_tokens": 1}, {"max_new_tokens": 1, "details": True}):
        for formatted in (False, True, False, True):
            body = {"inputs": "hi", "parameters": parameters}
            parsed = INVOCATIONS["lmi"].parse(body, context, RequestContext(may_be_formatted=formatted))
            found.append(parsed.requests[0].sampling.logprobs)
    assert found == [True, True, False, True, True, True, True, True], "the first is left to the preprocessor"


def test_null_means_absent_in_lmi() -> None:
    names = [*PARAMETERS, "details", "return_full_text", "truncate", "stream", "output_formatter"]
    assert [name for name in names if request(**{name: None}) != request()] == []


@in_one_test(
    ("name", "given", "field", "wanted"),
    [
        ("temperature", 0, "temperature", 0.0),
        ("top_k", -1, "top_k", 0),
        ("top_k", 5, "top_k", 5),
        ("top_p", 1, "top_p", 1.0),
        ("stop_sequences", ["a", "b"], "stop", ("a", "b")),
        ("stop_sequences", "a", "stop", ("a",)),
        ("stop", ["a"], "stop", ("a",)),
        ("stop", False, "stop", ()),
        ("min_length", 3, "min_new_tokens", 3),
        ("ignore_eos_token", True, "ignore_eos", True),
        ("include_stop_str_in_output", True, "include_stop", True),
        ("stop_token_ids", [5, 6], "stop_token_ids", (5, 6)),
        ("seed", 2**64 - 1, "seed", 2**64 - 1),
        ("skip_special_tokens", False, "skip_special_tokens", False),
        ("decoder_input_details", True, "prompt_logprobs", True),
        ("prompt_logprobs", 1, "prompt_logprobs", True),
        ("min_p", 0.1, "min_p", 0.1),
        ("best_of", 3, "best_of", 3),
        ("presence_penalty", -2, "presence_penalty", -2.0),
        ("logprobs", 2, "top_logprobs", 2),
        ("logprobs", 1, "top_logprobs", 0),
        ("top_n_tokens", 1, "top_logprobs", 1),
        ("logit_bias", {"7": 1, "5": -100, "6": 0}, "logit_bias", ((5, -100.0), (7, 1.0))),
        ("adapter_id", "", "n", 1),
    ],
)
def test_a_parameter_sets_its_field_in_lmi(name: str, given: Any, field: str, wanted: Any) -> None:
    assert getattr(request(**{name: given}).sampling, field) == wanted


@in_one_test(
    ("name", "given", "wanted"),
    [
        ("max_new_tokens", 0, "an integer from 1"),
        ("max_new_tokens", 1.5, "an integer from 1"),
        ("max_new_tokens", "8", "an integer from 1"),
        ("max_new_tokens", True, "an integer from 1"),
        ("max_new_tokens", 10**400, "an integer from 1"),
        ("do_sample", "true", "true or false"),
        ("do_sample", 2, "true or false"),
        ("temperature", -0.1, "a number of at least 0"),
        ("temperature", 10**400, "a number of at least 0"),
        ("temperature", "hot", "a number of at least 0"),
        ("top_p", 1.01, "at most 1"),
        ("top_k", -2, "an integer from -1"),
        ("min_p", 1, "below 1"),
        ("repetition_penalty", 1e-50, "above 0"),
        ("typical_p", 0, "above 0 and at most 1"),
        ("repetition_penalty", 0, "above 0"),
        ("presence_penalty", 2.1, "at least -2 and at most 2"),
        ("frequency_penalty", -3, "at least -2 and at most 2"),
        ("seed", -1, "an integer from 0"),
        ("seed", "abc", "an integer from 0"),
        ("n", 33, "at most 32"),
        ("best_of", 0, "an integer from 1"),
        ("num_beams", 99, "at most 32"),
        ("stop_sequences", [""], "non-empty strings"),
        ("stop_sequences", [1], "non-empty strings"),
        ("stop_sequences", ["x"] * 65, "at most 64 strings"),
        ("stop_sequences", "x" * 2049, "at most 2048 characters"),
        ("stop", True, "a string or a list"),
        ("stop_token_ids", [-1], "token ids"),
        ("stop_token_ids", "5", "token ids"),
        ("details", "yes", "true or false"),
        ("return_full_text", 2, "true or false"),
        ("truncate", 0, "an integer from 1"),
        ("output_formatter", "json_chat", "cannot format responses to prompts"),
        ("logprobs", -1, "an integer from 0"),
        ("prompt_logprobs", 2, "an integer from 0 to 1"),
        ("watermark", True, "is not supported"),
        ("grammar", {"type": "yaml", "value": {}}, "a 'type' that is json, json_object, json_schema or regex"),
        ("adapter_id", "mine", "the engine openvino serves no LoRA adapters: none is registered"),
        ("logprobs", 21, "an integer from 0 to 20"),
        ("top_n_tokens", 21, "an integer from 0 to 20"),
        ("logit_bias", {"5": 101}, "an object that maps token ids to numbers from -100 to 100"),
        ("logit_bias", {"5": 1, "05": 2}, "without duplicates"),
        ("logit_bias", {"-5": 1}, "an object that maps token ids"),
        ("logit_bias", {"\u0663": 1}, "an object that maps token ids"),
        ("logit_bias", {"5" * 5000: 1}, "an object that maps token ids"),
        ("length_penalty", 2.0, "only with parameters.num_beams > 1"),
        ("early_stopping", True, "only with parameters.num_beams > 1"),
        ("min_length", 31, "at most parameters.max_new_tokens=30"),
    ],
)
def test_a_wrong_value_is_refused_by_name_value_and_range(name: str, given: Any, wanted: str) -> None:
    message = refusal(**{name: given})
    assert message.startswith(f"parameters.{name}=")
    assert wanted in message


@in_one_test(
    ("name", "least", "most", "step"),
    [
        ("seed", 0, 2**64 - 1, 1),
        ("temperature", 0, None, 1e-9),
        ("top_k", -1, 2**31 - 1, 1),
        ("top_p", 0, 1, 1e-9),
        ("max_new_tokens", 1, None, 1),
        ("typical_p", 1e-9, 1, 1e-9),
        ("min_p", 0, 1 - 1e-9, 1e-9),
        ("presence_penalty", -2, 2, 1e-9),
        ("frequency_penalty", -2, 2, 1e-9),
        ("n", 1, None, 1),
        ("best_of", 1, None, 1),
        ("num_beams", 1, 32, 1),
        ("length_penalty", -20, 20, 1e-9),
        ("logprobs", 0, 20, 1),
        ("prompt_logprobs", 0, 1, 1),
        ("min_length", 0, None, 1),
        ("top_n_tokens", 0, 20, 1),
        ("priority", -(2**63), 2**63 - 1, 1),
    ],
)
def test_a_range_ends_where_it_says(name: str, least: float, most: float | None, step: float) -> None:
    def read(value: float) -> None:
        beams = {"num_beams": 2} if name == "length_penalty" else {}
        INVOCATIONS["lmi"].parse({"inputs": "a", "parameters": {name: value, **beams}}, CAPABLE)

    for accepted, refused in ((least, least - step), *([] if most is None else [(most, most + step)])):
        read(accepted)
        with pytest.raises(InvalidParameter, match=f"^parameters.{name}="):
            read(refused)


@pytest.mark.parametrize(("name", "neutral"), [("typical_p", 1.0), ("watermark", False), ("bad_sequences", [])])
def test_a_neutral_value_of_what_the_engine_lacks_is_accepted(name: str, neutral: Any) -> None:
    request(**{name: neutral}, do_sample=True)


def test_what_the_engine_lacks_is_refused_by_name() -> None:
    assert "typical_p=0.5: the engine openvino does not support it" in refusal(typical_p=0.5, do_sample=True)
    assert 'bad_sequences=["x"]: the engine openvino does not support it' in refusal(bad_sequences=["x"])


def test_greedy_ignores_sampling_values_but_checks_their_range() -> None:
    assert not request(typical_p=0.5, temperature=0.7).sampling.do_sample
    assert not request(typical_p=0.5, do_sample=False).sampling.do_sample
    assert "typical_p=5" in refusal(typical_p=5)


TENSORRT = replace(CONTEXT, sampling_defaults={"top_k": 5, "top_p": 0.85, "temperature": 0.8}, unsupported={})


@in_one_test(
    ("given", "k", "p", "temperature"),
    [
        ({"do_sample": True}, 5, 0.85, 0.8),
        ({"do_sample": True, "top_k": 40}, 40, 0.85, 0.8),
        ({"do_sample": True, "top_k": 0, "top_p": None, "temperature": 1.0}, 0, 0.85, 1.0),
        ({"do_sample": True, "runtime_top_p": [0.5]}, 5, 0.5, 0.8),
        ({"do_sample": False}, 0, 1.0, 1.0),
        ({}, 0, 1.0, 1.0),
        ({"runtime_top_k": [40]}, 40, 1.0, 1.0),  # GptManager's own defaults: LMI's come with LMI's do_sample
    ],
)
@in_one_test("schema", ["lmi", "tgi_compat", "dynamic_batch"])
def test_an_engines_sampling_defaults_stand_for_what_is_not_named(
    schema: str, given: dict[str, Any], k: int, p: float, temperature: float
) -> None:
    found = INVOCATIONS[schema].parse({"inputs": "a", "parameters": given}, TENSORRT).requests[0].sampling
    assert (found.top_k, found.top_p, found.temperature) == (k, p, temperature)


def test_a_chat_has_sampling_defaults_of_its_own() -> None:
    found = INVOCATIONS["lmi"].parse({"messages": [{"role": "user", "content": "a"}]}, TENSORRT).requests[0].sampling
    assert (found.do_sample, found.top_k, found.top_p, found.temperature) == (True, 0, 1.0, 1.0)


def test_one_most_likely_token_is_an_alternative_where_the_choice_is_drawn() -> None:
    context = replace(CONTEXT, unsupported={"top_logprobs": "it has none"})
    with pytest.raises(
        InvalidParameter, match=r"^parameters.top_n_tokens=1: the engine openvino does not support it: it has none"
    ):
        INVOCATIONS["lmi"].parse({"inputs": "a", "parameters": {"top_n_tokens": 1}}, context)
    INVOCATIONS["lmi"].parse({"inputs": "a", "parameters": {"top_n_tokens": 0, "logprobs": 1}}, context)


@in_one_test(
    "parameters",
    [
        {"logprobs": 2},
        {"min_length": 2},
        {"guided_regex": "a"},
        {"logit_bias": {"5": 1}},
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"bad_sequences": ["a"]},
    ],
)
def test_beams_are_refused_what_their_search_does_not_honour(parameters: dict[str, Any]) -> None:
    (name,) = parameters
    with pytest.raises(
        InvalidParameter, match=rf"^parameters\.{name}=.*: is not available with parameters\.num_beams > 1"
    ):
        INVOCATIONS["lmi"].parse({"inputs": "a", "parameters": {"num_beams": 2, **parameters}}, TENSORRT)


def test_aliases_that_contradict_each_other_are_refused() -> None:
    assert "contradicts parameters.max_new_tokens" in refusal(max_new_tokens=2, request_output_len=[[3]])
    assert request(stop_sequences=["a"], stop=["a"]).sampling.stop == ("a",)


def test_an_engines_limit_is_allowed_and_more_refused_if_it_has_an_effect() -> None:
    context = replace(CONTEXT, engine="able", limits={"temperature": 2.0})

    def read(**parameters: Any) -> float:
        (found,) = INVOCATIONS["lmi"].parse({"inputs": "hi", "parameters": parameters}, context).requests
        return found.sampling.temperature

    assert read(temperature=2, do_sample=True) == 2
    assert read(temperature=2.5) == 2.5
    with pytest.raises(InvalidParameter, match=r"^parameters\.temperature=2\.5: the engine able accepts at most 2$"):
        read(temperature=2.5, do_sample=True)


def test_n_and_best_of_and_beams_must_agree() -> None:
    assert "at least parameters.n=3" in refusal(n=3, best_of=2)
    assert "does not sample" in refusal(num_beams=2, do_sample=True)
    assert refusal(num_beams=2, n=3).endswith("at least parameters.n=3")
    assert refusal(num_beams=2, best_of=3).endswith("at least parameters.best_of=3")
    assert request(num_beams=4, length_penalty=2.0, early_stopping=True).sampling.num_sequences == 4


def test_several_sequences_do_not_stream() -> None:
    with pytest.raises(InvalidParameter, match="must be 1 when streaming"):
        parse({"n": 2}, stream=True)


@in_one_test(
    ("body", "wanted"),
    [
        ([], "must be a JSON object"),
        ("text", "must be a JSON object"),
        ({}, "no 'inputs'"),
        ({"inputs": ""}, "non-empty string"),
        ({"inputs": 5}, "non-empty string"),
        ({"inputs": None}, "no 'inputs'"),
        ({"messages": []}, "'messages' must be a non-empty list"),
        ({"inputs": ["a", "b"]}, "one string under rolling batch"),
        ({"inputs": "a", "parameters": []}, "'parameters' must be an object"),
        ({"inputs": "a", "stream": "yes"}, "'stream' must be true or false"),
        ({"inputs": "a", "adapters": "mine"}, "no LoRA adapters"),
        ({"parameters": {"input_ids": None}}, "no 'inputs'"),
    ],
)
def test_a_wrong_payload_is_refused(body: Any, wanted: str) -> None:
    found = answer("lmi", body)
    assert (found.status, found.content_type) == (424, "application/json")
    error = json.loads(found.body)
    assert set(error) == {"error", "code"}
    assert wanted in error["error"]


@in_one_test(
    ("raw", "wanted"),
    [
        (b"", "the body is empty"),
        (b"{", "not valid JSON"),
        (b'{"inputs":"a"} x', "Extra data"),
        (b'{"inputs":"a","inputs":"b"}', '"inputs" appears twice'),
        (b'{"inputs":"a","parameters":{"temperature":NaN}}', "NaN is not a JSON number"),
        (b'{"inputs":"\\ud800"}', "lone surrogate"),
        (b'{"inputs":"\xff"}', "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 5000, "not valid JSON"),
    ],
)
def test_what_is_not_json_is_refused(raw: bytes, wanted: str) -> None:
    with pytest.raises(InvalidPayload, match=wanted):
        decode(raw)


def test_unknown_names_are_reported_in_lmi() -> None:
    assert parse({"temprature": 1}, model="x").ignored == ["model", "parameters.temprature"]


def test_unknown_names_are_refused_where_that_is_asked() -> None:
    with pytest.raises(InvalidPayload, match=r"unknown names: parameters.temprature"):
        INVOCATIONS["lmi"].parse(
            {"inputs": "a", "parameters": {"temprature": 1}}, with_options(CONTEXT, unknown_parameters="refuse")
        )


@in_one_test(
    ("option", "parameter", "stream", "wanted"),
    [
        (None, None, False, "application/json"),
        (None, None, True, "application/jsonlines"),
        ("sse", None, True, "text/event-stream"),
        ("jsonlines", None, False, "application/jsonlines"),
        ("json", None, True, "application/json"),
        ("json", "sse", True, "text/event-stream"),
        ("sse", "json", True, "application/json"),
        ("sse", "xml", False, "application/json"),
        ("json", "xml", True, "application/jsonlines"),
        ("json", {}, True, "application/jsonlines"),
    ],
)
def test_the_formatter_of_the_request_beats_the_options_beats_stream(
    option: str | None, parameter: Any, stream: bool, wanted: str
) -> None:
    """A name that LMI does not know replaces the option's all the same, and changes nothing else."""
    body = {"inputs": "a", "stream": stream, "parameters": {"output_formatter": parameter}}
    context = with_options(CONTEXT, output_formatter=option)
    assert answer("lmi", body, context=context).content_type == wanted
    known = parameter in (None, "json", "sse")
    assert INVOCATIONS["lmi"].parse(body, context).ignored == ([] if known else ["parameters.output_formatter"])


@in_one_test("schema", ["lmi", "tgi_compat", "dynamic_batch"])
def test_of_two_names_the_one_counts_that_lmi_heeds(schema: str) -> None:
    both = {"stop_sequences": ["a"], "stop": ["b"]}
    found = parse(both, schema=schema)
    assert (found.requests[0].sampling.stop, found.ignored) == (("a",), ["parameters.stop"])
    assert parse({"stop_sequences": ["a"], "stop": ["a"]}, schema=schema).ignored == []
    of_trtllm = replace(CONTEXT, engine="trtllm")
    found = INVOCATIONS[schema].parse({"inputs": "hi", "parameters": both}, of_trtllm)
    assert (found.requests[0].sampling.stop, found.ignored) == (("b",), ["parameters.stop_sequences"])


@in_one_test("count", [0, 1, 2])
def test_the_count_of_alternatives_is_top_n_tokens(count: int) -> None:
    found = INVOCATIONS["lmi"].parse({"inputs": "hi", "parameters": {"logprobs": 5, "top_n_tokens": count}}, CAPABLE)
    assert (found.requests[0].sampling.top_logprobs, found.ignored) == (count, ["parameters.logprobs"])
    assert found.requests[0].details is (count > 0)


@in_one_test("schema", ["lmi", "tgi_compat", "dynamic_batch"])
def test_stream_among_the_parameters_streams_nothing(schema: str) -> None:
    """LMI's own, of the body, replaces it in every release (djl_python's input_parser.py; utils.py in 0.28)."""
    found = parse({"stream": True}, schema=schema)
    assert (found.streams, found.ignored) == (False, ["parameters.stream"])
    assert parse({"stream": False}, schema=schema).ignored == []
    if schema != "dynamic_batch":
        both = parse({"stream": True}, schema=schema, stream=True)
        assert (both.streams, both.ignored) == (True, [])


def test_the_most_probable_sequence_comes_first_and_n_says_how_many() -> None:
    found = value("lmi", {"inputs": "a", "parameters": {"n": 2, "best_of": 3, "do_sample": True}})
    others = found["details"]["best_of_sequences"]
    assert len(others) == 1
    top = sum(token["log_prob"] for token in found["details"]["tokens"])
    assert top > sum(token["log_prob"] for token in others[0]["tokens"])


def test_the_prompts_tokens_stand_with_the_best_sequence_whichever_it_is() -> None:
    script = [*deltas(0, prefill=True, shift=-9.0), *deltas(1)]
    parameters = {"best_of": 2, "do_sample": True, "details": True, "decoder_input_details": True}
    details = value("lmi", {"inputs": "a", "parameters": parameters}, script)["details"]
    assert details["tokens"][0]["log_prob"] == -0.05
    assert [token["text"] for token in details["prefill"]] == ["What", " is"]


def test_best_of_alone_returns_all_of_them() -> None:
    found = value("lmi", {"inputs": "a", "parameters": {"best_of": 3, "do_sample": True}})
    assert len(found["details"]["best_of_sequences"]) == 2


def test_a_dynamic_batch_names_what_asks_for_a_stream_in_vain() -> None:
    streaming = {"streaming": True}
    assert parse(streaming, schema="dynamic_batch").ignored == ["parameters.streaming"]
    assert parse(streaming, schema="dynamic_batch", stream=True).ignored == ["stream", "parameters.streaming"]
    assert parse({"stream": True}, schema="dynamic_batch", stream=True).ignored == ["stream"]


def test_a_stream_that_ends_without_a_token_still_closes_properly() -> None:
    script = [*deltas()[:2], deltas()[0]._replace(tokens=(), finish=Finish.LENGTH)]
    lines = answer("lmi", {"inputs": "a", "stream": True, "parameters": {"details": True}}, script).body.splitlines()
    last = json.loads(lines[-1])
    assert last["generated_text"] == 'Deep "Learning"'
    assert last["details"]["generated_tokens"] == 2


def test_a_sampled_request_draws_its_seed_so_that_tgi_can_show_it() -> None:
    found = value("tgi_compat", {"inputs": "a", "parameters": {"do_sample": True}})
    assert isinstance(found[0]["details"]["seed"], int)


def test_tgi_keeps_the_stop_string_unless_told_otherwise() -> None:
    def include(schema: str, **parameters: Any) -> bool:
        return parse(parameters, schema=schema).requests[0].sampling.include_stop

    assert include("tgi_compat")
    assert not include("tgi_compat", include_stop_str_in_output=False)
    assert not include("lmi")


@in_one_test(
    ("body", "wanted"),
    [
        ({"inputs": ["a", ""]}, "non-empty"),
        ({"inputs": ["a", 1]}, "non-empty"),
        ({"inputs": ["a"] * 33}, "33 prompts"),
        ({"inputs": "a", "parameters": {"details": True}}, "only available with rolling batch"),
        ({"inputs": "a", "parameters": {"n": 2}}, "must be 1"),
        ({"inputs": "a", "parameters": {"top_p": 7}}, "parameters.top_p=7"),
    ],
)
def test_dynamic_batching_refuses_with_the_seeds_document(body: Any, wanted: str) -> None:
    found = answer("dynamic_batch", body)
    error = json.loads(found.body)
    assert (found.status, error["code"], error["message"]) == (424, 424, "invoke handler failure")
    assert wanted in error["error"]


@pytest.mark.parametrize("body", [{"stream": True}, {"stream": False}, {"parameters": {"stream": True}}])
def test_a_dynamic_batch_streams_by_its_option_whatever_the_request_says(body: dict[str, Any]) -> None:
    context = with_options(CONTEXT, enable_streaming=True)
    assert answer("dynamic_batch", {"inputs": "a", **body}, None, context) == answer(
        "dynamic_batch", {"inputs": "a"}, None, context
    )


def test_a_dynamic_stream_may_end_without_a_token() -> None:
    script = [*deltas()[:1], Delta(1, 0, (), Finish.LENGTH)]
    found = answer("dynamic_batch", {"inputs": "a"}, script, with_options(CONTEXT, enable_streaming=True))
    assert found.body == b'{"outputs":["Deep"]}\n'


def test_a_dynamic_streams_lines_wait_for_the_slowest_prompt() -> None:
    context = with_options(CONTEXT, enable_streaming=True)
    reply = LmiDynamicBatch().parse({"inputs": ["a", "b"]}, context).reply
    one, two, three = (Token(id, text, 0.0, False) for id, text in enumerate("123"))
    for index in range(2):
        reply.start(index, 1)
    assert reply.feed(0, Delta(1, 0, (one, two))) == b""
    assert reply.feed(1, Delta(2, 0, (three,))) == b'{"outputs":["1","3"]}\n'
    assert reply.feed(1, Delta(2, 0, (), Finish.STOP)) == b'{"outputs":["2",""]}\n'
    assert reply.feed(0, Delta(1, 0, (three,))) == b'{"outputs":["3",""]}\n'
    assert not reply.finished
    assert reply.feed(0, Delta(1, 0, (one,), Finish.LENGTH)) == b'{"outputs":["1",""]}\n'
    assert reply.finished


def test_each_text_of_a_dynamic_stream_begins_with_its_prompt_where_asked() -> None:
    context = with_options(CONTEXT, enable_streaming=True)
    body = {"inputs": ["a", "b"], "parameters": {"return_full_text": True}}
    found = answer("dynamic_batch", body, None, context)
    assert found.body.startswith(b'{"outputs":["aDeep","bDeep"]}\n')


class OnlyByName(dict[str, Any]):
    """Parameters that may be read by name, but not all of them."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all parameters are read")

    items = keys = values = __iter__  # type: ignore[assignment]


@pytest.mark.parametrize("formatter", [{"output_formatter": "jsonlines"}, {"streaming": True}])
def test_a_refusal_reads_only_the_fields_that_choose_its_framing(formatter: dict[str, Any]) -> None:
    body = {"inputs": "a", "parameters": OnlyByName(formatter, bad_words=["a"] * 1000)}
    response = INVOCATIONS["lmi"].errors_of(body, CONTEXT).whole(InvalidParameter("top_k=0: wrong"))
    assert response.content_type == JSONLINES.content_type
