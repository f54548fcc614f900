"""TensorRT-LLM under the embedded server, on its double: `lmi serve DIR --engine trtllm`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.doubles import tiny
from tests.doubles.requests import CASES, OPTIONS, REFUSED, body, environment, lines
from tests.environment import clean_environment
from tests.servers import LiveServer, http, serve, wait_for


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model"))


def served(model: Path, manners: str, **options: str) -> Any:
    given = [f"{key}={value}" for key, value in {**OPTIONS, **options}.items() if key != "option.llm_engine"]
    flags = [flag for each in given for flag in ("-o", each)]
    return serve(str(model), "--engine", "trtllm", *flags, env=environment(manners))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LiveServer]:
    with served(model, "version=1.3.0") as found:
        found.wait_ready()
        yield found


@pytest.mark.parametrize("name", CASES)
def test_a_request_is_answered(server: LiveServer, name: str) -> None:
    case = CASES[name]
    answers = [server.post(body(case.parameters)) for _ in range(2 if case.settled else 6)]  # two may well be the same
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert case.check(answer.json()), answer.text
        assert "x-lmi-ignored-parameters" not in answer.headers
    assert (len({answer.text for answer in answers}) == 1) == case.settled


@pytest.mark.parametrize("name", ["greedy", "to the end", "sampled", "stop sequence"])
def test_a_stream_is_the_answer_in_pieces_with_trtllm(server: LiveServer, name: str) -> None:
    whole = server.post(body(CASES[name].parameters)).json()
    found = lines(server.post(body(CASES[name].parameters, stream=True)))
    assert [line["token"] for line in found] == whole["details"]["tokens"]
    assert found[-1]["generated_text"] == whole["generated_text"]
    assert found[-1]["details"]["finish_reason"] == whole["details"]["finish_reason"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_is_refused_by_name_with_trtllm(server: LiveServer, name: str) -> None:
    parameters, message = REFUSED[name]
    found = server.post(body(parameters))
    assert (found.status_code, message in found.text) == (424, True), found.text


def test_a_chat_with_trtllm(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    found = server.post({"messages": messages, "max_tokens": 6, "logprobs": True, "temperature": 0}).json()
    assert found["usage"]["completion_tokens"] <= 6
    assert found["choices"][0]["logprobs"]["content"]


def test_what_1_2_ignores_is_refused_by_the_samplers_name(model: Path) -> None:
    with served(model, "version=1.2.1", **{"option.max_beam_width": "1"}) as server:
        server.wait_ready()
        found = server.post(body({"repetition_penalty": 1.2}))
        assert found.status_code == 424
        assert "option.sampler_type=TRTLLMSampler" in found.json()["error"]
        assert server.post(body({"max_new_tokens": 3})).status_code == 200


def test_streams_that_die_are_told_and_the_next_is_served(model: Path) -> None:
    with served(model, "version=1.3.0;die_after=400;pause=0.002") as server, ThreadPoolExecutor(4) as pool:
        server.wait_ready()
        long = body({"max_new_tokens": 300, "ignore_eos_token": True}, stream=True)
        for answer in pool.map(server.post, [long] * 4):
            last = lines(answer)[-1]
            assert (last["code"], last["details"]["finish_reason"]) == (424, "error")
            assert "Engine has died: the executor died" in last["error"]
        server.wait_ready()
        assert server.post(body({"max_new_tokens": 3})).status_code == 200
        assert server.metric("lmi_engine_restarts_total") == 1


def test_a_silent_engine_is_replaced(model: Path) -> None:
    options = {"option.inactivity_timeout": "1", "option.engine_timeout": "30"}
    with served(model, "version=1.3.0;stall_after=100", **options) as server:
        server.wait_ready()
        found = server.post(body({"max_new_tokens": 300, "ignore_eos_token": True}))
        assert found.status_code == 424
        assert "option.inactivity_timeout" in found.text
        server.wait_ready()
        assert server.post(body({"max_new_tokens": 3})).status_code == 200


def test_a_client_that_leaves_frees_its_place_with_trtllm(server: LiveServer) -> None:
    long = body({"max_new_tokens": 400, "ignore_eos_token": True}, stream=True)
    with http.stream("POST", server.url + "/invocations", json=long, timeout=30) as answer:
        assert json.loads(next(answer.iter_lines()))["token"]
    wait_for(lambda: server.metric("lmi_active_sequences") == 0, 5, "it runs on")
    assert server.post(body({"max_new_tokens": 3})).status_code == 200


def test_a_start_that_cannot_succeed_says_why(model: Path) -> None:
    command = [sys.executable, "-m", "handler", "serve", str(model), "--engine", "trtllm", "--port", "0"]
    ended = subprocess.run(
        [*command, "-o", "option.tensor_parallel_degree=2"],
        env={**clean_environment(), **environment("")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert "Only 1 GPUs are available, but 2 are required." in ended.stderr
