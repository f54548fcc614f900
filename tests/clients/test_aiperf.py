"""AIPerf against the server's own route, and through SageMaker's emulator by the OpenAI route."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import pytest

from deploy.client import Predictor
from deploy.client.runtime import boto_session
from deploy.emulator.endpoint import Endpoint
from deploy.emulator.runtime import RuntimeEmulator
from tests.clients.driver import Driver, python_client
from tests.deploy.local.servers import Loop
from tests.servers import LiveServer

pytestmark = [
    pytest.mark.long,
    pytest.mark.nightly,
    pytest.mark.clients,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="AIPerf is for Python 3.11 and later"),
]

REQUESTS, TOKENS = 6, 8


@pytest.fixture(scope="module")
def aiperf() -> Driver:
    return python_client("aiperf", "drive_aiperf")


def check(found: dict[str, Any]) -> None:
    """Every request was answered in full, and the times are times."""
    assert found["request_count"]["avg"] == REQUESTS
    assert "error_request_count" not in found or found["error_request_count"]["avg"] == 0
    assert found["output_sequence_length"]["min"] == found["output_sequence_length"]["max"] == TOKENS
    assert 0 < found["time_to_first_token"]["min"] < found["request_latency"]["max"]
    assert found["inter_token_latency"]["avg"] > 0
    assert found["output_token_throughput"]["avg"] > 0


def load(**more: str) -> dict[str, Any]:
    return {"requests": REQUESTS, "clients": 2, "tokens": TOKENS, **more}


def test_the_server(aiperf: Driver, model_server: LiveServer) -> None:
    model_server.wait_ready()
    check(aiperf.generate(model_server.url, "model", **load()))


def test_the_endpoints_openai_route(aiperf: Driver, model_server: LiveServer) -> None:
    model_server.wait_ready()
    with ExitStack() as stack:
        loop = Loop()
        stack.callback(loop.close)
        url = stack.enter_context(loop.serving(RuntimeEmulator(Endpoint(model_server.url)).app()))
        route = Predictor("local", endpoint_url=url, session=boto_session("us-east-1", url)).openai_route()
        found = aiperf.generate(route.base_url.removesuffix("/v1"), "model", **load(key=route.token()))
    check(found)
