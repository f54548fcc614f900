"""Documents as `lmi bench` and `lmi deploy bench` print them, with figures that follow from the load."""

from __future__ import annotations

from typing import Any


def level(load: float, scale: float = 1.0, **more: Any) -> dict[str, Any]:
    """Throughput is `scale` times 100 tokens/s a unit of load; times grow by 1 ms a unit of load."""
    rate = 100.0 * scale * load
    times = {"p50": 10.0 + load, "p90": 20.0 + load, "p99": 40.0 + load}
    return {
        "tokens_per_second": rate,
        "ttft_ms": times,
        "itl_ms": {name: value / 10 for name, value in times.items()},
        "latency_ms": {name: value * 100 for name, value in times.items()},
        "errors": {},
        **more,
    }


def served(*loads: float, scale: float = 1.0, kind: str = "clients", **plan: Any) -> dict[str, Any]:
    """What `lmi bench` prints, of three repetitions each within 10 % of the median."""
    results = []
    for load in loads:
        value = {kind: load, **level(load, scale)}
        rate = value["tokens_per_second"]
        value |= {"tokens_per_second_each": [0.9 * rate, rate, 1.1 * rate], "engine_tokens_per_second": 1.2 * rate}
        results.append(value)
    asked = {"url": None, "engine": "vllm", "model": "/models/tiny", "tokens": 128, "prompt_words": 48, "quiet": 0.2}
    return {
        "plan": {**asked, "options": [], "repeat": 3, **plan},
        "results": results,
        "date": "2026-11-22T11:28:58+00:00",
        "machine": {"cpu": "AMD EPYC", "cores": 2, "memory_gb": 25},
        "python": "3.11.7",
        "versions": {"lmi-handler": "0.1.0", "vllm": "0.20.0"},
        "commit": "efc9431",
    }


def endpoint(*levels: dict[str, Any]) -> dict[str, Any]:
    """What `lmi deploy bench` prints."""
    return {"endpoint": "prod", "route": "invocations", "words": 100, "max_tokens": 64, "levels": list(levels)}


NOTHING: dict[str, Any] = {name: dict.fromkeys(("p50", "p90", "p99")) for name in ("ttft_ms", "itl_ms", "latency_ms")}
"""The times of a level without an answer."""
