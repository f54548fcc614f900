"""What DJL Serving itself makes of a request: the id in its answer, and the figures in its metrics."""

from __future__ import annotations

import os
import re

import pytest

from tests.djl import jars
from tests.djl.servers import DjlServer, djl, newer, versions
from tests.servers import http, wait_for

pytestmark = pytest.mark.djl

ECHO = {"option.entryPoint": "handler.entry", "option.llm_engine": "echo"}
ROLLING = {**ECHO, "option.rolling_batch": "auto"}
ASYNC = {**ECHO, "option.async_mode": "true", "option.rolling_batch": "disable"}
BODY = {"inputs": "a b c", "parameters": {"max_new_tokens": 2}}


METRICS = {"option.djl_metrics": "true", "option.model_name": "mine"}
PROMETHEUS = {"SERVING_PROMETHEUS": "true"}
FIGURES = [
    r"LmiPromptTokens(_total)?{Model=.mine.} 3\.0",
    r"LmiGeneratedTokens(_total)?{Model=.mine.} 2\.0",
    r"LmiTimeToFirstTokenSeconds(_count)?{Model=.mine.} \d",  # 0.28 has gauges
    r"LmiEngineQueueTimeSeconds(_count)?{Model=.mine.} \d",
]


def shown(server: DjlServer, version: str) -> str:
    """The metrics of the worker: DJL Serving's Prometheus text, else what DJL's own reader makes of its lines."""
    if "DJL_SERVING_HOME" in os.environ:
        return http.get(server.url + "/server/metrics").text
    return jars.run(version, "Metrics", "\n".join(re.findall(r"\[INFO\] (Lmi.*)", server.log)))


def check_figures(server: DjlServer, version: str) -> None:
    wait_for(lambda: all(re.search(each, shown(server, version)) for each in FIGURES), 20, "not all metrics are shown")
    assert "[METRICS]" not in server.log  # else Java would have shown the line
    assert "Invalid unit" not in server.log


@pytest.mark.parametrize("version", versions())
def test_a_rolling_batchs_answer_has_its_id_and_the_metrics_its_figures(version: str) -> None:
    with djl(version, {**ROLLING, **METRICS}, env=PROMETHEUS) as server:
        found = server.post(BODY)
        assert found.status_code == 200
        id = found.headers["x-request-id"] if newer(version, "0.30") else None
        assert found.headers.get("requestId") == id
        check_figures(server, version)
        assert server.post(BODY).status_code == 200


@pytest.mark.parametrize("version", versions("0.31"))
def test_async_mode_has_the_figures_and_no_id_as_in_lmi(version: str) -> None:
    with djl(version, {**ASYNC, **METRICS}, env=PROMETHEUS) as server:
        found = server.post(BODY)
        assert (found.status_code, found.headers.get("requestId")) == (200, None)
        check_figures(server, version)
