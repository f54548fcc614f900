"""WebSockets in any order of events: each response reaches its lane and its connection, and at the end nothing is held.

The loop and the engine are real, because what is looked for are the joints between connection, session and request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from typing import Any

import hypothesis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from handler.http.app import App
from handler.http.sockets.routes import Sockets
from handler.serving.model import ServedModel
from tests.app.sockets.client import frame, offer
from tests.services import echo_service
from tests.unit.http.connection import Connection, connected, tcp_pair

NUM_CLIENTS = 3
SECONDS = 60.0


class Client:
    """A client of a WebSocket, which knows what each lane has asked for.

    Args:
        number: number of the client, which its words contain.
    """

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection = connection
        self._number = number
        self._num_sent = 0
        self.asked: dict[str, list[str]] = defaultdict(list)  # by lane, the words of its requests
        self.is_closed = False

    def send(self, lane: str, size: int, streams: bool) -> None:
        word = f"c{self._number}r{self._num_sent}"
        self._num_sent += 1
        self.asked[lane].append(word)
        lanes = {"stream_id": lane} if lane else {}
        body = {"prompt": f"{word} " * size, "max_tokens": size, "stream": streams, **lanes}
        self._write(frame(1, json.dumps(body).encode()))

    def send_part(self) -> None:
        self._write(frame(1, b'{"prompt": "', first=0) + frame(9))

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

    async def events(self) -> list[Any]:
        """Read until the end of the connection, and return the events."""
        events = []
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                first, size = await self._connection.reader.readexactly(2)
                if size == 126:
                    size = int.from_bytes(await self._connection.reader.readexactly(2), "big")
                data = await self._connection.reader.readexactly(size)
                if first == 0x81:
                    events.append(json.loads(data))
                elif first == 0x88:
                    self._write(frame(8, data[:2]))
        return events

    def check(self, events: list[Any]) -> None:
        """Check that each event belongs to a request of its lane, in order."""
        texts: dict[str, str] = defaultdict(str)
        for event in events:
            if "error" in event:
                assert event.get("status", 503) in (424, 429, 503), event
                continue
            texts[event.get("stream_id", "")] += "".join(choice["text"] for choice in event["choices"])
        for lane, text in texts.items():
            words = [word for number, word in enumerate(text.split()) if word not in text.split()[:number]]
            asked = iter(self.asked[lane])
            assert all(word in asked for word in words), (lane, words, self.asked)


async def play(model: ServedModel, steps: list[tuple[Any, ...]]) -> None:
    sockets = Sockets(model.config)
    app = App(model, sockets=sockets)
    before = {*asyncio.all_tasks()}
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for number in range(NUM_CLIENTS):
            connection = await stack.enter_async_context(connected(app, tcp_pair()))
            connection.receive(offer("/v1/completions"))
            await connection.read_until(b"\r\n\r\n")
            clients.append((connection, Client(connection, number)))
        reading = [asyncio.ensure_future(client.events()) for _, client in clients]
        for index, kind, *values in steps:
            connection, client = clients[index]
            if kind == "send" and not client.is_closed:
                client.send(*values)
            elif kind == "part" and not client.is_closed:
                client.send_part()
            elif kind == "close":
                client.close(*values)
            elif kind == "drain":
                protocol: Any = connection.protocol.transport.get_protocol()
                if protocol is not None:  # the connection has not been closed
                    protocol.drain()
            elif kind == "lose":
                model.give_up()
            for _ in range(values[-1] if kind == "wait" else 1):
                await asyncio.sleep(0)
        for _, client in clients:
            client.close("end")
        for (_, client), events in zip(clients, await asyncio.wait_for(asyncio.gather(*reading), SECONDS), strict=True):
            client.check(events)
    for _ in range(20_000):
        if not (sockets.num_open or model.num_requests or asyncio.all_tasks() - before):
            break
        await asyncio.sleep(0.001)
    assert (sockets.num_open, model.num_requests) == (0, 0)
    assert asyncio.all_tasks() == before
    assert model.admission.memory.taken == 0
    assert model.num_queued == 0


INDEX = st.integers(0, NUM_CLIENTS - 1)
STEPS = st.one_of(
    st.tuples(INDEX, st.just("send"), st.sampled_from(["", "", "a", "b"]), st.sampled_from([1, 3, 300]), st.booleans()),
    st.tuples(INDEX, st.just("wait"), st.sampled_from([1, 5, 50])),
    st.tuples(INDEX, st.just("part")),
    st.tuples(INDEX, st.just("close"), st.sampled_from(["close frame", "reset", "end"])),
    st.tuples(INDEX, st.sampled_from(["drain", "lose"])),
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=[hypothesis.Phase.generate]
)
@hypothesis.given(steps=st.lists(STEPS, min_size=4, max_size=25))
def test_sessions_in_any_order_hold_nothing_at_their_end(steps: list[tuple[Any, ...]]) -> None:
    async def tell() -> None:
        model = await echo_service()
        try:
            await play(model, steps)
        finally:
            model.close()

    asyncio.run(tell())
