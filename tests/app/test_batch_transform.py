"""SageMaker's batch transform: a line a request, and a line an answer, also of what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx as http
import pytest

from tests.app.server import AppServer, serve

ECHO = ("--engine", "echo", "-o", "option.echo_cues=true", "-o", "option.max_model_len=40")
TYPE = {"content-type": "application/jsonlines"}
GOOD = {"inputs": "a b", "parameters": {"max_new_tokens": 3}}


@pytest.fixture(scope="module")
def server() -> Iterator[AppServer]:
    """As SageMaker starts it for a job."""
    with serve(*ECHO, env={"SAGEMAKER_BATCH": "true"}) as made:
        yield made


@pytest.fixture(scope="module")
def usual() -> Iterator[AppServer]:
    with serve(*ECHO) as made:
        yield made


def ask(server: AppServer, body: Any, **headers: str) -> http.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode() + b"\n"
    return http.post(server.url + "/invocations", content=content, headers={**TYPE, **headers})


def test_an_answer_is_the_usual_one(server: AppServer, usual: AppServer) -> None:
    chat = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 3}
    for body in (GOOD, chat):
        found, wanted = ask(server, body), ask(usual, body)
        assert found.status_code == 200
        assert found.headers["content-type"] == wanted.headers["content-type"]
        assert [*found.json()] == [*wanted.json()]
        assert b"\n" not in found.content


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": ""},
        {"inputs": "a", "parameters": {"top_p": 2}},
        {"inputs": "a " * 50},
        {"inputs": "a", "adapters": ["nobody"]},
        {"messages": []},
        b"not JSON\n",
        b"\n",
        b'{"inputs": "a"}\n{"inputs": "b"}\n',
        b"\xff\n",
    ],
    ids=str,
)
def test_a_refusal_is_an_answer_too(server: AppServer, usual: AppServer, body: Any) -> None:
    found, wanted = ask(server, body), ask(usual, body)
    assert wanted.status_code >= 400
    assert found.status_code == 200
    assert found.json() == wanted.json()
    assert b"\n" not in found.content


def test_a_content_type_that_nobody_reads_is_an_answer_too(server: AppServer) -> None:
    found = ask(server, b"a,b\n", **{"content-type": "text/csv"})
    assert found.status_code == 200
    assert "text/csv" in found.text


@pytest.mark.parametrize("more", [{"stream": True}, {"parameters": {"output_formatter": "jsonlines"}}])
def test_a_stream_is_refused_by_name(server: AppServer, more: dict[str, Any]) -> None:
    found = ask(server, {**GOOD, **more})
    assert found.status_code == 200
    assert "'stream': batch transform has one line for each answer" in found.text
    assert len(found.content.splitlines()) == 1


def test_what_may_succeed_another_time_keeps_its_status(server: AppServer) -> None:
    """So SageMaker sends it again. The next line is answered."""
    assert ask(server, {**GOOD, "inputs": "<raise>"}).status_code == 424
    assert ask(server, GOOD).json() == {"generated_text": " a b a"}


def test_in_asynchronous_modes_schema_an_answer_is_one_line_too() -> None:
    mode = ("-o", "option.lmi_version=0.36", "-o", "option.async_mode=true")
    with serve("--engine", "echo", *mode, env={"SAGEMAKER_BATCH": "true"}) as server:
        good, bad = ask(server, GOOD), ask(server, {"inputs": "a", "parameters": {"top_p": 2}})
    assert (good.status_code, bad.status_code) == (200, 200)
    assert "error" in bad.json()
    assert all(b"\n" not in one.content and one.json() for one in (good, bad))


def test_other_routes_are_as_ever(server: AppServer) -> None:
    found = http.post(server.url + "/v1/chat/completions", json={"messages": []})
    assert found.status_code == 400
