"""WebSockets in any order of events: each response reaches its lane and its connection, and at the end nothing is held.

The loop and the engine are real, because what is looked for are the joints between connection, session and request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections import defaultdict
from dataclasses import replace
from typing import Any
from unittest import mock

import hypothesis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from handler.engines.process import supervisor
from handler.http.app import App
from handler.http.sockets import base
from handler.http.sockets.routes import Sockets
from handler.serving.model import ServedModel
from tests.app.sockets.client import frame, offer
from tests.services import echo_service
from tests.unit.http.connection import Connection, connected, tcp_pair

NUM_CLIENTS = 3
COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
WORD = re.compile(r"c\d+r\d+")
SECONDS = 60.0


class Client:
    """A client of a WebSocket, which knows what each lane has asked for.

    Args:
        number: number of the client, which its words contain.
        path: path of its WebSocket.
    """

    def __init__(self, connection: Connection, number: int, path: str) -> None:
        self._connection = connection
        self._path = path
        self._number = number
        self._num_sent = 0
        self.asked: dict[str, list[str]] = defaultdict(list)  # by lane, the words of its requests
        self.events: list[Any] = []
        self.close_code = 0  # of the server
        self.num_expiries = 0
        self.is_closed = False
        self._rest = b""  # of a request that has been sent in part

    @property
    def num_missing(self) -> int:
        """The number of requests whose response is not complete."""
        return self._num_sent - sum(map(is_last, self.events)) - bool(self._rest)

    def send(self, lane: str, size: int, streams: bool) -> None:
        """Send a request, after the rest of one that has been sent in part."""
        if self._rest:
            self._write(frame(0, self._rest))
            self._rest = b""
        self._write(frame(1, self._request(lane, size, streams)))

    def send_part(self) -> None:
        """Send a part of a request, and a ping. `send` sends the rest."""
        if not self._rest:
            request = self._request("", 3, streams=True)
            self._write(frame(1, request[:20], first=0) + frame(9))
            self._rest = request[20:]

    def _request(self, lane: str, size: int, streams: bool) -> bytes:
        word = f"c{self._number}r{self._num_sent}"
        self._num_sent += 1
        self.asked[lane].append(word)
        lanes = {"stream_id": lane} if lane else {}
        prompt = f"{word} " * size
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": size, "stream": streams}
        if self._path == RESPONSES:
            body = {"type": "response.create", "input": prompt, "max_output_tokens": size, "store": False}
        return json.dumps({**body, **lanes}).encode()

    def close(self, how: str) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        if how == "close frame":
            self._write(frame(8, b"\x03\xe8"))
        elif how == "reset":
            self._connection.writer.transport.abort()
        else:
            self._connection.writer.close()

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self._connection.writer.write(data)

    async def read(self) -> None:
        """Read the events until the end of the connection."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                first, size = await self._connection.reader.readexactly(2)
                if size == 126:
                    size = int.from_bytes(await self._connection.reader.readexactly(2), "big")
                data = await self._connection.reader.readexactly(size)
                if first == 0x81:
                    self._note(json.loads(data))
                elif first == 0x88:
                    self.close_code = int.from_bytes(data[:2], "big")
                    self._write(frame(8, data[:2]))

    def _note(self, event: Any) -> None:
        if (event.get("error") or {}).get("code") == "websocket_connection_limit_reached":
            self.num_expiries += 1
        else:
            self.events.append(event)

    def check(self, *, fails: bool) -> None:
        """Check that each event belongs to a request of its lane, in order.

        Args:
            fails: whether requests may fail.
        """
        assert self.num_expiries <= 1
        texts: dict[str, str] = defaultdict(str)
        for event in self.events:
            if "error" in event or event.get("type") == "response.failed":
                assert fails, event
                assert event.get("status", 503) in (424, 429, 500, 503), event
                continue
            texts[event.get("stream_id", "")] += text_of(event)
        for lane, text in texts.items():
            words = [*dict.fromkeys(WORD.findall(text))]
            assert all(word.startswith(f"c{self._number}r") for word in words)
            asked = iter(self.asked[lane])
            assert all(word in asked for word in words), (lane, words, self.asked)


def is_last(event: Any) -> bool:
    """Return whether an event ends its response."""
    if "choices" not in event:
        return event.get("type") in ENDS or "error" in event
    return event["choices"][0]["finish_reason"] is not None


def text_of(event: Any) -> str:
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    return "".join(choice["text"] for choice in event.get("choices", ()))


class Play:
    """Some clients of one server.

    Args:
        path: path of the WebSockets.
        seconds: maximum lifetime of a connection.
    """

    def __init__(self, model: ServedModel, path: str, seconds: int) -> None:
        self._model = model
        self._path = path
        self.sockets = Sockets(replace(model.config, websockets_seconds=seconds))
        self._app = App(model, sockets=self.sockets)
        self._clients: list[tuple[Connection, Client]] = []
        self.fails = False  # whether requests may have failed
        self.ends = seconds < SECONDS  # whether the server may have closed a connection

    async def open(self, stack: contextlib.AsyncExitStack) -> None:
        for number in range(NUM_CLIENTS):
            connection = await stack.enter_async_context(connected(self._app, tcp_pair()))
            connection.receive(offer(self._path))
            await connection.read_until(b"\r\n\r\n")
            self._clients.append((connection, Client(connection, number, self._path)))

    def step(self, index: int, kind: str, *values: Any) -> None:
        connection, client = self._clients[index]
        if kind == "send" and not client.is_closed:
            client.send(*values)
        elif kind == "part" and not client.is_closed:
            client.send_part()
        elif kind == "close":
            client.close(*values)
        elif kind == "drain":
            self._drain(connection)
        elif kind == "drain all":
            for each, _ in self._clients:
                self._drain(each)
        elif kind == "lose":
            self.fails = True
            self._model.give_up()
        elif kind == "kill":
            self._kill()

    def _drain(self, connection: Connection) -> None:
        self.ends = True
        protocol: Any = connection.protocol.transport.get_protocol()
        if protocol is not None:  # the connection has not been closed
            protocol.drain()

    def _kill(self) -> None:
        """End the engine's process. The server starts another one."""
        self.fails = True
        engine = self._model.availability.engine
        assert isinstance(engine, supervisor.EngineSupervisor)
        if engine.pid is not None:  # otherwise the next one has not been started
            os.kill(engine.pid, signal.SIGKILL)

    async def run(self, steps: list[tuple[Any, ...]]) -> None:
        reading = [asyncio.ensure_future(client.read()) for _, client in self._clients]
        for index, kind, *values in steps:
            self.step(index, kind, *values)
            for _ in range(values[-1] if kind == "wait" else 1):
                await asyncio.sleep(0)
        for (_, client), read in zip(self._clients, reading, strict=True):
            await asyncio.wait_for(self._complete(client, read), SECONDS)
            client.close("end")
        await asyncio.wait_for(asyncio.gather(*reading), SECONDS)
        for _, client in self._clients:
            client.check(fails=self.fails)

    async def _complete(self, client: Client, read: asyncio.Future[None]) -> None:
        """Wait until a client that has not left has got all responses, or the server has closed its connection."""
        while client.num_missing and not (client.is_closed or read.done()):
            await asyncio.sleep(0.001)
        if client.num_missing and not client.is_closed:
            assert self.ends
            assert client.close_code == 1001


async def play(model: ServedModel, path: str, steps: list[tuple[Any, ...]], seconds: int) -> None:
    scene = Play(model, path, seconds)
    sockets = scene.sockets
    before = {*asyncio.all_tasks()}
    async with contextlib.AsyncExitStack() as stack:
        await scene.open(stack)
        await scene.run(steps)
    for _ in range(20_000):
        if not (sockets.num_open or model.num_requests or asyncio.all_tasks() - before):
            break
        await asyncio.sleep(0.001)
    assert (sockets.num_open, model.num_requests) == (0, 0)
    assert asyncio.all_tasks() == before
    assert model.admission.memory.taken == 0
    assert model.num_queued == 0


INDEX = st.integers(0, NUM_CLIENTS - 1)
SEND = st.tuples(
    INDEX, st.just("send"), st.sampled_from(["", "", "a", "b"]), st.sampled_from([1, 3, 300, 1000]), st.booleans()
)
WAIT = st.tuples(INDEX, st.just("wait"), st.sampled_from([1, 5, 50]))
PART = st.tuples(INDEX, st.just("part"))
CLOSE = st.tuples(INDEX, st.just("close"), st.sampled_from(["close frame", "reset", "end"]))
EVENT = st.tuples(INDEX, st.sampled_from(["drain", "drain all", "lose", "kill", "kill"]))
STEPS = st.sampled_from([*[SEND] * 12, *[WAIT] * 5, PART, CLOSE, EVENT]).flatmap(lambda step: step)
LIFE = st.sampled_from([3600] * 4 + [0])
"""Maximum lifetimes. With 0, a connection expires while its first requests run."""


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=[hypothesis.Phase.generate]
)
@hypothesis.given(
    path=st.sampled_from([COMPLETIONS, RESPONSES]),
    steps=st.lists(STEPS, min_size=15, max_size=40),
    seconds=LIFE,
    last=st.sampled_from([0.0, 60.0]),
)
def test_sessions_in_any_order_hold_nothing_at_their_end(
    path: str, steps: list[tuple[Any, ...]], seconds: int, last: float
) -> None:
    kills = any(kind == "kill" for _, kind, *_ in steps)

    async def tell() -> None:
        model = await echo_service(f"option.engine_isolation={'process' if kills else 'thread'}")
        try:
            with mock.patch.object(base, "LAST_SECONDS", last), mock.patch.object(supervisor, "_BACKOFF", 0.01):
                await play(model, path, steps, seconds)
        finally:
            model.close()

    asyncio.run(tell())
