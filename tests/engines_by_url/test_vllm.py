"""The engine openai in front of vLLM's own server with data-parallel engines. `make accept-vllm` runs it.

The model has no weights of its own. It says its prompt again and again, as echo does, but where a test asks for more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.server import AppServer, serve
from tests.app.test_http import CANCELLED
from tests.engines_by_url import golden, streams
from tests.engines_by_url.vllm_server import ENGINE, FREE, MOST_LOGPROBS, VllmServer, metric
from tests.servers import http, options, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]

RUNNING, SERVED = "vllm:num_requests_running", "vllm:generation_tokens_total"
STREAMS = 32
TOKENS = 1800  # more than vLLM makes until it is killed


@pytest.fixture(scope="module")
def vllm_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    found = VllmServer(tmp_path_factory.mktemp("vllm"), model)
    try:
        found.start()
        yield found
    finally:
        found.kill()


@pytest.fixture(scope="module")
def server(vllm_server: VllmServer, model: Path) -> Iterator[AppServer]:
    with serve(str(model), "--engine", "openai", *options(f"option.base_url={vllm_server.url}/v1")) as found:
        found.wait_ready()
        yield found


@pytest.mark.parametrize("name", [*golden.BY_ROLLING_BATCH][::8])  # `make test-dynamo` asks all, in a tenth of the time
def test_a_golden_request_is_answered_as_by_echo_in_vllm(server: AppServer, echo: AppServer, name: str) -> None:
    golden.check(name, echo, server)


TALE = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
SAMPLED = {**TALE, "temperature": 1, "seed": 7}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": TALE,
    "ids": {**TALE, "prompt": [426, 381, 262]},
    "sampled": SAMPLED,
    "top_k": {**SAMPLED, "top_k": 5},
    "top_p": {**SAMPLED, "top_p": 0.3},
    "min_p": {**SAMPLED, "min_p": 0.5},
    "penalties": {**TALE, "repetition_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": 1},
    "logit_bias": {**TALE, "logit_bias": {"300": 100}},
    "min_tokens": {**TALE, "min_tokens": 10},
    "stop": {**TALE, "stop": ["e"]},
    "logprobs": {**TALE, "logprobs": 0},
    "top_logprobs": {**TALE, "logprobs": 3},
}


@pytest.mark.parametrize("name", BODIES)
def test_an_answer_is_vllms_own(server: AppServer, vllm_server: VllmServer, name: str) -> None:
    body = {**BODIES[name], "model": "model", "stop_token_ids": [FREE]}
    direct, by_url = (http.post(f"{one.url}/v1/completions", json=body).json() for one in (vllm_server, server))
    assert by_url["usage"].items() <= direct["usage"].items()
    (expected,), (choice,) = direct["choices"], by_url["choices"]
    assert choice["finish_reason"] == expected["finish_reason"]
    half = "\N{REPLACEMENT CHARACTER}"  # vLLM leaves out a character that the end cuts
    assert choice["text"].rstrip(half) == expected["text"].rstrip(half)
    if "logprobs" in body:
        assert choice["logprobs"]["token_logprobs"] == expected["logprobs"]["token_logprobs"]
    if body.get("logprobs"):  # vLLM names a half of a character otherwise
        found, there = (one["logprobs"]["top_logprobs"] for one in (choice, expected))
        assert [sorted(tops.values()) for tops in found] == [sorted(tops.values()) for tops in there]


GUIDES: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": "[0-9]{3}-[0-9]{2}"}, r"\d{3}-\d{2}"),
    "choice": ({"choice": ["yes", "no"]}, "yes|no"),
    "grammar": ({"grammar": 'root ::= "left" | "right"'}, "left|right"),
    "json": ({"json": {"enum": [12, "ab"]}}, '12|"ab"'),
    "json_object": ({"json_object": True}, r"\{.*"),
}


@pytest.mark.parametrize("name", GUIDES)
def test_an_answer_follows_its_guide(server: AppServer, name: str) -> None:
    guide, pattern = GUIDES[name]
    answer = server.post({**TALE, "structured_outputs": guide}, "/v1/completions")
    assert re.fullmatch(pattern, answer.json()["choices"][0]["text"], re.DOTALL), answer.text


def test_vllms_words_are_the_error(server: AppServer) -> None:
    answer = server.post({**TALE, "logprobs": MOST_LOGPROBS + 1}, "/v1/completions")
    assert answer.status_code == 400
    assert f"greater than max allowed: {MOST_LOGPROBS}" in answer.json()["error"]["message"]


def test_who_leaves_is_given_up_there_in_vllm(server: AppServer, vllm_server: VllmServer) -> None:
    cancelled = server.metric(CANCELLED)
    body = {**TALE, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    with http.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # without a name it would end, and the answer with it
        next(lines)
        wait_for(lambda: sum(metric(vllm_server.url, RUNNING)) == 1, 10, "vLLM does not count it")
    wait_for(lambda: sum(metric(vllm_server.url, RUNNING)) == 0, 10, "vLLM goes on")
    assert server.metric(CANCELLED) == cancelled + 1


@pytest.mark.parametrize("killed", [ENGINE, ""], ids=["an engine", "the server"])
def test_streams_end_with_an_error_when_vllm_dies_and_work_when_it_is_back(
    server: AppServer, vllm_server: VllmServer, killed: str
) -> None:
    before = metric(vllm_server.url, SERVED)
    busy: list[bool] = []

    def die() -> None:
        busy.extend(after > value for after, value in zip(metric(vllm_server.url, SERVED), before, strict=True))
        vllm_server.kill(killed)

    for values in streams.during(server, STREAMS, TOKENS, die):
        streams.assert_one_error(values, "the vllm server ")
    assert busy == [True] * vllm_server.engines
    vllm_server.start()
    answer = server.post({**TALE, "max_tokens": 4}, "/v1/completions")
    assert answer.json()["choices"][0]["text"] == TALE["prompt"]
