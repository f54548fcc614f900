"""`lmi launch` with a program in place of an agent: its settings, and the server that ends with it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from handler.cli import main
from handler.launch import AGENTS
from tests.environment import clean_environment
from tests.servers import PATIENCE, LiveServer, http, options, serve, wait_for

PROGRAM = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([os.getpid(), sys.argv[1:], dict(os.environ)]), flush=True)
sys.exit(int(sys.stdin.readline()))
"""
ECHO = ("--engine", "echo", *options("option.served_model_name=qwen", "option.max_model_len=40000"))


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serve(*ECHO, env={"LMI_API_KEY": "secret,other"}) as server:
        server.wait_ready()
        yield server


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory with a program for each agent, which says how it was started, and ends as its input says."""
    for name in AGENTS:
        (tmp_path / name).write_text(PROGRAM)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def launch(programs: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    own = {"PATH": f"{programs}:{os.environ['PATH']}", "LMI_CACHE": str(programs / "cache")}
    return subprocess.Popen(
        [sys.executable, "-m", "handler", "launch", *words],
        env={**clean_environment(), **own, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told(process: subprocess.Popen[str]) -> tuple[list[str], dict[str, str]]:
    """The arguments and the environment of the agent, which is the very process that was started."""
    assert process.stdout is not None
    pid, words, environment = json.loads(process.stdout.readline())
    assert pid == process.pid
    return words, environment


def answers(url: str, key: str) -> int | None:
    """The status of a list of models; None from nobody."""
    try:
        return http.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code
    except httpx.ConnectError:
        return None


@pytest.mark.parametrize("agent", AGENTS)
def test_the_settings_of_each_agent(
    agent: str, server: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They name the server, its key, its model and its context."""
    monkeypatch.setenv("LMI_API_KEY", "secret,other")
    monkeypatch.setenv("NO_PROXY", "example.com")
    monkeypatch.delenv("no_proxy", raising=False)
    assert main(["launch", agent, "--url", server.url + "/v1/", "--print", "--", "-p", "a b"]) == 0
    *exports, command = capsys.readouterr().out.splitlines()
    values = dict(word.split("=", 1) for line in exports for word in shlex.split(line)[1:])
    words = shlex.split(command)
    assert values["NO_PROXY"] == values["no_proxy"] == "example.com,127.0.0.1"
    assert words[0] == agent
    assert words[-2:] == ["-p", "a b"]
    settings = json.dumps([values, words])
    assert ("40000" in settings) == (agent != "aider")  # which takes no limit
    assert server.url in settings
    assert "qwen" in settings
    assert re.search(r"\bsecret\b", json.dumps(values))


def test_an_agent_on_a_server_that_runs(programs: Path, server: LiveServer) -> None:
    process = launch(programs, "goose", "--url", server.url, "--name", "model", LMI_API_KEY="other")
    words, environment = told(process)
    assert words == ["session"]
    assert environment["GOOSE_MODEL"] == "model"
    process.communicate("7\n", timeout=PATIENCE)
    assert process.returncode == 7
    assert answers(server.url, "secret") == 200


def test_a_server_of_its_own_ends_with_the_agent(programs: Path) -> None:
    process = launch(
        programs, "claude", *ECHO, "--", "-p", "hello", ANTHROPIC_API_KEY="sk-own", CLAUDE_CODE_USE_BEDROCK="1"
    )
    words, environment = told(process)
    url, key = environment["ANTHROPIC_BASE_URL"], environment["ANTHROPIC_AUTH_TOKEN"]
    settings, *others = words[1:]
    assert (words[0], others) == ("--settings", ["-p", "hello"])
    assert json.loads(settings)["env"].items() <= environment.items()
    assert key not in settings, "other users can read it"
    assert environment["ANTHROPIC_API_KEY"] == ""
    assert environment["ANTHROPIC_MODEL"] == "qwen"
    assert environment["CLAUDE_CODE_USE_BEDROCK"] == ""
    assert (programs / "cache" / "launch.log").stat().st_mode & 0o777 == 0o600
    assert url.startswith("http://127.0.0.1:")
    assert (answers(url, key), answers(url, "none")) == (200, 401)
    process.kill()
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL
    assert "it logs to" in errors
    wait_for(lambda: answers(url, key) is None, PATIENCE, "the server goes on")


def test_a_server_that_does_not_start(programs: Path) -> None:
    process = launch(programs, "codex", "--engine", "echo", "-o", "option.max_model_len=none")
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "the server exited with status" in errors
    assert "option.max_model_len" in errors.partition("the server exited")[2]


def test_a_small_context_is_told(programs: Path) -> None:
    """With a key of the user's, which the server then has."""
    given = options("option.max_model_len=4096")
    process = launch(programs, "aider", "--engine", "echo", *given, LMI_API_KEY="mine")
    _, environment = told(process)
    assert environment["AIDER_OPENAI_API_KEY"] == "mine"
    _, errors = process.communicate("0\n", timeout=PATIENCE)
    assert process.returncode == 0
    assert "4096 tokens, but an agent needs 32000" in errors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["opencode"], r"OpenCode is not installed \(opencode is not on PATH\): npm install -g opencode-ai"),
        (
            ["claude", "--print", "--url", "http://127.0.0.1:9"],
            "cannot reach a server at http://127.0.0.1:9 .*lmi serve",
        ),
        (["claude", "--print", "--url", "URL"], "returned status 401; set LMI_API_KEY to the server's key"),
        (["claude", "--print", "--url", "http://127.0.0.1:8o80"], r"cannot reach a server at http://127.0.0.1:8o80 \("),
        (["claude", "--print", "--url", "URL/x"], "returned status 404$"),
        (["claude", "--print", "--url", "URL", "--name", "other"], "has no model other; its models are qwen, model"),
    ],
)
def test_refusals(
    words: list[str],
    said: str,
    server: LiveServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("LMI_API_KEY", "wrong" if words[-1] == "URL" else "secret")
    assert main(["launch", *(word.replace("URL", server.url) for word in words)]) == 2
    assert re.match(f"lmi launch: .*{said}", capsys.readouterr().err, re.DOTALL)
