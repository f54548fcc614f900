"""SageMaker's rules for a container (its guide: your-algorithms-inference-code), checked on the entry point.

That the model's directory is only read is in test_examples.py, whose model is in one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection, HTTPResponse

import httpx
import pytest

from deploy.emulator.container import command
from tests.environment import clean_environment
from tests.ports import free_port
from tests.servers import PATIENCE, http, wait_for

ACCEPT = 0.25  # seconds: a connection
PING = 2.0  # seconds
STOP = 25.0  # seconds, of the 30 after which SageMaker kills


class Process:
    """A container that is ready."""

    def __init__(self, *options: str) -> None:
        self.port = free_port()
        made = command(None, self.port, options, "echo")
        assert made.arguments[-1] == "serve", "SageMaker runs `docker run IMAGE serve`"
        self.process = subprocess.Popen(
            made.arguments,
            env={**clean_environment(), **made.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = f"http://127.0.0.1:{self.port}"
        wait_for(self._ready, PATIENCE, "not ready")

    def _ready(self) -> bool:
        assert self.process.poll() is None, "".join(self.lines)
        try:
            return self.ping() == 200
        except httpx.TransportError:
            return False

    def ping(self) -> int:
        return http.get(self.url + "/ping", timeout=PING).status_code

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.returncode

    @contextmanager
    def stream(self, tokens: int) -> Iterator[HTTPResponse]:
        body = {"inputs": "a b", "stream": True, "parameters": {"max_new_tokens": tokens}}
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)) as connection:
            connection.request("POST", "/invocations", json.dumps(body), {"Content-Type": "application/json"})
            with closing(connection.getresponse()) as response:
                yield response

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)


@contextmanager
def started(*options: str) -> Iterator[Process]:
    process = Process(*options)
    try:
        yield process
    finally:
        process.end()


@pytest.fixture(scope="module")
def container() -> Iterator[Process]:
    with started("option.echo_tokens_per_second=100") as process:
        yield process


def test_it_serves_where_it_is_told_and_takes_options_from_the_environment(container: Process) -> None:
    answer = http.post(container.url + "/invocations", json={"inputs": "a b", "parameters": {"max_new_tokens": 2}})
    assert (answer.status_code, answer.json()) == (200, {"generated_text": " a b"})


def test_metrics_are_on_the_same_port(container: Process) -> None:
    answer = http.get(container.url + "/metrics")
    assert answer.status_code == 200
    assert "lmi_requests_total" in answer.text


def test_headers_that_it_does_not_know_are_ignored(container: Process) -> None:
    headers = {"X-Amzn-SageMaker-Forwarded-Api": "invoke-endpoint", "X-Amzn-Trace-Id": "Root=1", "X-Mine": "1",
               "X-Amzn-SageMaker-Target-Variant": "AllTraffic", "X-Amzn-SageMaker-Prefix-Aware-Id": "p"}  # fmt: skip
    answer = http.post(container.url + "/invocations", json={"inputs": "a"}, headers=headers)
    assert answer.status_code == 200


def test_pings_and_connections_are_in_time_while_it_works(container: Process) -> None:
    pings, connects = [], []
    with ExitStack() as streams, httpx.Client(timeout=PING) as client:
        for _ in range(16):
            streams.enter_context(container.stream(1000))
        for _ in range(20):
            began = time.monotonic()
            with socket.create_connection(("127.0.0.1", container.port), timeout=PING):
                connects.append(time.monotonic() - began)
            began = time.monotonic()
            assert client.get(container.url + "/ping", headers={"Connection": "close"}).status_code == 200
            pings.append(time.monotonic() - began)
    # Not the slowest: this process may have been kept from running.
    assert statistics.median(connects) < ACCEPT
    assert statistics.median(pings) < ACCEPT


def test_a_refusal_is_a_status_before_the_first_byte(container: Process) -> None:
    body = {"inputs": "a", "stream": True, "parameters": {"max_new_tokens": -1}}
    answer = http.post(container.url + "/invocations", json=body)
    assert answer.status_code == 424
    assert "max_new_tokens" in answer.text


def test_a_stream_is_chunked_and_incremental(container: Process) -> None:
    with container.stream(1000) as stream:
        assert stream.getheader("Transfer-Encoding") == "chunked"
        first = json.loads(stream.readline())
    assert first["token"]["text"]
    assert "generated_text" not in first, "the answer came whole"


def test_sigterm_lets_a_running_stream_finish_and_takes_nothing_new() -> None:
    with started("option.echo_tokens_per_second=12") as process, process.stream(60) as stream:  # five seconds
        assert json.loads(stream.readline())["token"]
        began = time.monotonic()
        process.process.send_signal(signal.SIGTERM)
        wait_for(lambda: _status(process, "GET", "/ping") == 503, PATIENCE, "/ping does not say so")
        assert _status(process, "POST", "/invocations") == 503
        lines = [json.loads(line) for line in stream.read().splitlines()]
        assert len(lines) == 59, "the stream was cut"
        assert "generated_text" in lines[-1]
        assert process.end() == 0
        assert time.monotonic() - began < STOP


def _status(process: Process, method: str, path: str) -> int:
    return http.request(
        method, process.url + path, json={"inputs": "a"} if method == "POST" else None, timeout=5
    ).status_code


def test_a_second_word_of_command_is_refused() -> None:
    made = command(None, free_port(), [], "echo")
    done = subprocess.run(
        [*made.arguments[:-1], "train"], env={**os.environ, **made.environment}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "it has no `train`" in done.stderr
