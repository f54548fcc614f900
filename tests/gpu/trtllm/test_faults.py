"""TensorRT-LLM's processes: dying, falling silent, and none left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from handler.config.config import Config
from handler.core.errors import GenerationFailed
from handler.core.values import Finish, Sampling
from handler.engines.base import EngineConfig, EngineRequest
from handler.engines.process.supervisor import EngineSupervisor
from handler.engines.trtllm.arguments import environment
from handler.engines.trtllm.engine import TrtRequest, _Activity, _Requests
from tests.gpu.trtllm.cases import served
from tests.process_tree import in_session

# -- faults ------------------------------------------------------------------------------------------------------------
# TensorRT-LLM in a process of its own, dying and falling silent: those in flight are told, the next are served.


@pytest.mark.parametrize(
    ("manners", "options", "reason"),
    [
        pytest.param("die_after=60", {}, "the executor died", marks=pytest.mark.nightly),
        ("die_after=60;death=cpp", {}, "the executor died"),
        ("version=1.3.0;die_after=60", {}, "Engine has died: the executor died"),
        pytest.param(
            "stall_after=60",
            {"inactivity_timeout": 1.0},
            "no request made progress for 1 s",
            marks=pytest.mark.nightly,
        ),
        (
            "stall_after=60;stall_error=NCCL timed out in /opt/a.cpp",
            {"inactivity_timeout": 1.0},
            "engine failure: NCCL timed out in [path]; no request made progress for 1 s",
        ),
        ("exit_after=60", {}, "it exited with code 134"),
    ],
)
def test_those_in_flight_are_told_and_the_next_are_served(
    model: Path, manners: str, options: dict[str, Any], reason: str
) -> None:
    with served(model, manners, **options) as found:
        first = found.engine.pid
        lost = [found.submit(max_new_tokens=200, ignore_eos=True) for _ in range(3)]
        deltas = found.run()
        for id in lost:
            error = deltas[id][-1].error
            assert isinstance(error, GenerationFailed)
            assert reason in str(error)
        again = found.submit(max_new_tokens=5, ignore_eos=True)
        assert found.run()[again][-1].finish is Finish.LENGTH
        assert found.engine.pid != first
        assert found.engine.restarts == 1


def test_a_stall_is_noticed_though_empty_steps_come(model: Path) -> None:
    """They count as signs of life to the host, whose own patience is shorter here."""
    with served(model, "stall_after=60", timeout=0.5, inactivity_timeout=1.5) as found:
        id = found.submit(max_new_tokens=200, ignore_eos=True)
        began = time.monotonic()
        error = found.run()[id][-1].error
        assert 1.2 < time.monotonic() - began < 6
        assert "option.inactivity_timeout" in str(error)


def test_a_pause_between_requests_is_no_stall(model: Path) -> None:
    with served(model, "", inactivity_timeout=0.3) as found:
        for _ in range(2):
            id = found.submit(max_new_tokens=5, ignore_eos=True)
            assert found.run()[id][-1].finish is Finish.LENGTH
            time.sleep(0.5)
        assert found.engine.restarts == 0


def test_slow_tokens_are_no_stall(model: Path) -> None:
    with served(model, "pause=0.2", inactivity_timeout=0.6) as found:
        id = found.submit(max_new_tokens=8, ignore_eos=True)
        assert found.run()[id][-1].finish is Finish.LENGTH


@pytest.mark.parametrize("asked", [{}, {"return_context_logits": True}])
def test_an_answer_that_comes_whole_is_no_stall(model: Path, asked: dict[str, Any]) -> None:
    """It brings nothing before its end, which is later than the patience with others."""
    with served(model, "version=1.3.0;pause=0.1", inactivity_timeout=0.7, gather_generation_logits=True) as found:
        id = found.submit(max_new_tokens=20, ignore_eos=True, return_generation_logits=True, **asked)
        began = time.monotonic()
        assert found.run()[id][-1].finish is Finish.LENGTH
        assert time.monotonic() - began > 1.4
        assert found.engine.restarts == 0


def test_a_stall_beside_a_whole_answer_is_noticed(model: Path) -> None:
    options = {"inactivity_timeout": 0.7, "gather_generation_logits": True}
    with served(model, "version=1.3.0;stall_after=60", **options) as found:
        found.submit(max_new_tokens=400, ignore_eos=True, return_generation_logits=True)
        id = found.submit(max_new_tokens=400, ignore_eos=True)
        assert "option.inactivity_timeout" in str(found.run()[id][-1].error)


def test_what_has_not_begun_may_wait_behind_a_whole_answer() -> None:
    requests = _Requests(RuntimeError)
    activity = _Activity(None, requests, timeout=1.0)
    plain, begun = (TrtRequest(EngineRequest(key, [5], Sampling())) for key in (1, 3))
    whole = TrtRequest(EngineRequest(2, [5], Sampling(num_beams=2)))
    begun._sent = 1
    for running, expects in (([], False), ([plain], True), ([whole], False), ([plain, whole], False),
                             ([begun, whole], True)):  # fmt: skip
        requests.running = {one.key: one for one in running}
        assert activity._expects_results() == expects, running
    requests.close()


def test_a_first_load_that_fails_is_said(model: Path) -> None:
    with (
        pytest.raises(GenerationFailed, match="Executor worker died during initialization"),
        served(model, "init_fails"),
    ):
        pass


def test_a_death_with_nobody_there_costs_only_the_next(model: Path) -> None:
    with served(model, "die_after=40") as found:
        first = found.submit(max_new_tokens=37, ignore_eos=True)
        assert found.run()[first][-1].finish is Finish.LENGTH
        lost = found.submit(max_new_tokens=5, ignore_eos=True)
        assert found.run()[lost][-1].error is not None
        after = found.submit(max_new_tokens=5, ignore_eos=True)
        assert found.run()[after][-1].finish is Finish.LENGTH


def test_shutting_down_is_the_engines_end_and_no_refusal(model: Path) -> None:
    """What a request that comes after the death meets is not its own fault."""
    from tests.gpu.trtllm.cases import loaded

    with loaded(model) as found:
        found.double.shutdown()
        found.add()
        with pytest.raises(RuntimeError, match="LLM is shutting down"):
            found.engine.step()


# -- the processes that TensorRT-LLM starts: none outlives the engine, and none dies unnoticed -------------------------


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
    assert "the engine's process mpi4py (pid " in said
    assert said.count("the engine's process") == 1, "its orderly close is no death"


def test_open_mpi_5_starts_as_root_and_nothing_is_told_of_the_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(user: int, **options: object) -> dict[str, str]:
        monkeypatch.setattr(os, "geteuid", lambda: user)
        return environment(EngineConfig(Config(engine_options=options)))

    root = {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert of(0, usage_stats=True) == root
    assert of(1000) == {"TRTLLM_NO_USAGE_STATS": "1"}
    assert of(0) == {**root, "TRTLLM_NO_USAGE_STATS": "1"}
    assert of(1000, usage_stats=True) == {}
