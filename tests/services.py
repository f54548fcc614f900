"""A `ServedModel` on the echo engine, for tests that need an event loop but no HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from handler.config.loader import read_config
from handler.core.framing import dumps
from handler.plugins.functions import Formatters
from handler.serving.model import ServedModel
from handler.serving.request.task import RequestTask
from handler.serving.start import load_model


async def load_echo(*options: str, directory: Path | None = None) -> ServedModel:
    """Not started."""
    config = read_config(overrides=["option.llm_engine=echo", *options], environ={}).checked()
    return await load_model(config, Formatters(), directory)


async def echo_service(*options: str) -> ServedModel:
    """Ready; the caller closes it."""
    model = await load_echo(*options)
    model.start()
    await model.availability.opened
    return model


def begin(model: ServedModel, body: Any) -> tuple[RequestTask, asyncio.Future[None]]:
    """A request that is under way, and what resolves when there is something to answer."""
    begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_bytes(task: RequestTask) -> None:
        if (task.unsent or task.finished) and not begun.done():
            begun.set_result(None)

    task = model.open({}, id="id", on_bytes=on_bytes)
    task.begin(task.run(body if isinstance(body, bytes) else dumps(body)))
    return task, begun
