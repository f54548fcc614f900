"""Clients that send much, read nothing and hold on: what a server keeps for all of them together is bounded."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from tests.app.media.files import data_url
from tests.attacks.test_standstill import CHAT, INVOCATIONS, RESPONSE, RESPONSES, TEMPLATE, chat, parameters
from tests.attacks.watch import Watch, answering
from tests.servers import PATIENCE, ServerProcess, options, post_bytes, serve, wait_for

CLIENTS = 60
SIZE = 7_000_000  # bytes of a body, about
MOST = 300_000_000  # bytes of resident memory beyond those before, while all of them hold on
LEFT = 50_000_000  # when they have gone
FULL = ("option.requests_total_bytes", "large request bodies are being read")
"""What a refusal says."""


def tool(**more: Any) -> Any:
    return {**RESPONSE, "tools": [{"type": "function", "name": "f", "parameters": {}, **more}]}


def image() -> str:
    """Noise, which nothing makes smaller."""
    side = int((SIZE / 4) ** 0.5)
    file = io.BytesIO()
    PIL.Image.frombytes("RGB", (side, side), os.urandom(3 * side * side)).save(file, "PNG", compress_level=0)
    return data_url(file.getvalue(), "png")


ATTACKS: dict[str, tuple[str, Callable[[], Any]]] = {
    "descriptions that come back": (RESPONSES, lambda: tool(description="a" * SIZE)),
    "stored responses": (RESPONSES, lambda: {**tool(description="a" * SIZE), "store": True}),
    "other scripts": (RESPONSES, lambda: tool(description="\u4e00" * (SIZE // 6) + "\U0001f600")),
    "empty lists": (RESPONSES, lambda: tool(parameters={"properties": {"a": {"x": [[]] * 120_000}}})),
    "tools of a chat": (CHAT, lambda: chat("a", stream=True, tools=[
        {"type": "function", "function": {"name": "f", "description": "a" * SIZE, "parameters": {}}}
    ])),
    "a prompt that comes back": (INVOCATIONS, lambda: parameters(return_full_text=True) | {"inputs": "a" * SIZE}),
    "images": (CHAT, lambda: chat([{"type": "image_url", "image_url": {"url": image()}}], stream=True)),
    "names that nobody knows": (INVOCATIONS, lambda: {**parameters(), "x": "a" * SIZE}),
}  # fmt: skip
"""Path and body."""

AT_NIGHT = ("descriptions that come back", "tools of a chat", "other scripts", "names that nobody knows")
"""What is held in the same places as another."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    own = (f"option.chat_template={TEMPLATE}", "option.max_model_len=2000000", f"option.responses_store={tmp_path}")
    with serve("--engine", "echo", *options(*own)) as server:
        server.wait_ready()
        yield server


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in AT_NIGHT else name for name in ATTACKS]
)
def test_clients_that_read_nothing_share_a_bounded_memory(server: ServerProcess, name: str) -> None:
    path, body = ATTACKS[name]
    hostile = post_bytes(json.dumps(body()).encode(), path)
    neighbours = set[int]()

    def ask() -> None:
        neighbours.add(server.post(chat("a"), CHAT).status_code)

    ask()
    before = memory(server)
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE))
            for _ in range(CLIENTS)
        ]
        with Watch(ask), answering(server), ThreadPoolExecutor(CLIENTS) as threads:
            answers = [*threads.map(lambda connection: send(connection, hostile), connections)]
        held = memory(server) - before
    refused = [text for status, text in answers if status != 200]
    assert len(refused) < CLIENTS
    assert all("retry-after:" in text and any(word in text for word in FULL) for text in refused), refused
    assert neighbours == {200}
    assert held < MOST
    wait_for(lambda: memory(server) - before < LEFT, PATIENCE, "the memory is not given back")


def memory(server: ServerProcess) -> int:
    """Resident bytes of the server's process."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


def send(connection: socket.socket, request: bytes) -> tuple[int, str]:
    """Send a request; return the status and the beginning of its answer, of which no more is read."""
    connection.sendall(request)
    text = connection.recv(2048).decode(errors="replace")
    return int(text.split()[1]), text
