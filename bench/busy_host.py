"""Measure a server on one core that a busy process shares: begun streams, pace, `/ping`, CPU and writes a token.

The server's whole process tree has one core, the clients the other. Beside ours runs vLLM's Rust front end, in turns,
with a mock engine core. Three measurements; run each with nothing else on the machine:

    python bench/busy_host.py [--whole] [--clients 256,512,768,1024] [--rust PATH/vllm-rs --model DIRECTORY]
    python bench/busy_host.py --requests         # requests a second, on a whole core
    python bench/busy_host.py --full-speed       # how long a new client waits beside streams without a pace

PATH: the wheel of `pip download --no-deps vllm==0.33.0` has the file `vllm/vllm-rs`.
DIRECTORY: `python bench/dummy_model.py tiny DIRECTORY` makes it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import sys
import time
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from counting import Clients, Count
from cpu import cpu_seconds
from front_ends import OURS, FrontEnd, chat, rust, started
from pings import Pings
from throughput import Askers

from handler.bench.machine import describe
from handler.bench.metrics import table

PACE = 50
_LONG = 1_000_000  # tokens; no stream ends while it is measured
_BEGIN_SECONDS = 20.0  # for all streams to begin
_SETTLE = 1.5  # seconds between the last stream's begin and the window
_ANSWER_LIMIT = 10.0  # seconds for a ping, and for a new client's first token
_WARM_UP = 1.0
_CLIENTS = 64  # of --requests
_NEIGHBOURS = 200  # of --full-speed
_NEW_CLIENTS = 5


class Window(NamedTuple):
    """Streams at a pace.

    Attributes:
        begun: streams that began within the time for it.
        begun_seconds: from the first client's connecting to the begin of the last of them.
        kept: share of the pace, over all clients.
        cpu_us: of the server's process tree, a token.
        writes: a token.
        ping_p50_ms, ping_max_ms: no answer counts as the limit.
    """

    begun: int
    begun_seconds: float
    kept: float
    cpu_us: float
    writes: float
    ping_p50_ms: float
    ping_max_ms: float


class Rate(NamedTuple):
    """Requests a second, and CPU microseconds a request of the server's process tree."""

    per_second: float
    cpu_us: float
    failed: int


class NewClients(NamedTuple):
    """Some clients, one after another, beside streams without a pace.

    Attributes:
        begun, begun_seconds: of those streams, as in `Window`.
        wait_p50_ms, wait_max_ms: until a new client has its first token.
    """

    begun: int
    begun_seconds: float
    wait_p50_ms: float
    wait_max_ms: float


def measure_streams(front_end: FrontEnd, number: int, seconds: float, *, half: bool) -> Window:
    with started(front_end, PACE, half=half) as server:
        clients = Clients(server.url, chat(_LONG), number, heads=front_end.heads)
        with contextlib.closing(clients):
            counts = clients.wait(_BEGIN_SECONDS)
            begun = _streaming(counts)
            time.sleep(_SETTLE)
            pings = Pings(server.url + front_end.ping, seconds, _ANSWER_LIMIT)
            before, cpu_before = clients.counts(), cpu_seconds(server.pid)
            time.sleep(seconds)
            after, cpu_after = clients.counts(), cpu_seconds(server.pid)
            took = pings.result()
    if _streaming(after) < begun:
        raise RuntimeError("a stream ended before it should")
    tokens = sum(count.tokens for count in after) - sum(count.tokens for count in before)
    segments = sum(count.segments for count in after) - sum(count.segments for count in before)
    span = statistics.mean(count.at - earlier.at for count, earlier in zip(after, before, strict=True))
    cpu_us = (cpu_after - cpu_before) / tokens * 1e6
    kept, writes = tokens / (number * PACE * span), segments / tokens
    return Window(begun, _begun_seconds(counts), kept, cpu_us, writes, statistics.median(took) * 1e3, max(took) * 1e3)


def _streaming(counts: Sequence[Count]) -> int:
    """Return the number of streams; raise RuntimeError if there is none."""
    streams = sum(count.streaming for count in counts)
    if not streams:
        raise RuntimeError(f"no stream began within {_BEGIN_SECONDS:g} s: {counts}")
    return streams


def _begun_seconds(counts: Sequence[Count]) -> float:
    return max(count.last for count in counts) - min(count.first for count in counts)


def measure_requests(front_end: FrontEnd, tokens: int, seconds: float, *, stream: bool) -> Rate:
    with started(front_end, 0, half=False) as server:
        askers = Askers(server.url, chat(tokens, stream=stream), _CLIENTS)
        with contextlib.closing(askers):
            time.sleep(_WARM_UP)
            before, cpu_before = askers.answers(), cpu_seconds(server.pid)
            time.sleep(seconds)
            after, cpu_after = askers.answers(), cpu_seconds(server.pid)
    whole = after.whole - before.whole
    return Rate(whole / (after.at - before.at), (cpu_after - cpu_before) / whole * 1e6, after.failed)


def measure_new_clients(front_end: FrontEnd, *, half: bool) -> NewClients:
    with started(front_end, 0, half=half) as server:
        clients = Clients(server.url, chat(_LONG), _NEIGHBOURS, heads=front_end.heads)
        with contextlib.closing(clients):
            counts = clients.wait(_BEGIN_SECONDS)
            begun = _streaming(counts)
            time.sleep(_SETTLE)
            waits = [_first_token_seconds(server.url) * 1e3 for _ in range(_NEW_CLIENTS)]
    return NewClients(begun, _begun_seconds(counts), statistics.median(waits), max(waits))


def _first_token_seconds(url: str) -> float:
    where = urllib.parse.urlsplit(url)
    begin = time.monotonic()
    with socket.create_connection((where.hostname or "", where.port or 80), _ANSWER_LIMIT) as connection:
        connection.sendall(chat(1))
        received = b""
        while b'"content":"' not in received:
            try:
                data = connection.recv(1 << 16)
            except TimeoutError:
                return _ANSWER_LIMIT
            if not data:
                raise RuntimeError(f"a new client got no token: {received[:500]!r}")
            received += data
    return time.monotonic() - begin


def _medians(values: Sequence[tuple[float, ...]]) -> list[float]:
    return [statistics.median(column) for column in zip(*values, strict=True)]


def run_streams(
    front_ends: dict[str, FrontEnd], clients: Sequence[int], seconds: float, repeat: int, half: bool
) -> Any:
    rows, lines = [], []
    for number in clients:
        windows: dict[str, list[Window]] = {name: [] for name in front_ends}
        for _ in range(repeat):
            for name, front_end in front_ends.items():
                window = measure_streams(front_end, number, seconds, half=half)
                print(f"{number:5} streams, {name}: {window}", file=sys.stderr, flush=True)
                windows[name].append(window)
        for name, each in windows.items():
            middle = Window(*_medians(each))  # type: ignore[arg-type]
            rows.append({"clients": number, "server": name, **middle._asdict(), "each": each})
            lines.append(
                [
                    f"{number:,}",
                    name,
                    _begun(middle.begun, number, middle.begun_seconds),
                    f"{middle.kept:.3f}",
                    f"{middle.ping_p50_ms:.0f} / {middle.ping_max_ms:.0f}",
                    f"{middle.cpu_us:.1f}",
                    f"{middle.writes:.2f}",
                ]
            )
    head = ["streams", "server", "all begun, s", "pace kept", "/ping p50 / max ms", "CPU us/token", "writes/token"]
    print(f"{_core(half)}, {PACE} tokens/s a stream, {seconds:g} s, {repeat} times")
    print(table(head, lines))
    return rows


def run_requests(front_ends: dict[str, FrontEnd], lengths: Sequence[int], seconds: float, repeat: int) -> Any:
    rows, lines = [], []
    for stream in (True, False):
        for tokens in lengths:
            rates: dict[str, list[Rate]] = {name: [] for name in front_ends}
            for _ in range(repeat):
                for name, front_end in front_ends.items():
                    rate = measure_requests(front_end, tokens, seconds, stream=stream)
                    print(f"{tokens} tokens, stream {stream}, {name}: {rate}", file=sys.stderr, flush=True)
                    rates[name].append(rate)
            for name, each in rates.items():
                middle = Rate(*_medians(each))  # type: ignore[arg-type]
                ratio = statistics.median(
                    rate.per_second / other.per_second for rate, other in zip(rates["ours"], each, strict=True)
                )
                rows.append({"tokens": tokens, "stream": stream, "server": name, **middle._asdict(), "each": each})
                answer = "streamed" if stream else "whole"
                cells = [f"{middle.per_second:,.0f}", f"{middle.cpu_us:.0f}", f"{middle.failed:g}", f"{ratio:.2f}"]
                lines.append([str(tokens), answer, name, *cells])
    print(f"{_CLIENTS} clients, {_core(False)}, no pace, {seconds:g} s, {repeat} times")
    print(table(["tokens", "answer", "server", "requests/s", "CPU us/request", "failed", "ours of it"], lines))
    return rows


def run_full_speed(repeat: int, half: bool) -> Any:
    each = [measure_new_clients(OURS, half=half) for _ in range(repeat)]
    middle = NewClients(*_medians(each))  # type: ignore[arg-type]
    print(f"{_NEIGHBOURS} streams without a pace, then {_NEW_CLIENTS} new clients, {_core(half)}, {repeat} times")
    begun = _begun(middle.begun, _NEIGHBOURS, middle.begun_seconds)
    print(
        table(["all begun, s", "p50 ms", "max ms"], [[begun, f"{middle.wait_p50_ms:.0f}", f"{middle.wait_max_ms:.0f}"]])
    )
    return {"neighbours": _NEIGHBOURS, **middle._asdict(), "each": each}


def _core(half: bool) -> str:
    return "half a core" if half else "a whole core"


def _begun(begun: float, number: int, seconds: float) -> str:
    return f"{seconds:.1f}" if begun == number else f"{begun:,.0f} in {_BEGIN_SECONDS:g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--clients", default="256,512,768,1024", help="(default %(default)s)")
    add("--seconds", type=float, default=30.0, help="of each window (default %(default)s)")
    add("--repeat", type=int, default=3, help="medians are of so many (default %(default)s)")
    add("--whole", action="store_true", help="without the busy process")
    add("--requests", action="store_true", help="measure requests a second")
    add("--tokens", default="1,8", help="of each answer of --requests (default %(default)s)")
    add("--full-speed", action="store_true", help="measure how long a new client waits")
    add("--rust", type=Path, help="vLLM's Rust front end; needs --model")
    add("--model", type=Path, help="a Hugging Face directory; only tokenizer and config are read")
    given = parser.parse_args()
    if given.rust and not given.model:
        parser.error("--rust needs --model")
    front_ends: dict[str, FrontEnd] = {"ours": OURS}
    if given.rust:
        front_ends["vllm-rs"] = rust(given.rust, given.model)
    if given.requests:
        found = {"requests": run_requests(front_ends, _numbers(given.tokens), given.seconds, given.repeat)}
    elif given.full_speed:
        found = {"full_speed": run_full_speed(given.repeat, not given.whole)}
    else:
        half = not given.whole
        found = {"streams": run_streams(front_ends, _numbers(given.clients), given.seconds, given.repeat, half)}
    print(json.dumps({**found, **describe()}))
    return 0


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main())
