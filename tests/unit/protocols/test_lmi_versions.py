"""Differences of LMI's releases in rolling and dynamic batch (option.lmi_version); docs/migrating has them too."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from handler.config.lmi_version import VERSIONS, read_lmi_version
from handler.core.values import Request
from handler.protocols.kernel.context import GenerationDefaults, Notices, ServerContext
from handler.protocols.kernel.dialect import ParsedRequest
from handler.protocols.registry import INVOCATIONS
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, CONTEXT, TOOLS, answer, saying, value, with_options

BEFORE = ["0.28", "0.29", "0.30", "0.31"]
SINCE = [str(version) for version in VERSIONS if str(version) not in BEFORE]
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def of(version: str, context: ServerContext = CAPABLE, **options: Any) -> ServerContext:
    fresh = replace(context, notices=Notices())
    return with_options(fresh, lmi_version=read_lmi_version(version), **options)


def parse(context: ServerContext, dialect: str = "lmi", **parameters: Any) -> ParsedRequest:
    return INVOCATIONS[dialect].parse({"inputs": "hi", "parameters": parameters}, context)


def samples(context: ServerContext, dialect: str = "lmi", **parameters: Any) -> bool:
    return parse(context, dialect, **parameters).requests[0].sampling.do_sample


# -- do_sample ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", BEFORE)
def test_an_absent_do_sample_is_greedy_before_0_32(version: str) -> None:
    assert not samples(of(version), temperature=0.7, top_p=0.9, seed=1)
    assert not samples(of(version), do_sample=None, temperature=0.7)
    assert samples(of(version), do_sample=True)


@in_one_test("dialect", ["lmi", "tgi_compat"])
@in_one_test("version", SINCE)
def test_a_temperature_alone_samples_since_0_32(version: str, dialect: str) -> None:
    context = of(version)
    found = parse(context, dialect, temperature=0.7, top_p=0.9).requests[0].sampling
    assert (found.do_sample, found.temperature, found.top_p) == (True, 0.7, 0.9)
    assert samples(context, dialect, do_sample=None, temperature=1)
    assert parse(context, dialect, temperature=0.7, top_p=0.9).ignored == []


@in_one_test("given", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"seed": 1}, {"temperature": 0}])
def test_nothing_else_samples_since_0_32(given: dict[str, Any]) -> None:
    assert not samples(of("0.32"), **given)
    assert parse(of("0.32"), **given).ignored == [f"parameters.{name}" for name in given if name != "temperature"]


@pytest.mark.parametrize("version", ["0.28", "0.32", "0.36", "0.38"])
def test_an_explicit_false_stays_greedy(version: str) -> None:
    context = of(version)
    assert not samples(context, do_sample=False, temperature=0.7)
    assert parse(context, do_sample=False, temperature=0.7).ignored == ["parameters.temperature"]


def test_a_temperature_alone_never_samples_with_tensorrt_llm() -> None:
    context = of("0.36", replace(CAPABLE, engine="trtllm", sampling_defaults={"top_k": 5, "temperature": 0.8}))
    assert not samples(context, temperature=0.7)
    assert parse(context, temperature=0.7).ignored == ["parameters.temperature"]
    assert parse(context, do_sample=True).requests[0].sampling.top_k == 5


def test_an_inferred_sample_has_not_the_engines_defaults_of_do_sample() -> None:
    context = of("0.36", replace(CAPABLE, sampling_defaults={"top_k": 5, "top_p": 0.85}))
    assert parse(context, temperature=0.7).requests[0].sampling.top_k == 0
    assert parse(context, temperature=0.7, do_sample=True).requests[0].sampling.top_k == 5


def test_beams_never_sample() -> None:
    found = parse(of("0.36"), num_beams=2, temperature=0.7)
    assert (found.requests[0].sampling.do_sample, found.ignored) == (False, ["parameters.temperature"])


@pytest.mark.parametrize("version", ["0.28", "0.32", "0.38"])
def test_a_dynamic_batch_samples_with_do_sample_alone(version: str) -> None:
    context = of(version)
    assert not samples(context, "dynamic_batch", temperature=0.7)
    assert parse(context, "dynamic_batch", temperature=0.7).ignored == ["parameters.temperature"]
    assert samples(context, "dynamic_batch", temperature=0.7, do_sample=True)


def test_a_temperature_of_a_wrong_type_is_refused_by_name_in_every_release() -> None:
    for version in ("0.28", "0.36"):
        wrongs: list[Any] = ["hot", [], {}, True]
        for wrong in wrongs:
            found = answer("lmi", {"inputs": "hi", "parameters": {"temperature": wrong}}, context=of(version))
            assert found.status == 424
            assert "parameters.temperature=" in found.body.decode()


# -- what greedy decoding ignores ----------------------------------------------------------------------------------


def test_ignored_sampling_parameters_are_named_as_the_client_wrote_them() -> None:
    given: dict[str, Any] = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.5, "seed": 0}
    assert parse(of("0.28"), **given).ignored == [f"parameters.{name}" for name in given]
    assert parse(of("0.28"), max_new_tokens=3, temprature=1, temperature=1).ignored == [
        "parameters.temprature",
        "parameters.temperature",
    ]
    assert parse(of("0.28"), runtime_top_k=1, random_seed=3).ignored == ["parameters.random_seed"]


def test_values_that_ask_for_the_most_likely_token_are_not_ignored() -> None:
    idle: list[dict[str, Any]] = [
        {"temperature": 0}, {"top_k": 1}, {"top_k": 0}, {"top_k": -1}, {"top_p": 1}, {"top_p": 0}, {"min_p": 0},
    ]  # fmt: skip
    for given in idle:
        assert parse(of("0.28"), **given).ignored == []
    assert parse(of("0.28"), temperature=None, seed=None).ignored == []


@pytest.mark.parametrize("dialect", ["lmi", "tgi_compat", "dynamic_batch", "lmi_async"])
def test_greedy_by_the_clients_own_word_ignores_no_default(dialect: str, caplog: pytest.LogCaptureFixture) -> None:
    """The seed's defaults and transformers', as clients send them all together."""
    context = of("0.28", unknown_parameters="refuse")
    for given in (
        {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
        {"temperature": 1, "top_k": 50, "repetition_penalty": 1.0},
    ):
        with caplog.at_level(logging.WARNING):
            assert parse(context, dialect, do_sample=False, **given).ignored == []
    assert caplog.messages == []
    if dialect != "lmi_async":  # which samples without do_sample
        assert parse(context, dialect, temperature=1).ignored == ["parameters.temperature"]
    assert parse(context, dialect, do_sample=False, temperature=0.7).ignored == ["parameters.temperature"]


def test_they_are_ignored_not_unknown_and_so_never_refused() -> None:
    context = of("0.28", CONTEXT, unknown_parameters="refuse")
    assert parse(context, temperature=0.7, typical_p=0.5).ignored == ["parameters.temperature", "parameters.typical_p"]


def test_the_log_says_once_which_option_samples(caplog: pytest.LogCaptureFixture) -> None:
    context = of("0.28")
    with caplog.at_level(logging.WARNING):
        parse(context, do_sample=False, temperature=0.7)  # this client wants it so
        parse(context, "dynamic_batch", temperature=0.7)  # where no release samples
        parse(of("0.32"), top_p=0.5)
        parse(context)
        assert caplog.messages == []
        for _ in range(3):
            parse(context, temperature=0.7)
    (message,) = caplog.messages
    assert "option.lmi_version=0.32" in message
    assert "x-lmi-ignored-parameters" in message


# -- chats -----------------------------------------------------------------------------------------------------------


def chat(version: str, dialect: str = "lmi", **more: Any) -> Request:
    return INVOCATIONS[dialect].parse({**CHAT, **more}, of(version)).requests[0]


def test_a_chat_without_a_limit_has_30_tokens_before_0_32() -> None:
    for version in BEFORE:
        assert (chat(version).sampling.max_new_tokens, chat(version).fill_context) == (30, False)
    for version in SINCE:
        assert chat(version).fill_context
        assert not chat(version, max_tokens=3).fill_context
        assert chat(version, max_tokens=3).sampling.max_new_tokens == 3


def test_a_chat_of_tensorrt_llm_has_30_tokens_in_every_release() -> None:
    """LMI reads it with vLLM's defaults where vLLM runs it (djl_python/input_parser.py, use_vllm_chat_completions)."""
    for version in VERSIONS:
        context = replace(of(str(version)), engine="trtllm", generation=GenerationDefaults({"temperature": 0.0}))
        found = INVOCATIONS["lmi"].parse(CHAT, context).requests[0]
        assert (found.sampling.max_new_tokens, found.fill_context, found.sampling.do_sample) == (30, False, True)


@in_one_test("dialect", ["lmi", "tgi_compat", "dynamic_batch"])
@in_one_test("option", [None, "json", "jsonlines"])
def test_a_chat_streams_json_lines_and_events_since_0_37(option: str | None, dialect: str) -> None:
    for version in VERSIONS:
        context = of(str(version), output_formatter=option)
        wanted = "text/event-stream" if version >= (0, 37) else "application/jsonlines"
        found = answer(dialect, {**CHAT, "stream": True}, context=context)
        assert found.content_type == wanted
        assert found.body.endswith(b"data: [DONE]\n\n") == (version >= (0, 37))
        assert answer(dialect, CHAT, context=context).content_type == "application/json"


# -- prompts -----------------------------------------------------------------------------------------------------------


@in_one_test("version", VERSIONS, ids=str)
def test_a_prompt_streams_json_lines_in_every_release(version: Any) -> None:
    body = {"inputs": "hi", "stream": True}
    assert answer("lmi", body, context=of(str(version))).content_type == "application/jsonlines"
    assert answer("lmi", body, context=of(str(version), output_formatter="sse")).content_type == "text/event-stream"
    assert answer("lmi", body, context=of(str(version), output_formatter="json")).content_type == "application/json"


def test_a_dynamic_batchs_text_begins_with_its_prompt_since_0_29() -> None:
    for version in VERSIONS:
        for said in (None, True, False):
            body = {"inputs": "hi", "parameters": {"return_full_text": said}}
            (found,) = value("dynamic_batch", body, context=of(str(version)))
            wanted = version >= (0, 29) if said is None else said
            assert found["generated_text"].startswith("hi") is wanted


def test_a_dynamic_batch_has_30_tokens_whatever_the_models_own_limit() -> None:
    """LMI leaves it to transformers' generate; the schema's document says 30."""
    for version in VERSIONS:
        context = replace(of(str(version)), generation=GenerationDefaults(max_new_tokens=7))
        assert parse(context, "dynamic_batch").requests[0].sampling.max_new_tokens == 30


def test_a_dynamic_batchs_stream_has_no_prompt_unless_asked() -> None:
    body: dict[str, Any] = {"inputs": "hi"}
    context = of("0.36", enable_streaming=True)
    assert answer("dynamic_batch", body, context=context).body.startswith(b'{"outputs":["Deep"]}')
    body["parameters"] = {"return_full_text": True}
    assert answer("dynamic_batch", body, context=context).body.startswith(b'{"outputs":["hiDeep"]}')


@in_one_test("version", [str(version) for version in VERSIONS])
def test_what_later_releases_brought_is_there_in_every_release(version: str) -> None:
    context = of(version, replace(CAPABLE, no_media={"image": ""}))
    assert parse(context, details=True, top_n_tokens=2).requests[0].sampling.top_logprobs == 2
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aQ=="}}
    asked = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, image]}]}
    assert len(INVOCATIONS["lmi"].parse(asked, context).requests[0].media) == 1
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    ours = of(version, reasoning_parser="qwen3", tool_call_parser="hermes")
    found = value("lmi", {**CHAT, "tools": TOOLS}, saying(f"<think>Hm.</think>{call}"), ours)["choices"][0]["message"]
    assert (found["reasoning_content"], found["tool_calls"][0]["function"]["name"]) == ("Hm.", "weather")


def test_a_list_of_one_prompt_is_that_prompt_before_0_30() -> None:
    for version in VERSIONS:
        found = answer("lmi", {"inputs": ["hi"]}, context=of(str(version)))
        assert found.status == (200 if version < (0, 30) else 424), version
    one = {"parameters": {"details": True}, "stream": True}
    assert answer("lmi", {"inputs": ["hi"], **one}) == answer("lmi", {"inputs": "hi", **one})


@in_one_test("inputs", [[], [""], [5], [None], [["hi"]], ["hi", "ho"]])
def test_no_other_list_is_a_prompt_of_rolling_batch(inputs: Any) -> None:
    assert answer("lmi", {"inputs": inputs}, context=of("0.28")).status == 424
