"""Metrics in CloudWatch's embedded metric format: lines of JSON alone, by its specification."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from handler.serving.metrics.cloudwatch import document, reporting, samples
from handler.serving.metrics.prometheus import Gauges, Metrics
from tests.app.server import serve
from tests.app.serving.test_metrics import ASK
from tests.one_test import in_one_test
from tests.servers import wait_for

UNITS = {"Count", "Percent", "Seconds", "None"}


def check(line: str) -> dict[str, Any]:
    """A line's values; each metric is named once, has a unit, and a number at the root."""
    whole: dict[str, Any] = json.loads(line)
    (directive,) = whole["_aws"]["CloudWatchMetrics"]
    assert directive["Namespace"] == "LMI"
    assert directive["Dimensions"] == [["ModelName"]]
    assert isinstance(whole["_aws"]["Timestamp"], int)
    names = [metric["Name"] for metric in directive["Metrics"]]
    assert {metric["Unit"] for metric in directive["Metrics"]} <= UNITS
    assert set(whole) == {"_aws", "ModelName", *names}
    assert len(set(names)) == len(names) <= 100
    assert all(isinstance(whole[name], int | float) for name in names)
    return whole


def metrics() -> Metrics:
    return Metrics("m", Gauges(lambda: 2, lambda: 1, lambda: 7, lambda: 0, lambda: None, tuple))


def test_an_interval_has_the_growth_of_counters_and_the_means_of_its_requests() -> None:
    made = metrics()
    made.count_first(8.0)
    made.count("ok", seconds=9.0, first=8.0, num_prompt_tokens=1, num_tokens=2, num_sequences=1)
    before = samples(made.registry)
    assert "TimeToFirstToken" not in check(json.dumps(document("m", before, before, 1.5)))
    for first in (0.1, 0.3):
        made.count_first(first)
        made.count("ok", seconds=first + 1, first=first, num_prompt_tokens=4, num_tokens=11, num_sequences=1)
    found = check(json.dumps(document("m", before, samples(made.registry), 1.5)))
    assert found["_aws"]["Timestamp"] == 1500
    assert found["ModelName"] == "m"
    counts = [found[name] for name in ("RequestsOk", "RequestsFailed", "PromptTokens", "GeneratedTokens")]
    assert counts == [2, 0, 8, 0]
    assert (found["QueuedRequests"], found["RunningRequests"]) == (2, 1)
    assert found["TimeToFirstToken"] == pytest.approx(0.2)
    assert found["InterTokenLatency"] == pytest.approx(0.1)
    assert "KVCacheUsage" not in found


@in_one_test("name", ["modèle", "模型", "a\nb", "\x1b[31m", "x" * 2000])
def test_a_dimension_is_one_that_cloudwatch_takes(name: str) -> None:
    made = samples(metrics().registry)
    value = check(json.dumps(document(name, made, made, 1.5)))["ModelName"]
    assert value.isascii()
    assert value.isprintable()
    assert 1 <= len(value) <= 1024


def test_an_engine_that_was_started_again_counts_from_nothing() -> None:
    own = samples(metrics().registry)
    before, now = ({**own, "vllm:prefix_cache_hits_total": value} for value in (9.0, 2.0))
    assert document("m", before, now, 0)["PrefixCacheHits"] == 2


def test_the_last_interval_is_written_at_the_end_and_none_without_the_option() -> None:
    stream = io.StringIO()
    with reporting(metrics().registry, "m", 3600, stream):
        pass
    check(stream.getvalue())
    with reporting(CollectorRegistry(), "m", 0, stream=None):
        pass


def test_a_server_writes_its_metrics_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    written = ""

    def tokens() -> float:
        nonlocal written
        written += capsys.readouterr().out
        return math.fsum(check(line)["GeneratedTokens"] for line in written.splitlines())

    with serve("--engine", "echo", "-o", "option.cloudwatch_metrics_interval=0.1") as server:
        assert server.post(ASK).status_code == 200
        wait_for(lambda: tokens() == 5, 5, "no line has the tokens")
