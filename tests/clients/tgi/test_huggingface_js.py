"""@huggingface/inference on an endpoint of one's own, whose address it sends as the model's name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.checks import PARIS
from tests.clients.driver import Driver, driving_node
from tests.servers import LiveServer

pytestmark = pytest.mark.clients

QUESTION = "What is the capital of France?"
CHAT: dict[str, Any] = {"task": "chat", "max_tokens": 12, "temperature": 0}
TEXT: dict[str, Any] = {"task": "text", "max_new_tokens": 8, "temperature": 0}
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]


@pytest.fixture(scope="module")
def huggingface() -> Iterator[Driver]:
    with driving_node("drive_huggingface") as driver:
        yield driver


def test_a_chat(huggingface: Driver, openai_server: LiveServer) -> None:
    answer = huggingface.generate(openai_server.url, QUESTION, **CHAT)
    assert answer["message"]["content"] == "The capital of France is Paris."
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["model"] == huggingface.generate(openai_server.url, QUESTION, **CHAT, model="model")["model"]
    chunks = huggingface.stream(openai_server.url, QUESTION, **CHAT)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == answer["message"]["content"]
    assert len(chunks) == 8


def test_a_completion(huggingface: Driver, openai_server: LiveServer) -> None:
    text = huggingface.generate(openai_server.url, PARIS, **TEXT)["generated_text"]
    assert text.startswith(" Paris.")
    chunks = huggingface.stream(openai_server.url, PARIS, **TEXT)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


def test_a_tool_call_and_log_probabilities(huggingface: Driver, openai_server: LiveServer) -> None:
    answer = huggingface.generate(
        openai_server.url, "Weather in Paris?", **{**CHAT, "max_tokens": 60}, tools=TOOLS, tool_choice="required"
    )
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "weather"
    answer = huggingface.generate(openai_server.url, QUESTION, **CHAT, logprobs=True)
    assert len(answer["logprobs"]["content"]) == 8


@pytest.mark.parametrize(("task", "name"), [(CHAT, "max_tokens"), (TEXT, "max_new_tokens")], ids=["chat", "text"])
def test_a_refusal_is_in_its_exception(huggingface: Driver, openai_server: LiveServer, task: Any, name: str) -> None:
    """Its message has the server's for streams; of whole answers the answer's body lies beside it."""
    for how in ("generate", "stream"):
        outcome = huggingface.call(how, openai_server.url, PARIS, **{**task, name: -1})
        assert outcome.error == "ProviderApiError"
        assert "max_tokens=-1: must be an integer from" in outcome.message
