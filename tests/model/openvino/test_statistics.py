"""The usage of OpenVINO's KV cache, where it has a size."""

from __future__ import annotations

import pytest

from handler.config.config import Config
from handler.core.values import Sampling
from handler.engines.base import EngineConfig, EngineRequest, EngineStatistics
from handler.engines.openvino.engine import OpenVino, prepare

pytestmark = pytest.mark.model


@pytest.mark.parametrize("gib", [0, 1])
def test_a_cache_with_a_size_is_used_while_a_request_runs(gib: int) -> None:
    engine = OpenVino(EngineConfig(Config(kv_cache_gib=gib), model=prepare("demo", EngineConfig())))
    idle = EngineStatistics(kv_cache_usage=0.0) if gib else EngineStatistics()
    assert engine.statistics() == idle
    engine.add(EngineRequest(1, list(range(100, 200)), Sampling(max_new_tokens=4, ignore_eos=True)))
    engine.step()
    usage = engine.statistics().kv_cache_usage
    assert usage is None if not gib else 0 < (usage or 0) < 0.1
    while not engine.step().others:
        pass
    assert engine.statistics() == idle
    engine.close()
