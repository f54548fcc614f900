"""`lmi launch` with a program in place of an agent: its settings, and the server that ends with it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http import server as http_server
from pathlib import Path
from typing import Any

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
    agent: str,
    server: LiveServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They name the server, its key, its model and its context."""
    monkeypatch.setenv("LMI_CACHE", str(tmp_path))
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
    files = [Path(word).read_text() for word in words if word.startswith(str(tmp_path))]
    settings = json.dumps([values, words, files])
    assert "40000" in settings
    assert server.url in settings
    assert "qwen" in settings
    assert re.search(r"\bsecret\b", json.dumps(values))


@pytest.mark.parametrize(("limit", "has_websockets"), [(1, True), (0, False)])
def test_codex_uses_websockets_where_the_server_opens_them(
    limit: int, has_websockets: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMI_API_KEY", "secret")
    with serve(*ECHO, *options(f"option.websockets_max={limit}"), env={"LMI_API_KEY": "secret"}) as server:
        server.wait_ready()
        for _ in range(2):  # the first one must have closed its WebSocket
            assert main(["launch", "codex", "--url", server.url, "--print"]) == 0
            command = shlex.split(capsys.readouterr().out.splitlines()[-1])
            assert ("model_providers.lmi_launch.supports_websockets=true" in command) == has_websockets


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
    own = Path(settings)
    assert own.stat().st_mode & 0o777 == 0o600, "other users can read the key"
    assert json.loads(own.read_text())["env"].items() <= environment.items()
    assert key not in words
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
def test_refusals_in_launch(
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


@pytest.fixture
def other() -> Iterator[Other]:
    with Other(("127.0.0.1", 0), Answer) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        yield other
        other.shutdown()


class Other(http_server.ThreadingHTTPServer):
    """A server with the status, headers and body that a test sets; `keys` are those that came."""

    status, location, body = 200, "", b""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.keys: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answer(http_server.BaseHTTPRequestHandler):
    server: Other

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("authorization", ""))
        self.send_response(self.server.status)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)


def refused(url: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The message of a launch that ends before anything goes to the terminal or to an agent."""
    assert main(["launch", "goose", "--url", url, "--print"]) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert all(line.isprintable() for line in errors.splitlines())
    return errors


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_does_not_get_the_key(
    status: int, other: Other, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMI_API_KEY", "secret")
    with Other(("127.0.0.1", 0), Answer) as second:
        threading.Thread(target=second.serve_forever, daemon=True).start()
        other.status, other.location = status, f"{second.url}/v1/models"
        said = refused(other.url, capsys)
        second.shutdown()
        assert second.keys == []
    assert f"returned status {status}, a redirect to {second.url}/v1/models; set --url to that server" in said
    assert other.keys == ["Bearer secret"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"data": [{"id": "a\\u0000b"}]}', r"not printable .*: a\\x00b; set --name"),
        (b'{"data": [{"id": "a\\ud800b"}]}', r"not printable .*: a\\ud800b; set --name"),
        (b'{"data": [{"id": "a\\u001b]0;title\\u0007"}]}', r"not printable .*: a\\x1b\]0;title\\x07; set --name"),
        (b'{"data": [{"id": "' + b"x" * 200_000 + b'"}]}', r"longer than 1000 characters: x{400}\.\.\.; set --name"),
        (b"[" * 200_000, "does not return a list of models"),
        (b'{"data": [{"id": ' + b"9" * 5000 + b"}]}", "does not return a list of models"),
        (b'{"data": []}', "does not return a list of models"),
        (b"\xff", "does not return a list of models"),
    ],
)
def test_an_odd_list_of_models(body: bytes, said: str, other: Other, capsys: pytest.CaptureFixture[str]) -> None:
    other.body = body
    assert re.search(said, refused(other.url, capsys))


@pytest.mark.parametrize("context", ["true", "0", "-1", "1.5", '"8192"', "[]"])
def test_an_odd_context_is_none(context: str, other: Other, capsys: pytest.CaptureFixture[str]) -> None:
    other.body = b'{"data": [{"id": "m", "max_model_len": %s}]}' % context.encode()
    assert main(["launch", "goose", "--url", other.url, "--print"]) == 0
    assert "GOOSE_CONTEXT_LIMIT" not in capsys.readouterr().out
