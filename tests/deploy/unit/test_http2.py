"""The HTTP/2 server of the emulator, by an `h2` client: windows, streams at once, and ends of streams."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Iterator
from typing import Any
from unittest import mock

import h2.events
import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from deploy.emulator import http2
from deploy.emulator.http2 import Http2Connection
from tests.deploy.doubles.bidirectional import Caller
from tests.deploy.local.servers import Loop
from tests.servers import wait_for


class App:
    """An application that does as the path says; `ended` names the paths whose requests have ended, and how."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []
        self.ended: list[tuple[str, str]] = []
        self.sent = 0
        self.connections: set[Http2Connection] = set()
        self.released = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        end = "cancelled"
        try:
            end = await getattr(self, scope["path"].strip("/") or "echo")(receive, send)
        except ValueError:
            end = "failed"
            raise
        finally:
            self.ended.append((scope["path"], end))

    async def echo(self, receive: Any, send: Any) -> str:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return "disconnected"
            await send({"type": "http.response.body", "body": message["body"], "more_body": message["more_body"]})
            if not message["more_body"]:
                return "done"

    async def flood(self, receive: Any, send: Any) -> str:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(32):
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
            self.sent += 1
        await send({"type": "http.response.body", "body": b""})
        return "done"

    async def refuse(self, receive: Any, send: Any) -> str:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})
        return "done"

    async def fail(self, receive: Any, send: Any) -> str:
        raise ValueError("a defect")

    async def linger(self, receive: Any, send: Any) -> str:
        await self.released.wait()
        return "done"

    async def wait(self, receive: Any, send: Any) -> str:
        await asyncio.sleep(60)
        return "done"


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def app() -> App:
    return App()


@contextlib.contextmanager
def serving(loop: Loop, app: App) -> Iterator[str]:
    async def start() -> asyncio.Server:
        connect = functools.partial(Http2Connection, app, app.connections)
        return await asyncio.get_running_loop().create_server(connect, "127.0.0.1", 0)

    async def stop() -> None:  # on the thread of the loop, which may be closing a connection
        server.close()

    server = loop.run(start())
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    loop.run(stop())


@pytest.fixture
def caller(loop: Loop, app: App) -> Iterator[Caller]:
    with serving(loop, app) as url, contextlib.closing(Caller(url)) as caller:
        yield caller


def test_a_response_begins_before_the_request_ends(caller: Caller, app: App) -> None:
    stream = caller.begin({"x-a": "1"}, "/echo?b=c")
    assert caller.response(stream) == (200, {"a": "b"})
    data = caller.data(stream)
    for text in (b"one", b"two"):
        caller.send(stream, text)
        assert next(data) == text
    caller.send(stream, b"", end=True)
    assert b"".join(data) == b""
    [scope] = app.scopes
    assert (scope["method"], scope["path"], scope["query_string"]) == ("POST", "/echo", b"b=c")
    assert scope["headers"][1:] == [(b"x-a", b"1")]
    assert scope["server"][0] == "127.0.0.1"


def test_streams_run_at_once(caller: Caller) -> None:
    streams = [caller.begin(path="/echo") for _ in range(3)]
    for stream in reversed(streams):
        caller.send(stream, str(stream).encode(), end=True)
    for stream in streams:
        assert b"".join(caller.data(stream)) == str(stream).encode()


def test_more_data_than_the_windows_comes_back_whole(caller: Caller) -> None:
    """The request waits for the response, so both windows are in use."""
    stream = caller.begin(path="/echo")
    data = bytes(range(256)) * 2000
    back = caller.data(stream)
    received = bytearray()
    for index in range(0, len(data), 16_000):
        caller.send(stream, data[index : index + 16_000])
        received += next(back)
    caller.send(stream, b"", end=True)
    for piece in back:
        received += piece
    assert bytes(received) == data


def test_a_client_that_does_not_read_stops_the_application(loop: Loop, app: App) -> None:
    """Though its windows are open, as those of AWS's SDK are."""
    with serving(loop, app) as url, contextlib.closing(Caller(url)) as caller:
        caller.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 2**31 - 1})
        caller.h2.increment_flow_control_window(2**31 - 2**17)
        caller.response(caller.begin(path="/flood"))
        counts = [-1]

        def stands_still() -> bool:
            counts.append(app.sent)
            return app.sent > 0 and len(counts) > 20 and len(set(counts[-20:])) == 1

        wait_for(stands_still, 20, "the application does not stop")
        assert app.sent < 32  # MiB, as the kernel buffers some
        while app.sent < 32:
            assert caller.socket.recv(1 << 20)
    wait_for(lambda: app.ended == [("/flood", "done")], 20, "the application goes on")


def test_a_response_before_the_end_of_the_request_resets_the_rest(caller: Caller) -> None:
    stream = caller.begin(path="/refuse")
    assert caller.response(stream)[0] == 404
    assert b"".join(caller.data(stream)) == b"no"
    assert caller.wait(h2.events.StreamReset, stream).error_code == ErrorCodes.NO_ERROR
    again = caller.begin(path="/echo")
    caller.send(again, b"x", end=True)
    assert b"".join(caller.data(again)) == b"x"


def test_empty_frames_are_not_kept(caller: Caller) -> None:
    """No window stops a client that sends them."""
    stream = caller.begin(path="/echo")
    for _ in range(1000):
        caller.h2.send_data(stream, b"")
    caller.send(stream, b"x", end=True)
    assert [*caller.data(stream)] == [b"x", b""]


def test_data_after_the_response_is_dropped(caller: Caller) -> None:
    """It counts for the connection's window, which another stream then has."""
    stream = caller.begin(path="/refuse")
    caller.h2.send_data(stream, bytes(16_384))
    caller.h2.send_data(stream, bytes(16_384))
    caller.flush()
    caller.wait(h2.events.StreamReset, stream)
    again = caller.begin(path="/echo")
    caller.send(again, bytes(40_000), end=True)
    assert sum(len(data) for data in caller.data(again)) == 40_000


def test_a_defect_resets_only_its_stream(caller: Caller, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL, "deploy.emulator"):
        stream = caller.begin(path="/fail")
        assert caller.wait(h2.events.StreamReset, stream).error_code == ErrorCodes.INTERNAL_ERROR
    again = caller.begin(path="/echo")
    caller.send(again, b"x", end=True)
    assert b"".join(caller.data(again)) == b"x"


@pytest.mark.parametrize("how", ["reset", "goaway", "vanish"])
def test_an_application_learns_that_its_client_has_gone(caller: Caller, app: App, how: str) -> None:
    stream = caller.begin(path="/echo")
    caller.response(stream)
    if how == "vanish":
        caller.socket.shutdown(socket.SHUT_RDWR)
    elif how == "reset":
        caller.h2.reset_stream(stream, ErrorCodes.CANCEL)
        caller.flush()
    else:
        caller.h2.close_connection()
        caller.flush()
    wait_for(lambda: app.ended == [("/echo", "disconnected")], 20, "the application goes on")


def test_what_is_not_http2_ends_the_connection(loop: Loop, app: App) -> None:
    with serving(loop, app) as url:
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 20) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while connection.recv(1 << 16):
                pass
        wait_for(lambda: not app.connections, 20, "the connection is kept")
    assert app.scopes == []


def test_a_request_without_a_path_is_one(caller: Caller) -> None:
    """CONNECT has none."""
    stream = caller.h2.get_next_available_stream_id()
    caller.h2.send_headers(stream, [(":method", "CONNECT"), (":authority", "localhost")], end_stream=True)
    caller.flush()
    assert caller.response(stream)[0] == 200


def test_closing_ends_the_streams_and_says_so(loop: Loop, caller: Caller, app: App) -> None:
    for path in ("/wait", "/echo"):
        caller.begin(path=path)
    wait_for(lambda: len(app.scopes) == 2, 20, "the requests do not arrive")
    [connection] = app.connections
    loop.run(connection.close())
    assert sorted(app.ended) == [("/echo", "cancelled"), ("/wait", "cancelled")]
    caller.wait(h2.events.ConnectionTerminated)
    with pytest.raises(EOFError):
        caller.wait(h2.events.DataReceived)


# -- floods: what costs the client nothing, and a server without a limit memory and time -------------------------------


def _frame(kind: int, payload: bytes, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + stream.to_bytes(4, "big") + payload


FLOODS = {
    "DATA": _frame(0, b"", 1),
    "PRIORITY": _frame(2, b"\0\0\0\0\x01", 3),
    "SETTINGS": _frame(4, b""),
    "PING": _frame(6, bytes(8)),
    "WINDOW_UPDATE": _frame(8, b"\0\0\0\x01"),
    "unknown": _frame(99, b"x"),
}


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(http2, "MAX_IDLE", 500)
    return http2.MAX_IDLE


def calmed(caller: Caller) -> None:
    assert caller.wait(h2.events.ConnectionTerminated).error_code == ErrorCodes.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("frame", FLOODS.values(), ids=FLOODS)
def test_frames_without_progress_end_the_connection(caller: Caller, app: App, frame: bytes, most: int) -> None:
    assert caller.begin(path="/echo") == 1
    for _ in range(2):  # bytes of a body are progress
        caller.socket.sendall(frame * (most - 50))
        caller.send(1, b"x")
        assert next(caller.data(1)) == b"x"
    with contextlib.suppress(OSError):
        caller.socket.sendall(frame * (most + 50))
    calmed(caller)
    wait_for(lambda: app.ended == [("/echo", "disconnected")], 20, "the application goes on")


def test_a_client_that_does_not_read_replies_is_left(loop: Loop, app: App, most: int) -> None:
    """Not even bytes of a body are progress then."""
    with serving(loop, app) as url, contextlib.closing(Caller(url)) as caller:
        caller.begin(path="/refuse")
        wait_for(lambda: bool(app.connections), 20, "there is no connection")
        [connection] = app.connections
        sizes = [0]
        with contextlib.suppress(OSError):
            while connection in app.connections:
                caller.socket.sendall((FLOODS["PING"] * (most - 50) + _frame(0, b"x", 1)) * 4)
                sizes.append(connection.transport.get_write_buffer_size())
        assert max(sizes) < 1 << 20


def test_streams_that_were_reset_count_while_they_run(loop: Loop, caller: Caller, app: App, most: int) -> None:
    for _ in range(100):
        caller.h2.reset_stream(caller.begin(path="/linger"), ErrorCodes.CANCEL)
    caller.flush()
    refused = caller.begin(path="/linger")
    assert caller.wait(h2.events.StreamReset, refused).error_code == ErrorCodes.REFUSED_STREAM
    wait_for(lambda: len(app.scopes) == 100, 20, "the requests do not begin")
    with mock.patch.object(caller, "flush"):  # in one packet, as a closed connection would lose the last words
        for _ in range(most // 2):
            caller.h2.reset_stream(caller.begin(path="/linger"), ErrorCodes.CANCEL)
    caller.flush()
    calmed(caller)
    assert len(app.scopes) == 100
    loop.run(_set(app.released))
    wait_for(lambda: len(app.ended) == 100, 20, "the requests do not end")


async def _set(event: asyncio.Event) -> None:
    event.set()


def test_more_streams_than_announced_end_the_connection(caller: Caller, app: App) -> None:
    """RFC 9113, sections 5.1.2 and 5.4.1."""
    caller.wait(h2.events.RemoteSettingsChanged)
    limit = caller.h2.remote_settings.max_concurrent_streams
    assert limit == 100
    caller.h2.remote_settings._settings[SettingCodes.MAX_CONCURRENT_STREAMS].append(1000)
    caller.h2.remote_settings.acknowledge()
    for _ in range(limit + 1):
        caller.begin(path="/echo")
    caller.wait(h2.events.ConnectionTerminated)
    assert len(app.scopes) <= limit
