"""Hostile clients of a WebSocket: none of them stops the event loop, and what they hold is bounded and given back."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests.app.sockets.client import Wire, frame, offer, wire
from tests.attacks.test_standstill import CHAT, chat
from tests.attacks.watch import Watch, answering
from tests.servers import PATIENCE, ServerProcess, options, serve, wait_for

INVOKE, RESPONSES, REALTIME = "/invocations-bidirectional-stream", "/v1/responses", "/v1/realtime"
TEXT, CONTINUATION, CLOSE, PING = 1, 0, 8, 9
MANY = 10_000
MAX_OPEN = 4_096  # option.websockets_max
PER_SOCKET = 40_000  # bytes of resident memory
MAX_EVENTS = 2000  # events that a client reads before it goes; each is a request
MIB = 1 << 20
BUDGET = 64 * MIB  # option.requests_total_bytes


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    own = ("websockets_compression=true", f"requests_total_bytes={BUDGET}")
    with serve("--engine", "echo", *options(*(f"option.{pair}" for pair in own))) as server:
        server.wait_ready()
        yield server


@contextlib.contextmanager
def unhurt(server: ServerProcess) -> Iterator[None]:
    """Ask for /ping, for responses over HTTP, and for responses over a WebSocket that has been open before."""
    statuses = Counter[object]()
    with wire(server, INVOKE) as neighbour:

        def ask() -> None:
            neighbour.frame(TEXT, b'{"inputs": "a", "parameters": {"max_new_tokens": 1}}')
            statuses[neighbour.read()] += 1
            statuses[server.post(chat("a"), CHAT).status_code] += 1

        ask()
        with Watch(ask), answering(server):
            yield
        ask()
    assert {*statuses} == {(0x81, b'{"generated_text":" a"}'), 200}


def is_idle(server: ServerProcess) -> bool:
    """Return whether no socket and no sequence is left, and much of the memory can be taken at once."""
    if server.metric("lmi_websockets") or server.metric("lmi_active_sequences"):
        return False
    return server.post({"inputs": "a" * (BUDGET // 8), "parameters": {"max_new_tokens": 1}}).status_code != 503


def wait_idle(server: ServerProcess) -> None:
    wait_for(lambda: is_idle(server), PATIENCE, "something is held")


def resident(server: ServerProcess) -> int:
    return int(psutil.Process(server.process.pid).memory_info().rss)


# -- clients that say nothing ------------------------------------------------------------------------------------------


@pytest.fixture
def descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(server: ServerProcess) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    client.sendall(offer(INVOKE))
    return client


def silent(server: ServerProcess, stack: contextlib.ExitStack) -> list[tuple[socket.socket, int]]:
    """Open many WebSockets and send nothing. Return the connections, with the status of each handshake."""
    clients = []
    for _ in range(MANY // 100):
        burst = [stack.enter_context(connect(server)) for _ in range(100)]
        clients += [(client, int(client.recv(4096).split()[1])) for client in burst]
    return clients


@pytest.mark.usefixtures("descriptors")
def test_sockets_that_say_nothing_are_limited_and_small(server: ServerProcess) -> None:
    server.post(chat("a"), CHAT)
    before = resident(server)
    with unhurt(server), contextlib.ExitStack() as stack:
        clients = silent(server, stack)
        statuses = Counter(status for _, status in clients)
        held = resident(server) - before
    assert statuses == {101: MAX_OPEN - 1, 503: MANY - MAX_OPEN + 1}  # one is the neighbour's
    assert held < PER_SOCKET * MAX_OPEN
    wait_idle(server)


@pytest.mark.nightly  # it waits for a minute
@pytest.mark.usefixtures("descriptors")
def test_sockets_that_say_nothing_are_closed(server: ServerProcess) -> None:
    with contextlib.ExitStack() as stack:
        clients = silent(server, stack)
        with answering(server):
            closes = Counter[bytes]()
            for client, status in clients:
                if status == 101:
                    closes[client.recv(4)[2:4]] += 1  # the code of a close frame
    assert closes == {struct.pack("!H", 1008): MAX_OPEN}
    wait_idle(server)


# -- frames ------------------------------------------------------------------------------------------------------------


def bomb(size: int) -> bytes:
    deflate = zlib.compressobj(wbits=-12)
    parts = [deflate.compress(b" " * MIB) for _ in range(size // MIB)]
    return b"".join([*parts, deflate.flush(zlib.Z_SYNC_FLUSH)[:-4]])


EMPTY = frame(CONTINUATION, first=0)
FRAMES: dict[str, tuple[str, bytes, int]] = {
    "empty fragments": (INVOKE, frame(TEXT, first=0) + EMPTY * 200_000, 1008),
    "empty fragments, each after a ping": (INVOKE, frame(TEXT, first=0) + (frame(PING) + EMPTY) * 100_000, 1008),
    "messages of two bytes": (INVOKE, frame(TEXT, b"{}") * 200_000, 0),
    "empty messages": (INVOKE, frame(TEXT) * 200_000, 0),
    "events of two bytes": (REALTIME, frame(TEXT, b"{}") * 200_000, 0),
    "responses of two bytes": (RESPONSES, frame(TEXT, b"[]") * 200_000, 0),
    "pings": (INVOKE, frame(PING) * 100_000, -1),
    "long pings": (INVOKE, frame(PING, bytes(125)) * 100_000, -1),
    "pongs": (INVOKE, frame(10) * 200_000, -1),
    "a bomb": (RESPONSES, frame(TEXT, bomb(512 * MIB), first=0xC0), 1009),
    "small bombs": (RESPONSES, frame(TEXT, bomb(15 * MIB), first=0xC0) * 40, 0),
    "small bombs, which are parts of a message": (
        RESPONSES, frame(TEXT, bomb(MIB), first=0x40) + frame(CONTINUATION, first=0) * 900, -1
    ),
    "no mask": (INVOKE, frame(TEXT, b"{}", masked=False) * 100_000, 1002),
    "reserved bits": (INVOKE, frame(TEXT, b"{}", first=0xB0) * 100_000, 1002),
    "a long control frame": (INVOKE, frame(PING, bytes(MIB)), 1002),
    "a deep message": (INVOKE, frame(TEXT, b'{"type": ' + b"[" * 10_000 + b"]" * 10_000 + b"}") * 100, 0),
    "a deep response": (
        RESPONSES, frame(TEXT, b'{"type": "response.create", "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}") * 100, 0
    ),
    "a deep item": (
        REALTIME,
        frame(TEXT, b'{"type": "conversation.item.create", "item": ' + b'{"a":' * 900 + b"1" + b"}" * 901) * 1000,
        0,
    ),
    "a long number": (RESPONSES, frame(TEXT, b'{"type": "response.steer", "input": ' + b"9" * 4000 + b"}") * 1000, 0),
}  # fmt: skip
"""Path, what the client sends, and the code with which the connection must be closed. 0: it goes on, or is closed
because the client does not read what it gets. -1: it goes on.
"""


def last_of(client: Wire) -> int:
    """Read until the end of the connection, the pong for a last ping, or some events. Return the close code, or 0."""
    for _ in range(MAX_EVENTS):
        first, data = client.read()
        if (first, data) == (0x8A, b"last"):
            return 0
        if first in (0, 0x88):
            return int.from_bytes(data[:2], "big") if first else -1
    return 0


@pytest.mark.parametrize("name", FRAMES)
def test_frames_leave_neighbours_their_turn(server: ServerProcess, name: str) -> None:
    path, data, code = FRAMES[name]
    headers = ["Sec-WebSocket-Extensions: permessage-deflate"] if path == RESPONSES else []
    with unhurt(server), wire(server, path, headers) as client:
        client.socket.settimeout(PATIENCE)
        sender = threading.Thread(target=send, args=(client.socket, data + frame(PING, b"last")))
        sender.start()
        end = last_of(client)
        reset(client.socket)
        sender.join()
    if code > 0:
        assert end == code
    elif code < 0:
        assert end == 0
    wait_idle(server)


def send(client: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the connection may be closed early
        client.sendall(data)


def test_a_frame_that_arrives_slowly_holds_what_has_arrived(server: ServerProcess) -> None:
    """Each client announces a large message, and sends little of it."""
    size = 15 * MIB
    begun = b"\x81\xff" + size.to_bytes(8, "big") + bytes(4)
    with unhurt(server), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(wire(server)) for _ in range(100)]
        for client in clients:
            client.socket.sendall(begun)
        for _ in range(100):
            for client in clients:
                client.socket.sendall(b"x")
        assert server.post({"inputs": "a" * MIB, "parameters": {"max_new_tokens": 1}}).status_code != 503
    wait_idle(server)


# -- clients that do not read ------------------------------------------------------------------------------------------


STREAM = {"inputs": "word " * 1000, "parameters": {"max_new_tokens": 1_000_000}, "stream": True}
ECHO = {"type": "response.create", "store": False, "input": "a", "instructions": "b" * 100_000, "max_output_tokens": 1}


@pytest.mark.parametrize(("path", "body"), [(INVOKE, STREAM), (RESPONSES, ECHO)])
def test_clients_that_do_not_read_hold_little(server: ServerProcess, path: str, body: dict[str, Any]) -> None:
    before = resident(server)
    messages = [frame(TEXT, json.dumps({**body, "stream_id": f"lane-{number}"}).encode()) for number in range(32)]
    with unhurt(server), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(wire(server, path)) for _ in range(20)]
        threads = []
        for client in clients:
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            threads.append(threading.Thread(target=send, args=(client.socket, b"".join(messages) * 4)))
            threads[-1].start()
        highest = Highest(lambda: resident(server))
        with Watch(highest.look):
            wait_for(lambda: highest.is_stable, PATIENCE, "memory grows")
        for client in clients:
            reset(client.socket)
        for thread in threads:
            thread.join()
    assert highest.value - before < 3 * BUDGET
    wait_idle(server)


class Highest:
    """The highest value of a measure, which is stable if it has not grown for a while."""

    def __init__(self, measure: Callable[[], int]) -> None:
        self._measure = measure
        self._num_lower = 0
        self.value = 0

    @property
    def is_stable(self) -> bool:
        return self._num_lower > 200

    def look(self) -> None:
        value = self._measure()
        self._num_lower = 0 if value > self.value else self._num_lower + 1
        self.value = max(value, self.value)


def reset(client: socket.socket) -> None:
    """Close a connection without its closing handshake."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
