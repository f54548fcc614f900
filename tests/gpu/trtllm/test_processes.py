"""The processes that TensorRT-LLM starts: none outlives the engine, and none dies unnoticed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from handler.config.config import Config
from handler.core.errors import GenerationFailed
from handler.core.values import Finish
from handler.engines.base import EngineConfig
from handler.engines.process.supervisor import EngineSupervisor
from handler.engines.trtllm.arguments import environment
from tests.gpu.trtllm.served import served
from tests.process_tree import in_session


def workers(engine: EngineSupervisor) -> list[int]:
    """MPI's, of which the double starts one."""
    assert engine.pid is not None
    found = [pid for pid, command in in_session(engine.pid).items() if command.endswith("-m mpi4py.futures.server")]
    return [pid for pid in found if os.getpgid(pid) != engine.pid]  # Open MPI 5 gives it a group of its own


def wait_for_nobody(session: int) -> None:
    deadline = time.monotonic() + 20
    while there := in_session(session):
        assert time.monotonic() < deadline, f"they hold the GPU's memory: {there}"
        time.sleep(0.05)


def test_what_a_killed_engine_started_goes_with_it_and_nothing_else(model: Path) -> None:
    with served(model, "worker") as found, served(model, "worker") as other:
        pid = found.engine.pid
        assert pid is not None
        assert len(workers(found.engine)) == 1
        os.kill(pid, signal.SIGKILL)
        wait_for_nobody(pid)
        assert len(workers(other.engine)) == 1
        id = other.submit(max_new_tokens=5, ignore_eos=True)
        assert other.run()[id][-1].finish is Finish.LENGTH


def test_a_dead_worker_is_the_engines_end(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Open MPI 4 tells nobody; without a watch only the silence would be noticed, after a minute."""
    with served(model, "worker;silent_mpi") as found:
        first = found.engine.pid
        lost = found.submit(max_new_tokens=400, ignore_eos=True)
        while not found.batcher.step(timeout=0.5):
            pass
        os.kill(workers(found.engine)[0], signal.SIGKILL)
        began = time.monotonic()
        error = found.run()[lost][-1].error
        assert isinstance(error, GenerationFailed)
        assert "it exited with code 1" in str(error)
        assert time.monotonic() - began < 20, "the silence was noticed, not the death"
        again = found.submit(max_new_tokens=5, ignore_eos=True)
        assert found.run(60)[again][-1].finish is Finish.LENGTH
        second = found.engine.pid
        assert second is not None
        assert second != first
    wait_for_nobody(second)
    said = capfd.readouterr().err
    assert "the engine's own process mpi4py (pid " in said
    assert said.count("the engine's own process") == 1, "its orderly close is no death"


def test_open_mpi_5_starts_as_root_and_nothing_is_told_of_the_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(user: int, **options: object) -> dict[str, str]:
        monkeypatch.setattr(os, "geteuid", lambda: user)
        return environment(EngineConfig(Config(engine_options=options)))

    root = {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert of(0, usage_stats=True) == root
    assert of(1000) == {"TRTLLM_NO_USAGE_STATS": "1"}
    assert of(0) == {**root, "TRTLLM_NO_USAGE_STATS": "1"}
    assert of(1000, usage_stats=True) == {}
