"""The application in another ASGI server, whose part the tests play: lifespan, paths, and the end of a request."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
from starlette.types import Message

from handler.core.errors import ConfigError
from handler.http import app as http_app
from handler.http.app import MountedApp
from handler.http.exchange import AsgiExchange
from tests.unit.http.mounted import call, echo, in_app, own_environment

__all__ = ["own_environment"]


def test_requests_are_answered_between_startup_and_shutdown() -> None:
    async def story(app: MountedApp) -> None:
        assert (await call(app, "/ping")).status == 200
        body = b'{"inputs": "a b", "parameters": {"max_new_tokens": 2}}'
        answer = await call(app, "/invocations", "POST", body)
        assert (answer.status, json.loads(answer.body)["generated_text"]) == (200, " a b")

    in_app(story)


def test_the_prefix_of_a_mounted_application_is_not_in_its_paths() -> None:
    async def story(app: MountedApp) -> None:
        for root, path, status in (
            ("/llm", "/llm/ping", 200),
            ("/llm/", "/llm/ping", 200),
            ("/llm", "/ping", 200),
            ("/llm", "/llmping", 404),
            ("/pi", "/ping", 200),
            ("", "/llm/ping", 404),
        ):
            assert (await call(app, path, root_path=root)).status == status, (root, path)

    in_app(story)


def test_the_servers_address_tells_which_hosts_are_allowed() -> None:
    async def story(app: MountedApp) -> None:
        for server, host, status in (
            (("127.0.0.1", 80), b"evil.example", 403),
            (("127.0.0.1", 80), b"127.0.0.1:80", 200),
            (("203.0.113.5", 80), b"evil.example", 200),
            (None, b"evil.example", 200),
        ):
            answer = await call(app, "/ping", server=server, headers=[(b"host", host)])
            assert answer.status == status, (server, host)
        assert len(app._apps) == 3, "one for each address"

    in_app(story)


def test_hosts_origins_and_keys_are_those_that_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMI_API_KEY", "secret")

    async def story(app: MountedApp) -> None:
        page = [(b"origin", b"https://page.example"), (b"host", b"models.example")]
        answer = await call(app, "/ping", headers=page)
        assert answer.status == 200
        assert answer.headers[b"access-control-allow-origin"] == b"https://page.example"
        assert (await call(app, "/models", headers=page)).status == 401
        keyed = [*page, (b"authorization", b"Bearer secret")]
        assert (await call(app, "/models", headers=keyed)).status == 200
        assert (await call(app, "/ping", headers=[(b"host", b"other.example")])).status == 403

    in_app(story, origins=("https://page.example",), hosts=("models.example",))
    assert "LMI_API_KEY" not in os.environ


def test_a_request_without_a_loaded_model_is_a_servers_mistake() -> None:
    with pytest.raises(RuntimeError, match="the ASGI server must run the lifespan protocol"):
        asyncio.run(call(echo(), "/ping"))


@pytest.mark.parametrize(
    ("error", "told"), [(ConfigError("no such model"), "no such model"), (RuntimeError("a bug"), "Traceback")]
)
def test_a_start_that_fails_is_told_to_the_server(monkeypatch: pytest.MonkeyPatch, error: Exception, told: str) -> None:
    def fail(config: Any) -> Any:
        raise error

    monkeypatch.setattr(http_app, "users_functions", fail)
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "lifespan.startup"}

    asyncio.run(echo()({"type": "lifespan"}, receive, send))
    (message,) = sent
    assert message["type"] == "lifespan.startup.failed"
    assert message["message"].startswith(told)
    assert str(error) in message["message"]


def test_all_problems_of_an_application_are_told_before_it_runs() -> None:
    with pytest.raises(ConfigError) as raised:
        echo("option.dtype=wrong", origins=("no origin",))
    assert "dtype" in str(raised.value)
    assert "--allow-origin no origin" in str(raised.value)


# -- the exchange of such a server -------------------------------------------------------------------------------------


class Server:
    """Another server's `receive` and `send`."""

    def __init__(self, *received: Message, fails: Exception | None = None) -> None:
        self.received, self.fails = list(received), fails
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        if not self.received:
            await asyncio.get_running_loop().create_future()
        return self.received.pop(0)

    async def send(self, message: Message) -> None:
        if self.fails is not None:
            raise self.fails
        self.sent.append(message)


START = {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b"), (b"connection", b"close")]}
END = {"type": "http.response.body", "body": b"end"}


@pytest.mark.parametrize(("version", "kept"), [("1.0", True), ("1.1", True), ("2", False), ("3", False)])
def test_connection_headers_are_for_the_first_versions_of_http(version: str, kept: bool) -> None:
    async def story() -> None:
        server = Server()
        exchange = AsgiExchange(server.receive, server.send, version)
        await exchange.send(START)
        assert ((b"connection", b"close") in server.sent[0]["headers"]) == kept
        assert (b"a", b"b") in server.sent[0]["headers"]

    asyncio.run(story())


def test_an_exchange_of_another_server_is_over_after_the_last_part() -> None:
    async def story() -> None:
        server = Server()
        exchange = AsgiExchange(server.receive, server.send, "1.1")
        assert (exchange.is_paused, exchange.num_unsent, exchange.write_chunk(b"x")) == (True, 0, False)
        await exchange.send(START)
        await exchange.send({**END, "more_body": True})
        assert not exchange.is_over
        await exchange.send(END)
        assert exchange.is_over
        await exchange.send(END)
        assert len(server.sent) == 3, "nothing comes after it"
        await exchange.wait()

    asyncio.run(story())


def test_an_error_of_another_server_is_the_end_of_its_client() -> None:
    async def story() -> None:
        exchange = AsgiExchange(Server().receive, Server(fails=KeyError("gone")).send, "1.1")
        with pytest.raises(OSError, match="the ASGI server could not send the response: 'gone'"):
            await exchange.send(START)
        assert exchange.is_over

    asyncio.run(story())


def test_a_client_of_another_server_that_disconnects_ends_the_wait() -> None:
    async def story() -> None:
        server = Server({"type": "http.request"}, {"type": "http.disconnect"})
        exchange = AsgiExchange(server.receive, server.send, "1.1")
        await exchange.wait()
        assert exchange.is_over
        assert server.received == []

    asyncio.run(story())


def test_an_exchange_of_another_server_is_closed_with_its_request() -> None:
    async def story() -> None:
        server = Server()
        exchange = AsgiExchange(server.receive, server.send, "1.1")
        exchange.close()
        await exchange.wait(0.001)
        assert not exchange.is_over
        listener = exchange._listener
        assert listener is not None
        exchange.wake()
        await exchange.wait()
        assert exchange._listener is listener
        exchange.close()
        await asyncio.wait([listener])
        assert listener.cancelled()
        exchange.drop()
        assert exchange.is_over

    asyncio.run(story())
