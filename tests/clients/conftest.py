"""The client libraries, and the servers that they talk to."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.driver import HUBS, Driver, drivers, of_mode, python_client
from tests.deploy.local.servers import emulated
from tests.servers import LiveServer, serve, wait_for

HUB_CLIENTS = [
    of_mode((hub, mode), mode, f"{hub}-{mode}", newest=hub == [*HUBS][-1]) for hub in HUBS for mode in ("sync", "async")
]
_ECHO = ("--engine", "echo", "-o", "option.tgi_compat=true")


def pytest_itemcollected(item: pytest.Item) -> None:
    """A first run also builds the environments, from downloads."""
    item.add_marker(pytest.mark.timeout(600))


text_generation = drivers("text-generation", "drive_text_generation")


@pytest.fixture(scope="module", params=HUB_CLIENTS)
def huggingface_hub(request: pytest.FixtureRequest) -> Driver:
    hub, mode = request.param
    return python_client(HUBS[hub], "drive_huggingface_hub", mode)


langchain = drivers("langchain", "drive_langchain")


triton = drivers("triton", "drive_triton")


litellm = drivers("litellm", "drive_litellm")


@pytest.fixture(scope="session")
def triton_url(model_server: LiveServer) -> str:
    """The demo model."""
    model_server.wait_ready()
    return f"{model_server.url}/v2/models/model/generate"


@pytest.fixture(scope="session")
def triton_echo_url(echo_url: str) -> str:
    return echo_url.replace("/invocations", "/v2/models/model/generate")


@pytest.fixture(scope="session")
def tgi_url(tgi_server: LiveServer) -> str:
    """The demo model."""
    tgi_server.wait_ready()
    return f"{tgi_server.url}/invocations"


@pytest.fixture(scope="session")
def echo_url() -> Iterator[str]:
    """The echo engine, at a pace at which every token is an event of its own, and with its cues for failures."""
    with serve(*_ECHO, "-o", "option.echo_cues=true", "-o", "option.echo_tokens_per_second=500") as server:
        server.wait_ready()
        yield f"{server.url}/invocations"


@pytest.fixture
def fresh_url() -> Iterator[str]:
    """An echo engine for one test, which may leave it in a bad state."""
    with serve(*_ECHO) as server:
        server.wait_ready()
        yield f"{server.url}/invocations"


@pytest.fixture(scope="session")
def busy_url() -> Iterator[str]:
    """A server that has one request in its engine and one in its queue, and room for no more."""
    room = ("-o", "option.max_rolling_batch_size=1", "-o", "job_queue_size=1")
    slow = ("-o", "option.echo_tokens_per_second=5", "-o", "option.predict_timeout=3600")
    with serve(*_ECHO, *room, *slow) as server, contextlib.ExitStack() as streams:
        server.wait_ready()
        streams.enter_context(_endless_stream(server))
        wait_for(lambda: server.metric("lmi_active_sequences") == 1, 10, "nothing in the engine")
        streams.enter_context(_endless_stream(server))
        wait_for(lambda: server.metric("lmi_queued_requests") == 1, 10, "nothing in the queue")
        yield f"{server.url}/invocations"


def _endless_stream(server: LiveServer) -> socket.socket:
    """A stream that nobody reads: an HTTP client would wait for the queued one's first byte."""
    body = json.dumps({"inputs": "a b", "stream": True, "parameters": {"max_new_tokens": 100_000}}).encode()
    head = f"POST /invocations HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    return connection


openai = drivers("openai", "drive_openai")


responses = drivers("openai", "drive_responses")


anthropic = drivers("openai", "drive_anthropic")


langchain_openai = drivers("openai", "drive_langchain_openai")


@pytest.fixture(scope="module", params=HUB_CLIENTS)
def chatting_hub(request: pytest.FixtureRequest) -> Driver:
    hub, mode = request.param
    return python_client(HUBS[hub], "drive_chat_huggingface_hub", mode)


chatting_text_generation = drivers("text-generation", "drive_chat_text_generation")


@pytest.fixture(scope="session")
def storing_server(demo_model: Path) -> Iterator[LiveServer]:
    """The demo model with stored responses and threads, at the precision at which a cached prefix changes nothing."""
    with serve(str(demo_model), "-o", "option.dtype=fp32", "-o", "option.responses_store=memory") as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="session")
def sagemaker_url(model_server: LiveServer) -> Iterator[str]:
    """SageMaker Runtime before the demo model; the parts end within lines, and within characters."""
    with emulated(model_server, part_bytes=11) as url:
        yield url
