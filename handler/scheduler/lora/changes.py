"""Registering, updating and unregistering LoRA adapters: the registry and the engine kept in step, for every host."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from handler.core.errors import BadRequest, ServingError
from handler.core.values import Adapter, Delta
from handler.scheduler.batcher import Batcher
from handler.scheduler.lora.registry import AdapterRegistry, Registered, adapter_path

log = logging.getLogger("handler.adapters")

Sinks = dict[int, Callable[[Delta], None]]

Outcome = Registered | ServingError | None
"""What became of a change: what stands under the name now, None being nothing; or why nothing has changed."""

Then = Callable[[Outcome], None]
"""Gets what became of a change."""

Change = Callable[[Then], None]
"""Begins a change."""


class Order(NamedTuple):
    """What a call about adapters says; None: nothing. `ignored` are the names in it that mean nothing here."""

    name: str | None = None
    src: str | None = None
    preload: bool | None = None
    ignored: tuple[str, ...] = ()


class AdapterChanges:
    """Changes adapters, one call at a time, on the host's own thread.

    Args:
        registry: the adapters that there are.
        batcher: has the engine load and drop them.
        sinks: where the host looks for who gets a delta, by the batcher's id.
        base: where a relative `src` lies.
        no_adapters: why there are none here; "" where there are.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        batcher: Batcher,
        sinks: Sinks,
        base: Path | None = None,
        no_adapters: str = "",
    ) -> None:
        self.registry = registry
        self._batcher = batcher
        self._sinks = sinks
        self._base = base
        self._no_adapters = no_adapters

    def check(self) -> None:
        """
        Raises:
            BadRequest: there are no adapters here.
        """
        if self._no_adapters:
            raise BadRequest(f"LoRA is not enabled: {self._no_adapters}")

    def path(self, src: str) -> Path:
        """The directory that `src` names, looked at; may be called on any thread, as it reads files.

        Raises:
            BadRequest, AdapterFailed: it names none, or no adapter.
        """
        return adapter_path(src, self._base)

    def register(self, name: str, path: Path, then: Then, *, preload: bool = True) -> None:
        """Add an adapter. What is raised here is not told to `then`.

        Raises:
            BadRequest, Conflict, NoRoom, Unavailable.
        """
        self.check()
        self._bring(self.registry.begin(name, path), preload, then)

    def update(self, name: str, then: Then, path: Path | None = None, preload: bool | None = None) -> None:
        """Put another adapter, or other weights in the same directory, in an adapter's place.

        Requests that the engine has go on with the earlier one, those that come get the new one.

        Args:
            path: by default the one that it has.
            preload: by default as it is.

        Raises:
            BadRequest, NotFound, Conflict, Unavailable.
        """
        self.check()
        earlier = self.registry.get(name)
        adapter = self.registry.begin_update(name, path or Path(earlier.adapter.path))
        self._bring(adapter, earlier.preload if preload is None else preload, then)

    def unregister(self, name: str) -> None:
        """No request finds it from now on; the engine drops it when those that use it have ended.

        Raises:
            BadRequest, NotFound, Conflict.
        """
        self.check()
        self._batcher.drop_adapter(self.registry.remove(name), None)
        log.info("adapter %s unregistered", name)

    def _bring(self, adapter: Adapter, preload: bool, then: Then) -> None:
        if not preload:
            return then(self._settle(adapter, preload))
        try:
            id = self._batcher.load_adapter(adapter)
        except BaseException:
            self.registry.abandon(adapter)
            raise
        self._sinks[id] = functools.partial(self._loaded, adapter, then)

    def _loaded(self, adapter: Adapter, then: Then, delta: Delta) -> None:
        del self._sinks[delta.id]
        if delta.error is None:
            return then(self._settle(adapter, True))
        self.registry.abandon(adapter)
        log.warning("adapter %s from %s: %s", adapter.name, adapter.path, delta.error.public)
        then(delta.error)

    def _settle(self, adapter: Adapter, preload: bool) -> Registered:
        earlier = self.registry.settle(adapter, preload=preload)
        if earlier is not None:
            self._batcher.drop_adapter(earlier, adapter)
        settled = self.registry.get(adapter.name)
        log.info("adapter %s (%d) from %s", adapter.name, settled.number, adapter.path)
        return settled


_KNOWN = {"name", "src", "preload", "pin"}


def read_order(values: Mapping[str, Any], *, refuse_unknown: bool) -> Order:
    """What a call says, in the names of DJL's query and SageMaker's body: `name`, `src`, `preload`, `pin`.

    Raises:
        BadRequest: a value is no such thing, or is asked for in vain.
    """
    ignored = tuple(name for name in values if name not in _KNOWN)
    if ignored and refuse_unknown:
        raise BadRequest(f"unknown parameter {ignored[0]!r}; there are name, src, preload and pin")
    if _boolean(values, "pin"):
        raise BadRequest("pin=true: no engine here keeps an adapter from making room for others")
    return Order(_text(values, "name"), _text(values, "src"), _boolean(values, "preload"), ignored)


def required(value: str | None, name: str) -> str:
    """
    Raises:
        BadRequest: it was not given.
    """
    if value is None:
        raise BadRequest(f"Parameter {name} is required.")
    return value


def _text(values: Mapping[str, Any], name: str) -> str | None:
    value = values.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{name}={value!r}: must be a string that is not empty")
    return value


def _boolean(values: Mapping[str, Any], name: str) -> bool | None:
    value = values.get(name)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise BadRequest(f"{name}={value!r}: must be true or false")
