"""The adapter on the double: however items are cut and requests end, and where it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from handler.config.config import Config
from handler.core.values import Finish
from handler.engines.base import EngineConfig
from handler.engines.trtllm import engine as trtllm
from handler.engines.trtllm.arguments import leave_mpi
from tests.doubles import using
from tests.gpu.trtllm.cases import joined, loaded


@pytest.mark.parametrize(
    "manners",
    ["burst=3", "burst=3;late_finish", "late_finish", "burst=7;pause=0", "version=1.3.0;burst=2", "late_abort=3"],
)
def test_no_token_is_lost_or_said_twice_however_items_are_cut(model: Path, manners: str) -> None:
    with loaded(model) as found:
        wanted = found.one(max_new_tokens=100)
        stops = found.one(max_new_tokens=100, stop_token_ids=(wanted.ids[5],))
    with loaded(model, manners) as found:
        keys = [found.add(max_new_tokens=100) for _ in range(3)]
        keys.append(found.add(max_new_tokens=100, stop_token_ids=(wanted.ids[5],)))
        answers = [joined(outputs) for outputs in found.run(*keys).values()]
        for answer in answers[:3]:
            assert (answer.ids, answer.logprobs, answer.finish) == (wanted.ids, wanted.logprobs, wanted.finish)
        assert (answers[3].ids, answers[3].finish) == (stops.ids, Finish.STOP)
        assert not any(sum(output.finish is not None for output in answer.outputs) != 1 for answer in answers)


def test_a_slow_reader_gets_all_that_lay_there_at_once(model: Path) -> None:
    import time

    with loaded(model, "pause=0") as found:
        wanted = found.one(max_new_tokens=60, ignore_eos=True)
        key = found.add(max_new_tokens=60, ignore_eos=True)
        time.sleep(0.3)
        answer = joined(found.run(key)[key])
        assert (answer.ids, answer.logprobs) == (wanted.ids, wanted.logprobs)
        assert len(answer.outputs) < 60


def test_a_late_abort_brings_nothing(model: Path) -> None:
    with loaded(model, "late_abort=20") as found:
        gone = found.add(max_new_tokens=400, ignore_eos=True)
        found.engine.step()
        found.engine.cancel(gone)
        kept = found.add(max_new_tokens=60, ignore_eos=True)
        found.run(kept)
        assert found.heard_of == set()
        assert found.double.num_active == 0


def test_a_request_that_the_engine_cancels_by_itself_is_an_error(model: Path) -> None:
    with loaded(model, "cancel_all=5") as found:
        answer = found.one(logprobs=False)
        assert (answer.finish, answer.error) == (Finish.ERROR, "the engine ended the request: cancelled")
        answer = found.one()
        assert (answer.finish, (answer.error or "")[:16]) == (Finish.ERROR, "logprobs length:")


def test_an_abort_whose_last_item_cannot_be_read_concerns_nobody(model: Path) -> None:
    """1.2 compares the numbers of tokens and log-probabilities also where a request was cancelled."""
    with loaded(model, "version=1.2.1") as found:
        gone = [found.add(max_new_tokens=400, ignore_eos=True) for _ in range(3)]
        kept = found.add(max_new_tokens=60, ignore_eos=True)
        found.engine.step()
        for key in gone:
            found.engine.cancel(key)
        answer = joined(found.run(kept)[kept])
        assert (answer.finish, answer.error) == (Finish.LENGTH, None)
        assert len(found.double.aborted) == 3, "each was aborted once"
        assert found.double.num_active == 0
        assert found.heard_of <= set(gone)
        left = found.add(max_new_tokens=400, ignore_eos=True)
        found.engine.step()
        assert left in found.engine._running
    assert not found.engine._tasks


def test_a_failure_in_reading_ends_its_request_and_aborts_it(model: Path) -> None:
    with loaded(model, "assert_logprobs=4") as found:
        answer = found.one(max_new_tokens=400, ignore_eos=True)
        assert answer.finish is Finish.ERROR
        assert "logprobs length" in (answer.error or "")
        assert len(answer.ids) <= 3
        found.one(max_new_tokens=3, ignore_eos=True)
        assert found.double.num_active == 0


# -- where it starts ---------------------------------------------------------------------------------------------


def test_mpi_is_left_but_for_what_is_said_of_networks() -> None:
    environ = {
        "OMPI_COMM_WORLD_SIZE": "4",
        "PMIX_RANK": "0",
        "PMI_SIZE": "4",
        "OMPI_MCA_btl_tcp_if_include": "lo",
        "HOME": "x",
    }
    leave_mpi(environ)
    assert environ == {"OMPI_MCA_btl_tcp_if_include": "lo", "HOME": "x"}
    launched = {"OMPI_COMM_WORLD_SIZE": "4", "TLLM_SPAWN_PROXY_PROCESS": "1"}
    leave_mpi(launched)
    assert len(launched) == 2
    alone = {"PMIX_MCA_gds": "hash", "OMPI_MCA_pml": "ob1"}
    leave_mpi(alone)
    assert len(alone) == 2


def test_it_starts_under_mpirun(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with loaded(model) as found:
        assert found.one().finish


@pytest.mark.parametrize(
    ("manners", "options", "message"),
    [
        ("init_fails", {}, "Executor worker died during initialization"),
        ("", {"tensor_parallel_degree": "2"}, "Only 1 GPUs are available, but 2 are required."),
        ("", {"engine_options": {"engine_args": {"no_such_thing": 1}}}, "LLM got invalid argument: no_such_thing"),
        ("", {"engine_options": {"engine_args": {"kv_cache_config": {"nope": 1}}}}, "nope"),
        ("", {"engine_options": {"engine_args": {"batching_type": "x"}}}, "batching_type"),
        ("die_after=1", {}, "the executor died"),
        ("stall_after=1", {"engine_options": {"inactivity_timeout": 0.3}}, "no request got anywhere for 0.3 s"),
    ],
)
def test_what_keeps_it_from_starting_is_said(model: Path, manners: str, options: dict[str, Any], message: str) -> None:
    with using.tensorrt_llm(manners), pytest.raises((ValueError, RuntimeError, TimeoutError), match=message):
        trtllm.load(EngineConfig(Config(**options), model))


def test_several_gpus(model: Path) -> None:
    with loaded(model, "gpus=4", tensor_parallel_degree="2", engine_options={"pipeline_parallel_size": 2}) as found:
        assert found.engine.info.device == "4 GPU"
