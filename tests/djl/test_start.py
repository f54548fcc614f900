"""A worker that cannot start says why, at once and in one line; one that can, in each shape of model directory."""

from __future__ import annotations

import itertools
import json
import time

import pytest

from tests.djl.launch import StartFailed
from tests.djl.servers import djl, versions

pytestmark = pytest.mark.djl

OURS = {"option.entryPoint": "handler.entry", "option.rolling_batch": "auto"}
ECHO = {**OURS, "option.llm_engine": "echo"}


WRONG = {
    "unknown option": ({**ECHO, "option.max_rolling_batch_sise": "3"}, "did you mean 'option.max_rolling_batch_size'?"),
    "wrong value": ({**ECHO, "option.dtype": "int99"}, "option.dtype=int99: must be one of"),
    "two at once": (
        {**ECHO, "option.dtype": "int99", "option.tgi_compt": "true"},
        "2 problems: 1. serving.properties, line",
    ),
    "engine missing": ({**OURS, "option.llm_engine": "vllm"}, "the engine 'vllm'"),
    "no such model": ({**OURS, "option.model_id": "/nowhere"}, "there is no model at '/nowhere'"),
    "no model": (OURS, "option.model_id is not set"),
}
"""Each is asked of one version, by turns: Java hands on whatever line the worker ends with."""


@pytest.mark.parametrize(("version", "wrong"), [*zip(itertools.cycle(versions()), WRONG, strict=False)])
def test_a_wrong_start_says_why_at_once(version: str, wrong: str) -> None:
    properties, told = WRONG[wrong]
    began = time.monotonic()
    with pytest.raises(StartFailed) as failed, djl(version, properties):
        pass
    assert told in str(failed.value)
    assert time.monotonic() - began < 40


@pytest.mark.parametrize("version", versions())
def test_a_missing_package_is_named(version: str) -> None:
    """A module in the model directory comes before the installed one."""
    broken = {"orjson.py": "raise ImportError(\"No module named 'orjson'\")\n"}
    with pytest.raises(StartFailed) as failed, djl(version, ECHO, broken):
        pass
    assert "the handler cannot start: No module named 'orjson'" in str(failed.value)


@pytest.mark.parametrize("version", versions())
def test_a_model_py_may_bring_the_handler_itself(version: str) -> None:
    files = {"model.py": "from handler.entry import handle\n"}
    with djl(version, {"option.llm_engine": "echo", "option.rolling_batch": "auto"}, files) as server:
        assert server.post({"inputs": "a b", "parameters": {"max_new_tokens": 2}}).json() == {"generated_text": " a b"}


@pytest.mark.parametrize("version", versions())
def test_the_environment_sets_options(version: str) -> None:
    env = {"OPTION_LLM_ENGINE": "echo", "OPTION_TGI_COMPAT": "true", "SERVING_ROLLING_BATCH_BUFFER": "1"}
    with djl(version, OURS, env=env) as server:
        body = {"inputs": "a b", "parameters": {"max_new_tokens": 2, "details": False}}
        assert server.post(body).json() == [{"generated_text": " a b"}]


ASYNC = {**ECHO, "option.async_mode": "true", "option.rolling_batch": "disable"}


@pytest.mark.parametrize(
    ("version", "properties"),
    [*((version, ECHO) for version in versions()), *((version, ASYNC) for version in versions("0.31"))],
)
def test_the_chat_route_is_another_name_for_invocations(version: str, properties: dict[str, str]) -> None:
    with djl(version, properties) as server:
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
        answer = server.post(chat, "/v1/chat/completions").json()
        assert (
            answer["choices"][0]["message"].items() >= {"role": "assistant", "content": " user: hi assistant:"}.items()
        )
        lines = server.post({**chat, "stream": True}, "/v1/chat/completions").text.splitlines()
        assert (
            "".join(json.loads(line)["choices"][0]["delta"]["content"] for line in filter(None, lines))
            == " user: hi assistant:"
        )
        plain = {"inputs": "a b", "parameters": {"max_new_tokens": 2}}
        assert server.post(plain, "/v1/chat/completions").json() == {"generated_text": " a b"}


@pytest.mark.parametrize("version", versions())
def test_a_request_that_never_ends_is_ended(version: str) -> None:
    """DJL never says that a client has left."""
    limits = {**ECHO, "option.request_time_limit": "1", "option.echo_tokens_per_second": "20"}
    with djl(version, limits) as server:
        lines = server.post({"inputs": "a b", "parameters": {"max_new_tokens": 5000}, "stream": True}).text.splitlines()
    assert 10 < len(lines) < 60
    assert "not finished within 1 s (option.request_time_limit)" in lines[-1]
