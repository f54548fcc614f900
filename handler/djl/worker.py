"""The worker that `handler.entry` calls. The first call loads the model, and the worker's mode handles all others."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import djl_python
from djl_python import Input, Output

from handler.config import environment
from handler.config.config import Config
from handler.core.errors import ConfigError, Unavailable
from handler.djl import startup
from handler.djl.modes import Async, Dynamic, LoadFailed, Passive, Reloading, Rolling, seconds_of_call
from handler.djl.startup import (
    is_passive,
    prepare,
    read_properties,
    report_metrics,
    shared_adapters,
    steps_rolling,
)
from handler.djl.turns import HasNext, ResponseOrder, Unsent
from handler.djl.wire import DjlVersion, PieceWriter, Sent, installed_version, is_load, on_one_line, read_ahead, refusal
from handler.djl.worker_loop import WorkerLoop

log = logging.getLogger("handler.djl")

_LOOK = 0.5  # seconds between checks of the engine while there are no calls

_TOO_EARLY = (
    "DJL Serving has made a call before the load call, and no longer expects a response: it will restart this worker "
    "after option.predict_timeout"
)

mode: Passive | Rolling | Dynamic | Reloading | Async | None = None
"""The mode that answers all calls after the first, or None until the first call has loaded the model."""


def load(inputs: Input) -> Any:
    """Load the model, and answer DJL's first call. If an event loop is running, DJL is in async mode.

    Returns:
        An Output. In async mode, an awaitable of an Output or of an asynchronous iterator of Outputs.
    """
    environment.restore_text()
    properties = inputs.get_properties()
    if _is_async():
        return _load_async(properties)
    return _load_stepped(properties) if is_load(inputs) else _too_early()


def adapters(inputs: Input, change: str) -> Any:
    """Answer DJL's call about a LoRA adapter. `change` is "register", "update" or "unregister"."""
    if mode is not None:
        return mode.change_adapter(inputs, change)
    return _awaitable(refusal(Unavailable("Model is not ready"))) if _is_async() else _too_early()


def _is_async() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _awaitable(output: Output) -> Output:
    return output


def _too_early() -> Output:
    log.error("%s", _TOO_EARLY)
    return Unsent()


def _load_stepped(properties: Mapping[str, Any]) -> Output:
    global mode
    version = installed_version()
    has_next = read_ahead(version).has_next  # also for a passive rank, which gets the same calls
    if is_passive(properties, version):
        mode = Passive()
        return Output()
    if version.calls_early and startup.replaces_another():
        return _reload(properties, version, has_next)
    with _start() as answer:
        mode, loop = _load_mode(properties, version, ResponseOrder(has_next))
        threading.Thread(target=loop.look_after, args=(_LOOK,), name="look-after", daemon=True).start()
        if version.calls_early:
            startup.note_load()
    return answer


def _load_mode(
    properties: Mapping[str, Any], version: DjlVersion, turns: ResponseOrder
) -> tuple[Rolling | Dynamic, WorkerLoop]:
    config, formatters = prepare(properties, version, djl=djl_python.__version__)
    loop, directory = WorkerLoop(), Path(properties["model_dir"])
    model = loop.run(startup.load(config, formatters, directory, stepped=True))
    report_metrics(model, version)
    shared = loop.run(shared_adapters(model, directory, is_notified=version.tells_all_workers))
    if steps_rolling(config, properties, version):
        return Rolling(model, loop, version, turns, shared), loop
    return Dynamic(model, loop, turns, shared), loop


def _reload(properties: Mapping[str, Any], version: DjlVersion, has_next: HasNext) -> Output:
    """Answer the load call of a worker that replaces another one, then load the model on another thread.

    Java already calls this worker. Any call that comes before the response to the load call gets that response, and
    the load call gets none. Java then kills the worker after option.model_loading_timeout.
    """
    global mode
    began = time.monotonic()
    loaded: Future[Rolling | Dynamic] = Future()

    @functools.cache
    def config() -> Config:
        return read_properties(properties, asynchronous=False, djl=djl_python.__version__).config

    turns = ResponseOrder(has_next, lambda: began + config().model_loading_timeout)

    def load_and_look_after() -> None:  # on one thread, because the engine's process ends with it
        with _start() as answer:
            loaded_mode, loop = _load_mode(properties, version, turns)
            loaded.set_result(loaded_mode)
            loop.look_after(_LOOK)
        if answer.code != 200:
            loaded.set_exception(LoadFailed())

    mode = Reloading(loaded, version, lambda: seconds_of_call(config().predict_timeout), turns)
    thread = threading.Thread(target=load_and_look_after, name="reload", daemon=True)
    return Sent(PieceWriter(version).loaded(), thread.start)


async def _load_async(properties: Mapping[str, Any]) -> Output | AsyncIterator[Output]:
    """Load the model on djl_python's own event loop, which must not be blocked.

    Returns:
        An iterator of all later Outputs, or one Output if loading failed.
    """
    global mode
    with _start() as answer:
        config, formatters = prepare(properties, None, djl=djl_python.__version__)
        directory = Path(properties["model_dir"])
        model = await startup.load(config, formatters, directory, stepped=False)
        report_metrics(model, installed_version())
        shared = await shared_adapters(model, directory, is_notified=installed_version().tells_all_workers)
        mode = Async(model, installed_version(), shared)
        read_ahead(installed_version())
        return mode.outputs(answer)
    if startup.ends_start(answer.message):
        await asyncio.get_running_loop().create_future()  # Java ends this process
    return answer


@contextlib.contextmanager
def _start() -> Iterator[Output]:
    """Yield the response to the first call.

    If loading fails, the response contains the error, which Java logs before it drops the model.
    """
    answer = Output()
    try:
        yield answer
    except Exception as error:  # reported to Java
        message = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        log.error("cannot start: %s", message, exc_info=not isinstance(error, ConfigError))
        answer.code, answer.message = 500, on_one_line(message)
