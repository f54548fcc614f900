"""Measure what a WebSocket costs beside server-sent events: CPU time per token, and the memory of idle connections.

Both get the same chats from the same server, which runs `--engine echo` on one core. The clients run on the other core,
and their CPU time is not counted. In every other turn, the WebSockets are measured first.

Each client's connection has had a response before its stream begins: the handshake, or that of `/ping`. From the second
request of a connection on, Linux sends other acknowledgments. A server on loopback also pays for waking a client that
waits. A server that is slower finds more clients waiting, which makes it slower still. The clients therefore read every
few milliseconds, and nothing wakes them, as if they were on another machine. `--waiting` measures clients that wait
for each write. The command is:

    python -m tests.compare.sockets [--clients 32,256,1024] [--seconds 10] [--repeat 5] [--idle 1000] [--waiting]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from websockets.frames import Frame, Opcode

from proof.bench.cli import counts
from proof.bench.machine import describe
from proof.bench.processes import Server
from proof.bench.report import table
from tests.compare.busy_host import (
    CLIENT_CORE,
    LONG,
    PACE,
    SERVER_CORE,
    SETTLE,
    FrontEnd,
    chat,
    measure_interval,
    on_its_core,
    ours,
    total,
    wait_begun,
)
from tests.compare.clients import Client, Clients, Streaming, Streams, span

_HANDSHAKE = (
    b"GET /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
_PING = b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n"
_HEAD_END = b"\r\n\r\n"
_SHORT, _MEDIUM = 126, 1 << 16  # sizes from which the length of a frame takes 2 and 8 more bytes
_SERVER = FrontEnd(lambda pace: ours(pace, **{"option.websockets_max": "65536"}), "/ping", heads=0)


def frame_sizes(data: bytes) -> tuple[int, int]:
    """Return the number of whole frames at the beginning of unmasked frames, and their size in bytes."""
    number = end = 0
    while len(data) >= end + 2:
        start, size = end + 2, data[end + 1]
        if size == _SHORT:
            start, size = end + 4, int.from_bytes(data[end + 2 : end + 4], "big")
        elif size > _SHORT:
            start, size = end + 10, int.from_bytes(data[end + 2 : end + 10], "big")
        if len(data) < start + size:
            break
        number, end = number + 1, start + size
    return number, end


_READ_SECONDS = 0.004  # between two reads of clients that do not wait
_begun_reading = set[asyncio.AbstractEventLoop]()


def read_at_intervals() -> None:
    """Let the running loop read at intervals from now on, without waiting for what its connections receive."""
    loop = asyncio.get_running_loop()
    if loop not in _begun_reading:
        _begun_reading.add(loop)
        _read_later(loop)


def _read_later(loop: asyncio.AbstractEventLoop) -> None:
    time.sleep(_READ_SECONDS)
    loop.call_soon(_read_later, loop)


class SecondStreaming(Streaming):
    """A client that streams the response to the second request of its connection."""

    _has_asked = False

    def ask(self) -> None:
        self.transport.write(_PING)

    def data_received(self, data: bytes) -> None:
        if self._has_asked:
            return super().data_received(data)
        self._has_asked = True
        self.transport.write(self.request)


class SocketStreaming(Streaming):
    """A client that opens a WebSocket, sends one message and counts the frames of its response.

    Args:
        request: the handshake, followed by the frame of the message, which is sent after the server's handshake.
    """

    _rest = b""

    def ask(self) -> None:
        handshake, end, self._message = self.request.partition(_HEAD_END)
        self.transport.write(handshake + end)

    def data_received(self, data: bytes) -> None:
        self._rest += data
        if self._message:
            head, end, rest = self._rest.partition(_HEAD_END)
            if not end:
                return
            if not head.startswith(b"HTTP/1.1 101 "):
                self.transport.abort()
                return
            self.transport.write(self._message)
            self._message, self._rest = b"", rest
        number, size = frame_sizes(self._rest)
        self._rest = self._rest[size:]
        self.tokens += number
        if not self.begun and self.tokens > 0:
            self.begun = time.monotonic()


class PolledSecondStreaming(SecondStreaming):
    """The same, read at intervals."""

    def ask(self) -> None:
        read_at_intervals()
        super().ask()


class PolledSocketStreaming(SocketStreaming):
    """The same, read at intervals."""

    def ask(self) -> None:
        read_at_intervals()
        super().ask()


class Idle(Streaming):
    """A client that only waits after the head of the first response."""

    def data_received(self, data: bytes) -> None:
        if data.startswith((b"HTTP/1.1 101 ", b"HTTP/1.1 200 ")):
            self.begun = time.monotonic()


class Transport(NamedTuple):
    """How streams reach their clients.

    Attributes:
        kind: class of the clients.
        request: what each client sends for a stream.
        idle: what a client sends to get a connection that is idle.
    """

    kind: type[Client]
    request: bytes
    idle: bytes


def _message(request: bytes) -> bytes:
    """Return the body of an HTTP request as the frame of a client."""
    return Frame(Opcode.TEXT, request.partition(_HEAD_END)[2]).serialize(mask=True)


TRANSPORTS = {
    "SSE": Transport(PolledSecondStreaming, chat(LONG), _PING),
    "WebSocket": Transport(PolledSocketStreaming, _HANDSHAKE + _message(chat(LONG)), _HANDSHAKE),
}
WAITING = {
    "SSE": TRANSPORTS["SSE"]._replace(kind=SecondStreaming),
    "WebSocket": TRANSPORTS["WebSocket"]._replace(kind=SocketStreaming),
}


class Cost(NamedTuple):
    """The measurement of streams at a fixed pace.

    Attributes:
        cpu_us: the server's CPU microseconds per token.
        kept: the tokens that arrived, as a fraction of the tokens that were due at this pace.
        writes: writes per token.
    """

    cpu_us: float
    kept: float
    writes: float


def measure_streams(server: Server, transport: Transport, number: int, seconds: float) -> Cost:
    """Measure one transport.

    Raises:
        RuntimeError: a stream did not begin, or ended.
    """
    with contextlib.closing(Clients[Streams](transport.kind, server.url, transport.request, number)) as clients:
        begun = total(wait_begun(clients, number), "streaming")
        time.sleep(SETTLE)
        interval = measure_interval(_SERVER, server, clients, "tokens", seconds)
    if begun < number or total(interval.after, "streaming") < number:
        raise RuntimeError(f"only {begun} of {number} streams began, or one ended")
    due = number * PACE * span(interval.before, interval.after)
    tokens = interval.gain("tokens")
    return Cost(interval.cpu_us_per("tokens"), tokens / due, interval.gain("segments") / tokens)


def run_streams(
    transports: Mapping[str, Transport], clients: Sequence[int], seconds: float, repeat: int
) -> list[dict[str, Any]]:
    """Measure both transports in turn, `repeat` times for each number of clients, and print the medians."""
    rows, lines = [], []
    for number in clients:
        costs: dict[str, list[Cost]] = {name: [] for name in transports}
        for turn in range(repeat):
            with on_its_core(_SERVER, PACE, half=False) as server:
                for name in [*transports][:: -1 if turn % 2 else 1]:
                    costs[name].append(measure_streams(server, transports[name], number, seconds))
                    print(f"{number:5} streams, {name}: {costs[name][-1]}", file=sys.stderr, flush=True)
        for name, each in costs.items():
            middle = Cost(*map(statistics.median, zip(*each, strict=True)))
            ratio = statistics.median(a.cpu_us / b.cpu_us for a, b in zip(each, costs["SSE"], strict=True))
            rows.append({"clients": number, "transport": name, **middle._asdict(), "ratio": ratio, "each": each})
            cells = [f"{middle.cpu_us:.1f}", f"{middle.kept:.3f}", f"{middle.writes:.2f}", f"{ratio:.3f}"]
            lines.append([f"{number:,}", name, *cells])
    print(f"a whole core, {PACE} tokens/s per stream, {seconds:g} s, {repeat} times")
    print(table(["streams", "transport", "CPU us/token", "pace kept", "writes/token", "of SSE"], lines))
    return rows


def memory(pid: int) -> int:
    """Return the proportional set size of a process, in bytes."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("the kernel does not report the proportional set size")


def run_idle(number: int) -> list[dict[str, Any]]:
    """Measure the memory that idle connections add to a server, of a new server for each transport."""
    rows: list[dict[str, Any]] = []
    for name, transport in TRANSPORTS.items():
        with on_its_core(_SERVER, 0, half=False) as server:
            with contextlib.closing(Clients[Streams](Idle, server.url, transport.idle, 1)) as clients:
                wait_begun(clients, 1)  # what the first connection imports is no cost of the others
            before = memory(server.pid)
            with contextlib.closing(Clients[Streams](Idle, server.url, transport.idle, number)) as clients:
                open_ = total(wait_begun(clients, number), "streaming")
                added = memory(server.pid) - before
        if open_ < number:
            raise RuntimeError(f"only {open_} of {number} connections were opened")
        rows.append({"connections": number, "transport": name, "bytes": added})
    lines = [[f"{number:,}", row["transport"], f"{row['bytes'] / 2**20:.1f}", f"{row['bytes'] / number / 1024:.1f}"]
             for row in rows]  # fmt: skip
    print(table(["idle connections", "transport", "MiB", "KiB each"], lines))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--clients", type=counts, default=[32, 256, 1024], help="numbers of streams (default: 32,256,1024)")
    add("--seconds", type=float, default=10.0, help="seconds of each measurement (default: %(default)s)")
    add("--repeat", type=int, default=5, help="repetitions; the tables show medians (default: %(default)s)")
    add("--idle", type=int, default=1000, help="number of idle connections (default: %(default)s)")
    add("--waiting", action="store_true", help="let the clients wait for each write")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server keeps running
    if not {SERVER_CORE, CLIENT_CORE} <= os.sched_getaffinity(0):
        parser.error(f"this comparison needs CPU cores {SERVER_CORE} and {CLIENT_CORE}")
    streams = run_streams(WAITING if args.waiting else TRANSPORTS, args.clients, args.seconds, args.repeat)
    print(json.dumps({"streams": streams, "idle": run_idle(args.idle), **describe()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
