"""A WebSocket that is opened while the model loads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from handler.config.loader import read_config
from handler.http.app import App
from handler.http.security import OPEN, Access, AllowedHosts, Checks
from handler.http.server import StartingApp
from handler.http.sockets.routes import EarlySockets, Sockets
from tests.app.sockets.client import frame, offer
from tests.services import echo_service
from tests.unit.http.connection import Connection, connected, settle

INVOKE = "/invocations-bidirectional-stream"
CHAT = {"messages": [{"role": "user", "content": "red"}], "max_tokens": 2}
MESSAGES: dict[str, dict[str, Any]] = {
    INVOKE: {"inputs": "red", "parameters": {"max_new_tokens": 2}},
    "/v1/realtime": {"type": "response.create"},
    "/v1/responses": {"type": "response.create", "input": "red", "max_output_tokens": 2},
    "/v1/chat/completions": CHAT,
}


class Starting:
    """A server whose model loads."""

    def __init__(self, access: Access = OPEN, hosts: AllowedHosts | None = None) -> None:
        config = read_config(overrides=["option.llm_engine=echo"], environ={}).checked()
        self.sockets = Sockets(config)
        self.app = StartingApp(config.name)
        self.app.open_sockets = EarlySockets(config, self.sockets, Checks(access, hosts), self.app.refuse)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


async def opened(client: Connection, path: str, *headers: str) -> str:
    client.receive(offer(path, headers))
    return (await client.read_until(b"\r\n\r\n")).decode()


async def event_of(client: Connection) -> Any:
    first, size = await client.read(2)
    assert first == 0x81
    if size == 126:
        size = int.from_bytes(await client.read(2), "big")
    return json.loads(await client.read(size))


def story(tell: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(tell())  # type: ignore[arg-type]


@pytest.mark.parametrize("path", MESSAGES)
def test_messages_are_refused_until_the_model_is_loaded(path: str) -> None:
    message = frame(1, json.dumps(MESSAGES[path]).encode())

    async def tell() -> None:
        starting = Starting()
        async with connected(starting) as client:
            assert (await opened(client, path)).startswith("HTTP/1.1 101 ")
            for _ in range(2):
                client.writer.write(message)
                event = await event_of(client)
                assert (event["type"], event["status"]) == ("error", 503)
                assert event["error"]["message"].startswith("Model is not ready")
                assert int(event["headers"]["retry-after"]) > 0
            model = await echo_service()
            starting.app.open(model, App(model, sockets=starting.sockets))
            if path == "/v1/realtime":
                assert (await event_of(client))["type"] == "session.created"
            await settle()
            client.writer.write(message)
            event = await event_of(client)
            assert event.get("type") != "error"
            assert b"lmi_websockets 1.0" in model.metrics.render()
            client.writer.close()
            while starting.sockets.num_open:
                await asyncio.sleep(0.001)
            model.close()

    story(tell)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/audio/transcriptions"])
def test_a_path_of_another_task_gets_the_error_of_its_route(path: str) -> None:
    async def tell() -> None:
        starting = Starting()
        async with connected(starting) as client:
            assert (await opened(client, path)).startswith("HTTP/1.1 101 ")
            model = await echo_service()
            starting.app.open(model, App(model, sockets=starting.sockets))
            await settle()
            client.writer.write(frame(1, b'{"input": "red"}'))
            event = await event_of(client)
            assert (event["type"], event["status"]) == ("error", 404)
            client.writer.close()
            while starting.sockets.num_open:
                await asyncio.sleep(0.001)
            model.close()

    story(tell)


@pytest.mark.parametrize(
    ("starting", "headers", "status"),
    [
        ({"access": Access(keys=("secret",))}, [], 401),
        ({"access": Access(keys=("secret",))}, ["Authorization: Bearer secret"], 101),
        ({}, ["Origin: https://example.com"], 403),
        ({"access": Access(origins=frozenset({"https://example.com"}))}, ["Origin: https://example.com"], 101),
        ({"hosts": AllowedHosts(["other"])}, [], 403),
    ],
)
def test_the_head_is_checked_as_later(starting: dict[str, Any], headers: list[str], status: int) -> None:
    async def tell() -> None:
        for path in (INVOKE, "/v1/responses"):
            async with connected(Starting(**starting)) as client:
                assert (await opened(client, path, *headers)).startswith(f"HTTP/1.1 {status} ")

    story(tell)


def test_other_paths_and_a_stopping_server_refuse() -> None:
    async def tell() -> None:
        starting = Starting()
        async with connected(starting) as client:
            assert (await opened(client, "/nothing")).startswith("HTTP/1.1 503 ")
        starting.app.drain()
        async with connected(starting) as client:
            assert (await opened(client, INVOKE)).startswith("HTTP/1.1 503 ")

    story(tell)


def test_a_client_that_leaves_is_forgotten() -> None:
    async def tell() -> None:
        starting = Starting()
        async with connected(starting) as client:
            await opened(client, INVOKE)
            assert starting.sockets.num_open == 1
            client.writer.close()
            while starting.sockets.num_open:
                await asyncio.sleep(0.001)

    story(tell)


def test_a_client_that_does_not_read_its_refusals_is_disconnected() -> None:
    async def tell() -> None:
        starting = Starting()
        async with connected(starting) as client:
            await opened(client, INVOKE)
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            messages = frame(1, b"{}") * 1000
            for _ in range(100):
                if not starting.sockets.num_open:
                    break
                client.writer.write(messages)
                await asyncio.sleep(0.01)
            assert starting.sockets.num_open == 0

    story(tell)
