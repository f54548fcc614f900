"""`Predictor.openai()` with the real openai package, through SageMaker's emulator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from deploy.emulator.endpoint import Component, Endpoint
from deploy.emulator.runtime import Runtime
from tests.clients.driver import Driver, drivers
from tests.deploy.local.servers import Loop
from tests.servers import LiveServer

pytestmark = pytest.mark.clients

QUESTION = "What is the capital of France?"
chat = drivers("llmeter", "drive_predictor")


@pytest.fixture(scope="module")
def endpoint() -> Endpoint:
    return Endpoint("")


@pytest.fixture(scope="module")
def url(openai_server: LiveServer, endpoint: Endpoint) -> Iterator[str]:
    endpoint.container = openai_server.url
    loop = Loop()
    with ExitStack() as stack:
        stack.callback(loop.close)
        yield stack.enter_context(loop.serving(Runtime(endpoint).app()))


def test_a_stream_says_what_the_whole_answer_says(chat: Driver, url: str) -> None:
    answer = chat.generate(url, QUESTION, max_tokens=12, temperature=0)
    text = answer["choices"][0]["message"]["content"]
    assert "Paris" in text
    assert answer["usage"]["completion_tokens"] > 4
    chunks = chat.stream(url, QUESTION, max_tokens=12, temperature=0)
    assert "".join(chunk["choices"][0]["delta"]["content"] or "" for chunk in chunks) == text
    assert len(chunks) >= answer["usage"]["completion_tokens"]


def test_a_refusal_is_the_servers_own(chat: Driver, url: str) -> None:
    outcome = chat.call("generate", url, QUESTION, max_tokens=-1)
    assert outcome.error == "openai.BadRequestError"
    assert "max_tokens" in outcome.message


def test_a_component_is_in_the_address(chat: Driver, url: str, endpoint: Endpoint) -> None:
    endpoint.components = {"base": Component()}
    try:
        answer = chat.generate(url, QUESTION, component="base", max_tokens=2)
        assert answer["usage"]["completion_tokens"] == 2
        assert chat.call("generate", url, QUESTION, max_tokens=2).error == "openai.BadRequestError"
    finally:
        endpoint.components = {}
