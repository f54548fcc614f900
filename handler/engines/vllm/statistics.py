"""Sums up the statistics that vLLM's scheduler sends with each step (SchedulerStats in vllm/v1/metrics/stats.py)."""

from __future__ import annotations

from typing import Any

from handler.engines.base import EngineStatistics


class Statistics:
    """Those of vLLM 0.20 to 0.33; without any while `disable_log_stats` is true."""

    def __init__(self) -> None:
        self._last: Any = None
        self._queries = 0
        self._hits = 0

    def add(self, stats: Any) -> None:
        """Take a step's: the scheduler's present state, and the prefix cache's lookups since the step before."""
        self._last = stats
        cache = stats.prefix_cache_stats
        if cache is not None and cache.queries:
            self._queries += cache.queries
            self._hits += cache.hits

    def report(self, *, idle: bool, num_preemptions: int = 0) -> EngineStatistics:
        """Return the present ones.

        Args:
            idle: it has no requests: no step says so after the last one was cancelled.
            num_preemptions: so far.
        """
        last = self._last
        if last is None:
            return EngineStatistics()
        waiting = (
            0 if idle else last.num_waiting_reqs + getattr(last, "num_skipped_waiting_reqs", 0)
        )  # not in each of them
        usage = 0.0 if idle else last.kv_cache_usage
        return EngineStatistics(waiting, usage, self._queries, self._hits, num_preemptions)
