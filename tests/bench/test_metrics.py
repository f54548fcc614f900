"""Figures from results."""

from __future__ import annotations

import itertools
import statistics
from array import array

import pytest

from proof.bench.client import Closed, Open, Result, percentiles
from proof.bench.processes import Run
from proof.bench.report import Point, Repetition, show, summarize, tokens_per_second


def result(start: float, *arrivals: float, error: str = "") -> Result:
    return Result(start, array("d", arrivals), arrivals[-1] if arrivals else start, error)


def test_percentiles() -> None:
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None}
    assert percentiles([2.0, 1.0]) == pytest.approx({"p50": 1.5, "p90": 1.9, "p99": 1.99})
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0}
    assert percentiles([float(value) for value in range(101)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}


def test_a_rate_covers_all_from_the_first_start_to_the_last_end() -> None:
    assert tokens_per_second([result(1.0, 1.5, 2.0), result(1.0, 2.0, 3.0)]) == pytest.approx(2.0)


def test_summary_has_times_in_milliseconds_errors_by_kind_and_the_median_of_ratios() -> None:
    good = [result(0.0, 0.1, 0.2, 0.4)]
    bad = [*good, result(0.0, error="status 503"), result(0.0, error="status 503")]
    engines = [Run(3, 0.2), Run(3, 0.4), Run(3, 0.8)]
    point = Point(Closed(1), [Repetition(bad if engine is engines[0] else good, engine) for engine in engines])
    value = summarize(point)
    assert value["ttft_ms"]["p50"] == pytest.approx(100)
    assert value["itl_ms"]["p50"] == pytest.approx(150)
    assert value["errors"] == {"status 503": 2}
    assert value["served_over_engine"] == pytest.approx(statistics.median([0.5, 1.0, 2.0]))
    shown = show([point], [value])
    assert "2 status 503" in shown
    assert "1 client " in shown


def test_open_loop_keeps_its_rate() -> None:
    assert Open(rate=4, seconds=1, poisson=False).due() == [0.25, 0.5, 0.75, 1.0]
    due = Open(rate=100, seconds=50).due()
    assert len(due) == pytest.approx(5000, rel=0.05)
    assert due == Open(rate=100, seconds=50).due()
    assert statistics.pstdev(b - a for a, b in itertools.pairwise(due)) == pytest.approx(0.01, rel=0.1)
