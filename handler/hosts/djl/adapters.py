"""DJL's calls about LoRA adapters: what Java's PyAdapter sends, and what it wants back.

An Input with the properties `name` and `src` (and `pin`), and the management call's query as contents. Java makes the
client's answer of the Output's status and message; in async mode, of a piece like any request's.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from djl_python import Input, Output

from handler.errors import ConfigError, GenerationFailed, InvalidPayload, ServingError, serving_error
from handler.framing import dumps
from handler.hosts.adapters import AdapterDesk, Order, Then, read_order, required
from handler.hosts.djl.dialect import Dialect
from handler.hosts.djl.replies import PieceWriter, one_line, output, refusal
from handler.hosts.djl.requests import is_of_http
from handler.hosts.loaded import LoadedModel
from handler.hosts.service import Service
from handler.hosts.steps import StepDriver
from handler.schemas.base import front_end_error

log = logging.getLogger("handler.djl")

_JSON = {"Content-Type": "application/json"}


class SteppedAdapters:
    """For a host without an event loop: a call waits for the engine and hands the others' tokens on meanwhile.

    Args:
        seconds: that a call may take.
        refuse_unknown: names that mean nothing are refused, not reported in the log.
    """

    def __init__(self, desk: AdapterDesk, driver: StepDriver, seconds: float, *, refuse_unknown: bool) -> None:
        self._desk = desk
        self._driver = driver
        self._seconds = seconds
        self._refuse_unknown = refuse_unknown

    def answer(self, inputs: Input, what: str) -> Output:
        try:
            status = self._answer(inputs, what)
            return output(dumps({"status": status}), _JSON, message=one_line(status))
        except Exception as error:
            return refusal(serving_error(error))

    def load(self, at_start: Mapping[str, Path]) -> None:
        """Register the adapters that lie beside the model.

        Raises:
            ConfigError: one of them cannot be loaded; names it.
        """
        for name, path in at_start.items():
            try:
                self.change(functools.partial(self._desk.register, name, path))
            except ServingError as error:
                raise ConfigError(f"the adapter {name} cannot be used: {error.message}") from None

    def change(self, start: Callable[[Then], None]) -> None:
        """Start a change and wait for its end.

        Raises:
            ServingError: nothing has changed.
        """
        told: list[ServingError | None] = []
        deadline = time.monotonic() + self._seconds
        with self._driver.lock:
            start(told.append)
            while not told and time.monotonic() < deadline:
                self._driver.step(0.1)
        if not told:
            raise GenerationFailed(f"not finished within {self._seconds:g} s (option.predict_timeout)")
        if told[0] is not None:
            raise told[0]

    def _answer(self, inputs: Input, what: str) -> str:
        desk = self._desk
        _check_caller(inputs)
        desk.check()
        order = _order(inputs, refuse_unknown=self._refuse_unknown)
        name = required(order.name, "name")
        if what == "unregister":
            with self._driver.lock:
                desk.unregister(name)
        elif what == "update":
            path = desk.path(desk.adapters.get(name).adapter.path if order.src is None else order.src)
            self.change(lambda then: desk.update(name, then, path, order.preload))
        else:
            path = desk.path(required(order.src, "src"))
            if not is_there(desk, name, str(path)):
                self.change(lambda then: desk.register(name, path, then, preload=order.preload is not False))
        return _done(inputs, name, what)


def stepped_adapters(loaded: LoadedModel, driver: StepDriver) -> SteppedAdapters:
    """With those that lie beside the model loaded.

    Raises:
        ConfigError: one of them cannot be; names it.
    """
    config = loaded.config
    seconds = max(0.1, config.predict_timeout - 1.0)  # then Java kills the worker
    refuse = config.unknown_parameters == "refuse"
    made = SteppedAdapters(AdapterDesk.of(loaded, driver), driver, seconds, refuse_unknown=refuse)
    made.load(loaded.adapters.at_start)
    return made


class AsyncAdapters:
    """For async mode."""

    def __init__(self, service: Service, dialect: Dialect) -> None:
        self._service = service
        self._writer = PieceWriter(dialect)

    async def answer(self, inputs: Input, what: str) -> Output:
        try:
            body = dumps({"status": await self._answer(inputs, what)})
            return output(self._writer.piece(body, last=True), _JSON)
        except Exception as error:
            failure = serving_error(error)
            return output(self._writer.failure(failure, dumps(front_end_error(failure))), _JSON)

    async def _answer(self, inputs: Input, what: str) -> str:
        service = self._service
        _check_caller(inputs)
        service.desk.check()
        order = _order(inputs, refuse_unknown=service.config.unknown_parameters == "refuse")
        name = required(order.name, "name")
        if what == "unregister":
            service.desk.unregister(name)
        elif what == "update":
            await service.update_adapter(name, order.src, preload=order.preload)
        else:
            src = required(order.src, "src")
            if not is_there(service.desk, name, str(service.desk.path(src))):
                await service.register_adapter(name, src, preload=order.preload is not False)
        return _done(inputs, name, what)


def is_there(desk: AdapterDesk, name: str, path: str) -> bool:
    """Whether it was loaded at the start: DJL Serving registers what lies in the model's `adapters/` by itself."""
    found = desk.adapters.find(name)
    return found is not None and found.path == path


def _check_caller(inputs: Input) -> None:
    """
    Raises:
        InvalidPayload: it is a client's request, which a header of its own has led here.
    """
    if is_of_http(inputs.get_properties()):
        raise InvalidPayload("property handler: a request cannot choose the function that answers it")


def _order(inputs: Input, *, refuse_unknown: bool) -> Order:
    """
    Raises:
        BadRequest: a value cannot be used.
    """
    properties, content = inputs.get_properties(), inputs.get_content()
    values: dict[str, Any] = {
        str(key): bytes(value).decode(errors="replace")
        for key, value in zip(content.get_keys(), content.get_values(), strict=True)
    }
    values.pop("alias", None)
    values |= {name: properties[name] for name in ("name", "src", "pin") if name in properties}
    order = read_order(values, refuse_unknown=refuse_unknown)
    if order.ignored:
        log.warning("an adapter's call: without effect: %s", one_line(", ".join(map(repr, order.ignored))))
    return order


def _done(inputs: Input, name: str, what: str) -> str:
    """As DJL's own handlers say it; `alias` is what SageMaker's user calls the adapter."""
    return f"Adapter {inputs.get_properties().get('alias') or name} {what.removesuffix('e')}ed"
