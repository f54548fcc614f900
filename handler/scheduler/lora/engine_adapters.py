"""An engine's adapters as the batcher sees them: loaded beside the requests, dropped when nobody uses them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from handler.core.errors import AdapterFailed, InvalidPayload, Unavailable
from handler.core.values import Adapter, Delta, Finish, Request
from handler.engines.base import Output, SteppedEngine

log = logging.getLogger("handler.adapters")


class _Change(NamedTuple):
    """One that is under way; `id` is what the caller of `load` knows it by."""

    id: int
    adapter: Adapter
    drop: bool


class EngineAdapters:
    """A new life of the engine needs nothing of this: requests carry their adapters, which engines load when needed.

    Args:
        ids: of what deltas are about.
        keys: of what the engine is asked.
    """

    def __init__(self, engine: SteppedEngine, ids: Iterator[int], keys: Iterator[int]) -> None:
        self._engine = engine
        self._ids = ids
        self._keys = keys
        self._changes: dict[int, _Change] = {}  # by the engine's key
        # Of dropped adapters, as long as a request that was read before may still come with one of them.
        self._successors: weakref.WeakKeyDictionary[Adapter, Adapter | None] = weakref.WeakKeyDictionary()
        self.leaving: dict[int, Adapter] = {}  # dropped here, perhaps still in use

    def load(self, adapter: Adapter) -> int:
        """Have the engine load it; `delta` says under the id returned what became of it.

        Raises:
            Unavailable: there is no engine at the moment.
        """
        if not self._engine.ready:
            raise Unavailable("the engine is not ready: no adapter can be loaded")
        change = _Change(next(self._ids), adapter, drop=False)
        self._send(change)
        return change.id

    def drop(self, adapter: Adapter, successor: Adapter | None) -> None:
        """Let `drop_unused` drop it; `successor` is what `current` gives in its place."""
        for earlier, other in list(self._successors.items()):
            if other == adapter:
                self._successors[earlier] = successor
        self._successors[adapter] = successor
        self.leaving[adapter.id] = adapter

    def current(self, request: Request) -> Request:
        """The request with the adapter that is there now: it waited for its ids, perhaps for its batch.

        Raises:
            InvalidPayload: its adapter was dropped since it was read.
        """
        adapter = request.adapter
        if adapter is None or adapter not in self._successors:
            return request
        successor = self._successors[adapter]
        if successor is None:
            raise InvalidPayload(f"the adapter {adapter.name} was unregistered before the request began")
        return replace(request, adapter=successor)

    def drop_unused(self, requests: Iterable[Request]) -> None:
        """Have the engine drop what none of these requests uses."""
        for adapter in self._unused(requests):
            del self.leaving[adapter.id]
            if self._engine.ready:  # the next one never had it
                self._send(_Change(0, adapter, drop=True))

    def delta(self, output: Output) -> Delta | None:
        """What an output says of a load; None when it is about something else."""
        change = self._changes.pop(output.key, None)
        if change is None:
            return None
        name = change.adapter.name
        if change.drop:
            if output.error is not None:
                log.warning("the engine could not drop the adapter %s: %s", name, output.error)
            return None
        if output.error is None:
            return Delta(change.id, 0, (), Finish.STOP)
        error = AdapterFailed(f"the engine could not load the adapter {name}: {output.error}")
        return Delta(change.id, 0, (), Finish.ERROR, error)

    def lost(self, waiting: Iterable[Request]) -> list[int]:
        """The engine is gone: the ids of the loads that were under way. The next one has none of the adapters, and gets
        those that the waiting requests use."""
        for adapter in self._unused(waiting):
            del self.leaving[adapter.id]
        changes, self._changes = self._changes, {}
        return [change.id for change in changes.values() if not change.drop]

    def _unused(self, requests: Iterable[Request]) -> list[Adapter]:
        """Those that are leaving and that none of these requests uses."""
        used = {request.adapter.id for request in requests if request.adapter is not None}
        return [adapter for id, adapter in self.leaving.items() if id not in used]

    def _send(self, change: _Change) -> None:
        key = next(self._keys)
        self._changes[key] = change
        self._engine.change_adapter(key, change.adapter, drop=change.drop)
