"""Whether a model can serve: its state, its health, and the words of a refusal, from its start to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from handler.core.errors import ConfigError, Unavailable
from handler.engines.process.supervisor import State
from handler.serving.availability import Availability


class Model:
    """A model whose engine is in any state; `told` are the states that its host hears."""

    def __init__(self, finish: Callable[[], Awaitable[object]] | None = None) -> None:
        engine: Any = SimpleNamespace(state=State.LOADING, reason="no memory", ready=False)
        self.engine = engine
        self.availability = Availability("m", engine)
        self.told: list[State] = []
        self._changed = self.availability.follow(self.told.append, finish)

    async def become(self, state: State) -> None:
        self.engine.state, self.engine.ready = state, state is State.READY
        self._changed(state)
        for _ in range(3):
            await asyncio.sleep(0)

    def refusals(self) -> list[str]:
        """What `check_engine` and `check_open` say, each "" if nothing."""
        said = []
        for check in (self.availability.check_engine, self.availability.check_open):
            try:
                check()
            except Unavailable as error:
                said.append(error.message)
            else:
                said.append("")
        return said


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await story()

    asyncio.run(main())


def test_a_model_is_open_once_its_engine_is_ready() -> None:
    async def story() -> None:
        model = Model()
        available = model.availability
        assert (available.state, available.healthy) == ("loading", False)
        assert model.refusals() == ["Model is not ready: m"] * 2
        await model.become(State.READY)
        assert (available.state, available.healthy, available.opened.done()) == ("ready", True, True)
        assert model.refusals() == ["", ""]
        await model.become(State.LOADING)
        assert (available.state, available.healthy) == ("loading", False)
        assert model.refusals() == ["", ""], "a request may wait for the next engine"
        await model.become(State.READY)
        assert model.told == [State.READY, State.LOADING, State.READY]

    run(story)


def test_a_model_is_open_only_when_the_rest_of_its_start_is_done() -> None:
    async def story() -> None:
        done = asyncio.Event()
        model = Model(done.wait)
        await model.become(State.READY)
        assert (model.availability.state, model.availability.healthy, model.told) == ("loading", False, [])
        assert model.refusals() == ["Model is not ready: m"] * 2
        done.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert (model.availability.state, model.availability.healthy, model.told) == ("ready", True, [State.READY])

    run(story)


def test_a_start_that_fails_closes_the_model() -> None:
    async def fail() -> None:
        raise ConfigError("no such adapter")

    async def story() -> None:
        model = Model(fail)
        await model.become(State.READY)
        assert model.told == [State.CLOSED]
        assert (model.availability.state, model.availability.healthy) == ("loading", False)
        with pytest.raises(ConfigError, match=r"^no such adapter$"):
            await model.availability.opened

    run(story)


@pytest.mark.parametrize("closing", [False, True])
def test_an_engine_that_never_starts_is_an_error_unless_it_was_closed(closing: bool) -> None:
    async def story() -> None:
        model = Model()
        model.availability.closing = closing
        await model.become(State.CLOSED)
        assert model.told == [State.CLOSED]
        assert model.availability.opened.done() is not closing
        if not closing:
            with pytest.raises(ConfigError, match=r"^the engine could not start: no memory$"):
                await model.availability.opened

    run(story)


def test_a_dead_engine_refuses_by_its_reason() -> None:
    async def story() -> None:
        model = Model()
        await model.become(State.READY)
        await model.become(State.CLOSED)
        assert model.availability.state == "closed"
        assert model.refusals() == ["the engine is down: no memory", ""]
        model.availability.draining = True
        assert model.refusals() == ["the server is stopping"] * 2
        assert (model.availability.state, model.availability.healthy) == ("stopping", False)

    run(story)


def test_a_server_that_stops_is_not_healthy() -> None:
    async def story() -> None:
        model = Model()
        await model.become(State.READY)
        model.availability.draining = True
        assert (model.availability.state, model.availability.healthy) == ("stopping", False)
        assert model.refusals() == ["the server is stopping"] * 2

    run(story)
