"""llmeter against SageMaker's emulator, by stock boto3 and by the OpenAI route."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from deploy.client import Predictor
from deploy.client.runtime import boto_session
from tests.clients.checks import PARIS
from tests.clients.driver import Driver, python_client
from tests.clients.emulator import emulated
from tests.servers import LiveServer

pytestmark = pytest.mark.clients

TOKENS, CLIENTS, EACH = 8, 2, 3


@pytest.fixture(scope="module")
def llmeter() -> Driver:
    return python_client("llmeter", "drive_llmeter", "async")


@pytest.fixture(scope="module")
def lmi(model_server: LiveServer) -> Iterator[str]:
    with emulated(model_server, part_bytes=11) as url:
        yield url


@pytest.fixture(scope="module")
def tgi(tgi_server: LiveServer) -> Iterator[str]:
    with emulated(tgi_server, part_bytes=11) as url:
        yield url


def measure_stream(driver: Driver, url: str, endpoint: str, **options: Any) -> list[dict[str, Any]]:
    load = {"endpoint": endpoint, "tokens": TOKENS, "clients": CLIENTS, "requests": EACH, **options}
    found = driver.generate(url, PARIS, **load)
    assert found["failed"] == 0
    assert found["total"] == len(found["responses"]) == CLIENTS * EACH
    responses: list[dict[str, Any]] = found["responses"]
    assert all(response["error"] is None for response in responses)
    return responses


@pytest.mark.parametrize("schema", ["tgi", "lmi"])
def test_streams_through_boto3(llmeter: Driver, schema: str, request: pytest.FixtureRequest) -> None:
    """It is written for TGI's events; LMI's lines have what it looks for, too."""
    for response in measure_stream(llmeter, request.getfixturevalue(schema), "stream"):
        assert response["text"].startswith(" Paris")
        assert response["tokens"] == TOKENS
        assert 0 < response["first"] < response["last"]


def test_whole_answers_through_boto3(llmeter: Driver, lmi: str) -> None:
    for response in measure_stream(llmeter, lmi, "whole"):
        assert response["text"].startswith(" Paris")
        assert response["tokens"] == TOKENS


def test_chat_streams_through_the_openai_route(llmeter: Driver, lmi: str) -> None:
    route = Predictor("local", endpoint_url=lmi, session=boto_session("us-east-1", lmi)).openai_route()
    for response in measure_stream(llmeter, route.base_url, "openai", key=route.token()):
        assert response["text"]
        assert response["tokens"] == TOKENS
        assert 0 < response["first"] < response["last"]
