"""What `handler.entry` calls: the first call loads, the others are answered."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from djl_python import Input, Output

from handler.core import garbage
from handler.core.errors import ConfigError, Unavailable
from handler.djl.adapter_calls import AsyncAdapters, SteppedAdapters, stepped_adapters
from handler.djl.modes import Async, Dynamic, Passive, Rolling
from handler.djl.replies import Unsent, one_line, refusal
from handler.djl.startup import is_passive, load, step_driver, wait_ready
from handler.djl.versions import dialect, read_ahead
from handler.serving.service import Service

log = logging.getLogger("handler.djl")

_host: Rolling | Dynamic | Async | Passive | None = None  # loaded by the first call
_adapters: SteppedAdapters | AsyncAdapters | None = None  # loaded with it, where there is an engine


_LOST_STEP = (
    "a call about an adapter came while requests were under way: DJL's rolling batch has lost its step's answer and "
    "will restart this worker after option.predict_timeout; with option.async_mode=true such calls are safe"
)
"""Java keeps one future for a connection: of two calls the later one replaces the earlier one's, and gets its answer.
If we answered both, one more answer would lie there, and each step from then on would get that of the step before."""


def handle(inputs: Input) -> Any:
    """An Output; in async mode, which shows by its running loop, an awaitable of one or of an iterator of them."""
    if _host is not None and not isinstance(_host, Async):
        return _host.answer(inputs)
    return _handle_async(inputs) if _is_async() else _load(inputs)


def adapters(inputs: Input, what: str) -> Any:
    """DJL's call to register, update or unregister (`what`) a LoRA adapter."""
    if _adapters is not None:
        answer = _adapters.answer(inputs, what)
        if isinstance(_host, Rolling) and _host.is_stepping:
            log.error("%s", _LOST_STEP)
            return Unsent()
        return answer
    output = Output() if _host is not None else refusal(Unavailable("Model is not ready"))
    return _awaitable(output) if _is_async() else output


def _is_async() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _awaitable(output: Output) -> Output:
    return output


def _load(inputs: Input) -> Output:
    global _host, _adapters
    properties = inputs.get_properties()
    try:
        spoken = dialect()
        if is_passive(properties, steps_all_ranks=spoken.steps_all_ranks):
            _host = Passive()
            return Output()
        loaded = load(properties, asynchronous=False)
        wait_ready(loaded.engine)
        driver = step_driver(loaded)
        _adapters = stepped_adapters(loaded, driver)
        if loaded.config.rolling_batch != "disable" or (spoken.always_steps and "rolling_batch" in properties):
            _host = Rolling(driver, spoken)
        else:
            _host = Dynamic(driver, loaded.config)
    except Exception as error:
        return _cannot_start(error)
    return _started()


async def _handle_async(inputs: Input) -> Any:
    global _host, _adapters
    if isinstance(_host, Async):
        return await _host.answer(inputs)
    try:
        loaded = load(inputs.get_properties(), asynchronous=True)  # on this thread, with which the engine would end
        await asyncio.to_thread(wait_ready, loaded.engine)
        service = Service(loaded)
        service.start()
        await service.opened
        _adapters = AsyncAdapters(service, dialect())
        _host = Async(service, _adapters, dialect())
    except Exception as error:
        return _cannot_start(error)
    return _started()


def _started() -> Output:
    read_ahead()
    garbage.keep_collecting()
    return Output()


def _cannot_start(error: Exception) -> Output:
    """The Java side shows the message and gives the model up."""
    message = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    log.error("cannot start: %s", message, exc_info=not isinstance(error, ConfigError))
    return Output(code=500, message=one_line(message))
