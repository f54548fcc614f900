"""DJL's calls about LoRA adapters: what Java's PyAdapter sends, and what it wants back.

An Input with the properties `name` and `src` (and `pin`), and the management call's query as contents. 0.36 makes the
client's answer of the Output's status and message. In async mode it answers 200 before the worker has read the call;
0.28 always answers by itself. Then only the log says why a call failed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from djl_python import Input, Output

from handler.core.errors import ConfigError, GenerationFailed, InvalidPayload, ServingError, serving_error
from handler.core.framing import JSON, dumps
from handler.djl.replies import PieceWriter, one_line, output, refusal
from handler.djl.requests import is_of_http
from handler.djl.versions import Dialect
from handler.protocols.base import HttpResponse, front_end_error
from handler.scheduler.lora.calls import Order, read_order, required
from handler.scheduler.lora.registry import AdapterRegistry, Change, Outcome, Registered, Then
from handler.serving.daemon_thread import aside
from handler.serving.model import LoadedModel
from handler.serving.service import Service
from handler.serving.slots import Item
from handler.serving.steps import StepDriver

log = logging.getLogger("handler.djl")

_JSON = {"Content-Type": "application/json"}
_DONE = {"register": "registered", "update": "updated", "unregister": "unregistered"}
"""As DJL's own handlers say it; the name before it is `alias` where SageMaker's user calls the adapter so."""


class SteppedAdapters:
    """For a host without an event loop: a call waits for the engine and hands the others' tokens on meanwhile.

    Args:
        seconds: that a call may take.
        refuse_unknown: names that mean nothing are refused, not reported in the log.
    """

    def __init__(self, changes: AdapterRegistry, driver: StepDriver, seconds: float, *, refuse_unknown: bool) -> None:
        self._changes = changes
        self._driver = driver
        self._seconds = seconds
        self._refuse_unknown = refuse_unknown

    def answer(self, inputs: Input, what: str) -> Output:
        try:
            change, done = asked_change(self._changes, inputs, what, refuse_unknown=self._refuse_unknown)
            value = answered(what, done, self.change(change))
            return output(dumps(value), _JSON, message=one_line(done))
        except Exception as error:
            return refusal(_failure(error, inputs, what))

    def load(self, at_start: Mapping[str, Path]) -> None:
        """Register the adapters that lie beside the model.

        Raises:
            ConfigError: one of them cannot be loaded; names it.
        """
        for name, path in at_start.items():
            try:
                self.change(functools.partial(self._changes.register, name, path))
            except ServingError as error:
                raise ConfigError(f"the adapter {name} cannot be used: {error.message}") from None

    def change(self, begin: Change) -> Registered | None:
        """Begin a change and wait for its end; what stands under the name then.

        Raises:
            ServingError: nothing has changed.
        """
        told: list[Outcome] = []
        deadline = time.monotonic() + self._seconds
        with self._driver.lock:
            begin(told.append)
            while not told and time.monotonic() < deadline:
                self._driver.step(0.1)
        if not told:
            raise GenerationFailed(f"not finished within {self._seconds:g} s (option.predict_timeout)")
        outcome = told[0]
        if isinstance(outcome, ServingError):
            raise outcome
        return outcome


def stepped_adapters(loaded: LoadedModel, driver: StepDriver) -> SteppedAdapters:
    """With those that lie beside the model loaded.

    Raises:
        ConfigError: one of them cannot be; names it.
    """
    config = loaded.config
    seconds = max(0.1, config.predict_timeout - 1.0)  # then Java kills the worker
    refuse = config.unknown_parameters == "refuse"
    changes = loaded.adapters.registry
    made = SteppedAdapters(changes, driver, seconds, refuse_unknown=refuse)
    made.load(loaded.adapters.at_start)
    return made


class AsyncAdapters:
    """For async mode, in which a client's next call or request comes while this one is under way.

    Calls are done one after another, in the order in which they came.
    """

    def __init__(self, service: Service, dialect: Dialect) -> None:
        self._service = service
        self._writer = PieceWriter(dialect)
        self._turn = asyncio.Lock()
        self._under_way: dict[asyncio.Future[None], str] = {}  # the adapters' names

    async def answer(self, inputs: Input, what: str) -> Output:
        end = asyncio.get_running_loop().create_future()
        self._under_way[end] = str(inputs.get_properties().get("name") or "")
        try:
            async with self._turn:
                return await self._change(inputs, what)
        finally:
            del self._under_way[end]
            end.set_result(None)

    async def catch_up(self, item: Item) -> None:
        """Wait for the calls that came before a request and are about an adapter that it may name."""
        earlier = [end for end, name in self._under_way.items() if _mentions(item, name)]
        if earlier:
            await asyncio.wait(earlier)

    async def _change(self, inputs: Input, what: str) -> Output:
        try:
            service = self._service
            refuse = service.config.unknown_parameters == "refuse"
            change, done = await aside(
                functools.partial(asked_change, service.adapters, inputs, what, refuse_unknown=refuse)
            )
            value = answered(what, done, await service.change_adapter(change))
            return output(self._writer.piece(dumps(value), last=True), _JSON)
        except Exception as error:
            failure = _failure(error, inputs, what)
            answer = HttpResponse(failure.status, JSON.content_type, dumps(front_end_error(failure)))
            return output(self._writer.failure(answer), _JSON)


def _mentions(item: Item, name: str) -> bool:
    """Whether a header or a JSON string is this name, which has no character that JSON would escape."""
    return bool(name) and (name in item.headers.values() or f'"{name}"'.encode() in item.body)


def _failure(error: Exception, inputs: Input, what: str) -> ServingError:
    failure = serving_error(error)
    name = inputs.get_properties().get("name")
    log.warning("the call to %s %r failed: %s", what, name, one_line(failure.public))
    return failure


def answered(what: str, done: str, settled: Registered | None) -> dict[str, Any]:
    """The answer's body to a change that is done."""
    return {"status": done, "id": settled.number} if what == "register" and settled is not None else {"status": done}


def asked_change(changes: AdapterRegistry, inputs: Input, what: str, *, refuse_unknown: bool) -> tuple[Change, str]:
    """The change that a call asks for, which may be begun, and what to say when it is done.

    May be called on any thread, as it reads files.

    Args:
        what: register, update or unregister.

    Raises:
        ServingError: it cannot be.
    """
    _check_caller(inputs)
    changes.check()
    order = _order(inputs, refuse_unknown=refuse_unknown)
    name = required(order.name, "name")
    done = f"Adapter {inputs.get_properties().get('alias') or name} {_DONE[what]}"
    if what == "unregister":
        return functools.partial(_unregister, changes, name), done
    if what == "update":
        path = changes.path(changes.get(name).adapter.path if order.src is None else order.src)
        return functools.partial(changes.update, name, path=path, preload=order.preload), done
    path = changes.path(required(order.src, "src"))
    if (there := _loaded_at_start(changes, name, str(path))) is not None:
        return functools.partial(_nothing, there), done
    return functools.partial(changes.register, name, path, preload=order.preload is not False), done


def _unregister(changes: AdapterRegistry, name: str, then: Then) -> None:
    changes.unregister(name)
    then(None)


def _nothing(there: Registered, then: Then) -> None:
    then(there)


def _loaded_at_start(changes: AdapterRegistry, name: str, path: str) -> Registered | None:
    """What is there already: DJL Serving registers what lies in the model's `adapters/` by itself."""
    return next((entry for entry in changes if (entry.adapter.name, entry.adapter.path) == (name, path)), None)


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
