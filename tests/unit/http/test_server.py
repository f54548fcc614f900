"""What a server says to its operator."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from handler.core.errors import ConfigError
from handler.core.values import Task
from handler.http import server as http_server
from handler.http.security import Access
from handler.http.server import (
    HttpServer,
    Progress,
    StartingApp,
    _greeting,
    _host,
    _serve_grpc,
    _show,
    allow_connections,
    bind,
)
from handler.http.sockets.connection import WebSocket
from handler.plugins.aws import Handlers
from handler.plugins.functions import Formatters
from tests.one_test import in_one_test


def test_a_stop_tells_how_long_answers_may_take(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    app: Any = mock.Mock(num_requests=2)
    HttpServer(app, Access(), keep_alive_timeout=75).signalled(signal.SIGTERM)
    assert "SIGTERM: stopping; responses to finish: 2, within 20 s; a second signal ends them at once" in caplog.text


# -- stopping ----------------------------------------------------------------------------------------------------------


def stopping(num_requests: int) -> tuple[HttpServer, Any]:
    app: Any = mock.Mock(num_requests=num_requests)
    return HttpServer(app, Access(), keep_alive_timeout=75), app


def test_a_stop_of_an_idle_server_tells_nothing_to_wait_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    server, app = stopping(0)
    server.signalled(signal.SIGINT)
    assert caplog.messages == ["SIGINT: stopping"]
    app.drain.assert_called_once_with()


def test_ctrl_c_is_what_its_user_may_press_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    stopping(1)[0].signalled(signal.SIGINT)
    assert "a second Ctrl-C ends them at once" in caplog.text


def test_answers_have_until_the_deadline_or_the_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for signals, seconds in ((1, 20.0), (2, 0.0)):
        server, app = stopping(1)
        assert not asyncio.run(server.on_tick(0))
        for _ in range(signals):
            server.signalled(signal.SIGTERM)
        assert app.drain.call_count == 1
        now[0] += seconds - 0.5
        if seconds:
            assert not asyncio.run(server.on_tick(0))
            app.give_up.assert_not_called()
        now[0] += 0.5
        assert asyncio.run(server.on_tick(0))
        app.give_up.assert_called_once_with()
        assert server.should_exit


def test_a_server_whose_last_answer_is_sent_gives_up_nothing() -> None:
    server, app = stopping(1)
    server.signalled(signal.SIGTERM)
    app.num_requests = 0
    assert asyncio.run(server.on_tick(0))
    app.give_up.assert_not_called()


def test_websockets_are_drained_while_others_have_their_turn() -> None:
    server, _ = stopping(1)
    drained, between = list[int](), list[int]()

    async def story() -> None:
        for number in range(1_050):
            connection = mock.Mock(spec=WebSocket)
            connection.drain.side_effect = functools.partial(drained.append, number)
            server.server_state.connections.add(connection)
        server.signalled(signal.SIGTERM)
        while len(drained) < 1_050:
            between.append(len(drained))
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(story(), 30))
    assert sorted(drained) == [*range(1_050)]
    assert between == [*range(100, 1_001, 100)]


def test_a_signal_wakes_the_server_at_once() -> None:
    server, app = stopping(0)

    async def story() -> None:
        own, ticks = asyncio.get_running_loop(), list[float]()
        call_later = own.call_later

        def tick(seconds: float, *arguments: Any) -> Any:
            ticks.append(seconds)
            return call_later(seconds, *arguments)

        vars(own)["call_later"] = tick
        app.num_requests = 1
        loop = asyncio.ensure_future(server.main_loop())
        await asyncio.sleep(0)
        assert ticks == [1.0]
        server.signalled(signal.SIGTERM)
        for _ in range(5):
            await asyncio.sleep(0)
        assert ticks == [1.0, 0.1], "it looks more often for the last answer"
        app.num_requests = 0
        server.stop()
        for _ in range(5):
            await asyncio.sleep(0)
        assert loop.done()

    asyncio.run(story())
    app.give_up.assert_not_called()


def test_a_server_that_stops_hears_requests_that_arrive_until_none_does(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, arrivals = list[float](), [0]
    server, _ = stopping(0)
    server.servers = [mock.Mock()]

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) <= arrivals[0]:
            server.server_state.total_requests += 1

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr("uvicorn.Server.shutdown", mock.AsyncMock())
    for arrivals[0], number in ((0, 2), (3, 5), (100, 21)):
        pauses.clear()
        asyncio.run(server.shutdown())
        assert pauses == [0.1] * number
    assert server.servers[0].close.call_count == 3  # type: ignore[attr-defined]


# -- the socket --------------------------------------------------------------------------------------------------------


@in_one_test(
    ("soft", "hard", "set_to"),
    [
        (1024, 4096, (4096, 4096)),
        (1024, 1 << 20, (1 << 16, 1 << 20)),
        (1024, resource.RLIM_INFINITY, (1 << 16, resource.RLIM_INFINITY)),
        (4096, 4096, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
        (1 << 17, 1 << 20, None),
    ],
)
def test_as_many_files_are_allowed_as_the_system_lets_us(soft: int, hard: int, set_to: Any) -> None:
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as context:
        context.setattr(resource, "getrlimit", lambda kind: (soft, hard))
        context.setattr(resource, "setrlimit", lambda kind, limits: found.append(limits))
        allow_connections()
    assert found == ([] if set_to is None else [set_to])


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_kernel_closes_what_clients_do_not_read(host: str) -> None:
    with bind(host, 0, 2.5) as listener:
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2500
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 1
        listener.listen()
        address, port = listener.getsockname()[:2]
        with pytest.raises(ConfigError, match=f"^cannot listen on {host}:{port}: Address already in use$"):
            bind(host, port, 2.5)
        assert address == host


# -- before there is a model -------------------------------------------------------------------------------------------


def asked(app: StartingApp, path: str) -> tuple[int, Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        scope = {"type": "http", "method": "GET", "path": path, "headers": [(b"x-request-id", b"7")]}
        await app(scope, mock.Mock(), send)

    asyncio.run(run())
    assert dict(sent[0]["headers"])[b"x-request-id"] == b"7"
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_a_starting_server_says_so_and_a_stopping_one_too() -> None:
    app = StartingApp("m")
    assert asked(app, "/ping") == (503, {"status": "Unhealthy", "state": "loading"})
    status, value = asked(app, "/other")
    assert (status, value["message"]) == (503, "Model is not ready: m")
    app.drain()
    assert asked(app, "/ping") == (503, {"status": "Unhealthy", "state": "stopping"})
    assert asked(app, "/other")[1]["message"] == "the server is stopping"
    assert (app.is_open, app.num_requests) == (False, 0)
    app.give_up()


def test_an_opened_application_has_the_models_requests() -> None:
    for drained in (False, True):
        app, model, inner = StartingApp("m"), mock.Mock(num_requests=3), mock.Mock()
        if drained:
            app.drain()
        app.open(model, inner)
        assert model.drain.called == drained
        assert (app.is_open, app.num_requests) == (True, 3)
        scope: Any = {}
        assert app(scope, mock.Mock(), mock.Mock()) is inner.return_value
        app.drain()
        app.give_up()
        assert model.drain.call_count == 1 + drained
        model.give_up.assert_called_once_with()


def test_a_model_that_cannot_be_opened_ends_the_server() -> None:
    async def host(failure: Exception | None, *, done: bool = True, draining: bool = False) -> None:
        opened: Any = asyncio.get_running_loop().create_future()
        if done:
            opened.set_exception(failure) if failure else opened.set_result(None)
        model: Any = SimpleNamespace(availability=SimpleNamespace(opened=opened, draining=draining))
        serving = asyncio.ensure_future(asyncio.sleep(0))
        app: Any = mock.Mock()
        await _host(contextlib.nullcontext(model), app, str, serving)  # type: ignore[arg-type]
        app.open.assert_called_once_with(model, str(model))
        if failure and done:
            opened.exception()

    lost = ConfigError("no such model")
    with pytest.raises(ConfigError, match="no such model"):
        asyncio.run(host(lost))
    asyncio.run(host(lost, draining=True))
    asyncio.run(host(None))
    asyncio.run(host(lost, done=False))


def test_grpc_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "handler.http.grpc", None)
    config: Any = SimpleNamespace()
    with pytest.raises(ConfigError, match=r"^option.grpc_port needs .*\[triton\]"):
        asyncio.run(_serve_grpc(config, "127.0.0.1", mock.Mock(), Access()))


# -- what an operator reads --------------------------------------------------------------------------------------------


def progress(monkeypatch: pytest.MonkeyPatch, *, live: bool) -> str:
    printed: list[str] = []
    error = SimpleNamespace(isatty=lambda: live, write=printed.append, flush=lambda: None)
    seconds = iter(range(21))

    async def sleep(length: float) -> None:
        assert length == 1
        if next(seconds) == 20:
            raise asyncio.CancelledError

    with monkeypatch.context() as context:
        context.setattr(sys, "stderr", error)
        context.setattr(asyncio, "sleep", sleep)
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(_show("loading"))
    return "".join(printed)


def test_a_log_has_a_line_of_the_start_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["loading ... 0 s\n", "loading ... 10 s\n", "loading ... 20 s\n"]
    assert progress(monkeypatch, live=False) == "".join(lines)
    assert progress(monkeypatch, live=True) == "".join(f"\rloading ... {second} s" for second in range(21))


def test_progress_ends_when_it_is_told_to() -> None:
    async def story() -> None:
        line = Progress()
        line.stop()
        line.start("loading")
        await asyncio.sleep(0)
        task = line._task
        assert task is not None
        line.stop()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(story())


def greeting(
    address: tuple[str, int] = ("127.0.0.1", 80),
    access: Access = Access(),  # noqa: B008
    task: Task = Task.GENERATION,
    users: Formatters = Formatters(),  # noqa: B008
    no_labels: str = "",
    *,
    refuses_chats: bool = False,
) -> str:
    listener: Any = SimpleNamespace(getsockname=lambda: address)
    context = SimpleNamespace(task=task, no_labels=no_labels, refuses_chats=refuses_chats)
    model: Any = SimpleNamespace(context=context, config=SimpleNamespace(name="a b"))
    return _greeting(listener, access, model, users)


@in_one_test(
    ("address", "certfile", "told"),
    [
        (("127.0.0.1", 80), None, "listening on http://127.0.0.1:80; open it in a browser, or try:"),
        (("0.0.0.0", 80), None, "listening on http://0.0.0.0:80; open http://127.0.0.1:80 in a browser, or try:"),
        (("::", 80), None, "listening on http://[::]:80; open http://[::1]:80 in a browser, or try:"),
        (("10.0.0.1", 443), Path("c"), "listening on https://10.0.0.1:443; open it in a browser, or try:"),
    ],
)
def test_a_ready_server_greets_with_an_address_that_works(
    address: tuple[str, int], certfile: Path | None, told: str
) -> None:
    first, *requests = greeting(address, Access(certfile=certfile)).splitlines()
    assert first == told
    assert len(requests) == 7
    near = told.partition("open ")[2].partition(" in a")[0].replace("it", told.split()[2].rstrip(";"))
    assert all(line.startswith(f"  curl -s {near}/") for line in requests)
    assert any("/v2/models/a%20b/generate" in line for line in requests)


def test_the_greetings_requests_are_those_of_the_models_task() -> None:
    for task in Task:
        assert greeting(("127.0.0.1", 80), task=task).count("curl") == len(http_server.EXAMPLES[task])


def test_the_greeting_has_a_decision_only_if_the_engine_can_decide() -> None:
    assert "/v1/systemone" in greeting()
    assert "/v1/systemone" not in greeting(no_labels="the engine returns no log-probabilities")


def test_the_greeting_has_no_chat_if_the_model_has_no_chat_template() -> None:
    text = greeting(refuses_chats=True)
    paths = [line.split()[2].removeprefix("http://127.0.0.1:80") for line in text.splitlines()[1:]]
    assert paths == ["/invocations", "/v1/completions", "/generate", "/v2/models/a%20b/generate"]
    assert """/v1/completions -d '{"prompt":""" in text
    assert greeting(refuses_chats=True, task=Task.EMBEDDING) == greeting(task=Task.EMBEDDING)


def test_the_greeting_asks_for_a_key_without_showing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Authorization" not in greeting()
    for variable, shown in (("", "KEY"), ("secret", "${LMI_API_KEY%%,*}")):
        monkeypatch.setenv("LMI_API_KEY", variable)
        text = greeting(access=Access(keys=("secret",)))
        assert text.count(f' -H "Authorization: Bearer {shown}" ') == text.count("curl")
        assert "secret" not in text


def test_the_greeting_names_the_users_function_that_reads_bodies() -> None:
    formatter: Any = SimpleNamespace(title="input formatter f")
    handle: Any = object()
    readers = {
        "the input formatter f": Formatters(input=formatter, handle=handle),
        "handle of model.py": Formatters(handle=handle),
    }
    for title, users in readers.items():
        assert greeting(users=users).count(f"# in the format that {title} reads") == 1
    for handlers in (Handlers(pre=print), Handlers(invoke=print)):
        assert "that your custom handler reads" in greeting(users=Formatters(handlers=handlers))


def test_a_handler_that_reads_no_bodies_leaves_the_greetings_requests_as_they_are() -> None:
    assert greeting(users=Formatters(handlers=Handlers(ping=print))) == greeting()
