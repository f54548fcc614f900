"""`tests.compare.busy_host` from end to end: ours with echo, vLLM's Rust front end's stand-in with the mock core."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.compare import busy_host
from tests.compare.clients import PINGS, Asking, Pings, Streaming
from tests.compare.processes import cpu_seconds
from tests.compare.rust_front_end import Front

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, binds processes to cores"),
    pytest.mark.long,
]

ROOT = Path(__file__).parents[2]
BUSY_HOST = [sys.executable, "-m", "tests.compare.busy_host"]


@pytest.fixture
def front() -> Iterator[Front]:
    """The front end of a mock core that takes 200 steps a second."""
    with closing(Front("tcp://127.0.0.1:*")) as front:
        core = subprocess.Popen([sys.executable, "-m", "tests.compare.mock_core", front.address, "--pace", "200"])
        try:
            yield front
        finally:
            core.kill()
            core.wait()


@pytest.fixture
def rust(tmp_path: Path) -> list[str]:
    """The arguments that name the stand-in."""
    binary = tmp_path / "vllm-rs"
    binary.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m tests.compare.rust_front_end "$@"\n')
    binary.chmod(0o755)
    return ["--rust", str(binary), "--model", str(tmp_path)]


def run(*arguments: str) -> Any:
    """The JSON line."""
    command = [*BUSY_HOST, "--repeat", "1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_options_that_do_not_go_together_are_refused_in_busy_host() -> None:
    done = subprocess.run([*BUSY_HOST, "--requests", "--whole"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "--whole" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("core", [[], pytest.param(["--whole"], marks=pytest.mark.nightly)], ids=["half", "whole"])
def test_streams_of_both_servers(core: list[str], rust: list[str]) -> None:
    rows = run("--clients", "8", "--seconds", "1", *core, *rust)["streams"]
    assert [(row["clients"], row["server"]) for row in rows] == [(8, "ours"), (8, "vllm-rs")]
    for row in rows:
        assert row["begun"] == row["clients"]
        assert row["kept"] > 0
        assert row["cpu_us"] > 0
        assert row["writes"] > 0
        assert 0 < row["ping_connect_ms"] < 10_000
        assert 0 < row["ping_p50_ms"] <= row["ping_max_ms"] < 10_000


@pytest.mark.nightly
def test_requests_of_both_servers(rust: list[str]) -> None:
    rows = run("--requests", "--tokens", "2", "--seconds", "1", *rust)["requests"]
    servers = ("ours", "ours, engine apart", "vllm-rs")
    assert [(row["stream"], row["server"]) for row in rows] == [
        (stream, server) for stream in (True, False) for server in servers
    ]
    for row in rows:
        assert row["per_second"] > 0
        assert row["cpu_us"] > 0
        assert row["failed"] == 0


def test_an_engine_apart_has_the_core_of_the_clients() -> None:
    with busy_host.on_its_core(busy_host.OURS_APART, 0, half=False) as server:
        engine = busy_host.engine_of(server.pid)
        for process, core in ((server.pid, busy_host.SERVER_CORE), (engine, busy_host.CLIENT_CORE)):
            threads = Path(f"/proc/{process}/task").iterdir()
            assert {frozenset(os.sched_getaffinity(int(thread.name))) for thread in threads} == {frozenset({core})}
        assert 0 < busy_host.OURS_APART.cpu(server.pid) < cpu_seconds(server.pid).host


def test_only_processes_that_are_started_meanwhile_are_bound_to_the_core() -> None:
    affinity = os.sched_getaffinity(0)
    with busy_host.pinned(busy_host.CLIENT_CORE):
        assert os.sched_getaffinity(0) == {busy_host.CLIENT_CORE}
    assert os.sched_getaffinity(0) == affinity


def outputs_until_end(front: Front, *ids: str) -> list[list[Any]]:
    """The outputs of all steps until these requests have ended."""
    found: list[list[Any]] = []
    while {output[0] for output in found if len(output) > 2} < set(ids):
        found += front.outputs()
    return found


def test_the_core_brings_each_request_a_token_a_step(front: Front) -> None:
    assert front.shake_hands()["max_num_seqs"] >= 1024
    front.add("a", 2)
    front.add("b", 3)
    outputs = outputs_until_end(front, "a", "b")
    end = [None, None, None, 1]
    assert [output[2:] for output in outputs if output[0] == "a"] == [[], end]
    assert [output[2:] for output in outputs if output[0] == "b"] == [[], [], end]
    assert {len(output[1]) for output in outputs} == {1}


def test_the_core_ends_an_aborted_request(front: Front) -> None:
    front.shake_hands()
    front.add("endless", 1 << 20)
    assert front.outputs()[0][0] == "endless"
    front.abort("endless", "unknown")
    front.add("next", 3)
    assert [output[0] for output in outputs_until_end(front, "next")][-2:] == ["next", "next"]


def test_the_core_answers_calls(front: Front) -> None:
    front.shake_hands()
    front.call(7, "reset_prefix_cache")
    assert front.message()[4] == [7, None, [None, None]]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_client_counts_tokens_however_they_are_cut(size: int) -> None:
    counter = Streaming(b"", heads=1)
    stream = b'HTTP/1.1 200 OK\r\n\r\n9\r\ndata: {"role":{}}\n\n\r\n' + b'9\r\ndata: {"a":{}}\n\n\r\n' * 3
    begun = []
    for start in range(0, len(stream), size):
        counter.data_received(stream[start : start + size])
        begun.append(counter.streaming)
    assert counter.tokens == 3
    assert begun == sorted(begun)
    if size == 1:
        assert begun.index(True) == stream.index(b'{"a":{}}\n') + len(b'{"a":{}}\n') - 1


class Listener:
    """A server that gives every connection the same answer, or none."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        try:
            while True:
                connection = self._listener.accept()[0]
                self._connections.append(connection)
                connection.recv(1 << 16)
                connection.sendall(self._answer)
        except OSError:
            pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            connection.close()


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
REFUSED = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"
LIMIT = 0.3


@pytest.mark.parametrize(
    ("answer", "healthy"), [(OK, True), (REFUSED, False), (b"", False)], ids=["ok", "refused", "silent"]
)
def test_a_ping_without_an_answer_counts_as_the_limit(answer: bytes, healthy: bool) -> None:
    with closing(Listener(answer)) as listener:
        seconds = Pings(f"{listener.url}/ping", 4 / PINGS, LIMIT).result()
    assert len(seconds) == 4
    assert [value < LIMIT for value in seconds] == [healthy] * 4


@pytest.mark.parametrize(
    "answer",
    [REFUSED, b'HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n{"a":1}'],
    ids=["refused", "without an end"],
)
def test_an_incomplete_answer_is_a_failure(answer: bytes) -> None:
    async def ask() -> None:
        asker = Asking(b"")
        asker.connection_made(Transport())
        asker.data_received(answer)
        assert (asker.whole, asker.failed) == (0, 1)

    asyncio.run(ask())


class Transport(asyncio.Transport):
    def write(self, data: Any) -> None:
        pass
