"""Agents in loops of several turns: Python's libraries, and coding agents' programs."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
from websockets.sync.client import connect

from handler.protocols.assistant.summary import PROMPT as SUMMARIZE
from tests.clients import toolchains
from tests.clients.agents.scripted import ASKING, Model, call, said_by, scripted
from tests.clients.driver import Driver, python_client, skipped_without
from tests.deploy.local.servers import emulated
from tests.servers import wait_for

pytestmark = pytest.mark.clients

# -- agents of Python's libraries in loops of several turns: the model calls a tool, and says what it found ------------


AGENTS = {
    "strands": ("strands", "drive_strands", "async", ("chat", "responses", "anthropic", "sagemaker")),
    "openai-agents": ("agents", "drive_openai_agents", "async", ("responses", "socket", "chat")),
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
    prompts_begin_alike(model, f"What is the weather in {turns[0]}?", agent.answers, agent.says("So."))


def test_openai_agents_keep_one_socket(model: Model) -> None:
    """Three calls of tools in each of two turns are requests of one connection, and the last of all is a word."""

    def answer(prompt: str) -> str:
        results, turns = said_by("tool", prompt), len(said_by("user", prompt))
        return "Done." if len(results) == 3 * turns else call("weather", city=f"C{len(results)}")

    def requests() -> list[tuple[str, str]]:
        return re.findall(r" id=(\S+)-(\d+) outcome=ok", model.front.log.removeprefix(before))

    model.says(answer)
    driver, before = python_client("agents", "drive_openai_agents", "async"), model.front.log
    agent = Agent("openai-agents", "socket", driver, model.url)
    assert agent.answers(QUESTION, "And in Rome?") == "Done."
    wait_for(lambda: len(requests()) == 8, 20, "not all requests are in the log")
    assert len({connection for connection, _ in requests()}) == 1
    numbers = [int(number) for _, number in requests()]
    assert numbers == [*range(numbers[0], numbers[0] + 8)]
    assert len(model.prompts) == 8


def prompts_begin_alike(model: Model, task: str, session: Callable[[str], object], last: str = "So.") -> None:
    """Each prompt begins with all of the one before, and another session's with all that stands before its task, so
    that an engine finds it in its cache. `last` is what ends a turn.
    """
    first, pairs = model.prompts[0], [*itertools.pairwise(model.prompts)]
    moved = [n for n, (one, after) in enumerate(pairs) if not after.startswith(one.removesuffix(ASKING))]
    assert moved == []
    model.says(lambda prompt: last)
    session("Sing a song.")
    [other] = model.prompts
    differs = next(n for n, (one, two) in enumerate(zip(first, other, strict=False)) if one != two)
    assert first[differs:].startswith(task)


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


# -- coding agents' programs in loops of several turns, run by `lmi launch` in an empty home ----------


_ROOT = Path(__file__).parents[3]
_LIMIT = 100  # seconds for one run of a program
FACT = "The sky is green"


class Trap:
    """A proxy on loopback that serves nobody; `asked` is what came."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def variables(self) -> dict[str, str]:
        """For a program, which then goes to the server itself and here for all else."""
        names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
        proxies = dict.fromkeys((*names, *map(str.lower, names)), self.url)
        return {**proxies, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                with connection:
                    self.asked.append(connection.recv(1000).decode(errors="replace").partition("\r\n")[0])


class CodingAgent:
    """A program in a home and a working directory of its own, run by `lmi launch`.

    Attributes:
        trap: what it asked of others than the server.
        work: the directory that it works in.
        warm_ups: the number of prompts that the server only reads, in each run.
        variables: its environment variables besides those of `lmi launch`.
    """

    warm_ups = 0
    variables: Mapping[str, str] = MappingProxyType({})

    def __init__(self, home: Path, url: str, trap: Trap) -> None:
        self.url, self.trap = url, trap
        self.work, self._home = home / "work", home
        self.work.mkdir()
        (self.work / "fact.txt").write_text(FACT)

    def program(self) -> Path:
        raise NotImplementedError

    def arguments(self, *, again: bool) -> list[str]:
        """Its own, before what the user says; `again` goes on with the session before."""
        raise NotImplementedError

    def runs(self, command: str) -> str:
        """The model's call of the tool that runs a command."""
        raise NotImplementedError

    def answers(self, said: str, *, again: bool = False) -> str:
        """What it prints."""
        program = self.program()
        path = f"{program.parent}:{os.environ['PATH']}"
        own = {"HOME": str(self._home), "PATH": path, "LANG": "C.UTF-8", "PYTHONPATH": str(_ROOT), **self.variables}
        launch = [sys.executable, "-m", "handler", "launch", program.name, "--url", self.url, "--"]
        process = subprocess.Popen(
            [*launch, *self.arguments(again=again), said],
            cwd=self.work,
            env={**own, **self.trap.variables()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=_LIMIT)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it has started
        assert process.returncode == 0, output
        return output


class ClaudeCode(CodingAgent):
    def program(self) -> Path:
        return toolchains.claude_code()

    def arguments(self, *, again: bool) -> list[str]:
        # In this form, that of its SDK, it asks for updates of thoughts too.
        options = ["--allowedTools=Bash", "--output-format=stream-json", "--verbose", "--print"]
        return [*(["--continue"] if again else []), *options]

    def runs(self, command: str) -> str:
        return call("Bash", command=command, description="Run it")


class Codex(CodingAgent):
    """By default it uses a WebSocket, which the server is asked for."""

    warm_ups = 1
    overrides: Sequence[str] = ()

    def program(self) -> Path:
        return toolchains.codex()

    def arguments(self, *, again: bool) -> list[str]:
        free = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        settings = [word for pair in self.overrides for word in ("-c", f"model_providers.lmi_launch.{pair}")]
        return [*settings, "exec", *free, *(["resume", "--last"] if again else [])]

    def runs(self, command: str) -> str:
        return call("exec_command", cmd=command)


class CodexOverHttp(Codex):
    warm_ups = 0
    overrides = ("supports_websockets=false",)


class OpenCode(CodingAgent):
    """It also asks for a title of the session. When it starts, it installs a package of its own for the user's plugins,
    here from an npm registry that does not exist.
    """

    variables = MappingProxyType({"npm_config_registry": "http://127.0.0.1:9"})

    def program(self) -> Path:
        return toolchains.opencode()

    def arguments(self, *, again: bool) -> list[str]:
        return ["run", "--auto", *(["--continue"] if again else [])]

    def runs(self, command: str) -> str:
        return call("bash", command=command, description="Run it")


@pytest.fixture
def trap() -> Iterator[Trap]:
    with contextlib.closing(Trap()) as trap:
        yield trap


@pytest.fixture(params=[ClaudeCode, Codex, CodexOverHttp])
def coding_agent(request: pytest.FixtureRequest, tmp_path: Path, model: Model, trap: Trap) -> CodingAgent:
    with skipped_without():
        agent = request.param(tmp_path, model.url, trap)
        agent.program()
    return agent  # type: ignore[no-any-return]


def test_a_loop_of_calls(coding_agent: CodingAgent, model: Model) -> None:
    """Two calls in one answer, then one that fails; the model reads results in the calls' order, and nobody else is
    asked for anything.
    """

    def answer(prompt: str) -> str:
        found = said_by("tool", prompt)
        match len(found):
            case 0:
                # Claude Code sends results as they come: here the second one first.
                return (
                    "I look. "
                    + coding_agent.runs("sleep 0.2; cat fact.txt")
                    + coding_agent.runs("echo $((6 * 7000007))")
                )
            case 2:
                return coding_agent.runs("cat missing.txt")
            case _:
                return f"FOUND {found}"

    model.says(answer)
    before = model.front.log
    output = coding_agent.answers("What does the file say?")
    found = output[output.index("FOUND") :]
    places = [found.index(part) for part in (FACT, "42000042", "No such file or directory")]
    assert places == sorted(places)
    assert len(model.prompts) == 3
    assert len(model.warm_ups) == coding_agent.warm_ups
    assert "outcome=refused" not in model.front.log.removeprefix(before)
    assert coding_agent.trap.asked == []


def test_a_long_conversation_of_a_coding_agent(coding_agent: CodingAgent, model: Model) -> None:
    """A session of ten calls one after the other, and another turn of the user's that sees them all."""

    def answer(prompt: str) -> str:
        found = said_by("tool", prompt)
        if len(found) < 10:
            return coding_agent.runs(f"echo step $(({len(found)} * 1001))")
        return f"FOUND {re.findall(r'step ([0-9]+)', ' '.join(found))}, ASKED {'And now?' in prompt}"

    model.says(answer)
    wanted = [str(number * 1001) for number in range(10)]
    assert f"FOUND {wanted}, ASKED False" in coding_agent.answers("Count.")
    for prompt in model.warm_ups:  # its last message goes on in that of the turn
        length = len(prompt.removesuffix(ASKING)) - 20
        assert model.prompts[0][:length] == prompt[:length]
    assert f"FOUND {wanted}, ASKED True" in coding_agent.answers("And now?", again=True)
    assert len(model.prompts) == 12
    assert len(model.warm_ups) == 2 * coding_agent.warm_ups
    assert coding_agent.trap.asked == []
    prompts_begin_alike(model, "Count.", coding_agent.answers)


# -- Codex where WebSockets are off, or too many ---------------------------------------------------------------------


class StubbornCodex(Codex):
    """Tries a WebSocket that it was not to try, and gives up after two attempts instead of seven."""

    warm_ups = 0
    overrides = ("supports_websockets=true", "stream_max_retries=1")


@pytest.mark.parametrize(
    ("limit", "status", "attempts"), [(0, 426, 1), (1, 503, 3)], ids=["no-websockets", "too-many-websockets"]
)
def test_codex_goes_on_over_http(limit: int, status: int, attempts: int, tmp_path: Path, trap: Trap) -> None:
    """One attempt where there are no WebSockets, besides that of the launch."""
    (tmp_path / "home").mkdir()
    with scripted(tmp_path / "model", f"option.websockets_max={limit}") as model, contextlib.ExitStack() as stack:
        with skipped_without():
            codex = StubbornCodex(tmp_path / "home", model.url, trap)
            codex.program()
        if limit:
            stack.enter_context(connect(model.url.replace("http", "ws", 1) + "/v1/responses"))

        def answer(prompt: str) -> str:
            results = said_by("tool", prompt)
            return f"FOUND {len(results)}" if len(results) == 3 else codex.runs("cat fact.txt")

        model.says(answer)
        assert "FOUND 3" in codex.answers("Read.")
        assert (len(model.prompts), model.warm_ups, trap.asked) == (4, [], [])
        assert model.front.log.count(f"status={status} method=GET path='/v1/responses'") == 1 + attempts


# -- Codex past its context -----------------------------------------------------------------------------------------


class CodexOfOpenAi(Codex):
    """Lets the server summarize, as Codex does if its provider has OpenAI's name."""

    overrides: Sequence[str] = ('name="OpenAI"',)

    def arguments(self, *, again: bool) -> list[str]:
        return ["-c", "model_auto_compact_token_limit=20000", *super().arguments(again=again)]


class CodexOfOpenAiOverHttp(CodexOfOpenAi):
    warm_ups = 0
    overrides = ('name="OpenAI"', "supports_websockets=false")


@pytest.mark.parametrize("kind", [CodexOfOpenAi, CodexOfOpenAiOverHttp])
def test_codex_goes_on_with_a_summary(kind: type[Codex], tmp_path: Path, model: Model, trap: Trap) -> None:
    """After a call, which the summary covers."""
    with skipped_without():
        codex = kind(tmp_path, model.url, trap)
        codex.program()

    def answer(prompt: str) -> str:
        users = said_by("user", prompt)
        if SUMMARIZE in users[-1]:
            return f"The file says: {said_by('tool', prompt)}"
        if any("Summary of the earlier conversation" in text for text in users):
            return f"FOUND {FACT in prompt}, CALLS {len(said_by('tool', prompt))}, ASKED {'What does' in prompt}"
        return codex.runs("cat fact.txt")

    model.says(answer)
    before = model.front.log
    assert "FOUND True, CALLS 0, ASKED True" in codex.answers("What does the file say?")
    assert "outcome=refused" not in model.front.log.removeprefix(before)
    assert trap.asked == []


# -- sessions that pass the model's context, as `lmi launch` sets the programs up -----------------------------------


_CONTEXT = 80_000
_ASKS = re.compile(
    "CONTEXT CHECKPOINT COMPACTION|CRITICAL: Respond|create a detailed summary|^Here is the conversation so far:"
)
SUMMARY = "The file said that the sky is green. Next: say so."


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with scripted(tmp_path_factory.mktemp("small"), f"option.max_model_len={_CONTEXT}") as model:
        yield model


@pytest.mark.parametrize("kind", [ClaudeCode, Codex, CodexOverHttp, OpenCode])
def test_a_session_passes_the_context(kind: type[CodingAgent], tmp_path: Path, small_model: Model, trap: Trap) -> None:
    """The program asks for a summary in time, and goes on with it; no prompt is too long."""
    with skipped_without():
        agent = kind(tmp_path, small_model.url, trap)
        agent.program()

    def answer(prompt: str) -> str:
        users = said_by("user", prompt)
        if _ASKS.search(users[-1]):
            return f"<summary>{SUMMARY}</summary>"
        if SUMMARY in prompt:
            return f"FOUND {len(said_by('tool', prompt))}"
        return agent.runs("cat fact.txt; seq 100000 101500")

    small_model.says(answer)
    before = small_model.front.log
    output = agent.answers("Read the file, again and again.")
    log = small_model.front.log.removeprefix(before)
    assert re.search(r"FOUND [01]\b", output), "of all results, at most the latest is still there"
    assert "outcome=refused" not in log
    assert max(map(int, re.findall(r"prompt_tokens=(\d+)", log))) > _CONTEXT / 2
    assert len(small_model.prompts) > 3
    assert trap.asked == []
