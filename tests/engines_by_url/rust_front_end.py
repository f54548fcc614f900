"""The engine openai in front of vLLM's Rust front end, with `tests.compare.mock_core` behind it for an engine.

`pytest tests/engines_by_url/rust_front_end.py --rust PATH`: PATH is the file `vllm/vllm-rs` in vLLM's wheel, version
0.33. vLLM's CPU build does not have it, so no target of the Makefile runs this.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.app.server import AppServer, serve
from tests.engines_by_url import streams
from tests.engines_by_url.vllm_server import metric
from tests.servers import free_port, http, options, wait_for

IDS = range(257, 321)
"""What the core says, one after the other and again, to all requests at once."""

ABORTED = 'vllm:request_success_total{model_name="model",engine="0",finished_reason="abort"}'
SILENCE = 3
"""Seconds; a front end without its core goes on listening, and says nothing."""


class Front:
    """The front end, always at the same port, and its core; each writes a log to `directory`."""

    def __init__(self, directory: Path, model: Path, binary: str) -> None:
        self._directory = directory
        port, self._handshake = free_port(), free_port()
        self._command = (
            *(binary, "serve", str(model), "--served-model-name", "model", "--port", str(port)),
            *("--data-parallel-size-local", "0", "--data-parallel-size", "1"),
            *("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(self._handshake)),
        )
        self.url = f"http://127.0.0.1:{port}"
        self._front: subprocess.Popen[bytes] | None = None
        self._core: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._front = self._run("front", self._command)
        address = f"tcp://127.0.0.1:{self._handshake}"
        self._core = self._run("core", (sys.executable, "-m", "tests.compare.mock_core", address, "--pace", "100"))
        wait_for(self._ready, 30, "the front end does not serve")

    def kill_core(self) -> None:
        _kill(self._core)

    def stop(self) -> None:
        _kill(self._front)
        _kill(self._core)

    def _run(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self._directory / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _ready(self) -> bool:
        try:
            return http.get(f"{self.url}/health").status_code == 200
        except httpx.HTTPError:
            return False


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def front(model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Front]:
    binary = request.config.getoption("--rust")
    assert binary, "--rust names vllm-rs"
    found = Front(tmp_path_factory.mktemp("front"), model, binary)
    try:
        found.start()
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="module")
def server(front: Front, model: Path) -> Iterator[AppServer]:
    given = options(f"option.base_url={front.url}/v1", f"option.base_url_timeout={SILENCE}")
    with serve(str(model), "--engine", "openai", *given) as found:
        found.wait_ready()
        yield found


def test_a_whole_answer_has_the_cores_tokens(server: AppServer) -> None:
    body = {"prompt": "Once upon", "max_tokens": 20, "return_token_ids": True}
    answer = server.post(body, "/v1/completions").json()
    (choice,) = answer["choices"]
    ids = choice["token_ids"]
    assert ids == [IDS[(ids[0] - IDS[0] + number) % len(IDS)] for number in range(20)]
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 20)


def test_a_word_that_the_front_end_cannot_take_is_refused_with_its_words(server: AppServer) -> None:
    answer = server.post({"prompt": "a", "max_tokens": 2, "logit_bias": {"999999": 1}}, "/v1/completions")
    assert answer.status_code == 400, answer.text
    assert "999999" in answer.text


def test_who_leaves_is_given_up_there_in_rust_front_end(server: AppServer, front: Front) -> None:
    before = sum(metric(front.url, ABORTED))  # its line comes with the first
    body = {"prompt": "Once upon", "max_tokens": 400, "stream": True}
    with http.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    wait_for(lambda: sum(metric(front.url, ABORTED)) == before + 1, 10, "the front end goes on")


@pytest.mark.parametrize("killed", ["the core", "the front end"])
def test_streams_end_with_an_error_and_new_ones_are_served_when_it_is_back(
    server: AppServer, front: Front, killed: str
) -> None:
    kill = front.kill_core if killed == "the core" else front.stop
    for values in streams.during(server, 16, 400, kill):
        streams.assert_one_error(values, "the vllm server ")
    front.stop()
    front.start()
    assert server.post({"prompt": "a", "max_tokens": 2}, "/v1/completions").status_code == 200
