"""A server that is asked to stop: what hears it, and what each route does then."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from handler.http.app import App
from handler.http.exchange import EXCHANGE, AsgiExchange
from handler.http.inference import Endpoint
from handler.http.security import Access
from handler.http.server import HttpServer, StartingApp, allow_connections
from handler.serving.model import ServedModel
from handler.serving.request.plan import Encoding, Wait
from handler.serving.request.stages import Tokenizing
from tests.app.server import serve
from tests.servers import wait_for
from tests.services import load_echo
from tests.user_files import write_adapter

# -- a server that stops: each route that does work refuses it, and each request counts until it is answered -----------


READS = {
    ("POST", "/v2/repository/index"),
    *(
        ("POST", f"/v2/{kind}sharedmemory{path}")
        for kind in ("system", "cuda")
        for path in ("/region/{region}/register", "/region/{region}/unregister", "/unregister")
    ),
}
"""They tell of the server's state, as routes under GET do, or of shared memory, of which there is none."""

TASKS = ("text-generation", "text-embedding", "rerank", "text-classification")


def client(app: ASGIApp) -> httpx.AsyncClient:
    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = AsgiExchange(receive, send, "1.1")
        try:
            await app({**scope, "extensions": {EXCHANGE: exchange}}, receive, exchange.send)
        finally:
            exchange.close()

    return httpx.AsyncClient(transport=httpx.ASGITransport(serve), base_url="http://localhost")


def working(model: ServedModel) -> list[tuple[str, str]]:
    """Methods and paths of the routes that do work."""
    names = {"{model}": model.config.name, "{version}": "1", "{adapter}": "one"}
    found = []
    for route in App(model).routes:
        assert isinstance(route.app, Endpoint)
        path = route.path
        for name, value in names.items():
            path = path.replace(name, value)
        found += [(method, path) for method in route.app.handlers if method != "GET"]
    return [one for one in found if one not in READS]


async def model_with_adapter(directory: Path, task: str) -> ServedModel:
    write_adapter(directory / "adapters" / "one")
    adapters = ["option.enable_lora=true"] if task == "text-generation" else []
    model = await load_echo(f"option.task={task}", *adapters, directory=directory)
    model.start()
    await model.availability.opened
    return model


@pytest.mark.parametrize("task", TASKS)
def test_each_route_refuses_work(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "true")

    async def story() -> dict[Any, int]:
        model = await model_with_adapter(tmp_path, task)
        routes = working(model)
        model.drain()
        query = {"name": "two", "src": str(tmp_path / "adapters" / "one")}
        body = {"inputs": "a", "lora_name": "one", "lora_path": query["src"]}
        async with client(App(model)) as http:
            answers = {
                (method, path): await http.request(
                    method, path, json=body, params=query if path.endswith("/adapters") else None
                )
                for method, path in routes
            }
        model.close()
        assert all("retry-after" in answer.headers for answer in answers.values() if answer.status_code in (503, 529))
        return {route: answer.status_code for route, answer in answers.items()}

    statuses = asyncio.run(story())
    if task != "text-generation":  # those about adapters say that the engine has none
        statuses = {route: status for route, status in statuses.items() if "adapter" not in route[1]}
    assert ("POST", "/tokenize") in statuses
    assert {route for route, status in statuses.items() if status not in (503, 529)} == set()


def test_until_there_is_a_model_each_request_is_refused_with_the_reason() -> None:
    async def story() -> None:
        starting = StartingApp("name")
        for state, message in (("loading", "Model is not ready: name"), ("stopping", "the server is stopping")):
            async with client(starting) as http:
                ping, answer = await http.get("/ping"), await http.post("/invocations", json={"inputs": "a"})
            assert (ping.status_code, ping.json()) == (503, {"status": "Unhealthy", "state": state})
            assert (answer.status_code, answer.json()["message"]) == (503, message)
            starting.drain()

    asyncio.run(story())


def test_each_request_counts_until_it_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        free = asyncio.Event()

        def held(hook: Callable[[Tokenizing, Encoding], Wait]) -> Callable[[Tokenizing, Encoding], Wait]:
            async def wait(stage: Tokenizing, encoding: Encoding) -> None:
                await free.wait()
                await (hook(stage, encoding) or asyncio.sleep(0))

            return wait

        monkeypatch.setattr(Tokenizing, "encode", held(Tokenizing.encode))
        monkeypatch.setattr(Tokenizing, "tokenize", held(Tokenizing.tokenize))
        model = await model_with_adapter(tmp_path, "text-generation")
        async with client(App(model)) as http:
            asked = [
                asyncio.ensure_future(http.post("/tokenize", json={"inputs": "a"})),
                asyncio.ensure_future(http.post("/invocations", json={"inputs": "a"})),
            ]
            while model.num_requests < 2:
                await asyncio.sleep(0.001)
            model.drain()
            free.set()
            assert [(await one).status_code for one in asked] == [200, 200], "what was accepted is answered"
        assert model.num_requests == 0
        model.close()

    asyncio.run(story())


PINGS = """
import model_hosting_container_standards.sagemaker as standards


@standards.custom_ping_handler
async def ping(request):
    return None
"""


@pytest.mark.parametrize(("path", "code"), [("/invocations", ""), ("/adapters", ""), ("/invocations", PINGS)])
def test_a_body_that_never_comes_does_not_hold_the_stop(path: str, code: str, tmp_path: Path) -> None:
    """The stop waits for the answer beside it, and then refuses what has not come; also before a user's code."""
    (tmp_path / "model.py").write_text(code)
    words = " ".join(["a"] * 40)
    options = ("-o", "option.enable_lora=true", "-o", "option.echo_tokens_per_second=40")
    with serve(str(tmp_path), "--engine", "echo", *options) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, {"inputs": words, "parameters": {"max_new_tokens": 40}})
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            wait_for(lambda: server.metric("lmi_active_sequences") == 1, 10, "the other request is not computed")
            asked = time.monotonic()
            server.send_signal(signal.SIGTERM)
            assert answer.result(10).status_code == 200
            assert connection.recv(65536).startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert server.wait(10) == 0
        assert time.monotonic() - asked < 10, "it took the drain's 20 s"


# -- the server's main loop, which looks once a second: what asks it to stop is heard at once --------------------------


class _Answering(StartingApp):
    """An application with as many running requests as `busy` says."""

    def __init__(self, busy: Callable[[], int] = int) -> None:
        super().__init__("name")
        self._busy = busy

    @property
    def num_requests(self) -> int:
        return self._busy()


async def _left_after(ask: Callable[[HttpServer], object], busy: Callable[[], int] = int) -> float:
    """Seconds from `ask` to the loop's end."""
    server = HttpServer(_Answering(busy), Access(), keep_alive_timeout=75)
    server.config.load()
    _slow_down(asyncio.get_running_loop())
    loop = asyncio.ensure_future(server.main_loop())
    await asyncio.sleep(0.3)
    asked = time.monotonic()
    ask(server)
    await asyncio.wait_for(loop, 30)
    return time.monotonic() - asked


def _slow_down(loop: asyncio.AbstractEventLoop) -> None:
    """The server's clock of one second is one of a minute: a test that waits for it fails."""
    call_later: Any = loop.call_later
    loop.call_later = lambda delay, *more: call_later(60 if delay == 1.0 else delay, *more)  # type: ignore[method-assign]


@pytest.mark.parametrize("ask", [HttpServer.stop, lambda server: server.signalled(signal.SIGTERM)])
def test_who_stops_an_idle_server_does_not_wait_for_its_clock(ask: Callable[[HttpServer], object]) -> None:
    asyncio.run(_left_after(ask))


def test_it_leaves_soon_after_the_last_answer() -> None:
    answers = [1, 1, 1]
    left = asyncio.run(
        _left_after(lambda server: server.signalled(signal.SIGTERM), lambda: len(answers) and answers.pop())
    )
    assert left > 0.15, "it looks again after each tenth of a second"


@pytest.mark.parametrize(("arriving", "waits"), [(0, 1), (3, 4), (1000, 20)])
def test_it_accepts_connections_while_requests_arrive(
    monkeypatch: pytest.MonkeyPatch, arriving: int, waits: int
) -> None:
    """Those that wait in the kernel's queue would be reset."""
    server = HttpServer(_Answering(), Access(), keep_alive_timeout=75)
    waited = 0

    async def pause(seconds: float) -> None:
        nonlocal waited
        waited += not closing.called
        server.server_state.total_requests += waited <= arriving

    closing = mock.Mock()
    server.servers = [mock.Mock(close=closing)]
    monkeypatch.setattr(asyncio, "sleep", pause)
    monkeypatch.setattr(uvicorn.Server, "shutdown", mock.AsyncMock())
    asyncio.run(server.shutdown())
    closing.assert_called_once()
    assert waited == waits


def test_a_server_may_have_more_connections_than_a_shells_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        allow_connections()
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert allowed == (1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16))
