"""pydantic-ai's Agent on OpenAI's chat: text, structured answers by a tool that must be called."""

from __future__ import annotations

import pytest

from tests.clients.driver import Driver, drivers
from tests.servers import LiveServer

pytestmark = pytest.mark.clients

QUESTION = "What is the capital of France?"
agent = drivers("openai", "drive_pydantic_ai")


def test_a_stream_says_what_the_whole_answer_says(agent: Driver, openai_server: LiveServer) -> None:
    answer = agent.generate(openai_server.url, QUESTION, max_tokens=12, temperature=0)
    assert answer == {"output": "The capital of France is Paris.", "tools": [], "tokens": 8, "prompt_tokens": 37}
    pieces = agent.stream(openai_server.url, QUESTION, max_tokens=12, temperature=0)
    assert "".join(pieces) == answer["output"]
    assert len(pieces) > 4


def test_a_structured_answer_is_a_tool_call(agent: Driver, openai_server: LiveServer) -> None:
    answer = agent.generate(openai_server.url, "Paris is in France", city=True, temperature=0)
    assert answer["output"].keys() == {"city", "country"}
    assert set(answer["tools"]) == {"final_result"}


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_a_refusal_is_the_servers_own(agent: Driver, openai_server: LiveServer, how: str) -> None:
    outcome = agent.call(how, openai_server.url, QUESTION, max_tokens=-1)
    assert outcome.error == "pydantic_ai.exceptions.ModelRequestRejectedError"
    assert "max_completion_tokens=-1: must be an integer from 1" in outcome.message
