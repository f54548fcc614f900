"""DJL's calls about LoRA adapters: read what Java's PyAdapter sends, and change the adapters.

An Input has the properties `name` and `src` (and `pin`), and the management call's query as contents. 0.36 makes the
client's answer of the Output's status and message. In async mode it answers 200 without waiting for the worker, unless
an error is there first; 0.28 always answers by itself. Then only the log says why a call failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from djl_python import Input

from handler.core.errors import InvalidPayload, NotFound, ServingError
from handler.djl.batches import Item
from handler.djl.versions import is_of_http
from handler.djl.wire import one_line
from handler.scheduler.lora.calls import AdapterCall, read_adapter_call, required
from handler.serving.model import ServedModel

log = logging.getLogger("handler.djl")

_DONE = {"register": "registered", "update": "updated", "unregister": "unregistered"}
"""As DJL's own handlers say it; the name before it is `alias` where SageMaker's user calls the adapter so."""


class AdapterCalls:
    """Makes changes one after another, in the order of the calls."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._turn = asyncio.Lock()
        self._under_way: dict[asyncio.Future[None], str] = {}  # the adapters' names

    async def answer(self, inputs: Input, what: str) -> tuple[str, dict[str, Any]]:
        """Do what a call asks for; return what was done, in words, and the answer's value.

        Args:
            what: register, update or unregister.

        Raises:
            ServingError: nothing has changed; the log has it.
        """
        name = inputs.get_properties().get("name")
        end = asyncio.get_running_loop().create_future()
        self._under_way[end] = str(name or "")
        try:
            async with self._turn:
                return await self._change(inputs, what)
        except ServingError as error:
            log.warning("the call to %s %r failed: %s", what, name, one_line(error.public))
            raise
        finally:
            del self._under_way[end]
            end.set_result(None)

    async def catch_up(self, item: Item) -> None:
        """Wait for the calls that came before a request and are about an adapter that it may name."""
        earlier = [end for end, name in self._under_way.items() if _mentions(item, name)]
        if earlier:
            await asyncio.wait(earlier)

    async def _change(self, inputs: Input, what: str) -> tuple[str, dict[str, Any]]:
        _check_caller(inputs)
        adapters = self._model.adapters
        adapters.registry.check()
        call = _read_call(inputs, refuse_unknown=self._model.config.unknown_parameters == "refuse")
        name = required(call.name, "name")
        done = f"Adapter {inputs.get_properties().get('alias') or name} {_DONE[what]}"
        value: dict[str, Any] = {"status": done}
        if what == "unregister":
            with contextlib.suppress(NotFound):  # Java lists it, as it answered a failed registration too early
                adapters.unregister(name)
        elif what == "update":
            await adapters.update(name, call.src, preload=call.preload)
        else:  # DJL Serving registers what lies in the model's `adapters/` by itself
            src, preload = required(call.src, "src"), call.preload is not False
            value["id"] = (await adapters.register(name, src, preload=preload, again=True)).number
        return done, value


def _mentions(item: Item, name: str) -> bool:
    """Whether a header or a JSON string is this name, which has no character that JSON would escape."""
    return bool(name) and (name in item.headers.values() or f'"{name}"'.encode() in item.body)


def _check_caller(inputs: Input) -> None:
    """
    Raises:
        InvalidPayload: it is a client's request, which a header of its own has led here.
    """
    if is_of_http(inputs.get_properties()):
        raise InvalidPayload("property handler: a request cannot choose the function that answers it")


def _read_call(inputs: Input, *, refuse_unknown: bool) -> AdapterCall:
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
    call = read_adapter_call(values, refuse_unknown=refuse_unknown)
    if call.ignored:
        log.warning("an adapter's call: without effect: %s", one_line(", ".join(map(repr, call.ignored))))
    return call
