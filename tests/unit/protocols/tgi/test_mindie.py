"""Requests and answers of MindIE's text and stream inference (POST /), after Huawei's MindIE documentation."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from handler.core.errors import Overloaded, Unavailable
from handler.core.values import Request
from handler.protocols.registry import routes
from handler.protocols.tgi.api import OutOfRange, WrongType
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, CONTEXT, answer, deltas, value

ROOT = routes("mindie")["/"]
ABLE = replace(CAPABLE, most_tokens=lambda: 100)

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


def read(parameters: Any = None, **more: Any) -> Request:
    (request,) = ROOT.parse({"inputs": "a", "parameters": parameters, **more}, ABLE).requests
    return request


def test_the_seeds_example_is_read() -> None:
    call = ROOT.parse(EXAMPLE, CONTEXT)  # an engine without typical decoding
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
    request = read()
    assert (request.sampling.max_new_tokens, request.sampling.do_sample, request.full_text) == (20, False, False)
    assert (request.fill_context, request.min_free_tokens, request.details) == (False, None, False)
    assert ROOT.parse({"inputs": "a"}, ABLE).streams is False
    assert ROOT.parse({"inputs": "a", "stream": True}, ABLE).streams is True


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
    request = read({"stop": None, "adapter_id": "None"})
    assert (request.sampling.stop, request.adapter) == ((), None)
    assert read({"stop": ["x"]}).sampling.stop == ("x",)


def test_names_that_it_does_not_have_are_reported() -> None:
    parameters = {"best_of": 2, "frequency_penalty": 1, "top_n_tokens": 1, "watermark": True, "typical_p": 1.0}
    assert ROOT.parse({"inputs": "a", "parameters": parameters, "model": 1}, ABLE).ignored == [
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
        read(parameters)
    assert found.value.message == message


@in_one_test(
    "parameters",
    [{"typical_p": 1.0}, {"top_k": 5}, {"seed": 1}, {"max_new_tokens": 80}, {"truncate": 99}, None, {"details": None}],
)
def test_the_ends_of_the_ranges_are_taken(parameters: dict[str, Any] | None) -> None:
    assert read(parameters).prompt == "a"


def test_prompts() -> None:
    with pytest.raises(OutOfRange, match="cannot be empty"):
        read(inputs="")
    with pytest.raises(OutOfRange, match="at most 524288 characters"):
        read(inputs="a" * (524288 + 1))
    assert len(read(inputs="é" * 524288).prompt) == 524288
    with pytest.raises(WrongType):
        read(inputs=None)


def test_a_stream_has_no_prefill() -> None:
    with pytest.raises(OutOfRange, match="decoder_input_details"):
        read({"decoder_input_details": True}, stream=True)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [(Overloaded("full"), 429, "Model is overloaded"), (Unavailable("loading"), 503, "loading")],
)
def test_an_error_is_its_message_alone(error: Any, status: int, message: str) -> None:
    for body in (None, {"stream": True}):
        found = ROOT.errors_of(body, CONTEXT).whole(error)
        assert (found.status, found.content_type) == (status, "application/json")
        assert json.loads(found.body) == {"error": message}


def test_a_stream_that_ends_by_its_length() -> None:
    body = {"inputs": "a", "stream": True, "parameters": {"details": True, "max_new_tokens": 5, "seed": 9}}
    last = answer("mindie", body, deltas()).body.splitlines()[-2]
    assert json.loads(last.removeprefix(b"data: "))["details"] == {
        "prompt_tokens": 2, "finish_reason": "length", "generated_tokens": 5, "seed": 9,
    }  # fmt: skip
