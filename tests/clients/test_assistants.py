"""Thoughts and calls as LangChain, pydantic-ai and Vercel's ai read them, on each route that has them.

The echo engine says the prompt's words, which the reasoning parser reads as a thought up to its end mark.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.driver import Driver, driving_node, of_mode, python_client
from tests.servers import LiveServer, serve

pytestmark = pytest.mark.clients

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather."}
TOOLS = {
    "langchain": {"type": "function", "function": {**WEATHER, "parameters": CITY}},
    "pydantic-ai": {**WEATHER, "parameters_json_schema": CITY},
    "ai": {**WEATHER, "parameters": CITY},
}
THOUGHT = "Hm </think> Yes"
CALL = '<tool_call>[{"name": "weather", "arguments": {"city": "Paris"}}]</tool_call>'
MODES = {"langchain": ("sync", "async"), "pydantic-ai": ("sync", "async"), "ai": ("sync",)}
NO_THOUGHTS = {("langchain", "chat"), ("langchain", "responses"), ("ai", "chat"), ("ai", "responses")}
"""Where the client leaves thoughts out: OpenAI's own chat has none, and of responses these read summaries only."""

Piece = list[Any]


@pytest.fixture(scope="module")
def thinking() -> Iterator[str]:
    with serve("--engine", "echo", "-o", "option.reasoning_parser=deepseek_r1") as server:
        server.wait_ready()
        yield server.url


@pytest.fixture(scope="module")
def ai() -> Iterator[Driver]:
    with driving_node("drive_ai") as driver:
        yield driver


class Client:
    """One library on one dialect."""

    def __init__(self, name: str, dialect: str, driver: Driver) -> None:
        self.name, self.dialect = name, dialect
        self.has_stop = dialect in ("chat", "compatible")  # a message that ends with one ends with no call
        self._driver = driver

    def ask(self, how: str, url: str, prompt: str, **options: Any) -> tuple[list[Piece], dict[str, Any]]:
        """The answer's parts, each with all its pieces joined, and what the client says at its end."""
        asked = {"dialect": self.dialect, **options}
        if how == "generate":
            found = self._driver.generate(url, prompt, **asked)
            return joined(found["parts"]), found
        events = self._driver.stream(url, prompt, **asked)
        ends = {name: value for event in events for name, value in event.items() if value is not None}
        return joined([piece for event in events for piece in event["parts"]]), ends


CLIENTS = [
    of_mode((name, dialect, mode), mode, f"{name}-{dialect}-{mode}")
    for name, modes in MODES.items()
    for dialect in ("chat", "responses", "messages", *(("compatible",) if name == "ai" else ()))
    for mode in modes
]


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> Client:
    name, dialect, mode = request.param
    scripts = {"langchain": "drive_langchain_openai", "pydantic-ai": "drive_pydantic_ai"}
    driver = python_client("openai", scripts[name], mode) if name in scripts else request.getfixturevalue("ai")
    return Client(name, dialect, driver)


def joined(pieces: list[Piece]) -> list[Piece]:
    """Join the pieces of one part; a call's first piece has its name."""
    parts: list[Piece] = []
    for kind, text, name in pieces:
        if parts and parts[-1][0] == kind and not name:
            parts[-1][1] += text
        elif text or name:
            parts.append([kind, text, name])
    return [[kind, json.loads(text) if kind == "call" else text, name] for kind, text, name in parts]


def shown(client: Client, parts: list[Piece]) -> list[Piece]:
    """Take the thought off the parts, if this client shows it."""
    if (client.name, client.dialect) in NO_THOUGHTS:
        return parts
    assert parts[0][0] == "reasoning"
    assert parts[0][1].endswith("user: Hm ")
    return parts[1:]


def calling(client: Client, url: str) -> dict[str, Any]:
    """Options for an answer that ends before the prompt's last word, `assistant:`."""
    tools = [TOOLS[client.name]]
    if client.has_stop:
        return {"tools": tools, "max_tokens": 400, "stop": ["assistant:"]}
    _, end = client.ask("generate", url, f"{THOUGHT} {CALL}", tools=tools, max_tokens=1)
    return {"tools": tools, "max_tokens": end["prompt_tokens"] - 1}


both = pytest.mark.parametrize("how", ["generate", "stream"])


@both
def test_a_thought_and_the_text_after_it(client: Client, thinking: str, how: str) -> None:
    parts, end = client.ask(how, thinking, THOUGHT, max_tokens=4)
    assert shown(client, parts) == [["text", " Yes", None]]
    assert (end["prompt_tokens"], end["tokens"]) == (5, 4)


@both
def test_a_call_after_a_thought(client: Client, thinking: str, how: str) -> None:
    parts, end = client.ask(how, thinking, f"{THOUGHT} {CALL}", **calling(client, thinking))
    text, call = shown(client, parts)
    assert text[:2] == ["text", " Yes "]
    assert call == ["call", {"city": "Paris"}, "weather"]
    if client.has_stop:
        assert end["finish_reason"] in ("tool_calls", "tool_call", "tool-calls")


def test_a_tools_result(client: Client, thinking: str) -> None:
    """The second answer says the whole conversation as the model saw it: what was asked, called and found."""
    (tool,), asked = [TOOLS[client.name]], f"{THOUGHT} {CALL}"
    _, end = client.ask("generate", thinking, asked, tools=[tool], max_tokens=1)
    words = end["prompt_tokens"] - 1  # before the answer's
    result = {"text": "12 °C", "then": {"max_tokens": words + len(f"assistant: Yes {CALL} user: [ 12 °C ]".split())}}
    parts, _ = client.ask("generate", thinking, asked, tools=[tool], max_tokens=words, result=result)
    calls = [part for part in parts if part[0] == "call"]
    assert calls[0] == calls[1] == ["call", {"city": "Paris"}, "weather"]
    assert "12 °C" in "".join(text for kind, text, _ in parts if kind == "text")


@pytest.mark.parametrize("client", [case for case in CLIENTS if not case.marks], indirect=True)
def test_the_demo_model(client: Client, model_server: LiveServer) -> None:
    question = "What is the capital of France?"
    parts, end = client.ask("stream", model_server.url, question, max_tokens=12, temperature=0)
    assert parts == [["text", "The capital of France is Paris.", None]]
    assert (end["prompt_tokens"], end["tokens"]) == (37, 8)
    assert end["finish_reason"] in ("stop", "end_turn", "completed")
