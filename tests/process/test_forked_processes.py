"""Processes that outlive a server that was killed: they hold none of the locks by which others notice its end."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from tests.servers import http, options, serve, wait_for
from tests.user_files import write_model

FORKS = """
import os, time
from pathlib import Path
from handler.formatters import input_formatter


@input_formatter
def read(decoded_payload: dict, **kwargs) -> dict:
    if path := decoded_payload.pop("fork", ""):
        if not (pid := os.fork()):
            os.closerange(0, 3)  # the test reads what the server writes until nobody can write any more
            time.sleep(600)
            os._exit(0)
        Path(path).write_text(str(pid))
    return decoded_payload
"""
KEY = {"authorization": "Bearer ann"}


def locks_of(pid: int, directory: Path) -> list[str]:
    """The files in a directory on which an open file of a process has a lock."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has been closed meanwhile
            path = Path(os.readlink(entry))
            info = Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text()
            if path.is_relative_to(directory) and "lock:" in info:
                found.append(path.name)
    return sorted(found)


def test_a_forked_process_does_not_keep_what_a_killed_server_has_locked(tmp_path: Path) -> None:
    """User code may fork, as `multiprocessing` does by default. Its process does not end with the server."""
    responses, captured = tmp_path / "responses", tmp_path / "captured"
    captured.mkdir()
    stores = options(f"option.responses_store={responses}", f"option.capture_requests={captured}")
    own = options("option.echo_tokens_per_second=20", "option.engine_isolation=process")
    arguments = ("--engine", "echo", "--properties", str(write_model(tmp_path, FORKS)), *stores, *own)
    body = {"input": "a b", "max_output_tokens": 4000, "background": True}
    forked = 0
    try:
        with serve(*arguments) as server:
            server.wait_ready()
            conversation = http.post(f"{server.url}/v1/conversations", json={}, headers=KEY).json()["id"]
            body["conversation"] = conversation
            made = server.post(body, "/v1/responses", headers=KEY).json()["id"]
            short = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
            server.post(short)
            wait_for(lambda: len(locks_of(server.process.pid, tmp_path)) == 3, 10, "it locks too few files")
            server.post({**short, "fork": str(tmp_path / "pid")})
            forked = int((tmp_path / "pid").read_text())
            assert "conversations.lock" in locks_of(server.process.pid, tmp_path)
            assert locks_of(forked, tmp_path) == []
            assert locks_of(server.engine_pid(), tmp_path) == []
            server.send_signal(signal.SIGKILL)
            server.wait(60)
        with serve(*arguments) as other:
            assert Path(f"/proc/{forked}").exists()
            failed = http.get(f"{other.url}/v1/responses/{made}", headers=KEY).json()
            assert failed["status"] == "failed"
            again = other.post({**body, "max_output_tokens": 1}, "/v1/responses", headers=KEY).json()
            assert again["status"] == "queued"
            path = f"{other.url}/v1/responses/{again['id']}"
            wait_for(lambda: http.get(path, headers=KEY).json()["status"] == "incomplete", 10, "it does not end")
    finally:
        if forked:
            os.kill(forked, signal.SIGKILL)
