"""Answer 503 while the model is being loaded, and show the progress."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time

from starlette.types import ASGIApp, Receive, Scope, Send

from handler.core.errors import Unavailable
from handler.http.asgi import send_json
from handler.protocols.base import front_end_error
from handler.serving.model import ServedModel
from handler.serving.preprocess import request_id


class StartingApp:
    """The ASGI application of a server: it refuses every request with 503 until `open` names the real one."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._draining = False
        self._model: ServedModel | None = None
        self._app: ASGIApp = self._refuse

    def open(self, model: ServedModel, app: ASGIApp) -> None:
        """Hand all later requests to `app`."""
        self._model, self._app = model, app
        if self._draining:
            model.drain()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    @property
    def num_requests(self) -> int:
        """Requests that are being answered; refusals do not count."""
        return self._model.num_requests if self._model is not None else 0

    def drain(self) -> None:
        self._draining = True
        if self._model is not None:
            self._model.drain()

    def give_up(self) -> None:
        if self._model is not None:
            self._model.give_up()

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in reversed(scope["headers"])}
        scope["request_id"] = request_id(headers)
        if scope["path"] == "/ping":
            state = "stopping" if self._draining else "loading"
            await send_json(scope, send, 503, {"status": "Unhealthy", "state": state})
        else:
            message = "the server is stopping" if self._draining else f"Model is not ready: {self._model_name}"
            await send_json(scope, send, 503, front_end_error(Unavailable(message)))


CLEAR = "\r\033[K" if sys.stderr.isatty() else ""
"""Removes the progress line from a terminal."""


class Progress:
    """What the server is doing: seconds count up on a terminal, a log gets a line every ten seconds."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._task: asyncio.Task[None] | None = None

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._began

    def start(self, what: str) -> None:
        self._task = asyncio.ensure_future(_show(what))

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()


async def _show(what: str) -> None:
    live = sys.stderr.isatty()
    for second in itertools.count():
        if live or second % 10 == 0:
            start, end = ("\r", "") if live else ("", "\n")
            print(f"{start}{what} ... {second} s", end=end, file=sys.stderr, flush=True)
        await asyncio.sleep(1)
