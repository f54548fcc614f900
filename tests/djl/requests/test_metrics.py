"""What DJL Serving itself makes of a request: the id in its answer, and the figures in its metrics."""

from __future__ import annotations

import pytest

from tests.djl.servers import djl, newer, versions
from tests.servers import wait_for

pytestmark = pytest.mark.djl

ECHO = {"option.entryPoint": "handler.entry", "option.llm_engine": "echo"}
ROLLING = {**ECHO, "option.rolling_batch": "auto"}
ASYNC = {**ECHO, "option.async_mode": "true", "option.rolling_batch": "disable"}
BODY = {"inputs": "a b c", "parameters": {"max_new_tokens": 2}}


@pytest.mark.parametrize("version", versions())
def test_a_rolling_batchs_answer_has_its_id_as_in_lmi(version: str) -> None:
    """Java reads the worker's lines, and hands them to its logger of metrics."""
    with djl(version, {**ROLLING, "option.djl_metrics": "true", "option.model_name": "mine"}) as server:
        found = server.post(BODY)
        assert found.status_code == 200
        id = found.headers["x-request-id"] if newer(version, "0.30") else None
        assert found.headers.get("requestId") == id
        wanted = ["LmiPromptTokens.Count:3", "LmiGeneratedTokens.Count:2", "LmiTimeToFirstToken.Seconds:"]
        wait_for(lambda: all(f"[INFO] {line}" in server.log for line in wanted), 10, "the metrics")
        assert "[METRICS]" not in server.log  # else Java would have shown the line
        assert server.post(BODY).status_code == 200


@pytest.mark.parametrize("version", versions("0.31"))
def test_async_mode_has_the_figures_and_no_id_as_in_lmi(version: str) -> None:
    with djl(version, {**ASYNC, "option.djl_metrics": "true"}) as server:
        found = server.post(BODY)
        assert (found.status_code, found.headers.get("requestId")) == (200, None)
        wait_for(lambda: "LmiGeneratedTokens.Count:2" in server.log, 10, "the metrics")
