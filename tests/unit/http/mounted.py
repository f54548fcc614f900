"""The echo engine's application, called in the test's own event loop as another ASGI server would."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from starlette.types import Message

from handler.core import loop
from handler.http.app import MountedApp, create_app


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OPTION_", "LMI_", "SERVING_", "HF_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(loop, "keep_collecting", lambda: None)  # what follows belongs to the whole process
    monkeypatch.setattr(loop, "importing", contextlib.nullcontext)


def echo(*options: str, **more: Any) -> MountedApp:
    return create_app("option.llm_engine=echo", *options, **more)


@contextlib.asynccontextmanager
async def alive(app: MountedApp) -> AsyncIterator[None]:
    """Run the lifespan protocol around the block."""
    said: asyncio.Queue[Message] = asyncio.Queue()
    heard: asyncio.Queue[Message] = asyncio.Queue()
    life = asyncio.ensure_future(app({"type": "lifespan"}, heard.get, said.put))
    await heard.put({"type": "lifespan.startup"})
    assert await said.get() == {"type": "lifespan.startup.complete"}
    yield
    assert said.empty()
    await heard.put({"type": "lifespan.shutdown"})
    assert await said.get() == {"type": "lifespan.shutdown.complete"}
    await life


class Answer:
    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message["body"]

    @property
    def value(self) -> Any:
        return json.loads(self.body)


async def call(app: MountedApp, path: str, method: str = "GET", body: bytes = b"", **scope: Any) -> Answer:
    answer, messages = Answer(), [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    server = {"type": "http", "http_version": "1.1", "server": ("127.0.0.1", 80), "query_string": b""}
    await app({**server, "headers": headers, "method": method, "path": path, **scope}, receive, answer.send)
    return answer


def in_app(story: Callable[[MountedApp], Coroutine[Any, Any, None]], *options: str, **more: Any) -> None:
    async def run() -> None:
        app = echo(*options, **more)
        async with alive(app):
            await story(app)

    asyncio.run(run())
