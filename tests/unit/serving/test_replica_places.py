"""What each replica gets: devices in its environment, cores, options of its own; and what is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from handler.config.loader import Config, read_config
from handler.core.errors import ConfigError
from handler.engines import echo
from handler.engines.base import EngineConfig
from handler.engines.process.engine_loop import Spec
from handler.engines.process.places import Place
from handler.engines.process.replicas import ReplicaSet
from handler.engines.process.supervisor import EngineSupervisor, State
from handler.serving.replicas import check_replicas, replica_places, start_engine

FOUR = ["0", "1", "2", "3"]


def config(*options: str, engine: str = "vllm") -> Config:
    return read_config(overrides=[f"option.{one}" for one in (f"llm_engine={engine}", *options)], environ={}).checked()


@pytest.mark.parametrize(
    ("options", "devices", "wanted"),
    [
        (["replicas=auto"], FOUR, ["0", "1", "2", "3"]),
        (["replicas=2"], FOUR, ["0", "1"]),
        (["replicas=auto", "tensor_parallel_degree=2"], FOUR, ["0,1", "2,3"]),
        (["replicas=auto", "tensor_parallel_degree=2", "pipeline_parallel_degree=2"], FOUR, [None]),
        (["replicas=auto", "tensor_parallel_degree=max"], FOUR, [None]),
        (["replicas=2", "tensor_parallel_degree=max"], FOUR, ["0,1", "2,3"]),
        (["replicas=auto", "tensor_parallel_degree=3"], FOUR, [None]),
        (["replicas=auto"], ["GPU-a", "GPU-b"], ["GPU-a", "GPU-b"]),
        (["replicas=auto"], [], [None]),
        (["replicas=5"], FOUR, "option.replicas=5: with option.tensor_parallel_degree=1 it needs 5 GPUs; there are 4"),
        (
            ["replicas=2", "tensor_parallel_degree=2", "pipeline_parallel_degree=2"],
            FOUR,
            "with option.tensor_parallel_degree=2 and 2 stages it needs 8 GPUs; there are 4",
        ),
        (["replicas=2", "engine_isolation=thread"], FOUR, "replicas are processes, but option.engine_isolation=thread"),
    ],
)
def test_devices(options: list[str], devices: list[str], wanted: Any) -> None:
    def places() -> list[str | None]:
        check_replicas(config(*options))
        found = replica_places(config(*options), devices, [0, 1])
        return [place.environ.get("CUDA_VISIBLE_DEVICES") for place in found]

    if isinstance(wanted, str):
        with pytest.raises(ConfigError) as error:
            places()
        assert wanted in str(error.value)
    else:
        assert places() == wanted


@pytest.mark.parametrize(
    ("cores", "wanted"), [([0, 1, 2, 3], [{0, 1}, {2, 3}]), ([4], [{4}, {4}]), ([], [set(), set()])]
)
def test_without_devices_the_cores_are_divided(cores: list[int], wanted: list[set[int]]) -> None:
    assert [place.cores for place in replica_places(config("replicas=2", engine="openvino"), [], cores)] == wanted


def test_the_engines_process_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    core = max(os.sched_getaffinity(0))
    engine = EngineSupervisor(
        Spec("echo", EngineConfig()), place=Place({"CUDA_VISIBLE_DEVICES": "2,3"}, frozenset({core}))
    )
    try:
        while engine.state is State.LOADING:
            engine.step(timeout=1)
        environ = Path(f"/proc/{engine.pid}/environ").read_bytes().split(b"\0")
        assert [one for one in environ if one.startswith(b"CUDA")] == [b"CUDA_VISIBLE_DEVICES=2,3"]
        threads = Path(f"/proc/{engine.pid}/task").iterdir()
        assert {frozenset(os.sched_getaffinity(int(thread.name))) for thread in threads} == {frozenset({core})}
    finally:
        engine.close()


def options_of(*urls: str) -> Any:
    def replica_options(config: EngineConfig) -> list[Mapping[str, Any]]:
        return [{"echo_tokens_per_second": url} for url in urls]

    return replica_options


@pytest.mark.parametrize("replicas", [(), ("replicas=auto",), ("replicas=2",)])
def test_an_engine_may_have_replicas_of_its_own(monkeypatch: pytest.MonkeyPatch, replicas: tuple[str, ...]) -> None:
    monkeypatch.setattr(echo, "replica_options", options_of("10", "20"), raising=False)
    seen: list[Any] = []
    monkeypatch.setattr(echo, "Echo", lambda config: seen.append(config.options) or _Silent(config))
    spec = Spec("echo", EngineConfig(options={"echo_cues": True}))
    engine = start_engine(config(*replicas, engine="echo"), spec)
    try:
        assert isinstance(engine, ReplicaSet)
        while engine.state is State.LOADING:
            engine.step(timeout=1)
        assert sorted(options["echo_tokens_per_second"] for options in seen) == ["10", "20"]
        assert all(options["echo_cues"] for options in seen)
    finally:
        engine.close()


class _Silent(echo.Echo):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(EngineConfig())


def test_an_engines_own_number_is_not_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echo, "replica_options", options_of("10", "20"), raising=False)
    with pytest.raises(ConfigError, match=r"option\.replicas=3: the engine echo has 2 by its own options"):
        start_engine(config("replicas=3", engine="echo"), Spec("echo", EngineConfig()))
    monkeypatch.setattr(echo, "replica_options", options_of("10"), raising=False)
    engine = start_engine(config(engine="echo"), Spec("echo", EngineConfig()))
    assert isinstance(engine, EngineSupervisor)
    engine.close()
