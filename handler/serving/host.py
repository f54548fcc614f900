"""Run a served model: the one start, and the one end, of every host."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from handler.config.config import Config
from handler.core import child_processes, garbage
from handler.core.loop_watch import LoopWatch
from handler.engines.process.engine_loop import Spec
from handler.engines.process.supervisor import State
from handler.plugins.functions import Formatters
from handler.serving.loading.load import load_model
from handler.serving.loading.model_directory import model_formatters
from handler.serving.metrics import cloudwatch
from handler.serving.model import ServedModel

__all__ = ["ServedModel", "running"]

_DRAIN = 20.0
"""Seconds for requests to finish when the block has ended."""

_LAST_BYTES = 1.0
"""Seconds for clients to be told that their requests are given up."""

_TIDY = 2.0
"""Seconds for a conversion that was killed to remove what it has written."""


@contextlib.asynccontextmanager
async def running(
    config: Config,
    formatters: Formatters | None = None,
    directory: Path | None = None,
    *,
    stepped: bool = False,
    signals: bool = False,
    wait_ready: bool = True,
    announce: Callable[[Spec], None] = lambda spec: None,
    on_state: Callable[[ServedModel, State], None] = lambda model, state: None,
) -> AsyncIterator[ServedModel]:
    """Load a model on the running loop and start it; end it when the block ends.

    Requests that are open then may finish, unless the host has drained the model itself, or the block raised.

    Args:
        formatters: those of `model_formatters`, which runs a user's code: a host that listens calls it before. By
            default it is called here.
        directory: where serving.properties lies, or would; by default where it does.
        stepped: as in `ServedModel`. Nobody watches such a loop.
        signals: the loop handles SIGTERM and SIGINT: the watch of the loop sees to it.
        wait_ready: begin the block when the engine is ready. False: while it loads, for a host that answers already.
        announce: called when the model's files are there, before the engine starts.
        on_state: called with the model and its engine's state, at the start and at every change.

    Raises:
        ConfigError: the model or its engine cannot be had; the message says what to change.
    """
    if formatters is None:
        formatters = model_formatters(config, directory)
    model = await _loaded(load_model(config, formatters, directory, announce=announce, stepped=stepped))
    watch = LoopWatch(0.0 if stepped else config.event_loop_timeout, signals=signals)

    def changed(state: State) -> None:
        if state is State.READY:
            watch.start()
        on_state(model, state)

    with contextlib.ExitStack() as at_end:
        at_end.callback(model.close)
        at_end.callback(watch.stop)
        garbage.keep_collecting()
        garbage.return_large_blocks()
        model.start(changed)
        interval = config.cloudwatch_metrics_interval
        at_end.enter_context(cloudwatch.reporting(model.metrics.registry, config.label, interval))
        at_end.callback(model.give_up)
        if wait_ready:
            await asyncio.wait({model.opened})  # which a cancelled host must not cancel
            model.opened.result()
        yield model
        await _finish(model)


async def _loaded(load: Coroutine[Any, Any, ServedModel]) -> ServedModel:
    """Return the model; where nobody waits for it any more, end what its loading has begun."""
    loading = asyncio.ensure_future(load)
    try:
        await asyncio.wait({loading})
    except asyncio.CancelledError:
        if not loading.done():
            child_processes.stop_all()
            await asyncio.wait({loading}, timeout=_TIDY)
            loading.cancel()
            await asyncio.wait({loading})
        if not loading.cancelled() and loading.exception() is None:
            loading.result().close()
        raise
    return loading.result()


async def _finish(model: ServedModel) -> None:
    """Take no more requests, and have those that are open answered."""
    if not model.draining:  # else the host has waited for them
        model.drain()
        await _wait_idle(model, _DRAIN)
    model.give_up()
    await _wait_idle(model, _LAST_BYTES)


async def _wait_idle(model: ServedModel, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while model.num_requests and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
