"""Decisions by the engine openai in front of vLLM's own server. `make accept-vllm` runs it.

The model has random weights, so almost no label is among the alternatives. The server allows fewer of them than usual.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import pytest

from tests.app.server import AppServer, serve
from tests.app.test_http import CANCELLED
from tests.engines_by_url.vllm_server import VllmServer, metric
from tests.servers import http, options, post_bytes, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]

STATE = "The parcel arrived broken."
CHOICE = {"type": "choice", "instructions": "Which?", "criteria": dict.fromkeys(ascii_uppercase)}
LETTERS = {"type": "choice", "instructions": "", "choices": [{"value": letter} for letter in ascii_uppercase]}
MANY = json.dumps({"input": STATE, "questions": [LETTERS] * 400}).encode()
"""A body for which vLLM gets about 10,000 requests."""

RUNNING, SERVED = "vllm:num_requests_running", "vllm:generation_tokens_total"


@pytest.fixture(scope="module")
def vllm_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    server = VllmServer(tmp_path_factory.mktemp("vllm"), model, ())
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def server(vllm_server: VllmServer, model: Path) -> Iterator[AppServer]:
    arguments = options(f"option.base_url={vllm_server.url}/v1")
    with serve(str(model), "--engine", "openai", *arguments) as server:
        server.wait_ready()
        yield server


def tokens(server: AppServer, content: str) -> list[int]:
    messages = [{"role": "user", "content": content}]
    return list(http.post(f"{server.url}/tokenize", json={"messages": messages}).json()["tokens"])


def scored(vllm_server: VllmServer, ids: list[int]) -> float:
    """Return vLLM's log-probability of the last token of a prompt."""
    body = {"model": "model", "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    response = http.post(f"{vllm_server.url}/v1/completions", json=body).json()
    return float(response["choices"][0]["prompt_logprobs"][-1][str(ids[-1])]["logprob"])


def test_labels_have_vllms_own_log_probabilities(server: AppServer, vllm_server: VllmServer) -> None:
    response = server.post({"state": STATE, "questions": {"q": CHOICE}}, "/v1/systemone").json()
    lines = [f"{letter}: {letter}" for letter in ascii_uppercase]
    prompt = "\n".join([STATE, "", "Question: Which?", *lines, "Answer with the letter of one option only."])
    ids = tokens(server, prompt)
    assert response["usage"]["input_tokens"] == len(ids)
    labels = [
        http.post(f"{server.url}/tokenize", json={"prompt": letter}).json()["tokens"] for letter in ascii_uppercase
    ]
    logprobs = [scored(vllm_server, [*ids, *label]) for label in labels]
    mass = math.fsum(map(math.exp, logprobs))
    assert response["diagnostics"]["q"]["label_mass"] == pytest.approx(mass, rel=1e-3)
    probabilities = response["answers"]["q"]["probabilities"]
    for letter, logprob in zip(ascii_uppercase, logprobs, strict=True):
        assert math.log(probabilities[letter]) == pytest.approx(logprob - math.log(mass), abs=1e-3)


def test_a_decision_is_cancelled_at_vllm(server: AppServer, vllm_server: VllmServer) -> None:
    cancelled, before = server.metric(CANCELLED), sum(metric(vllm_server.url, SERVED))
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(post_bytes(MANY, "/v1/decisions"))
        wait_for(lambda: sum(metric(vllm_server.url, SERVED)) > before, 60, "vLLM does not begin")
    wait_for(lambda: server.metric(CANCELLED) == cancelled + 1, 60, "the decision is not cancelled")
    wait_for(lambda: sum(metric(vllm_server.url, RUNNING)) == 0, 60, "vLLM goes on")
    served = sum(metric(vllm_server.url, SERVED))
    assert server.post({"input": STATE, "questions": [LETTERS]}, "/v1/decisions").status_code == 200
    alone = sum(metric(vllm_server.url, SERVED)) - served
    assert alone == pytest.approx(len(ascii_uppercase), abs=1), "only the last decision is served"


def test_a_decision_fails_if_vllm_dies_and_works_when_it_is_back(server: AppServer, vllm_server: VllmServer) -> None:
    before = sum(metric(vllm_server.url, SERVED))
    with ThreadPoolExecutor(1) as pool:
        decision = pool.submit(http.post, f"{server.url}/v1/decisions", content=MANY, timeout=120.0)
        wait_for(lambda: sum(metric(vllm_server.url, SERVED)) > before, 60, "vLLM does not begin")
        vllm_server.kill()
        response = decision.result()
    assert response.status_code == 500
    assert "vllm server" in response.json()["error"]["message"]
    vllm_server.start()
    body: dict[str, Any] = {"input": STATE, "questions": [{"type": "predicate", "instructions": "It is broken."}]}
    assert 0 < server.post(body, "/v1/decisions").json()["answers"][0]["probability"] < 1
