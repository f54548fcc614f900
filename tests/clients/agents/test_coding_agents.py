"""Coding agents' programs in loops of several turns, with the settings of docs/agents.md, in an empty home."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.clients import toolchains
from tests.clients.agents.scripted import Model, call, said_by
from tests.clients.driver import skipped_without
from tests.docs.blocks import Block, parse

pytestmark = pytest.mark.clients

_PAGE = Path(__file__).parents[3] / "docs" / "agents.md"
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
    """A program in a home and a working directory of its own.

    Attributes:
        trap: what it asked of others than the server.
        work: the directory that it works in.
    """

    def __init__(self, home: Path, url: str, trap: Trap) -> None:
        self.url, self.trap = url, trap
        self.work, self._home = home / "work", home
        self.work.mkdir()
        (self.work / "fact.txt").write_text(FACT)
        self.prepare(home)

    def prepare(self, home: Path) -> None:
        """Write its settings."""

    def command(self, *, again: bool) -> list[str]:
        """The program, which then takes what the user says; `again` goes on with the session before."""
        raise NotImplementedError

    def variables(self) -> Mapping[str, str]:
        raise NotImplementedError

    def runs(self, command: str) -> str:
        """The model's call of the tool that runs a command."""
        raise NotImplementedError

    def answers(self, said: str, *, again: bool = False) -> str:
        """What it prints."""
        own = {"HOME": str(self._home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        process = subprocess.Popen(
            [*self.command(again=again), said],
            cwd=self.work,
            env={**own, **self.trap.variables(), **self.variables()},
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
    def command(self, *, again: bool) -> list[str]:
        program = [str(toolchains.claude_code()), *(["--continue"] if again else [])]
        # In this form, that of its SDK, it asks for updates of thoughts too.
        return [*program, "--allowedTools=Bash", "--output-format=stream-json", "--verbose", "--print"]

    def variables(self) -> Mapping[str, str]:
        lines = [line for line in documented("sh", "claude").splitlines() if line.startswith("export ")]
        return dict(pair.split("=", 1) for line in lines for pair in shlex.split(self.here(line))[1:])

    def runs(self, command: str) -> str:
        return call("Bash", command=command, description="Run it")

    def here(self, text: str) -> str:
        return text.replace("http://127.0.0.1:8080", self.url)


class Codex(CodingAgent):
    def prepare(self, home: Path) -> None:
        settings = documented("toml", "model_provider").replace("http://127.0.0.1:8080", self.url)
        (home / ".codex").mkdir()
        (home / ".codex" / "config.toml").write_text(settings)

    def command(self, *, again: bool) -> list[str]:
        free = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        return [str(toolchains.codex()), "exec", *free, *(["resume", "--last"] if again else [])]

    def variables(self) -> Mapping[str, str]:
        return {"LMI_KEY": "none"}

    def runs(self, command: str) -> str:
        return call("exec_command", cmd=command)


def documented(language: str, word: str) -> str:
    """The block of docs/agents.md that has the word."""
    blocks = [item for item in parse(_PAGE.read_text()).items if isinstance(item, Block)]
    [block] = [block for block in blocks if block.language == language and word in block.text]
    return block.text


@pytest.fixture
def trap() -> Iterator[Trap]:
    with contextlib.closing(Trap()) as trap:
        yield trap


@pytest.fixture(params=[ClaudeCode, Codex])
def agent(request: pytest.FixtureRequest, tmp_path: Path, model: Model, trap: Trap) -> CodingAgent:
    with skipped_without():
        agent = request.param(tmp_path, model.url, trap)
        agent.command(again=False)
    return agent  # type: ignore[no-any-return]


def test_a_loop_of_calls(agent: CodingAgent, model: Model) -> None:
    """Two calls in one answer, then one that fails; the model reads results in the calls' order, and nobody else is
    asked for anything.
    """

    def answer(prompt: str) -> str:
        found = said_by("tool", prompt)
        match len(found):
            case 0:
                # Claude Code sends results as they come: here the second one first.
                return "I look. " + agent.runs("sleep 0.2; cat fact.txt") + agent.runs("echo $((6 * 7))")
            case 2:
                return agent.runs("cat missing.txt")
            case _:
                return f"FOUND {found}"

    model.says(answer)
    before = model.front.log
    output = agent.answers("What does the file say?")
    found = output[output.index("FOUND") :]
    places = [found.index(part) for part in (FACT, "42", "No such file or directory")]
    assert places == sorted(places)
    assert len(model.prompts) == 3
    assert "outcome=refused" not in model.front.log.removeprefix(before)
    assert agent.trap.asked == []


def test_a_long_conversation(agent: CodingAgent, model: Model) -> None:
    """A session of ten calls one after the other, and another turn of the user's that sees them all."""

    def answer(prompt: str) -> str:
        found = said_by("tool", prompt)
        if len(found) < 10:
            return agent.runs(f"echo step $(({len(found)} * 1001))")
        return f"FOUND {re.findall(r'step ([0-9]+)', ' '.join(found))}, ASKED {'And now?' in prompt}"

    model.says(answer)
    wanted = [str(number * 1001) for number in range(10)]
    assert f"FOUND {wanted}, ASKED False" in agent.answers("Count.")
    assert f"FOUND {wanted}, ASKED True" in agent.answers("And now?", again=True)
    assert len(model.prompts) == 12
    assert agent.trap.asked == []
