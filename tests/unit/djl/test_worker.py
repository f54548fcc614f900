"""DJL's first call, which loads the echo engine here, and the mode that answers the later ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from handler.config import environment
from handler.core import loop
from handler.core.errors import ConfigError
from handler.djl import modes, startup
from handler.djl import worker as djl_worker
from tests.doubles import djl_python
from tests.doubles.djl_python import Connection
from tests.stepped import ask, item


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The worker's module before its first call; the model that it loads is closed."""
    monkeypatch.setattr(djl_worker, "mode", None)
    monkeypatch.setattr(loop, "keep_collecting", lambda: None)
    monkeypatch.setattr(loop, "importing", contextlib.nullcontext)
    monkeypatch.setattr(startup, "AT_END", contextlib.AsyncExitStack())
    monkeypatch.setattr(djl_python.Input, "read", None, raising=False)
    yield djl_worker
    running = getattr(djl_worker.mode, "_loop", None)
    if running is not None:
        with running.lock:
            running.run(startup.AT_END.aclose())
            running.close()


@pytest.fixture
def properties(tmp_path: Path) -> dict[str, str]:
    return {"model_dir": str(tmp_path), "llm_engine": "echo", "rolling_batch": "auto"}


def first_call(properties: dict[str, str]) -> djl_python.Input:
    return djl_python.Input(properties)


def test_the_first_call_loads_the_model_and_the_next_are_steps(
    worker: Any, properties: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    restored: list[str] = []
    monkeypatch.setattr(environment, "restore_text", lambda: restored.append("text"))
    caplog.set_level(logging.INFO)
    answer = worker.load(first_call(properties))
    assert (answer.code, answer.message, restored) == (200, "OK", ["text"])
    assert "loading no model with echo" in caplog.messages
    assert any(line.startswith("ready after ") for line in caplog.messages)
    assert isinstance(worker.mode, modes.Rolling)
    call = {"batch_size": "1", "batch_000.seed": "1"}
    step = worker.mode.answer(djl_python.Input(call, {"batch_000.data": item(ask("a b", 1)).body}))
    java = Connection()
    step.send(java)
    assert b" a" in java.written
    assert vars(djl_python.Input)["read"], "calls are read ahead"
    assert worker.adapters(djl_python.Input({"name": "a"}), "register").code == 400, "the mode answers"


def test_a_worker_looks_after_its_engine_between_calls(
    worker: Any, properties: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    periods: list[float] = []
    monkeypatch.setattr(worker.WorkerLoop, "look_after", lambda self, period: periods.append(period))
    worker.load(first_call(properties))
    assert periods == [0.5]


def test_without_a_rolling_batch_calls_are_whole_batches(worker: Any, properties: dict[str, str]) -> None:
    assert worker.load(first_call(properties | {"rolling_batch": "disable"})).code == 200
    assert isinstance(worker.mode, modes.Dynamic)
    answer = worker.mode.answer(
        djl_python.Input({"content-type": "application/json"}, {"data": item(ask("a b", 2)).body})
    )
    assert b"generated_text" in answer.data


def test_a_passive_rank_loads_nothing(worker: Any, properties: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "mpi_world", lambda: ("2", "1"))
    assert worker.load(first_call(properties | {"rolling_batch": "trtllm"})).code == 200
    assert isinstance(worker.mode, modes.Passive)
    for answer in (worker.mode.answer(djl_python.Input()), worker.adapters(djl_python.Input(), "register")):
        assert (answer.code, answer.message, answer.data) == (200, "OK", b"")


def test_in_async_mode_the_first_answer_goes_on_with_all_later_ones(worker: Any, properties: dict[str, str]) -> None:
    async def story() -> bytes:
        outputs = await worker.load(first_call(properties | {"rolling_batch": "disable"}))
        assert (await anext(outputs)).code == 200
        java = Connection()
        call = djl_python.Input({"request_tracking_id": "one"}, {"data": item(ask("a b", 2)).body})
        assert [output async for output in await worker.mode.answer(call)] == []
        while b"true" not in java.written:
            (await anext(outputs)).send(java)
        await outputs.aclose()
        await startup.AT_END.aclose()
        return java.written

    written = asyncio.run(story())
    assert b"one" in written
    assert b"generated_text" in written
    assert vars(djl_python.Input)["read"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_metrics_are_written_from_the_first_request_on(
    worker: Any, properties: dict[str, str], monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(worker, "report_metrics", lambda model, version: reported.append((model.config.label, version)))

    async def load() -> None:
        await worker.load(first_call(properties | {"rolling_batch": "disable"}))
        await startup.AT_END.aclose()

    if asynchronous:
        asyncio.run(load())
    else:
        worker.load(first_call(properties))
    ((label, version),) = reported
    assert label
    assert version.metric_types


@pytest.mark.parametrize(("asked", "number"), [("true", 1), ("false", 0)])
def test_a_model_has_a_recorder_of_metrics_if_the_option_asks_for_it(asked: str, number: int) -> None:
    recorders: list[Any] = []
    config = SimpleNamespace(djl_metrics=asked == "true", label="m")
    model: Any = SimpleNamespace(config=config, metrics=SimpleNamespace(recorders=recorders))
    startup.report_metrics(model, SimpleNamespace(metric_types=True))  # type: ignore[arg-type]
    assert len(recorders) == number


def test_a_long_load_is_told_every_ten_seconds(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    opened, now, timeouts = Future[None](), [100.0], list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    async def wait(futures: set[Any], timeout: float) -> tuple[set[Any], set[Any]]:
        timeouts.append(timeout)
        now[0] += timeout
        return (futures, set()) if len(timeouts) == 3 else (set(), futures)

    async def story(end: Callable[[Future[None]], None]) -> None:
        end(opened)
        model: Any = SimpleNamespace(availability=SimpleNamespace(opened=opened))
        await startup._wait_ready(model)

    monkeypatch.setattr(asyncio, "wait", wait)
    asyncio.run(story(lambda future: future.set_result(None)))
    assert timeouts == [10, 10, 10]
    assert caplog.messages == ["still loading after 10 s", "still loading after 20 s"]
    opened, timeouts[:] = Future(), [0.0, 0.0]
    with pytest.raises(ConfigError, match="no such model"):
        asyncio.run(story(lambda future: future.set_exception(ConfigError("no such model"))))


def test_an_error_of_the_start_is_one_line_for_java(
    worker: Any, properties: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def broken(properties: dict[str, str], *arguments: Any, **more: Any) -> Any:
        raise errors[properties["llm_engine"]]

    errors = {"config": ConfigError("first line\n  second line"), "bug": RuntimeError("a\nbug")}
    monkeypatch.setattr(worker, "prepare", broken)
    for kind, told, traced in (("config", "first line second line", False), ("bug", "RuntimeError: a bug", True)):
        caplog.clear()
        answer = worker.load(first_call(properties | {"llm_engine": kind}))
        assert (answer.code, answer.message) == (500, told)
        record = next(record for record in caplog.records if record.message.startswith("cannot start: "))
        assert bool(record.exc_info) == traced
    assert worker.mode is None
