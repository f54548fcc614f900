"""Conversations of openai's client, and of openai-agents with tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.clients.agents.scripted import Model, call, said_by, scripted
from tests.clients.driver import Driver, drivers, python_client
from tests.servers import LiveServer, serve

pytestmark = pytest.mark.clients

conversations = drivers("openai", "drive_conversations")


@pytest.fixture(scope="module")
def storing_echo() -> Iterator[LiveServer]:
    with serve("--engine", "echo", "-o", "option.responses_store=memory") as server:
        yield server


@pytest.fixture(scope="module")
def storing_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with scripted(tmp_path_factory.mktemp("model"), "option.responses_store=memory") as model:
        yield model


def texts(items: list[Any]) -> list[str]:
    return ["".join(part["text"] for part in item["content"]) for item in items]


def test_a_conversation_with_openais_client(conversations: Driver, storing_echo: LiveServer) -> None:
    found = conversations.generate(storing_echo.url, "one")
    id = found["made"]["id"]
    assert [one["metadata"] for one in (found["made"], *found["found"])] == [
        {"topic": "demo"}, {"topic": "demo"}, {"topic": "other"}, {"topic": "other"}
    ]  # fmt: skip
    assert texts(found["added"]) == [f"more {number}" for number in range(5)]
    first, second = found["first"], found["second"]
    assert first["conversation"] == second["conversation"] == {"id": id}
    expected = ["one", *texts(found["added"]), "say", *texts(first["output"]), "say", *texts(second["output"])]
    assert texts(found["listed"]) == expected
    assert found["one"] == found["newest"] == found["listed"][-1]
    assert texts(found["left"]) == expected[-2::-1]
    assert found["counted"]["input_tokens"] > second["usage"]["input_tokens"]
    assert found["deleted"] == {"id": id, "object": "conversation.deleted", "deleted": True}
    message = f"Conversation with id '{id}' not found."
    assert [[status, error["message"]] for status, error in found["gone"]] == [[404, message]] * 2


_WAIT_FOR_A_TURN = """
import json, time
from openai import OpenAI

begun = time.monotonic()
with OpenAI(base_url={url!r}, api_key="none") as client:
    responses = client.responses.with_raw_response
    found = responses.create(model="model", input="b", conversation={id!r}, max_output_tokens=1)
print(json.dumps([found.retries_taken, time.monotonic() - begun, found.parse().status]))
"""


def test_openais_client_waits_for_its_turn() -> None:
    """It repeats a 409 by itself, twice: by its own delays (0.5 and 1 s), these would often be too early."""
    driver = python_client("openai", "drive_conversations")
    driver.run("")  # it has imported the client then
    settings = ("-o", "option.responses_store=memory", "-o", "option.echo_tokens_per_second=20")
    with serve("--engine", "echo", *settings) as server:
        id = httpx.post(f"{server.url}/v1/conversations", headers={"authorization": "Bearer none"}).json()["id"]
        body = {"input": "one two", "conversation": id, "stream": True, "max_output_tokens": 20}
        url, key = f"{server.url}/v1/responses", {"authorization": "Bearer none"}
        with httpx.stream("POST", url, json=body, headers=key, timeout=60) as other, ThreadPoolExecutor(1) as pool:
            lines = other.iter_lines()
            assert "response.created" in next(lines)
            code = _WAIT_FOR_A_TURN.format(url=f"{server.url}/v1", id=id)
            waiting = pool.submit(driver.run, code)
            assert "response.incomplete" in [line for line in lines if line.startswith("data: ")][-1]
            retries, seconds, status = json.loads(waiting.result(60))
    assert status == "incomplete"
    assert 1 <= retries <= seconds


TURNS = ["What is the weather in Paris?", "And in Rome?"]


def weather(prompt: str) -> str:
    """Call the tool once for each of the user's questions."""
    results, asked = said_by("tool", prompt), len(said_by("user", prompt))
    return f"So {' '.join(results)}" if len(results) == asked else call("weather", city=("Paris", "Rome")[asked - 1])


@pytest.mark.parametrize("kind", ["session", "conversation"])
def test_turns_of_openai_agents(storing_model: Model, kind: str) -> None:
    """The model reads all that went before; the server's conversation has each item once, in order."""
    storing_model.says(weather)
    driver = python_client("agents", "drive_agents_session", "async")
    found = driver.generate(storing_model.url, TURNS[0], more=TURNS[1:], kind=kind)
    assert len(storing_model.prompts) == 4
    assert said_by("user", storing_model.prompts[-1]) == TURNS
    assert len(said_by("tool", storing_model.prompts[-1])) == 2
    assert "5 °C in Paris" in found["texts"][0]
    assert "4 °C in Rome" in found["texts"][1]
    turn = ["message", "function_call", "function_call_output", "message"]
    assert [item.get("type", "message") for item in found["items"]] == turn * 2
    assert len({item["id"] for item in found["items"]}) == 8
    if kind == "session":
        assert found["latest"] == found["items"][-2:]
        assert texts([found["popped"]]) == ["popped"]
        assert (found["left"], found["emptied"]) == (found["items"], [])
