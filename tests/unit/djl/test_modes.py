"""What DJL is answered when something has a bug, without Java: its `djl_python` is a stand-in here."""

from __future__ import annotations

import asyncio
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from handler.scheduler.lora.registry import AdapterRegistry
from tests.stepped import Bench, ask, benches, item

__all__ = ["benches"]


class Output:
    def __init__(self, code: int = 200, message: str = "OK") -> None:
        self.code, self.message = code, message
        self.properties: dict[str, str] = {}
        self.data = b""

    def add_property(self, name: str, value: str) -> Output:
        self.properties[name] = value
        return self

    def add(self, value: bytes, key: str) -> Output:
        self.data += value
        return self

    @staticmethod
    def write_utf8(buffer: bytearray, text: str) -> None:
        buffer += len(text).to_bytes(4, "big")


class Input:
    """A call about an adapter."""

    def get_properties(self) -> dict[str, str]:
        return {"name": "a", "src": "a"}


def fail(*arguments: object) -> NoReturn:
    raise RuntimeError("a bug")


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    ours = [f"handler.djl.{name}" for name in ("versions", "wire", "adapters", "modes", "worker")]
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    stand_in = types.ModuleType("djl_python")
    vars(stand_in).update(__version__="0.34.0", Input=Input, Output=Output)
    monkeypatch.setitem(sys.modules, "djl_python", stand_in)
    module = importlib.import_module("handler.djl.modes")
    vars(module).update(installed_version=importlib.import_module("handler.djl.versions").installed_version)
    yield module
    for name in ours:
        sys.modules.pop(name, None)


def test_a_bug_in_an_adapters_call_puts_no_answer_among_the_steps(modes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step after it would get that answer for its own, and every later step that of the one before."""
    bench = Bench()
    rolling = modes.Rolling(bench.model, bench.loop, modes.installed_version())
    monkeypatch.setattr(AdapterRegistry, "check", fail)
    assert rolling.change_adapter(Input(), "register").code == 500
    rolling._batch.step(1, {0: item(ask("a b", 50, stream=True))})
    assert isinstance(rolling.change_adapter(Input(), "register"), modes.Unsent)
    rolling._batch.reset()


def test_a_bug_in_async_mode_is_answered(modes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Java waits for a last piece."""
    bench = Bench()
    mode = modes.Async(bench.model, modes.installed_version())

    async def outputs() -> list[Output]:
        pieces = mode._outputs(item(ask("a b", 3, stream=True)))
        return [piece async for piece in pieces]

    assert [b"true" in piece.data for piece in bench.loop.run(outputs())][-1]
    monkeypatch.setattr(AdapterRegistry, "check", fail)
    assert b"internal error: RuntimeError" in bench.loop.run(mode.change_adapter(Input(), "register")).data
    monkeypatch.setattr(modes, "headers_of", fail)
    (piece,) = bench.loop.run(outputs())
    assert b"internal error: RuntimeError" in piece.data
    assert not bench.model._driver.sinks


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_start_is_the_first_calls_answer(modes: Any, asynchronous: bool) -> None:
    worker = importlib.import_module("handler.djl.worker")
    properties = {"model_dir": "/nothing", "rolling_batch": "disable", "dtype": "wrong"}
    answer = asyncio.run(worker._load_async(properties)) if asynchronous else worker._load_stepped(properties)
    assert (answer.code, "dtype=wrong" in answer.message) == (500, True), answer.message
    answer = asyncio.run(worker._load_async({})) if asynchronous else worker._load_stepped({})
    assert (answer.code, answer.message) == (500, "KeyError: 'model_dir'")
    assert worker._mode is None
