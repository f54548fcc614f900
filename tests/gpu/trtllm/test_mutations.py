"""Faulty adapters, each with a mistake that TensorRT-LLM's API invites: the double must expose each of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from handler.config.config import Config
from handler.core.values import Finish
from handler.engines.base import EngineConfig
from handler.engines.trtllm import engine as trtllm
from handler.engines.trtllm import engine as trtllm_results
from handler.engines.trtllm.engine import TrtRequest
from tests.doubles import using
from tests.gpu.trtllm.cases import Loaded, joined, loaded


def load(model: Path) -> Loaded:
    return Loaded(EngineConfig(Config(max_rolling_batch_size=16), model=model))


def test_a_shared_sampling_params_shows(model: Path) -> None:
    with using.tensorrt_llm():
        found = load(model)
        try:
            kept: dict[str, Any] = {}
            make = found.engine._sampling_params
            found.engine._sampling_params = lambda **given: kept.setdefault("one", make(**given))
            found.one()
            with pytest.raises(SystemExit, match="a SamplingParams was used twice"):
                found.one()
        finally:
            found.engine.close()


def test_differences_instead_of_own_counts_show(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Differences(TrtRequest):
        def _ids(self, output: Any) -> Sequence[int]:
            return [*[-1] * self._sent, *output.token_ids_diff]

    with loaded(model, "pause=0") as found:
        wanted = found.one(max_new_tokens=60, ignore_eos=True).ids
        monkeypatch.setattr(trtllm, "TrtRequest", Differences)
        key = found.add(max_new_tokens=60, ignore_eos=True)
        time.sleep(0.3)  # the loop was busy elsewhere: several items lie there
        assert joined(found.run(key)[key]).ids != wanted


def test_a_forgotten_abort_shows(model: Path) -> None:
    with loaded(model) as found:
        gone = found.add(max_new_tokens=400, ignore_eos=True)
        found.engine.step()
        found.engine._requests.running.pop(gone)  # cancelled, and the engine not told
        assert found.one(max_new_tokens=3, ignore_eos=True).finish is Finish.LENGTH
        assert found.double.num_active == 1
        assert found.double.aborted == []


def test_a_failed_result_that_is_taken_up_again_shows(model: Path) -> None:
    with using.tensorrt_llm("assert_logprobs=3"):
        found, added = load(model), asyncio.Event()
        try:

            async def stubborn(running: TrtRequest) -> None:
                await added.wait()  # the first tokens may come while it is added
                for _ in range(3):
                    try:
                        async for _ in running.result:
                            found.engine._requests._notify(running)
                    except AssertionError:
                        continue

            found.engine._requests._follow = stubborn  # type: ignore[method-assign]
            found.add(ignore_eos=True)
            added.set()
            with pytest.raises(SystemExit, match="iterated again after it had raised"):
                any(found.engine.step() is None for _ in range(50))
        finally:
            found.engine.close()


def test_stop_ids_that_are_cut_and_not_put_back_show(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from handler.engines.trtllm import sampling as trtllm_sampling

    def cut(sampling: Any, loaded_model: Any) -> dict[str, Any]:
        found = trtllm_sampling.sampling_arguments(sampling, loaded_model)
        return {**found, "include_stop_str_in_output": False}

    with loaded(model) as found:
        whole = found.one(ignore_eos=True).ids
        wanted = whole[: whole.index(whole[3]) + 1]
        monkeypatch.setattr(trtllm, "sampling_arguments", cut)
        assert found.one(stop_token_ids=(whole[3],)).ids == wanted  # put back from stop_reason
        monkeypatch.setattr(trtllm_results.TrtRequest, "_ids", lambda self, output: output.token_ids)
        assert found.one(stop_token_ids=(whole[3],)).ids == wanted[:-1]
