"""The engine openai in front of Dynamo: its own front end, KV router and two workers. `make test-dynamo` runs it.

Dynamo's processes listen beyond loopback: this needs a network of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.app.server import AppServer, serve
from tests.app.test_http import CANCELLED
from tests.doubles import tiny
from tests.engines_by_url import golden, streams
from tests.servers import free_port, http, options, wait_for

# -- dynamo's front end with its KV router, and workers, as processes on this machine; no etcd, no NATS ----------------


ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-dynamo" / "bin" / "python"


class Cluster:
    """`workers` run; the files of `directory` are theirs and what they write."""

    def __init__(self, directory: Path, model: Path) -> None:
        self._directory = directory
        self._model = model
        self._environment = {
            **os.environ,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(directory / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
        }
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}/v1"
        self.workers: list[subprocess.Popen[bytes]] = []
        self._started = 0
        self._front: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._front = self._run(
            "front", "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(self._port),
            "--router-mode", "kv", "--migration-limit", "3",
        )  # fmt: skip

    def add_worker(self) -> None:
        """Start one, and wait until the front end has a model."""
        self._started += 1
        name = f"worker-{self._started}"
        self.workers.append(self._run(name, str(Path(__file__).with_name("worker.py")), str(self._model)))
        wait_for(self.ready, 30, "Dynamo has no model")

    def kill_worker(self) -> None:
        worker = self.workers.pop(0)
        worker.send_signal(signal.SIGKILL)
        worker.wait()

    def ready(self) -> bool:
        try:
            return bool(http.get(f"{self.url}/models").json()["data"])
        except (httpx.HTTPError, ValueError):
            return False

    def said(self, line: str) -> int:
        """How often workers have written a line."""
        texts = [path.read_text().splitlines() for path in self._directory.glob("worker-*.log")]
        return sum(text.count(line) for text in texts)

    def stop(self) -> None:
        for process in (*self.workers, *([self._front] if self._front else [])):
            process.kill()
            process.wait()

    def _run(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._directory / f"{name}.log").open("wb") as log:
            return subprocess.Popen([PYTHON, *arguments], env=self._environment, stdout=log, stderr=subprocess.STDOUT)


@contextlib.contextmanager
def cluster(directory: Path, model: Path, workers: int = 2) -> Iterator[Cluster]:
    found = Cluster(directory, model)
    try:
        found.start()
        for _ in range(workers):
            found.add_worker()
        yield found
    finally:
        found.stop()


DROPPED = {"logit_bias": {"5": 5}, "bad_words": ["a"], "top_logprobs": 6}
"""What Dynamo would drop, refuse, or cut."""

TOKENS = 200


@pytest.fixture(scope="module")
def dynamo(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    assert [name for _, name in socket.if_nameindex()] == ["lo"], "run it by `make test-dynamo`"
    with cluster(tmp_path_factory.mktemp("dynamo"), model) as found:
        yield found


@pytest.fixture(scope="module")
def server(dynamo: Cluster, model: Path) -> Iterator[AppServer]:
    with serve(str(model), "--engine", "openai", *options(f"option.base_url={dynamo.url}")) as found:
        found.wait_ready()
        yield found


@pytest.mark.parametrize("name", golden.one_of_each(golden.BY_ROLLING_BATCH))  # test_echo.py asks all
def test_a_golden_request_is_answered_as_by_echo_in_dynamo(server: AppServer, echo: AppServer, name: str) -> None:
    golden.check(name, echo, server)


@pytest.mark.parametrize("name", DROPPED)
def test_what_dynamo_would_drop_is_refused_by_name(server: AppServer, name: str) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "logprobs": True}
    answer = server.post({**chat, name: DROPPED[name]}, "/v1/chat/completions")
    assert answer.status_code == 400
    assert name in answer.json()["error"]["message"]


def test_the_limit_is_dynamos(server: AppServer) -> None:
    answer = server.post({"prompt": [10] * (tiny.CONTEXT + 1), "max_tokens": 1}, "/v1/completions")
    assert answer.status_code == 400
    assert str(tiny.CONTEXT - 1) in answer.json()["error"]["message"]


def test_alternatives_have_their_texts(server: AppServer) -> None:
    answer = server.post({"prompt": [426, 381], "max_tokens": 2, "logprobs": 1}, "/v1/completions")
    assert answer.json()["choices"][0]["logprobs"]["top_logprobs"] == [{"Once": 0.0}, {" upon": 0.0}]


def test_who_leaves_is_given_up_by_the_worker(server: AppServer, dynamo: Cluster) -> None:
    before, cancelled = dynamo.said("given up"), server.metric(CANCELLED)
    body = {"prompt": "Once upon a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with http.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    wait_for(lambda: dynamo.said("given up") == before + 1, 10, "the worker goes on")
    assert server.metric(CANCELLED) == cancelled + 1


def test_streams_of_a_worker_that_is_killed_end_whole(server: AppServer, echo: AppServer, dynamo: Cluster) -> None:
    for number, values in enumerate(streams.during(server, 64, TOKENS, dynamo.kill_worker)):
        assert not any("error" in value for value in values)
        body = {"prompt": streams.prompt(number), "max_tokens": TOKENS}
        text = "".join(value["choices"][0]["text"] for value in values)
        assert text == echo.post(body, "/v1/completions").json()["choices"][0]["text"]


def test_without_a_worker_requests_say_so_and_a_new_one_serves(server: AppServer, dynamo: Cluster) -> None:
    while dynamo.workers:
        dynamo.kill_worker()
    wait_for(lambda: not dynamo.ready(), 30, "Dynamo still names the model")
    body = {"prompt": "Once upon", "max_tokens": 3}
    answer = server.post(body, "/v1/completions")
    assert answer.status_code >= 400
    assert "the dynamo server serves no model" in answer.json()["error"]["message"]
    assert server.ping() == 200
    dynamo.add_worker()
    wait_for(lambda: server.post(body, "/v1/completions").status_code == 200, 30, "it does not serve again")
