"""Our histogram is rendered as prometheus_client's own."""

from __future__ import annotations

import random

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from handler.serving.metrics.prometheus import Histogram

BOUNDS = (0.00015, 0.005, 0.5, 1, 60, 2560.0)


def test_it_is_rendered_as_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1700000000.5)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    labels = {"model_name": 'a "b"\n', "engine": "0"}
    mine = Histogram("vllm:time", "Times", BOUNDS, ours, labels)
    its = prometheus_client.Histogram("vllm:time", "Times", [*labels], buckets=BOUNDS, registry=theirs)
    rng = random.Random(0)
    for value in (0.0, *BOUNDS, *(rng.expovariate(1) for _ in range(200)), 1e9):
        mine.observe(value)
        its.labels(*labels.values()).observe(value)
    assert generate_latest(ours) == generate_latest(theirs)


def test_without_labels_and_values() -> None:
    registry = CollectorRegistry()
    Histogram("times", "Times", (1.0,), registry)
    text = generate_latest(registry).decode()
    assert 'times_bucket{le="+Inf"} 0.0\ntimes_count 0.0\ntimes_sum 0.0\n' in text


def test_a_value_counts_several_times() -> None:
    registry = CollectorRegistry()
    Histogram("times", "Times", (1.0, 2.0), registry).observe(1.5, 3)
    assert registry.get_sample_value("times_bucket", {"le": "1.0"}) == 0
    assert registry.get_sample_value("times_bucket", {"le": "2.0"}) == 3
    assert registry.get_sample_value("times_sum") == 4.5
