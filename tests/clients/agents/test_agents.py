"""Agents of Python's libraries in loops of several turns: the model calls a tool, and says what it found."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.clients.agents.scripted import Model, call, said_by
from tests.clients.driver import Driver, python_client
from tests.clients.emulator import emulated

pytestmark = pytest.mark.clients

AGENTS = {
    "strands": ("strands", "drive_strands", "async", ("chat", "responses", "anthropic", "sagemaker")),
    "openai-agents": ("agents", "drive_openai_agents", "async", ("responses", "chat")),
    "smolagents": ("agents", "drive_smolagents", "sync", ("calls",)),
}
CASES = [(name, provider) for name, (*_, providers) in AGENTS.items() for provider in providers]
QUESTION = "What is the weather in Paris?"
ANSWER = "So: "
_OBSERVED = re.compile(
    r"\n(?:Observation|Error):\n(.*?)(?=\n(?:Error:|New task:|Now let's retry)|<\|im_end\|>)", re.DOTALL
)


@pytest.fixture(scope="module")
def runtime(model: Model) -> Iterator[str]:
    """SageMaker Runtime, as `lmi deploy local` has it."""
    with emulated(model.front) as url:
        yield url


class Agent(NamedTuple):
    """One library on one API."""

    name: str
    provider: str
    driver: Driver
    url: str

    def answers(self, prompt: str, *more: str, **options: object) -> str:
        found = self.driver.generate(self.url, prompt, provider=self.provider, more=more, **options)
        assert found["prompt_tokens"] > 0
        return str(found["text"]).strip()

    def streams(self, prompt: str) -> list[str]:
        return [piece for piece in self.driver.stream(self.url, prompt, provider=self.provider) if piece]

    def results(self, prompt: str) -> list[str]:
        """What tools found: smolagents has the user say it, the answers of turns before too."""
        if self.name != "smolagents":
            return said_by("tool", prompt)
        said = prompt[prompt.index("<|im_start|>user\n") :]  # the instructions have examples
        return [found for found in _OBSERVED.findall(said) if not found.startswith(ANSWER)]

    def says(self, text: str) -> str:
        """What the model says to end a turn: smolagents has a tool for that."""
        return call("final_answer", answer=text) if self.name == "smolagents" else text


@pytest.fixture(params=CASES, ids="-".join)
def agent(request: pytest.FixtureRequest, model: Model) -> Agent:
    name, provider = request.param
    environment, script, mode, _ = AGENTS[name]
    url = request.getfixturevalue("runtime") if provider == "sagemaker" else model.url
    return Agent(name, provider, python_client(environment, script, mode), url)


both = pytest.mark.parametrize("how", ["whole", "streamed"])


@both
def test_a_tools_result_reaches_the_model(agent: Agent, model: Model, how: str) -> None:
    def answer(prompt: str) -> str:
        found = agent.results(prompt)
        return agent.says(f"{ANSWER}{found[0]}.") if found else "I look. " + call("weather", city="Paris")

    model.says(answer)
    if how == "whole":
        assert "5 °C in Paris." in agent.answers(QUESTION)
    else:
        pieces = agent.streams(QUESTION)
        assert "5 °C in Paris." in "".join(pieces)
        assert len(pieces) > 3
    first, second = model.prompts
    assert '"name": "weather"' in first
    assert agent.results(first) == []
    assert len(agent.results(second)) == 1
    assert "Paris" in said_by("assistant", second)[0]  # its own call


@both
def test_parallel_calls(agent: Agent, model: Model, how: str) -> None:
    """Their results reach the model, in the calls' order but with smolagents, which has them as they come."""

    def answer(prompt: str) -> str:
        found = agent.results(prompt)
        cities = ("Paris", "Rome", "Oslo")
        return (
            agent.says(f"{ANSWER}{'; '.join(found)}.")
            if found
            else "".join(call("weather", city=one) for one in cities)
        )

    model.says(answer)
    text = agent.answers(QUESTION) if how == "whole" else "".join(agent.streams(QUESTION))
    places = [text.index(found) for found in ("5 °C in Paris", "4 °C in Rome", "4 °C in Oslo")]
    assert places == sorted(places) or agent.name == "smolagents"
    assert len(model.prompts) == 2


def test_a_tool_that_fails(agent: Agent, model: Model) -> None:
    """The model reads the error, and tries again."""

    def answer(prompt: str) -> str:
        found = agent.results(prompt)
        if len(found) < 2:
            return call("weather", city="Paris" if found else "Atlantis")
        return agent.says(f"{ANSWER}{found[0]}; {found[1]}.")

    model.says(answer)
    text = agent.answers(QUESTION)
    assert ("An error occurred" if agent.name == "openai-agents" else "no such city: Atlantis") in text
    assert "5 °C in Paris" in text


def test_a_long_conversation(agent: Agent, model: Model) -> None:
    """Four turns of the user's, each with two calls one after the other; the model sees all that went before."""
    turns = ["ab", "abc", "abcd", "abcde"]

    def answer(prompt: str) -> str:
        found, said = agent.results(prompt), len(turns_in(prompt))
        return (
            agent.says(f"{ANSWER}{' '.join(found)}.")
            if len(found) == 2 * said
            else call("weather", city=f"C{len(found)}")
        )

    def turns_in(prompt: str) -> list[str]:
        return [turn for turn in turns if any(f"in {turn}?" in text for text in said_by("user", prompt))]

    model.says(answer)
    text = agent.answers(*(f"What is the weather in {turn}?" for turn in turns))
    assert len(model.prompts) == 12
    last = model.prompts[-1]
    assert turns_in(last) == turns
    assert [f"2 °C in C{number}" in text for number in range(8)] == [True] * 8


@both
def test_an_agent_that_writes_code(model: Model, how: str) -> None:
    agent = Agent("smolagents", "code", python_client("agents", "drive_smolagents"), model.url)

    def answer(prompt: str) -> str:
        found = agent.results(prompt)
        code = f"final_answer({found[0]!r})" if found else "print(weather('Paris'))"
        return f"Thought: I look.\n<code>\n{code}\n</code> and no more"

    model.says(answer)
    text = agent.answers(QUESTION) if how == "whole" else "".join(agent.streams(QUESTION))
    assert "5 °C in Paris" in text
    assert len(model.prompts) == 2
    assert "no more" not in model.prompts[1]  # </code> is one of its stop strings
