"""vLLM's statistics of each step, summed up, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from handler.engines.base import EngineStatistics
from handler.engines.vllm.results import Statistics


def stats(waiting: int, usage: float, queries: int, hits: int, **more: Any) -> Any:
    cache = SimpleNamespace(queries=queries, hits=hits)
    return SimpleNamespace(num_waiting_reqs=waiting, kv_cache_usage=usage, prefix_cache_stats=cache, **more)


def test_lookups_add_up_and_the_state_is_the_last_steps() -> None:
    statistics = Statistics()
    assert statistics.report(idle=True) == EngineStatistics()  # disable_log_stats
    statistics.add(stats(3, 0.5, 10, 4))
    statistics.add(stats(1, 0.25, 0, 0))
    statistics.add(stats(1, 0.75, 6, 6, num_skipped_waiting_reqs=2))
    assert statistics.report(idle=False) == EngineStatistics(3, 0.75, 16, 10, 0)


def test_an_engine_without_requests_uses_nothing_even_if_its_last_step_does_not_say_so() -> None:
    statistics = Statistics()
    statistics.add(stats(1, 0.5, 10, 4))
    assert statistics.report(idle=True, num_preemptions=2) == EngineStatistics(0, 0.0, 10, 4, 2)
