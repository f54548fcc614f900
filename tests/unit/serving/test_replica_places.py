"""What each replica gets: devices in its environment, and cores; and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from handler.config.config import Config
from handler.config.loader import read_config
from handler.core.errors import ConfigError
from handler.engines.base import EngineConfig
from handler.engines.process.engine_process import Spec
from handler.engines.process.supervisor import EngineSupervisor, Place, State, on_cores, on_devices
from handler.engines.vllm.arguments import engine_arguments
from handler.serving.engine import check_replicas, replica_places
from tests.one_test import in_one_test

FOUR = ["0", "1", "2", "3"]


def config(*options: str, engine: str = "vllm") -> Config:
    return read_config(overrides=[f"option.{one}" for one in (f"llm_engine={engine}", *options)], environ={}).checked()


@in_one_test(
    ("options", "devices", "wanted"),
    [
        (["replicas=auto"], FOUR, ["0", "1", "2", "3"]),
        (["replicas=2"], FOUR, ["0", "1"]),
        (["replicas=auto", "tensor_parallel_degree=2"], FOUR, ["0,1", "2,3"]),
        (["replicas=auto", "tensor_parallel_degree=2", "pipeline_parallel_degree=2"], FOUR, [None]),
        (["replicas=auto", "prefill_context_parallel_size=2"], FOUR, ["0,1", "2,3"]),
        (["replicas=2", "tensor_parallel_degree=2", "decode_context_parallel_size=2"], FOUR, ["0,1", "2,3"]),
        (["replicas=auto", 'engine_args={"tensor_parallel_size": 2}'], FOUR, ["0,1", "2,3"]),
        (["replicas=auto", "tensor_parallel_degree=max"], FOUR, [None]),
        (
            ["replicas=3", "prefill_context_parallel_size=2"],
            FOUR,
            "with option.tensor_parallel_degree=1 and 2 parts of the context it needs 6 GPUs; there are 4",
        ),
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


@in_one_test(
    ("cores", "count", "wanted"),
    [([0, 1], 2, [[0], [1]]), ([3, 1, 2, 0], 2, [[0, 1], [2, 3]]), ([0, 1, 2], 2, [[0], [1, 2]]),
     ([0, 1], 4, [[0], [0], [1], [1]]), ([5], 2, [[5], [5]])],
)  # fmt: skip
def test_cores_are_divided(cores: list[int], count: int, wanted: list[list[int]]) -> None:
    assert sorted(sorted(place.cores) for place in on_cores(cores, count)) == wanted


def test_devices_are_divided_by_their_own_names() -> None:
    environs = [place.environ for place in on_devices(["2", "GPU-a", "5", "7"], 2)]
    assert environs == [{"CUDA_VISIBLE_DEVICES": "2,GPU-a"}, {"CUDA_VISIBLE_DEVICES": "5,7"}]


@pytest.mark.parametrize(("cores", "wanted"), [([0, 1, 2, 3], [{0, 1}, {2, 3}]), ([], [set(), set()])])
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


@pytest.mark.parametrize("replicas", ["auto", "2"])
def test_several_servers_by_url_are_no_replicas(replicas: str) -> None:
    with pytest.raises(ConfigError, match=rf"option\.replicas={replicas}: .*option\.base_url"):
        check_replicas(config(f"replicas={replicas}", "base_url=http://a/v1", engine="openai"))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["context_parallel_size=2"], ["0,1", "2,3"]),
        (["context_parallel_size=2", "pipeline_parallel_size=2"], [None]),
        (["tensor_parallel_degree=2", "moe_expert_parallel_size=2"], ["0,1", "2,3"]),
    ],
)
def test_parts_of_the_context_are_gpus_of_an_engine(options: list[str], wanted: list[str | None]) -> None:
    found = replica_places(config("replicas=auto", *options, engine="trtllm"), FOUR, [])
    assert [place.environ.get("CUDA_VISIBLE_DEVICES") for place in found] == wanted


def test_max_leaves_gpus_for_stages_and_parts_of_the_context() -> None:
    for options in ({"pipeline_parallel_size": 2}, {"prefill_context_parallel_size": 2}):
        arguments = engine_arguments(
            EngineConfig(Config(tensor_parallel_degree="max", engine_options=options)), 4, cpu=False
        )
        assert arguments["tensor_parallel_size"] == 2
