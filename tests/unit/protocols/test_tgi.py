"""Requests and answers of TGI's own routes and of MindIE's."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from handler.config.config import Config
from handler.core.errors import (
    AnswerTooLong,
    GenerationFailed,
    InternalError,
    InvalidParameter,
    InvalidPayload,
    MethodNotAllowed,
    Overloaded,
    PromptTooLong,
    ServingError,
    TooLarge,
    Unavailable,
    UnsupportedMedia,
)
from handler.core.tgi_version import TgiVersion, read_tgi_version
from handler.core.values import Delta, Finish, Request, StructuredOutput, Truncation
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import Timing
from handler.protocols.registry import ROUTES, choose, routes
from handler.protocols.tgi.api import OutOfRange, WrongType
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, CONTEXT, answer, deltas, value, with_options

# -- tgi native --------------------------------------------------------------------------------------------------------
# TGI's request as its router 3.3.7 reads it (router/src/validation.rs): types, limits, order, texts, defaults.


ROOT, GENERATE, STREAM = routes("tgi")["/"], ROUTES["/generate"], ROUTES["/generate_stream"]
ABLE = replace(CAPABLE, most_tokens=lambda: 100)


def read(parameters: dict[str, Any] | None = None, *, context: ServerContext = ABLE, **more: Any) -> Request:
    body = {"inputs": "a", **({} if parameters is None else {"parameters": parameters}), **more}
    (request,) = ROOT.parse(body, context).requests
    return request


def refusal(parameters: Any, **more: Any) -> str:
    with pytest.raises(OutOfRange) as found:
        ROOT.parse({"inputs": "a", "parameters": parameters, **more}, ABLE)
    assert found.value.message.startswith(found.value.public)
    assert not found.value.public.endswith("Given")
    return found.value.message


# -- types -------------------------------------------------------------------------------------------------------


@in_one_test("name", ["do_sample", "stop", "watermark", "details", "decoder_input_details"])
def test_these_take_no_null(name: str) -> None:
    with pytest.raises(WrongType, match=rf"parameters\.{name}: invalid type: null, expected"):
        read({name: None})


def test_null_stands_for_the_others_default() -> None:
    nulls = (
        "best_of", "temperature", "repetition_penalty", "frequency_penalty", "top_k", "top_p", "typical_p",
        "max_new_tokens", "return_full_text", "truncate", "seed", "top_n_tokens", "grammar", "adapter_id",
    )  # fmt: skip
    assert read(dict.fromkeys(nulls)) == read({})


@in_one_test(
    ("body", "message"),
    [
        ([], "the body: invalid type: sequence, expected an object"),
        ({}, "missing field `inputs`"),
        ({"inputs": None}, "inputs: invalid type: null, expected a string"),
        ({"inputs": ["a"]}, "inputs: invalid type: sequence, expected a string"),
        ({"inputs": 1}, "inputs: invalid type: integer `1`, expected a string"),
        ({"inputs": "a", "parameters": None}, "parameters: invalid type: null, expected an object"),
        ({"inputs": "a", "parameters": []}, "parameters: invalid type: sequence, expected an object"),
        ({"inputs": "a", "stream": None}, "stream: invalid type: null, expected a boolean"),
        ({"inputs": "a", "stream": "true"}, 'stream: invalid type: string "true", expected a boolean'),
        ({"max_new_tokens": -1}, "parameters.max_new_tokens: invalid value: integer `-1`, expected u32"),
        ({"max_new_tokens": 1 << 32}, "parameters.max_new_tokens: invalid value: integer `4294967296`, expected u32"),
        ({"max_new_tokens": 1.0}, "parameters.max_new_tokens: invalid type: floating point `1.0`, expected u32"),
        ({"max_new_tokens": True}, "parameters.max_new_tokens: invalid type: boolean `true`, expected u32"),
        ({"seed": -1}, "parameters.seed: invalid value: integer `-1`, expected u64"),
        ({"seed": 1 << 64}, "parameters.seed: invalid value: integer `18446744073709551616`, expected u64"),
        ({"top_k": 1 << 31}, "parameters.top_k: invalid value: integer `2147483648`, expected i32"),
        ({"stop": "a"}, 'parameters.stop: invalid type: string "a", expected a sequence'),
        ({"stop": ["a", 1]}, "parameters.stop[1]: invalid type: integer `1`, expected a string"),
        ({"temperature": {}}, "parameters.temperature: invalid type: map, expected f32"),
        ({"temperature": False}, "parameters.temperature: invalid type: boolean `false`, expected f32"),
        ({"grammar": "x"}, 'parameters.grammar: invalid type: string "x", expected an object'),
        ({"adapter_id": 1}, "parameters.adapter_id: invalid type: integer `1`, expected a string"),
    ],
)
def test_a_wrong_type_is_named_with_its_place(body: Any, message: str) -> None:
    plain = not isinstance(body, dict) or not body or body.keys() & {"inputs"}
    with pytest.raises(WrongType) as found:
        ROOT.parse(body if plain else {"inputs": "a", "parameters": body}, ABLE)
    assert found.value.message == message
    place, _, told = message.partition(": ")
    assert found.value.public == (f"{place} has a wrong type" if told else message)


# -- limits ------------------------------------------------------------------------------------------------------

BEST = {"do_sample": True, "best_of": 2}


@in_one_test(
    ("parameters", "message"),
    [
        ({"best_of": 3, "do_sample": True}, "`best_of` must be > 0 and <= 2. Given: 3"),
        ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
        ({"temperature": 0}, "`temperature` must be strictly positive"),
        ({"temperature": -0.5}, "`temperature` must be strictly positive"),
        ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
        ({"frequency_penalty": 2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        ({"frequency_penalty": -2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"top_p": 0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"typical_p": 1}, "`typical_p` must be > 0.0 and < 1.0"),
        ({"top_k": 0}, "`top_k` must be strictly positive"),
        ({"top_k": -1}, "`top_k` must be strictly positive"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
        ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
        ({**BEST, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
        ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
        ({"truncate": 0}, "`truncate` must be strictly positive and less than 99. Given: 0"),
        ({"truncate": 100}, "`truncate` must be strictly positive and less than 99. Given: 100"),
    ],
)
def test_what_breaks_a_limit_is_refused_in_tgis_words(parameters: dict[str, Any], message: str) -> None:
    assert refusal(parameters) == message


def test_an_empty_prompt_is_refused() -> None:
    assert refusal({}, inputs="") == "`inputs` cannot be empty"


@pytest.mark.parametrize(("best_of", "fails"), [(0, True), (1, False), (2, True), (None, False)])
def test_a_stream_has_one_sequence_in_tgi(best_of: int | None, fails: bool) -> None:
    parameters = {"best_of": best_of, "do_sample": True}
    if fails:
        assert refusal(parameters, stream=True) == "`best_of` != 1 is not supported when streaming tokens"
    else:
        assert read(parameters, stream=True).sampling.best_of == 1


def test_a_stream_has_no_prefill_in_tgi() -> None:
    message = "`decoder_input_details` == true is not supported when streaming tokens"
    assert refusal({"decoder_input_details": True}, stream=True) == message


def test_the_first_of_several_is_tgis_first() -> None:
    """Whatever the body's own order; each step takes the offender away that was named."""
    wrong: dict[str, Any] = {
        "grammar": {"type": "regex", "value": ""}, "truncate": 0, "top_n_tokens": 6, "seed": 1, "stop": [*"abcde"],
        "max_new_tokens": 0, "top_k": 0, "typical_p": 1.0, "top_p": 1.0, "frequency_penalty": 3,
        "repetition_penalty": 0, "temperature": 0, "best_of": 2,
    }  # fmt: skip
    found = []
    given = dict(wrong)
    for name in (
        "temperature", "repetition_penalty", "frequency_penalty", "top_p", "typical_p", "top_k", "max_new_tokens",
        "stop", "seed", "top_n_tokens", "truncate", "grammar",
    ):  # fmt: skip
        found.append(refusal({**given, "do_sample": True}))
        del given[name]
    assert [message.replace("grammar", "`grammar`").split("`")[1] for message in found] == [
        "temperature", "repetition_penalty", "frequency_penalty", "top_p", "typical_p", "top_k", "max_new_tokens",
        "stop", "seed", "top_n_tokens", "truncate", "grammar",
    ]  # fmt: skip


@pytest.mark.parametrize("value", [{"type": "regex", "value": ""}, {"type": "xml"}, {"type": "json", "value": 3}])
def test_a_grammar_that_is_none_is_refused(value: dict[str, Any]) -> None:
    assert refusal({"grammar": value}).startswith("grammar is not valid: it must ")


def test_what_the_engine_lacks_is_named_in_tgi() -> None:
    context = replace(ABLE, unsupported={"structured_output": "no grammars here"})
    with pytest.raises(ServingError) as found:
        read({"grammar": {"type": "regex", "value": "a"}}, context=context)
    assert "parameters.grammar=" in found.value.message
    assert "engine able does not support it: no grammars here" in found.value.message


def test_unknown_names_are_reported_or_refused_in_tgi() -> None:
    body = {"inputs": "a", "parameters": {"stop_sequences": ["a"], "details": True}, "model": "x"}
    assert ROOT.parse(body, ABLE).ignored == ["model", "parameters.stop_sequences"]
    with pytest.raises(InvalidPayload, match=r"parameters\.stop_sequences"):
        ROOT.parse(body, with_options(ABLE, unknown_parameters="refuse"))


# -- meaning -----------------------------------------------------------------------------------------------------


def test_no_parameters_at_all_samples_and_empty_ones_do_not() -> None:
    assert read().sampling.do_sample
    assert not read({}).sampling.do_sample


@in_one_test("said", [{}, {"do_sample": False}])
@in_one_test("route", [ROOT, GENERATE, STREAM])
@in_one_test("given", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.5}, {"typical_p": 0.95}])
def test_whatever_shapes_the_distribution_samples(route: Any, given: dict[str, Any], said: dict[str, Any]) -> None:
    found = route.parse({"inputs": "a", "parameters": {**given, **said}}, ABLE)
    sampling = found.requests[0].sampling
    assert (sampling.do_sample, found.ignored) == (True, [])
    assert [getattr(sampling, name) for name in given] == list(given.values())


@pytest.mark.parametrize("given", [{"temperature": 1.0}, {"seed": 3}, {"repetition_penalty": 1.5}, {"top_k": None}])
def test_nothing_else_does(given: dict[str, Any]) -> None:
    assert not read(given).sampling.do_sample


def test_an_unsupported_shape_is_named_without_an_explicit_do_sample() -> None:
    lacking = replace(ABLE, unsupported={"typical_p": "it does not implement typical decoding"})
    langchain = {"do_sample": False, "temperature": 0.8, "top_p": 0.95, "typical_p": 0.95}
    found = GENERATE.parse({"inputs": "a", "parameters": langchain}, lacking)
    sampling = found.requests[0].sampling
    assert (sampling.do_sample, sampling.temperature, sampling.top_p, sampling.typical_p) == (True, 0.8, 0.95, 1.0)
    assert found.ignored == ["parameters.typical_p"]
    alone = GENERATE.parse({"inputs": "a", "parameters": {"typical_p": 0.95}}, lacking)
    assert (alone.requests[0].sampling.do_sample, alone.ignored) == (False, ["parameters.typical_p"])
    with pytest.raises(InvalidParameter, match=r"typical_p=0\.95"):
        read({**langchain, "do_sample": True}, context=lacking)


def test_the_default_fills_the_context_and_a_number_may_be_cut() -> None:
    assert read({}).fill_context
    asked = read({"max_new_tokens": 100_000})
    assert (asked.fill_context, asked.sampling.max_new_tokens, asked.min_free_tokens) == (False, 100_000, 1024)


@in_one_test(
    ("release", "most", "samples", "room"),
    [
        ("0.9.4", 20, False, None),
        ("1.1.0", 20, False, None),
        ("1.1.1", None, False, None),
        ("1.1", None, False, None),
        ("1.2.0", None, False, None),
        ("1.3.0", None, False, None),
        ("1.3.2", None, False, None),
        ("1.3.3", 100, False, None),
        ("1.3", 100, False, None),
        ("1.4.5", 100, True, None),
        ("2.4.1", 100, True, None),
        ("3.0.0", None, True, 1024),
        ("3.3", None, True, 1024),
    ],
)
def test_a_release_has_its_own_defaults_on_invocations(
    release: str, most: int | None, samples: bool, room: int | None
) -> None:
    route = choose(Config(tgi_version=read_tgi_version(release)))
    (request,) = route.parse({"inputs": "a"}, ABLE).requests
    assert (request.full_text, request.details, request.sampling.do_sample) == (True, False, samples)
    assert (request.fill_context, request.min_free_tokens) == (most is None, room)
    assert most in (None, request.sampling.max_new_tokens)
    for own in (None, 7):
        (request,) = route.parse({"inputs": "a", "parameters": {"max_new_tokens": own}}, ABLE).requests
        assert (own or most) in (None, request.sampling.max_new_tokens)
        assert not request.sampling.do_sample


def test_limits_that_an_operator_of_tgi_may_raise_are_the_engines_on_invocations() -> None:
    body = {"inputs": "a", "parameters": {"stop": list("abcdefgh"), "top_n_tokens": 6}}
    with pytest.raises(OutOfRange, match="up to 4 stop sequences"):
        ROOT.parse(body, ABLE)
    (request,) = choose(Config(tgi_version=read_tgi_version("3.3"))).parse(body, ABLE).requests
    assert (len(request.sampling.stop), request.sampling.top_logprobs) == (8, 6)


def test_chats_name_the_model_as_tgi_does() -> None:
    config = Config(tgi_version=read_tgi_version("3.3"), model_id="a/b")
    context = with_options(ABLE, model_id="a/b")
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for sent, told in ((None, "a/b"), ("tgi", "a/b"), ("a/b", "a/b"), ("nobody", "a/b")):
        found = answer(choose(config), {**chat, "model": sent}, deltas(), context)
        assert json.loads(found.body)["model"] == told


@in_one_test("text", ["3.4", "4.0", "3", "two", "", "3.3.x", "2.4-dev"])
def test_what_is_no_release_of_tgi_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"release of TGI up to 3\.3"):
        read_tgi_version(text)
    assert str(read_tgi_version("v2.4.1")) == str(TgiVersion(2, 4)) == "2.4"


@in_one_test(
    ("schema", "given", "full"),
    [(ROOT, None, True), (GENERATE, None, False), (STREAM, None, False), (ROOT, False, False), (GENERATE, True, True)],
)
def test_the_full_text_is_the_roots_default(schema: Any, given: bool | None, full: bool) -> None:
    (request,) = schema.parse({"inputs": "a", "parameters": {"return_full_text": given}}, ABLE).requests
    assert request.full_text is full


def test_everything_reaches_the_engine() -> None:
    asked = read({
        "do_sample": True, "temperature": 0.5, "repetition_penalty": 1.5, "frequency_penalty": -1, "top_k": 3,
        "top_p": 0.25, "typical_p": 0.75, "max_new_tokens": 7, "stop": ["x", "y"], "truncate": 2, "seed": 5,
        "top_n_tokens": 2, "grammar": {"type": "json", "value": {"properties": {}}}, "decoder_input_details": True,
    })  # fmt: skip
    sampling = asked.sampling
    assert (sampling.temperature, sampling.repetition_penalty, sampling.frequency_penalty) == (0.5, 1.5, -1)
    assert (sampling.top_k, sampling.top_p, sampling.typical_p, sampling.seed) == (3, 0.25, 0.75, 5)
    assert (sampling.max_new_tokens, sampling.stop, sampling.include_stop) == (7, ("x", "y"), True)
    assert (sampling.top_logprobs, sampling.prompt_logprobs, sampling.skip_special_tokens) == (2, True, False)
    assert sampling.structured_output == StructuredOutput("json_schema", '{"properties": {}}')
    assert (asked.truncation, asked.details) == (Truncation(2), True)


def test_best_of_zero_is_one_and_two_samples() -> None:
    assert read({"best_of": 0}).sampling.best_of == 1
    asked = read({"best_of": 2, "temperature": 0.5}).sampling
    assert (asked.best_of, asked.do_sample) == (2, True)


def test_which_routes_stream() -> None:
    body = {"inputs": "a", "stream": True}
    assert [schema.parse(body, ABLE).streams for schema in (ROOT, GENERATE, STREAM)] == [True, False, True]
    assert [schema.parse({"inputs": "a"}, ABLE).streams for schema in (ROOT, GENERATE, STREAM)] == [False, False, True]
    assert GENERATE.parse(body, ABLE).ignored == ["stream"]
    assert STREAM.parse(body, ABLE).ignored == []


def test_headers() -> None:
    headers = ROOT.parse({"inputs": "aé"}, ABLE).headers
    assert headers is not None
    assert headers(None) == [("x-compute-type", "able"), ("x-compute-characters", "2")]
    assert dict(headers(Timing(0.0105, 0.25, 1.5, 4, 3))) == {
        "x-compute-type": "able",
        "x-compute-characters": "2",
        "x-compute-time": "1.760500",
        "x-total-time": "1760",
        "x-validation-time": "10",
        "x-queue-time": "250",
        "x-inference-time": "1500",
        "x-time-per-token": "500",
        "x-prompt-tokens": "4",
        "x-generated-tokens": "3",
    }


# -- answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "finish"), [(5, "length"), (6, "eos_token")])
def test_length_comes_before_other_ends(most: int, finish: str) -> None:
    body = {"inputs": "a", "parameters": {"max_new_tokens": most, "details": True}}
    assert value("tgi_generate", body)["details"]["finish_reason"] == finish
    stopped = [*deltas()[:-1], deltas()[-1]._replace(finish=Finish.STOP)]
    found = value("tgi_generate", body, stopped)["details"]["finish_reason"]
    assert found == ("length" if most == 5 else "stop_sequence")


# -- failures ----------------------------------------------------------------------------------------------------


@in_one_test(
    ("error", "status", "kind", "text", "in_stream"),
    [
        (Overloaded("full"), 429, "overloaded", "Model is overloaded", True),
        (GenerationFailed("x"), 424, "generation", "Request failed during generation: x", True),
        (Unavailable("loading"), 503, "healthcheck", "loading", False),
        (InternalError("a bug"), 500, "incomplete_generation", "a bug", True),
        (InvalidPayload("'inputs' has no tokens"), 422, "validation", "Input validation error: 'inputs' has no", True),
        (WrongType("missing field `inputs`"), 422, "validation", "Failed to deserialize the JSON body into", False),
        (UnsupportedMedia("type"), 415, "validation", "type", False),
        (TooLarge("big"), 413, "validation", "big", False),
        (MethodNotAllowed("no"), 405, "validation", "no", False),
    ],
)
def test_an_error_is_an_event_where_it_is_one_in_tgi(
    error: ServingError, status: int, kind: str, text: str, in_stream: bool
) -> None:
    whole = GENERATE.errors.whole(error)
    assert (whole.status, whole.content_type) == (status, "application/json")
    assert whole.body.decode().startswith(f'{{"error":"{text}')
    assert whole.body.decode().endswith(f'","error_type":"{kind}"}}')
    streamed = STREAM.errors.whole(error)
    if in_stream:
        assert (streamed.status, streamed.content_type) == (200, "text/event-stream")
        assert streamed.body == b"data: " + whole.body + b"\n\n"
    else:
        assert streamed == whole
    assert ROOT.errors_of({"stream": True}, ABLE).whole(error) == streamed
    assert ROOT.errors_of({"stream": "true"}, ABLE).whole(error) == ROOT.errors.whole(error) == whole


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        (
            {"max_new_tokens": 50},
            AnswerTooLong("x", 70, 50, 100),
            "`inputs` tokens + `max_new_tokens` must be <= 100. Given: 70 `inputs` tokens and 50 `max_new_tokens`",
        ),
        (
            {"max_new_tokens": 5000},
            PromptTooLong("x", 120, 99),
            "`inputs` tokens + `max_new_tokens` must be <= 100. Given: 120 `inputs` tokens and 1024 `max_new_tokens`",
        ),
        (
            {},
            PromptTooLong("x", 120, 99),
            "`inputs` tokens + `max_new_tokens` must be <= 100. Given: 120 `inputs` tokens and 0 `max_new_tokens`",
        ),
        ({}, PromptTooLong("x", 100, 99), "`inputs` must have less than 99 tokens. Given: 100"),
    ],
)
def test_what_is_too_long_is_said_in_tgis_order(parameters: dict[str, Any], error: ServingError, message: str) -> None:
    call = GENERATE.parse({"inputs": "a", "parameters": parameters}, ABLE)
    assert call.errors.whole(error).body.decode() == (
        f'{{"error":"Input validation error: {message}","error_type":"validation"}}'
    )


def test_an_answer_that_the_server_cannot_finish_is_incomplete() -> None:
    stopping = Unavailable("the server stopped before the response was complete")
    call = GENERATE.parse({"inputs": "a"}, ABLE)
    assert call.errors.whole(stopping).status == 503
    call.reply.feed(0, deltas()[0])
    incomplete = b'{"error":"Incomplete generation","error_type":"incomplete_generation"}'
    assert (call.errors.whole(stopping).status, call.errors.whole(stopping).body) == (500, incomplete)
    stream = STREAM.parse({"inputs": "a"}, ABLE).reply
    stream.feed(0, deltas()[0])
    assert stream.feed(0, Delta(1, 0, (), Finish.ERROR, stopping)) == b"data: " + incomplete + b"\n\n"
    assert stream.finished


@pytest.mark.parametrize("error", [PromptTooLong("inputs", 12, 9), AnswerTooLong("max_new_tokens", 12, 50, 10)])
def test_what_is_refused_after_signs_of_life_is_told_as_before_them(error: ServingError) -> None:
    call = STREAM.parse({"inputs": "a", "parameters": {"max_new_tokens": 50}}, ABLE)
    end = call.reply.feed(0, Delta(1, 0, (), Finish.ERROR, error))
    assert end == call.errors.whole(error).body
    assert b"and 50 `max_new_tokens`" in end


# -- requests and answers of MindIE's text and stream inference (POST /), after Huawei's MindIE documentation ----------


MINDIE_ROOT = routes("mindie")["/"]

# The request in MindIE's documentation.
EXAMPLE: dict[str, Any] = {
    "inputs": "My name is Olivier and I",
    "parameters": {
        "decoder_input_details": True, "details": True, "do_sample": True, "max_new_tokens": 20,
        "repetition_penalty": 1.03, "return_full_text": False, "seed": None, "temperature": 0.5, "top_k": 10,
        "top_p": 0.95, "truncate": None, "typical_p": 0.5, "watermark": False,
    },
    "stream": False,
}  # fmt: skip


def mindie_read(parameters: Any = None, **more: Any) -> Request:
    (request,) = MINDIE_ROOT.parse({"inputs": "a", "parameters": parameters, **more}, ABLE).requests
    return request


def test_the_seeds_example_is_read() -> None:
    call = MINDIE_ROOT.parse(EXAMPLE, CONTEXT)  # an engine without typical decoding
    assert call.ignored == ["parameters.typical_p"]
    (request,) = call.requests
    sampling = request.sampling
    assert (sampling.do_sample, sampling.max_new_tokens, sampling.repetition_penalty) == (True, 20, 1.03)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.typical_p) == (0.5, 10, 0.95, 1.0)
    assert (request.details, sampling.prompt_logprobs, request.truncation, request.full_text) == (
        True,
        True,
        None,
        False,
    )


def test_the_seeds_example_is_answered() -> None:
    found = value("mindie", EXAMPLE)
    assert list(found) == ["details", "generated_text"]
    assert list(found["details"]) == [
        "finish_reason", "generated_tokens", "prefill", "prompt_tokens", "seed", "tokens",
    ]  # fmt: skip
    assert found["details"]["prefill"][0] == {"id": 504, "logprob": None, "special": None, "text": "What"}
    assert found["details"]["prompt_tokens"] == 2
    assert type(found["details"]["seed"]) is int


def test_defaults() -> None:
    request = mindie_read()
    assert (request.sampling.max_new_tokens, request.sampling.do_sample, request.full_text) == (20, False, False)
    assert (request.fill_context, request.min_free_tokens, request.details) == (False, None, False)
    assert MINDIE_ROOT.parse({"inputs": "a"}, ABLE).streams is False
    assert MINDIE_ROOT.parse({"inputs": "a", "stream": True}, ABLE).streams is True


def test_a_seed_is_told_even_when_nothing_was_drawn() -> None:
    body = {"inputs": "a", "parameters": {"details": True}}
    seeds = {value("mindie", body)["details"]["seed"] for _ in range(4)}
    assert len(seeds) == 4
    assert all(type(seed) is int and seed > 0 for seed in seeds)
    last = answer("mindie", {**body, "stream": True}).body.splitlines()[-2]
    assert type(json.loads(last.removeprefix(b"data: "))["details"]["seed"]) is int
    given = {"inputs": "a", "parameters": {"details": True, "seed": 2**64 - 1}}
    assert value("mindie", given)["details"]["seed"] == 2**64 - 1


def test_later_versions_names() -> None:
    request = mindie_read({"stop": None, "adapter_id": "None"})
    assert (request.sampling.stop, request.adapter) == ((), None)
    assert mindie_read({"stop": ["x"]}).sampling.stop == ("x",)


def test_names_that_it_does_not_have_are_reported() -> None:
    parameters = {"best_of": 2, "frequency_penalty": 1, "top_n_tokens": 1, "watermark": True, "typical_p": 1.0}
    assert MINDIE_ROOT.parse({"inputs": "a", "parameters": parameters, "model": 1}, ABLE).ignored == [
        "model", "parameters.best_of", "parameters.frequency_penalty", "parameters.top_n_tokens",
        "parameters.watermark",
    ]  # fmt: skip


@in_one_test(
    ("parameters", "message"),
    [
        ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
        ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
        ({"seed": 0}, "`seed` must be strictly positive"),
        ({"temperature": 0}, "`temperature` must be strictly positive"),
        ({"top_k": 0}, "`top_k` must be strictly positive"),
        ({"top_k": 6}, "`top_k` must be <= 5. Given: 6"),  # of a vocabulary of six
        ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"top_p": 0.0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"truncate": 0}, "`truncate` must be strictly positive and less than 99. Given: 0"),
        ({"typical_p": 0.0}, "`typical_p` must be > 0.0 and <= 1.0"),
        ({"typical_p": 1.5}, "`typical_p` must be > 0.0 and <= 1.0"),
    ],
)
def test_values_out_of_range_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(OutOfRange) as found:
        mindie_read(parameters)
    assert found.value.message == message


@in_one_test(
    "parameters",
    [{"typical_p": 1.0}, {"top_k": 5}, {"seed": 1}, {"max_new_tokens": 80}, {"truncate": 99}, None, {"details": None}],
)
def test_the_ends_of_the_ranges_are_taken(parameters: dict[str, Any] | None) -> None:
    assert mindie_read(parameters).prompt == "a"


def test_prompts_in_tgi() -> None:
    with pytest.raises(OutOfRange, match="cannot be empty"):
        mindie_read(inputs="")
    with pytest.raises(OutOfRange, match="at most 524288 characters"):
        mindie_read(inputs="a" * (524288 + 1))
    assert len(mindie_read(inputs="é" * 524288).prompt) == 524288
    with pytest.raises(WrongType):
        mindie_read(inputs=None)


def test_a_stream_of_mindies_has_no_prefill() -> None:
    with pytest.raises(OutOfRange, match="decoder_input_details"):
        mindie_read({"decoder_input_details": True}, stream=True)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [(Overloaded("full"), 429, "Model is overloaded"), (Unavailable("loading"), 503, "loading")],
)
def test_an_error_is_its_message_alone(error: Any, status: int, message: str) -> None:
    for body in (None, {"stream": True}):
        found = MINDIE_ROOT.errors_of(body, CONTEXT).whole(error)
        assert (found.status, found.content_type) == (status, "application/json")
        assert json.loads(found.body) == {"error": message}


def test_a_stream_that_ends_by_its_length() -> None:
    body = {"inputs": "a", "stream": True, "parameters": {"details": True, "max_new_tokens": 5, "seed": 9}}
    last = answer("mindie", body, deltas()).body.splitlines()[-2]
    assert json.loads(last.removeprefix(b"data: "))["details"] == {
        "prompt_tokens": 2, "finish_reason": "length", "generated_tokens": 5, "seed": 9,
    }  # fmt: skip
