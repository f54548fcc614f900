"""The worker that `handler.entry` calls. The first call loads the model, and the worker's mode handles all others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import djl_python
from djl_python import Input, Output

from handler.config import environment
from handler.core.errors import ConfigError, Unavailable
from handler.djl import startup
from handler.djl.modes import Async, Dynamic, Passive, Rolling
from handler.djl.startup import is_passive, prepare, report_metrics, steps_rolling
from handler.djl.wire import installed_version, one_line, read_ahead, refusal
from handler.djl.worker_loop import WorkerLoop

log = logging.getLogger("handler.djl")

_LOOK = 0.5  # seconds between checks of the engine while there are no calls

mode: Passive | Rolling | Dynamic | Async | None = None
"""The mode that answers all calls after the first, or None until the first call has loaded the model."""


def load(inputs: Input) -> Any:
    """Load the model, and answer DJL's first call. If an event loop is running, DJL is in async mode.

    Returns:
        An Output. In async mode, an awaitable of an Output or of an asynchronous iterator of Outputs.
    """
    environment.restore_text()
    properties = inputs.get_properties()
    return _load_async(properties) if _is_async() else _load_stepped(properties)


def adapters(inputs: Input, what: str) -> Any:
    """Answer DJL's call about a LoRA adapter. `what` is "register", "update" or "unregister"."""
    if mode is not None:
        return mode.change_adapter(inputs, what)
    output = refusal(Unavailable("Model is not ready"))
    return _awaitable(output) if _is_async() else output


def _is_async() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _awaitable(output: Output) -> Output:
    return output


def _load_stepped(properties: Mapping[str, Any]) -> Output:
    global mode
    with _start() as answer:
        version = installed_version()
        read_ahead(version)  # also for a passive rank, which gets the same calls
        if is_passive(properties, version):
            mode = Passive()
            return answer
        config, formatters = prepare(properties, version, djl=djl_python.__version__)
        loop = WorkerLoop()
        model = loop.run(startup.load(config, formatters, Path(properties["model_dir"]), stepped=True))
        report_metrics(model, version)
        rolling = steps_rolling(config, properties, version)
        mode = Rolling(model, loop, version) if rolling else Dynamic(model, loop)
        loop.look_after(_LOOK)
    return answer


async def _load_async(properties: Mapping[str, Any]) -> Output | AsyncIterator[Output]:
    """Load the model on djl_python's own event loop, which must not be blocked.

    Returns:
        An iterator of all later Outputs, or one Output if loading failed.
    """
    global mode
    with _start() as answer:
        config, formatters = prepare(properties, None, djl=djl_python.__version__)
        model = await startup.load(config, formatters, Path(properties["model_dir"]), stepped=False)
        report_metrics(model, installed_version())
        mode = Async(model, installed_version())
        read_ahead(installed_version())
        return mode.outputs(answer)
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
        answer.code, answer.message = 500, one_line(message)
