"""Tracks whether a model can serve requests, from its startup to its shutdown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from handler.config.environment import secrets
from handler.core.errors import ConfigError, Unavailable, client_words
from handler.engines.process.replicas import ReplicaSet
from handler.engines.process.supervisor import EngineSupervisor, State

OnState = Callable[[State], None]


class Availability:
    """The availability of a model, from its creation until it is closed.

    Args:
        name: name of the model.

    Attributes:
        engine: engine of the model.
        draining: whether new requests are refused because the server is stopping.
        closing: whether the model has been closed.
        started_at: time of creation, in seconds since 1970.
        opened: future that completes when the engine is ready and the model has finished starting (see `follow`). It
            raises a ConfigError if the model cannot start.
    """

    def __init__(self, name: str, engine: EngineSupervisor | ReplicaSet) -> None:
        self.engine = engine
        self.draining = self.closing = False
        self.started_at = time.time()
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._name = name
        self._opening: asyncio.Task[None] | None = None

    def follow(self, on_state: OnState, finish: Callable[[], Awaitable[object]] | None) -> OnState:
        """Return a callback for the engine, which passes its state changes on to `on_state`.

        READY is passed on only after `finish` has succeeded. If `finish` fails, CLOSED is passed on instead.

        Args:
            finish: coroutine function that completes the startup once the engine is ready, or None if nothing is left
                to do.
        """

        def changed(state: State) -> None:
            if state is State.READY and not self.opened.done():
                if finish is not None:
                    self._opening = asyncio.ensure_future(self._open(finish))
                    self._opening.add_done_callback(lambda _: changed(State.READY if self._is_open else State.CLOSED))
                    return
                self.opened.set_result(None)
            if state is State.CLOSED and not self.opened.done() and not self.closing:
                self.opened.set_exception(ConfigError(f"the engine could not start: {self.engine.reason}"))
            on_state(state)

        return changed

    async def _open(self, finish: Callable[[], Awaitable[object]]) -> None:
        try:
            await finish()
        except ConfigError as error:
            self.opened.set_exception(error)
        else:
            self.opened.set_result(None)

    @property
    def state(self) -> str:
        if self.draining:
            return "stopping"
        state = self.engine.state
        return State.LOADING.value if state is State.READY and not self._is_open else state.value

    @property
    def reason(self) -> str:
        """The reason why the engine cannot serve requests, if known, without details that belong only in the log."""
        return client_words(self.engine.reason, secrets())

    @property
    def healthy(self) -> bool:
        return self.engine.ready and self._is_open and not self.draining

    @property
    def _is_open(self) -> bool:
        return self.opened.done() and self.opened.exception() is None

    def check_engine(self) -> None:
        """Raise `Unavailable` if the engine has failed permanently, or if `check_open` raises it."""
        if self.engine.state is State.CLOSED and not self.draining:
            raise Unavailable(f"the engine is down: {self.reason}")
        self.check_open()

    def check_open(self) -> None:
        """Raise `Unavailable` while the server is stopping or the model is still starting. Clients must not register
        adapters before the adapters next to the model are registered, which get the first numbers.
        """
        if self.draining:
            raise Unavailable("the server is stopping")
        if not self._is_open:
            raise Unavailable(f"Model is not ready: {self._name}")
