"""The container: what it is started with, its health check, SageMaker's rules for it, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from aiohttp import web

from deploy.emulator.container import Command, ContainerProcess, Probing, command, keep_watch, until_ready
from deploy.emulator.endpoint import Endpoint, Status
from deploy.errors import DeployError, Failed
from tests.deploy.local.servers import Container as HealthContainer
from tests.deploy.local.servers import Loop
from tests.environment import clean_environment
from tests.process_tree import alive
from tests.servers import PATIENCE, free_port, http, wait_for

# -- the container's process: what it is started with, its log, and its end --------------------------------------------


T = TypeVar("T")


def python(code: str, **environment: str) -> Command:
    return Command((sys.executable, "-c", code), environment)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE))


def test_sagemaker_s_argument_and_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LMI_CACHE", "/somewhere")
    made = command(None, 8123, ["option.max_model_len=64", "job_queue_size=2"], "echo")
    assert made.arguments == (sys.executable, "-m", "handler.container", "serve")
    assert dict(made.environment) == {
        "SAGEMAKER_BIND_TO_PORT": "8123",
        "LMI_HOST": "127.0.0.1",
        "LMI_CACHE": "/somewhere",
        "OPTION_MAX_MODEL_LEN": "64",
        "SERVING_JOB_QUEUE_SIZE": "2",
        "OPTION_LLM_ENGINE": "echo",
        "SAGEMAKER_MODEL_PATH": "/dev/null",
        "OPTION_MODEL_ID": "demo",
    }


def test_a_directory_is_sagemaker_s_model_data_and_a_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = command(str(tmp_path), 1, [], None).environment
    assert directory["SAGEMAKER_MODEL_PATH"] == str(tmp_path)
    assert "OPTION_MODEL_ID" not in directory
    file = tmp_path / "m.gguf"
    file.touch()
    monkeypatch.chdir(tmp_path)
    assert command("m.gguf", 1, [], None).environment["OPTION_MODEL_ID"] == str(file)
    assert command(str(file), 1, [], None).environment["OPTION_MODEL_ID"] == str(file)


@pytest.mark.parametrize("name", ["owner/model", "owner/model/file.gguf", "demo"])
def test_a_name_that_is_no_path_stays(name: str) -> None:
    assert command(name, 1, [], None).environment["OPTION_MODEL_ID"] == name


@pytest.mark.parametrize("option", ["a", "=b", ""])
def test_an_option_without_a_name_or_a_value(option: str) -> None:
    with pytest.raises(DeployError, match="must be KEY=VALUE"):
        command(None, 1, [option], None)


def test_the_shell_s_settings_do_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPTION_ENGINE", "SERVING_X", "HF_TOKEN", "SAGEMAKER_MODEL_PATH", "LMI_API_KEY"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("MINE", "stays")
    lines: list[str] = []

    async def go() -> None:
        container = ContainerProcess(lines.append)
        code = "import os; print(sorted(name for name in os.environ if os.environ[name] in ('mine', 'stays', 'set')))"
        await container.start(python(code, OPTION_X="set"))
        await container.wait_for_exit()
        await container.stop()

    run(go())
    assert lines == ["['MINE', 'OPTION_X']"]


def test_its_death_has_its_status_and_last_lines() -> None:
    shown: list[str] = []

    async def go(code: str) -> Failed:
        container = ContainerProcess(shown.append)
        await container.start(python(code))
        try:
            return await container.wait_for_exit()
        finally:
            await container.stop()

    failed = run(go("import sys\nfor i in range(30): print('line', i)\nprint('at last', file=sys.stderr)\nsys.exit(3)"))
    assert str(failed) == "the container exited with status 3"
    assert failed.advice == "Its last log lines:\n" + "\n".join(f"  line {i}" for i in range(11, 30)) + "\n  at last"
    assert len(shown) == 31
    assert str(run(go("import os; os.kill(os.getpid(), 9)"))) == "the container was killed by SIGKILL"
    assert run(go("pass")).advice == "It logged nothing."


def test_a_line_without_end_and_bytes_that_are_no_text_do_no_harm() -> None:
    shown: list[str] = []

    async def go() -> None:
        container = ContainerProcess(shown.append)
        code = "import sys; sys.stdout.buffer.write(b'x' * 3_000_000 + b'\\n\\xff end\\nrest')"
        await container.start(python(code))
        await container.wait_for_exit()
        await container.stop()

    run(go())
    assert shown[-2:] == ["� end", "rest"]
    assert "(a line too long to show)" in shown


def test_sigterm_first_and_sigkill_for_who_stays(tmp_path: Path) -> None:
    """Its children go with it."""
    shown: list[str] = []
    children: list[int] = []
    stays = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )

    async def go() -> int:
        container = ContainerProcess(shown.append)
        await container.start(python(stays))
        while not shown:
            await asyncio.sleep(0.01)
        children.append(int(shown[0]))
        return await container.stop(1.5)

    assert run(go()) == -9
    assert shown[1:] == ["asked", "still running 1.5 s after SIGTERM, so it is killed with SIGKILL, as on SageMaker"]
    wait_for(lambda: not alive(children[0]), PATIENCE, "its child is left behind")


def test_one_that_leaves_at_sigterm_is_not_killed() -> None:
    leaves = (
        "import signal, sys, time\n"
        "def leave(*_):\n    print('finishing', flush=True); time.sleep(0.1); print('done', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )
    shown: list[str] = []

    async def go() -> int:
        container = ContainerProcess(shown.append)
        await container.start(python(leaves))
        while not shown:
            await asyncio.sleep(0.01)
        return await container.stop()

    assert run(go()) == 0
    assert shown == ["up", "finishing", "done"]


def test_a_child_that_left_its_group_does_not_hold_up_the_end() -> None:
    """It has the log's pipe, and is nobody's to end."""
    away = "import subprocess; subprocess.Popen(['sleep', '20'], start_new_session=True); print('up', flush=True)"

    async def go() -> float:
        lines: list[str] = []
        container = ContainerProcess(lines.append)
        await container.start(python(f"{away}; import time; time.sleep(60)"))
        while not lines:
            await asyncio.sleep(0.01)
        began = asyncio.get_running_loop().time()
        await container.stop(5)
        return asyncio.get_running_loop().time() - began

    assert run(go()) < 15


def test_its_death_is_seen_while_a_child_lives_on() -> None:
    away = "import subprocess; subprocess.Popen(['sleep', '20'], start_new_session=True)"

    async def go() -> tuple[str, float]:
        container = ContainerProcess(lambda line: None)
        began = asyncio.get_running_loop().time()
        await container.start(python(f"{away}; raise SystemExit(3)"))
        failed = await container.wait_for_exit()
        await container.stop(5)
        return str(failed), asyncio.get_running_loop().time() - began

    said, seconds = run(go())
    assert said == "the container exited with status 3"
    assert seconds < 15


# -- the health check: into service, out of it, and back ---------------------------------------------------------------


QUICK = Probing(window=60, timeout=10, between=0.01, steady=0.01, failures=3)


def test_it_is_ready_with_the_first_200(loop: Loop) -> None:
    container = HealthContainer(pings=503)
    with loop.serving(container.app()) as url:

        async def go() -> None:
            waiting = asyncio.ensure_future(until_ready(Endpoint(url, status=Status.CREATING), QUICK))
            while container.pinged < 3:
                await asyncio.sleep(0.005)
            assert not waiting.done()
            container.pings = 200
            await waiting

        asyncio.run(asyncio.wait_for(go(), PATIENCE))


@pytest.mark.parametrize(
    ("pings", "timeout", "said"),
    [(503, 10, "/ping responds with status 503"), (0, 0.1, "/ping does not respond within 0.1 s")],
)
def test_a_window_that_passes_fails_the_endpoint(loop: Loop, pings: int, timeout: float, said: str) -> None:
    with loop.serving(HealthContainer(pings=pings).app()) as url:
        endpoint = Endpoint(url, status=Status.CREATING)
        with pytest.raises(Failed, match=r"did not pass the ping health check within 0\.2 s") as raised:
            asyncio.run(until_ready(endpoint, Probing(window=0.2, timeout=timeout, between=0.01)))
    assert str(raised.value).endswith(f"Last ping: {said}.")
    assert endpoint.status is Status.FAILED


def test_no_container_is_waited_for(loop: Loop) -> None:
    with loop.serving(HealthContainer().app()) as url:
        pass
    with pytest.raises(Failed, match="/ping cannot be reached"):
        asyncio.run(until_ready(Endpoint(url), Probing(window=0.05, between=0.01)))


def test_three_failed_pings_take_it_out_and_one_good_one_brings_it_back(loop: Loop) -> None:
    container, told = HealthContainer(), list[str]()
    with loop.serving(container.app()) as url:
        endpoint = Endpoint(url)

        async def until(healthy: bool) -> None:
            deadline = time.monotonic() + PATIENCE
            while endpoint.status.is_healthy is not healthy:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.005)

        async def go() -> None:
            watching = asyncio.ensure_future(keep_watch(endpoint, QUICK, told.append))
            container.pings = 500
            await until(False)
            container.pings = 200
            await until(True)
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

        asyncio.run(go())
    assert told == [
        "unhealthy: /ping responds with status 500 (3 times in a row). SageMaker would replace the instance.",
        "healthy again",
    ]


def test_a_redirection_is_no_answer(loop: Loop) -> None:
    with loop.serving(HealthContainer(pings=200).app()) as url:

        async def elsewhere(request: web.Request) -> web.Response:
            return web.Response(status=302, headers={"Location": f"{url}/ping"})

        app = web.Application()
        app.router.add_get("/ping", elsewhere)
        with loop.serving(app) as moved, pytest.raises(Failed, match="/ping responds with status 302"):
            asyncio.run(until_ready(Endpoint(moved), Probing(window=0.05, between=0.01)))


# -- SageMaker's rules for a container (its guide: your-algorithms-inference-code), checked on the entry point ---------
# That the model's directory is only read is in test_examples.py, whose model is in one.


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
    assert "it cannot `train` them" in done.stderr
