"""Stateful sessions over HTTP: AWS's headers and words, a model.py's files, expiry, a killed engine, an end."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from handler.serving.sessions import Sessions
from tests.app.server import AppServer, refused_start, serve
from tests.servers import LiveServer, wait_for
from tests.stepped import Clock
from tests.user_files import write_model

HEADER = "X-Amzn-SageMaker-Session-Id"
NEW, CLOSED = "X-Amzn-SageMaker-New-Session-Id", "X-Amzn-SageMaker-Closed-Session-Id"
CHAT = "/v1/chat/completions"

_DOCUMENT = Path(__file__).parents[2] / "docs" / "sessions.md"
MODEL = (
    re.findall(r"^```python\n(from handler.formatters .*?)^```$", _DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)[0]
    + """

from handler.formatters import TextGenerationOutput, output_formatter


@output_formatter
def write(output: TextGenerationOutput) -> str:
    sequence, session = output.sequences[0], output.input.session
    token, _, first, _ = sequence.get_next_token()
    name = session.id if session else "nobody"
    return f"{name}:{token.text}" if first else token.text
"""
)
"""The document's example, which keeps the words of a session, and a function that writes whose they are."""


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock(time.time())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, clock: Clock) -> Iterator[AppServer]:
    """With its own clock, an engine process of its own, and a chat beside it."""
    root = tmp_path_factory.mktemp("sessions")
    options = ("-o", "option.enable_stateful_sessions=true", "-o", f"option.sessions_path={root}")
    with (
        mock.patch.object(Sessions.__init__, "__defaults__", (clock,)),
        serve("--engine", "echo", "-o", "option.engine_isolation=process", *options) as server,
    ):
        server.wait_ready()
        yield server
    assert list(root.iterdir()) == []  # its end removed them


def send(server: LiveServer, body: Any, session: str = "", path: str = "/invocations") -> httpx.Response:
    return server.post(body, path, headers={HEADER: session} if session else {})


def opened(server: LiveServer) -> str:
    return send(server, {"requestType": "NEW_SESSION"}, "NEW_SESSION").headers[NEW].partition(";")[0]


def ask(words: str = "a b") -> dict[str, Any]:
    return {"inputs": words, "parameters": {"max_new_tokens": 2}}


def test_open_use_and_close(server: LiveServer, clock: Clock) -> None:
    found = send(server, {"requestType": "NEW_SESSION"})
    assert found.status_code == 200
    assert found.headers[NEW] == found.headers[HEADER]
    id, _, expires = found.headers[NEW].partition("; Expires=")
    assert found.json() == {"result": f"Session {id} created"}
    until = datetime.strptime(expires, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    assert 0 <= until.timestamp() - clock.now - 1200 <= 1
    for path, body in (("/invocations", ask()), ("/invocations", {**ask(), "stream": True}), (CHAT, _chat())):
        answer = send(server, body, id, path)
        assert (answer.status_code, NEW in answer.headers) == (200, False)
    closed = send(server, {"requestType": "CLOSE"}, id)
    assert (closed.status_code, closed.headers[CLOSED], HEADER in closed.headers) == (200, id, False)
    assert closed.json() == {"result": f"Session {id} closed"}


def _chat() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("body", "session", "told"),
    [
        (ask(), "nobody", "Bad request: session not found: nobody"),
        ({"requestType": "CLOSE"}, "nobody", "Bad request: session not found: nobody"),
        ({"requestType": "CLOSE"}, "NEW_SESSION", "Bad request: session not found: NEW_SESSION"),
        ({"requestType": "CLOSE"}, "", "Session ID is required in request headers to close a session"),
        (ask(), "../../etc", "Bad request: session not found: '../../etc'"),
        ({"requestType": "END"}, "", "requestType='END': must be NEW_SESSION or CLOSE"),
        ({"requestType": "CLOSE", **ask()}, "", "requestType=CLOSE: a body that opens or closes a session"),
    ],
)
def test_what_is_refused_in_sessions(server: LiveServer, body: Any, session: str, told: str) -> None:
    found = send(server, body, session)
    assert found.status_code == 400
    assert found.json()["error"].startswith(told)
    assert (NEW in found.headers, CLOSED in found.headers) == (False, False)


def test_the_header_alone_opens_none(server: LiveServer) -> None:
    found = send(server, ask(), "NEW_SESSION")
    assert (found.status_code, NEW in found.headers) == (200, False)


@pytest.mark.parametrize("path", ["/invocations", CHAT])
def test_an_expired_session_is_refused_at_its_first_request(server: LiveServer, clock: Clock, path: str) -> None:
    """AWS's own code and LMI's answer that one without a session."""
    id = opened(server)
    clock.now += 1201
    found = send(server, ask() if path == "/invocations" else _chat(), id, path)
    assert found.status_code == 400
    assert f"Bad request: session not found: {id}" in found.text
    assert send(server, {"requestType": "CLOSE"}, id).status_code == 400


def test_a_session_outlives_a_killed_engine(server: AppServer) -> None:
    id = opened(server)
    os.kill(server.engine_pid(), signal.SIGKILL)
    wait_for(lambda: server.metric("lmi_engine_restarts_total") == 1, 10, "the engine is not started again")
    server.wait_ready(20)
    assert send(server, ask(), id).json() == {"generated_text": " a b"}
    assert send(server, {"requestType": "CLOSE"}, id).status_code == 200


def test_off_by_default(echo_server: LiveServer) -> None:
    for body, session in ((ask(), "x"), (ask(), "NEW_SESSION"), ({"requestType": "NEW_SESSION"}, "")):
        found = send(echo_server, body, session)
        assert found.status_code == 400
        assert found.json()["error"].startswith("Invalid payload. stateful sessions not enabled")  # AWS's words
        assert "option.enable_stateful_sessions=true" in found.json()["error"]


def test_a_model_py_keeps_files_of_two_clients_apart(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    properties = write_model(model, MODEL)
    root = tmp_path / "sessions"
    variables = {"SAGEMAKER_ENABLE_STATEFUL_SESSIONS": "true", "SAGEMAKER_SESSIONS_PATH": str(root)}
    with serve("--engine", "echo", "--properties", str(properties), env=variables) as server:
        server.wait_ready()

        def client(name: str) -> None:
            id = opened(server)
            words = [f"{name}{turn}" for turn in range(5)]
            for turn, word in enumerate(words, 1):
                echoed = (words[:turn] * 6)[:6]
                assert send(server, {"word": word}, id).text == f"{id}: {' '.join(echoed)}"
            assert (root / id / "turns").read_text() == " ".join(words)
            send(server, {"requestType": "CLOSE"}, id)
            assert not (root / id).exists()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(client, "abcd"))
        assert send(server, {"word": "x"}).text == f"nobody:{' x' * 6}"
        assert send(server, {"word": "x"}, "y").status_code == 400
        assert json.loads(send(server, {"requestType": "NEW_SESSION"}).text)["result"].endswith("created")


def test_a_path_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = ("-o", "option.enable_stateful_sessions=true", "-o", f"option.sessions_path={tmp_path / 'file'}")
    assert f"option.sessions_path={tmp_path / 'file'}: sessions cannot be stored in this directory" in refused_start(
        "--engine", "echo", *options
    )
