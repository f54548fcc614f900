"""The start and the end that all hosts share."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from handler.config.config import Config
from handler.config.loader import read_config
from handler.core import child_processes, loop
from handler.core.errors import ConfigError
from handler.core.values import Adapter
from handler.engines.echo.engine import Echo
from handler.engines.process.supervisor import State
from handler.serving import start
from handler.serving.request.task import RequestTask
from handler.serving.start import ServedModel, load_model, running
from tests.user_files import write_adapter


def echo(*options: str) -> Config:
    return read_config(overrides=["option.llm_engine=echo", *options], environ={}).checked()


@pytest.fixture(autouse=True)
def collecting() -> Iterator[mock.Mock]:
    with mock.patch.object(loop, "keep_collecting") as keep:
        yield keep


def ask(model: ServedModel, tokens: int) -> RequestTask:
    task = model.open({})
    task.begin(task.run(json.dumps({"inputs": "a", "parameters": {"max_new_tokens": tokens}}).encode()))
    return task


def test_the_block_begins_when_the_model_is_ready_and_its_end_closes_it(collecting: mock.Mock) -> None:
    states = []

    async def story() -> None:
        async with running(echo(), on_state=lambda model, state: states.append((model, state))) as model:
            assert model.availability.healthy
            assert states[-1] == (model, State.READY)
        assert states[-1] == (model, State.CLOSED)

    asyncio.run(story())
    collecting.assert_called_once_with()


@pytest.mark.parametrize(("stepped", "watched"), [(False, 30.0), (True, 0.0)])
def test_the_loop_is_watched_from_ready_to_the_end_unless_it_is_stepped(stepped: bool, watched: float) -> None:
    async def story() -> None:
        with mock.patch.object(start, "LoopWatch") as watch:
            async with running(echo(), stepped=stepped, wait_ready=False) as model:
                watch.assert_called_once_with(watched, signals=False)
                await asyncio.wait({model.availability.opened})
                await asyncio.sleep(0)
                watch.return_value.start.assert_called_once_with()
                watch.return_value.stop.assert_not_called()
            watch.return_value.stop.assert_called_once_with()

    asyncio.run(story())


def test_metrics_are_reported_until_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        async with running(echo("option.cloudwatch_metrics_interval=60")):
            assert capsys.readouterr().out == ""

    asyncio.run(story())
    assert json.loads(capsys.readouterr().out)["EngineReady"] == 1


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_waits_for_open_requests_unless_the_block_failed(fails: bool) -> None:
    async def story() -> list[Any]:
        answers: list[Any] = []

        async def take(task: RequestTask) -> None:
            with task:
                while not task.finished:
                    await asyncio.sleep(0.005)
                answers.append(json.loads(task.take()))

        async def block() -> None:
            async with running(echo("option.echo_tokens_per_second=20")) as model:
                answered.append(asyncio.ensure_future(take(ask(model, 4))))
                await asyncio.sleep(0.01)
                if fails:
                    raise OSError("gone")
            assert (model.num_requests, answers) == (0, [{"generated_text": " a a a a"}])

        answered: list[asyncio.Future[None]] = []
        if fails:
            with pytest.raises(OSError, match="gone"):
                await block()
        else:
            await block()
        await asyncio.gather(*answered)
        return answers

    (answer,) = asyncio.run(story())
    assert ("the server stopped" in answer.get("error", "")) == fails


def test_what_the_host_drained_is_given_up_at_once() -> None:
    async def story() -> None:
        with mock.patch.object(start, "_LAST_BYTES", 0.01):
            async with running(echo("option.echo_tokens_per_second=1")) as model:
                task = ask(model, 60)
                model.drain()
        assert "the server stopped" in task.take().decode()

    asyncio.run(story())


def test_a_start_that_fails_raises_and_ends_what_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(engine: Echo, adapter: Adapter) -> None:
        raise ValueError("too large")

    monkeypatch.setattr(Echo, "load_adapter", refuse)
    write_adapter(tmp_path / "adapters" / "big")
    states = []

    async def story() -> None:
        config = echo("option.enable_lora=true")
        async with running(config, directory=tmp_path, on_state=lambda model, state: states.append(state)):
            raise AssertionError("it cannot start")

    with pytest.raises(ConfigError, match=r"the adapter big cannot be used: .* too large"):
        asyncio.run(story())
    assert states[-1] is State.CLOSED
    assert State.READY not in states


def test_a_host_that_is_cancelled_twice_while_it_loads_leaves_nothing_behind() -> None:
    """The model comes in spite of the cancellation, when nobody waits for it any more."""
    loaded: list[ServedModel] = []

    async def story() -> None:
        begun, stopping = asyncio.Event(), asyncio.Event()

        async def stubborn(*arguments: Any, **more: Any) -> ServedModel:
            begun.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            loaded.append(await load_model(*arguments, **more))
            return loaded[0]

        async def block() -> None:
            async with running(echo()):
                raise AssertionError("it was cancelled")

        async def closed() -> None:
            while not loaded or loaded[0].availability.engine.state is not State.CLOSED:
                await asyncio.sleep(0.01)

        patched = mock.patch.object(start, "load_model", stubborn)
        with patched, mock.patch.object(child_processes, "stop_all", stopping.set):
            task = asyncio.ensure_future(block())
            for event in (begun, stopping):
                await event.wait()
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.wait_for(closed(), 60)

    asyncio.run(story())


def test_a_host_that_is_cancelled_while_it_loads_leaves_nothing_behind() -> None:
    loaded: list[ServedModel] = []

    async def story() -> None:
        begun, go = asyncio.Event(), asyncio.Event()

        async def slow(*arguments: Any, **more: Any) -> ServedModel:
            begun.set()
            await go.wait()
            loaded.append(await load_model(*arguments, **more))
            return loaded[0]

        async def block() -> None:
            async with running(echo()):
                raise AssertionError("it was cancelled")

        with mock.patch.object(start, "load_model", slow), mock.patch.object(child_processes, "stop_all", go.set):
            task = asyncio.ensure_future(block())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert loaded[0].availability.engine.state is State.CLOSED

    asyncio.run(story())
