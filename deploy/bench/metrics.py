"""Metrics of a load level, and advice on scaling."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handler.bench.load import Result, percentiles

HEADROOM = 0.7
"""Fraction of the knee: scaling out takes minutes, in which load grows further."""

_STILL_RISING = 1.15  # ratio of throughput to that of the level before


def summary(load: Mapping[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    """Return the metrics of one level. Times in milliseconds, of answers without errors; rates over its whole time."""
    good = [result for result in results if not result.error]
    seconds = max(result.end for result in results) - min(result.start for result in results)
    gaps = [later - earlier for result in good for earlier, later in itertools.pairwise(result.arrivals)]
    return {
        **load,
        "requests": len(results),
        "errors": dict(Counter(result.error for result in results if result.error)),
        "requests_per_second": round(len(good) / seconds, 3),
        "tokens_per_second": round(sum(result.num_tokens for result in good) / seconds, 1),
        "ttft_ms": _milliseconds([result.arrivals[0] - result.start for result in good]),
        "itl_ms": _milliseconds(gaps),
        "latency_ms": _milliseconds([result.end - result.start for result in good]),
        "mean_latency_ms": round(1000 * statistics.fmean(r.end - r.start for r in good), 2) if good else None,
    }


def _milliseconds(seconds: Sequence[float]) -> dict[str, float | None]:
    values = percentiles([1000 * value for value in seconds])
    return {name: None if value is None else round(value, 2) for name, value in values.items()}


@dataclass(frozen=True)
class Advice:
    """Advice on scaling.

    Attributes:
        knee: concurrent requests; None: unknown.
        concurrency: value for scaling.concurrency; None: unknown.
        text: a sentence for people.
    """

    knee: float | None
    concurrency: float | None
    text: str


def advice(levels: Sequence[Mapping[str, Any]]) -> Advice:
    """Find the load at which latency begins to grow.

    Closed systems have two bounds. Below the knee an answer takes as long as alone; beyond it throughput is at its
    maximum and only waiting grows. Both meet at (maximum throughput) x (latency alone). The latency of the lowest level
    is taken for that alone.

    Args:
        levels: `summary`s of closed loops, by rising `clients`.
    """
    good = [level for level in levels if not level["errors"] and level["mean_latency_ms"]]
    if len(good) < 2:
        return Advice(None, None, "No advice on scaling.concurrency: it needs two levels without errors.")
    first = good[0]
    most = max(level["requests_per_second"] for level in good)
    knee = min(most * first["mean_latency_ms"] / 1000, float(good[-1]["clients"]))
    knee = max(knee, 1.0)
    concurrency = round(max(HEADROOM * knee, 1.0), 1)
    text = f"The knee is at about {knee:.1f} requests at once, so scaling.concurrency: {concurrency:g}."
    last, before = (level["requests_per_second"] for level in reversed(good[-2:]))
    if last > _STILL_RISING * before:
        text += " Throughput still rose at the last level: measure more clients, it may bear more."
    return Advice(round(knee, 1), concurrency, text)


def rows(levels: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the table for people: a head, and a row a level."""
    head = ["load", "requests", "errors", "req/s", "tok/s", "TTFT p50", "p90", "p99 ms", "ITL p50", "p99 ms",
            "latency p50", "p99 ms"]  # fmt: skip
    table = [head]
    for level in levels:
        load = f"{level['clients']} at once" if "clients" in level else f"{level['rate']:g}/s"
        errors = ", ".join(f"{count} {kind}" for kind, count in level["errors"].items()) or "0"
        cells = [level["ttft_ms"][p] for p in ("p50", "p90", "p99")]
        cells += [level[name][p] for name in ("itl_ms", "latency_ms") for p in ("p50", "p99")]
        rates = [f"{level['requests_per_second']:.2f}", f"{level['tokens_per_second']:.1f}"]
        table.append([load, str(level["requests"]), errors, *rates, *("-" if c is None else f"{c:.1f}" for c in cells)])
    return table
