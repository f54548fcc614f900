"""The LoRA adapters of a served model: register, update and drop them while it serves, the same for every host."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

from handler.core.errors import ConfigError, ServingError
from handler.core.event_loop import run_in_daemon_thread
from handler.plugins.adapter_formatters import AdapterFormatters, load_adapter_formatters
from handler.scheduler.lora.registry import AdapterHome, Change, Outcome, Registered


class ServedAdapters:
    """Changes a model's adapters. A change goes on when its awaiter is cancelled.

    Args:
        check_open: raises where the model takes no changes: it still loads, or it stops.
        formatters: those of the adapters' own, which run on the request path.

    Attributes:
        registry: what requests may name now.
        num_calls: those within `counted`.
    """

    def __init__(self, home: AdapterHome, check_open: Callable[[], None], formatters: AdapterFormatters) -> None:
        self.registry = home.registry
        self.num_calls = 0
        self._at_start = home.at_start
        self._check_open = check_open
        self._formatters = formatters
        self._changing: list[str] = []  # directories

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a call while it is read and answered: a stop waits for it."""
        self.num_calls += 1
        try:
            yield
        finally:
            self.num_calls -= 1

    async def register(self, name: str, src: str, *, preload: bool = True, again: bool = False) -> Registered:
        """Return when requests may name it.

        Args:
            src: its directory.
            preload: the engine loads it now; otherwise for its first request.
            again: the same name from the same directory changes nothing and is no conflict.

        Raises:
            ServingError: nothing has changed.
        """
        path = await self._path(src)
        there = self._registered(name, path) if again else None
        register = functools.partial(self.registry.register, name, path, preload=preload)
        return there or await self._change(name, register, path)

    async def update(self, name: str, src: str | None = None, *, preload: bool | None = None) -> Registered:
        """Return when requests that name it get the new one.

        Args:
            src, preload: by default those of the earlier one.

        Raises:
            ServingError: nothing has changed.
        """
        self._check_open()
        path = await self._path(self.registry.get(name).adapter.path if src is None else src)
        return await self._change(name, functools.partial(self.registry.update, name, path=path, preload=preload), path)

    def unregister(self, name: str) -> None:
        """Drop an adapter; requests under way keep it.

        Raises:
            ServingError: nothing has changed.
        """
        self._check_open()
        self.registry.unregister(name)
        self._forget_formatters()

    @property
    def at_start(self) -> bool:
        """Whether some lie beside the model."""
        return bool(self._at_start)

    async def load_at_start(self) -> None:
        """Register those that lie beside the model.

        Raises:
            ConfigError: one cannot be used.
        """
        for name, path in self._at_start.items():
            try:
                await self._change(name, functools.partial(self.registry.register, name, path), path)
            except ServingError as error:
                raise ConfigError(f"the adapter {name} cannot be used: {error.public}") from None

    async def _path(self, src: str) -> Path:
        self._check_open()  # before it reads files, and when it has
        path = await run_in_daemon_thread(functools.partial(self.registry.path, src))
        self._check_open()
        return path

    def _registered(self, name: str, path: Path) -> Registered | None:
        same = (entry for entry in self.registry if (entry.adapter.name, entry.adapter.path) == (name, str(path)))
        return next(same, None)

    async def _change(self, name: str, begin: Change, path: Path) -> Registered:
        """Load the adapter's model.py, then its weights."""
        directory = str(path)
        self._changing.append(directory)
        try:
            formatters = await run_in_daemon_thread(functools.partial(load_adapter_formatters, path, name))
            earlier = self._formatters.set(directory, formatters)
            try:
                return await self._register(begin)
            except ServingError:
                self._formatters.set(directory, earlier)
                raise
        finally:
            self._changing.remove(directory)
            self._forget_formatters()

    def _forget_formatters(self) -> None:
        self._formatters.keep({*(entry.adapter.path for entry in self.registry), *self._changing})

    async def _register(self, begin: Change) -> Registered:
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        begin(lambda outcome: None if done.done() else done.set_result(outcome))
        outcome = await done
        if isinstance(outcome, ServingError):
            raise outcome
        return outcome
