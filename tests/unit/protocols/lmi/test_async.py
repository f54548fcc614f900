"""LMI's async mode: what of a body is read, and what is refused or reported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from handler.config.config import Config
from handler.config.lmi_version import NEWEST
from handler.core.errors import InvalidParameter, InvalidPayload, ModelNotFound
from handler.core.values import Adapter
from handler.protocols.kernel.dialect import Notices, ParsedRequest, ServerContext
from handler.protocols.lmi.asynchronous import TABLE
from handler.protocols.openai.request import COMPLETIONS, FOREIGN
from handler.protocols.registry import INVOCATIONS, choose
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, VOCABULARY, answer, value, with_options

ASYNC = INVOCATIONS["lmi_async"]
ONE = Adapter("one", 1, "/one")


class Adapters:
    def find(self, name: str) -> Adapter | None:
        return ONE if name == "one" else None

    def by_number(self, number: int) -> Adapter | None:
        return None

    def names(self) -> list[str]:
        return ["one"]


WITH_ADAPTERS = replace(CAPABLE, adapters=Adapters(), no_adapters="")


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


def test_null_means_absent() -> None:
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
        ({"inputs": ["a", "b"]}, "'inputs' has 2 prompts; at most 1; a body with 'prompt'"),
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
@pytest.mark.parametrize("name", sorted(FOREIGN.keys() - {"adapters"}))
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


def test_a_stream_has_no_prefill() -> None:
    with pytest.raises(InvalidParameter, match="decoder_input_details=true: is not available when streaming"):
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
    with pytest.raises(InvalidPayload, match="'adapters': 'two': no adapter of that name"):
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
