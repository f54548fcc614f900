"""A server's adapters where its engine refuses them: in its own words, at the start and later."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from handler.config.loader import read_config
from handler.core.errors import AdapterFailed, ConfigError, Unavailable
from handler.core.values import Adapter
from handler.engines.echo.engine import Echo
from handler.engines.process.supervisor import State
from handler.scheduler.lora import AdapterHome, adapter_path
from handler.serving import model as served_model
from handler.serving.engine import engine_spec
from handler.serving.model import ServedModel
from handler.serving.user_code import adapter_home
from tests.services import load_echo
from tests.user_files import write_adapter


@asynccontextmanager
async def service(directory: Path, states: list[State] | None = None) -> AsyncIterator[ServedModel]:
    made = await load_echo("option.enable_lora=true", "option.adapters_root=/", directory=directory)
    made.start((states if states is not None else []).append)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(engine: Echo, adapter: Adapter) -> None:
        raise ValueError(f"{adapter.name} has rank 64, at most 16 are possible")

    monkeypatch.setattr(Echo, "load_adapter", refuse)


@pytest.mark.usefixtures("refusing")
def test_a_refused_adapter_beside_the_model_closes_the_server(tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapters" / "big")
    states: list[State] = []

    async def run() -> None:
        async with service(tmp_path, states) as made:
            with pytest.raises(ConfigError, match=r"the adapter big cannot be used: .*: big has rank 64, at most 16"):
                await asyncio.wait_for(asyncio.shield(made.availability.opened), 30)
            assert not made.availability.healthy
            while State.CLOSED not in states:
                await asyncio.sleep(0.01)

    asyncio.run(run())
    assert State.READY not in states


@pytest.mark.usefixtures("refusing")
def test_one_that_the_engine_refuses_is_not_registered(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "big")

    async def run() -> None:
        async with service(tmp_path) as made:
            await asyncio.wait_for(made.availability.opened, 30)
            for _ in range(2):  # the name is free again
                with pytest.raises(AdapterFailed, match="could not load the adapter big: big has rank"):
                    await made.adapters.register("big", str(path), preload=True)
            assert made.adapters.registry.find("big") is None
            await made.adapters.register("big", str(path), preload=False)
            earlier = made.adapters.registry.find("big")
            with pytest.raises(AdapterFailed, match="rank 64"):
                await made.adapters.update("big", None, preload=True)
            assert made.adapters.registry.find("big") == earlier

    asyncio.run(run())


def test_it_is_not_ready_before_those_beside_the_model_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(tmp_path / "adapters" / "slow")
    go = threading.Event()
    monkeypatch.setattr(Echo, "load_adapter", lambda engine, adapter: go.wait(60))
    states: list[State] = []

    async def run() -> None:
        async with service(tmp_path, states) as made:
            await asyncio.sleep(0.3)
            assert (made.availability.state, made.availability.healthy, states) == ("loading", False, [State.LOADING])
            go.set()
            await asyncio.wait_for(made.availability.opened, 30)
            await asyncio.sleep(0)
            assert (made.availability.state, made.availability.healthy, states) == (
                "ready",
                True,
                [State.LOADING, State.READY],
            )
            assert made.adapters.registry.find("slow") is not None

    asyncio.run(run())


def test_who_stops_waiting_does_not_stop_the_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_adapter(tmp_path / "slow")
    go = threading.Event()
    monkeypatch.setattr(Echo, "load_adapter", lambda engine, adapter: go.wait(60))

    async def run() -> None:
        async with service(tmp_path) as made:
            await asyncio.wait_for(made.availability.opened, 30)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(made.adapters.register("slow", str(path), preload=True), 0.2)
            assert made.adapters.registry.find("slow") is None
            go.set()
            while made.adapters.registry.find("slow") is None:
                await asyncio.sleep(0.01)

    asyncio.run(run())


@pytest.mark.timeout(30)
def test_a_path_that_nobody_can_read_holds_up_neither_others_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, go = write_adapter(tmp_path / "good"), threading.Event()
    look = adapter_path

    def hang(src: str, base: Path | None) -> Path:
        if src == "hung":
            go.wait()
        return look(src, base)

    monkeypatch.setattr(served_model, "adapter_path", hang)

    async def run() -> None:
        async with service(tmp_path) as made:
            await asyncio.wait_for(made.availability.opened, 30)
            hung = asyncio.ensure_future(made.adapters.register("hung", "hung", preload=True))
            settled = await asyncio.wait_for(made.adapters.register("good", str(path), preload=True), 30)
            assert (settled.adapter.name, settled.number) == ("good", 1)
            hung.cancel()

    try:
        asyncio.run(run())  # which joins the threads of the loop's executor
        hung = [thread for thread in threading.enumerate() if thread.name == "blocking-call"]
        assert hung  # and perhaps the other's thread, which is about to end
        assert all(thread.daemon for thread in hung)  # nor does the interpreter's end wait for it
    finally:
        go.set()


def test_no_adapter_is_registered_before_the_models_own_or_at_the_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_adapter(tmp_path / "adapters" / "slow")
    go = threading.Event()
    monkeypatch.setattr(Echo, "load_adapter", lambda engine, adapter: go.wait(60))

    async def run() -> None:
        async with service(tmp_path) as made:
            with pytest.raises(Unavailable, match="not ready"):
                await made.adapters.register("early", str(path), preload=False)
            go.set()
            await asyncio.wait_for(made.availability.opened, 30)
            assert made.adapters.registry.get("slow").number == 1
            made.drain()
            with pytest.raises(Unavailable, match="stopping"):
                await made.adapters.register("late", str(path), preload=False)

    asyncio.run(run())


def test_those_of_two_places_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    properties, model = tmp_path / "properties", tmp_path / "model"
    for place, name in ((properties, "b"), (model, "a"), (model, "c")):
        write_adapter(place / "adapters" / name)
    assert list(home(properties, model).at_start) == ["a", "b", "c"]


def home(directory: Path, model: Path | None = None, *, enable_lora: str = "true") -> AdapterHome:
    given = {"option.llm_engine": "echo", "option.enable_lora": enable_lora}
    if model is not None:
        given["option.model_id"] = str(model)
    config = read_config(overrides=[f"{key}={value}" for key, value in given.items()], environ={}).checked()
    return adapter_home(config, engine_spec(config), directory)


def test_adapters_are_beside_the_properties_and_in_the_models_directory(tmp_path: Path) -> None:
    properties, model = tmp_path / "properties", tmp_path / "model"
    first, second = write_adapter(properties / "adapters" / "a"), write_adapter(model / "adapters" / "b")
    found = home(properties, model)
    assert found.at_start == {"a": first, "b": second}
    assert found.registry.base == properties / "adapters"
    assert home(model, model).at_start == {"b": second}
    assert home(tmp_path).registry.base == tmp_path / "adapters"  # not there yet


def test_one_name_in_two_places_is_refused(tmp_path: Path) -> None:
    for name in ("properties", "model"):
        write_adapter(tmp_path / name / "adapters" / "a")
    with pytest.raises(ConfigError, match="the adapter a exists in two directories"):
        home(tmp_path / "properties", tmp_path / "model")


def test_without_lora_they_are_only_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "adapters" / "not one").mkdir(parents=True)
    assert home(tmp_path, enable_lora="false").at_start == {}
    assert f"the adapters in {tmp_path / 'adapters'} are not loaded: echo: it was started without" in caplog.text


@pytest.mark.parametrize("value", ["0", "-1", "many", ""])
def test_a_number_of_adapters_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("SAGEMAKER_MAX_NUMBER_OF_ADAPTERS_IN_MEMORY", value)
    with pytest.raises(ConfigError, match=f"ADAPTERS_IN_MEMORY={value}: must be a whole number"):
        home(tmp_path)


def test_secure_mode_refuses_an_adapter_with_code_and_does_not_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_adapter(tmp_path / "a")
    (path / "model.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")

    async def run() -> None:
        async with service(tmp_path) as made:
            await asyncio.wait_for(made.availability.opened, 30)
            monkeypatch.setenv("SAGEMAKER_SECURE_MODE", "true")
            monkeypatch.setenv("SAGEMAKER_SECURITY_CONTROLS", "DISALLOW_CUSTOM_INFERENCE_SCRIPTS")
            with pytest.raises(AdapterFailed, match=r"model\.py: DISALLOW_CUSTOM_INFERENCE_SCRIPTS"):
                await made.adapters.register("a", str(path), preload=True)
            assert made.adapters.registry.find("a") is None

    asyncio.run(run())
    assert not (tmp_path / "ran").exists()
