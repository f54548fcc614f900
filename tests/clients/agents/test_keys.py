"""Coding agents' programs, run by `lmi launch` with settings of a user's for other servers: this server gets its key
and no other. The server here refuses all requests, and notes them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.clients import toolchains
from tests.clients.driver import skipped_without

pytestmark = pytest.mark.clients

_ROOT = Path(__file__).parents[3]
_LIMIT = 100  # seconds for one run of a program
OTHER = "anothers-key"
ELSEWHERE = "http://127.0.0.1:9"  # nobody


class Note(NamedTuple):
    path: str
    headers: str
    model: str


class Server(ThreadingHTTPServer):
    notes: list[Note]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(200, {"object": "list", "data": [{"id": "qwen", "max_model_len": 131072}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.notes.append(Note(self.path, str(self.headers).lower(), body["model"]))
        self._answer(400, {"type": "error", "error": {"type": "invalid_request_error", "message": "not now"}})

    def _answer(self, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.notes = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def launched(server: Server, program: Path, home: Path, arguments: list[str], variables: dict[str, str]) -> list[Note]:
    """The requests of an agent that `lmi launch` runs in the home."""
    own = {
        "HOME": str(home),
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(_ROOT),
        "LMI_API_KEY": "servers-key",
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), ELSEWHERE),
    }
    words = ["launch", program.name, "--url", f"http://127.0.0.1:{server.server_port}", "--", *arguments]
    subprocess.run(
        [sys.executable, "-m", "handler", *words],
        cwd=home / "work",
        env={**own, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_LIMIT,
    )
    return server.notes


def written(home: Path, files: dict[str, str]) -> None:
    (home / "work").mkdir()
    for name, text in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)


def program(find: Callable[[], Path]) -> Path:
    with skipped_without():
        return find()
    raise AssertionError


def settings(**values: object) -> str:
    return json.dumps(values)


OF_CLAUDE = {
    "key": {".claude/settings.json": settings(env={"ANTHROPIC_API_KEY": OTHER})},
    "token": {".claude/settings.json": settings(env={"ANTHROPIC_AUTH_TOKEN": OTHER, "ANTHROPIC_BASE_URL": ELSEWHERE})},
    "helper": {".claude/settings.json": settings(apiKeyHelper=f"echo {OTHER}")},
    "headers": {".claude/settings.json": settings(env={"ANTHROPIC_CUSTOM_HEADERS": f"X-Gateway: {OTHER}"})},
    "cloud": {".claude/settings.json": settings(env={"CLAUDE_CODE_USE_MANTLE": "1", "CLAUDE_CODE_USE_BEDROCK": "1"})},
    "project": {
        "work/.claude/settings.json": settings(env={"ANTHROPIC_API_KEY": OTHER}),
        "work/.claude/settings.local.json": settings(apiKeyHelper=f"echo {OTHER}"),
    },
    "environment": {},
}


@pytest.mark.parametrize("where", OF_CLAUDE)
def test_claude_code_sends_the_servers_key_alone(where: str, server: Server, tmp_path: Path) -> None:
    claude = program(toolchains.claude_code)
    written(tmp_path, OF_CLAUDE[where])
    variables = {"ANTHROPIC_API_KEY": OTHER} if where == "environment" else {}
    notes = launched(server, claude, tmp_path, ["-p", "hello"], variables)
    assert notes
    for note in notes:
        assert (note.path.partition("?")[0], note.model) == ("/v1/messages", "qwen")
        assert "authorization: bearer servers-key\n" in note.headers
        assert "x-api-key" not in note.headers
        assert OTHER not in note.headers


def test_codex_sends_the_servers_key_alone(server: Server, tmp_path: Path) -> None:
    """Beside a provider that the user wrote from docs/agents.md, and added to."""
    codex = program(toolchains.codex)
    provider = (
        f'name = "lmi"\nbase_url = "{ELSEWHERE}"\nenv_key = "LMI_KEY"\nhttp_headers = {{ "X-Gateway" = "{OTHER}" }}'
    )
    config = f'model = "gpt-5"\nmodel_provider = "lmi"\n[model_providers.lmi]\n{provider}\n'
    written(tmp_path, {".codex/config.toml": config, ".codex/.env": f"LMI_KEY={OTHER}\nOPENAI_API_KEY={OTHER}\n"})
    notes = launched(server, codex, tmp_path, ["exec", "--skip-git-repo-check", "hello"], {"OPENAI_API_KEY": OTHER})
    assert notes
    for note in notes:
        assert (note.path, note.model) == ("/v1/responses", "qwen")
        assert "authorization: bearer servers-key\n" in note.headers
        assert OTHER not in note.headers
