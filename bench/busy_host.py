"""Measure a server on one core that a busy process shares: begun streams, pace, `/ping`, CPU and writes a token.

The server's whole process tree has one core, the clients the other. Beside ours runs vLLM's Rust front end, in turns,
with a mock engine core. Three measurements; run each with nothing else on the machine:

    python bench/busy_host.py [--whole] [--clients 256,512,768,1024] [--rust PATH/vllm-rs --model DIRECTORY]
    python bench/busy_host.py --requests         # requests a second, on a whole core
    python bench/busy_host.py --full-speed       # how long a new client waits beside streams without a pace

PATH: `pip download --no-deps vllm==0.33.0` has the file `vllm/vllm-rs`. DIRECTORY: `python bench/dummy_model.py tiny DIRECTORY`.
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

from counting import Clients
from cpu import cpu_seconds
from front_ends import Start, chat, ours, rust, started
from pings import Pings
from throughput import Askers

from handler.bench.machine import describe
from handler.bench.metrics import percentiles, table

PACE = 50
_LONG = 100_000  # tokens; no stream ends while it is measured
_BEGIN_SECONDS = 20.0  # for all streams to begin
_SETTLE = 1.5  # seconds between the last stream's begin and the window
_PING_LIMIT = 10.0
_WARM_UP = 1.0
_CLIENTS = 64  # of --requests
_NEIGHBOURS = 200  # of --full-speed
_NEW_CLIENTS = 10


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


def measure_streams(start: Start, number: int, seconds: float, *, half: bool) -> Window:
    with started(start, PACE, half=half) as server:
        clients = Clients(server.url, chat(_LONG), number, heads=1)
        with contextlib.closing(clients):
            counts = clients.wait(_BEGIN_SECONDS)
            begun = sum(count.streaming for count in counts)
            begun_seconds = max(count.last for count in counts) - min(count.first for count in counts)
            time.sleep(_SETTLE)
            pings = Pings(server.url, seconds, _PING_LIMIT)
            before, cpu_before = clients.counts(), cpu_seconds(server.pid)
            time.sleep(seconds)
            after, cpu_after = clients.counts(), cpu_seconds(server.pid)
            took = pings.result()
    tokens = sum(count.tokens for count in after) - sum(count.tokens for count in before)
    segments = sum(count.segments for count in after) - sum(count.segments for count in before)
    span = statistics.mean(count.at - earlier.at for count, earlier in zip(after, before, strict=True))
    cpu_us = (cpu_after - cpu_before) / tokens * 1e6
    kept, writes = tokens / (number * PACE * span), segments / tokens
    return Window(begun, begun_seconds, kept, cpu_us, writes, statistics.median(took) * 1e3, max(took) * 1e3)


def measure_requests(start: Start, tokens: int, seconds: float, *, stream: bool) -> Rate:
    with started(start, 0, half=False) as server:
        askers = Askers(server.url, chat(tokens, stream=stream), _CLIENTS)
        with contextlib.closing(askers):
            time.sleep(_WARM_UP)
            before, cpu_before = askers.answers(), cpu_seconds(server.pid)
            time.sleep(seconds)
            after, cpu_after = askers.answers(), cpu_seconds(server.pid)
    whole = after.whole - before.whole
    return Rate(whole / (after.at - before.at), (cpu_after - cpu_before) / whole * 1e6, after.failed)


def measure_new_clients(start: Start, *, half: bool) -> list[float]:
    """Seconds until the first token of each of some clients, one after another, beside streams at full speed."""
    with started(start, 0, half=half) as server:
        clients = Clients(server.url, chat(_LONG * 100), _NEIGHBOURS, heads=1)
        with contextlib.closing(clients):
            clients.wait_streaming()
            time.sleep(_SETTLE)
            return [_first_token_seconds(server.url) for _ in range(_NEW_CLIENTS)]


def _first_token_seconds(url: str) -> float:
    where = urllib.parse.urlsplit(url)
    begin = time.monotonic()
    with socket.create_connection((where.hostname or "", where.port or 80)) as connection:
        connection.sendall(chat(1))
        received = b""
        while b'"content":"' not in received.partition(b"}\n")[2]:  # the first event has the role
            data = connection.recv(1 << 16)
            if not data:
                raise RuntimeError(f"a new client got no token: {received[:500]!r}")
            received += data
    return time.monotonic() - begin


def _medians(values: Sequence[tuple[float, ...]]) -> list[float]:
    return [statistics.median(column) for column in zip(*values, strict=True)]


def run_streams(starts: dict[str, Start], clients: Sequence[int], seconds: float, repeat: int, half: bool) -> Any:
    rows, lines = [], []
    for number in clients:
        windows: dict[str, list[Window]] = {name: [] for name in starts}
        for _ in range(repeat):
            for name, start in starts.items():
                window = measure_streams(start, number, seconds, half=half)
                print(f"{number:5} streams, {name}: {window}", file=sys.stderr, flush=True)
                windows[name].append(window)
        for name, each in windows.items():
            middle = Window(*_medians(each))  # type: ignore[arg-type]
            rows.append({"clients": number, "server": name, **middle._asdict(), "each": each})
            all_begun = middle.begun == number
            lines.append(
                [
                    f"{number:,}",
                    name,
                    f"{middle.begun_seconds:.1f}" if all_begun else f"{middle.begun:,.0f} in {_BEGIN_SECONDS:g}",
                    f"{middle.kept:.3f}",
                    f"{middle.ping_p50_ms:.0f} / {middle.ping_max_ms:.0f}",
                    f"{middle.cpu_us:.1f}",
                    f"{middle.writes:.2f}",
                ]
            )
    head = ["streams", "server", "all begun, s", "pace kept", "/ping p50 / max ms", "CPU us/token", "writes/token"]
    print(f"{'half a' if half else 'a whole'} core, {PACE} tokens/s a stream, {seconds:g} s, {repeat} times")
    print(table(head, lines))
    return rows


def run_requests(starts: dict[str, Start], lengths: Sequence[int], seconds: float, repeat: int) -> Any:
    rows, lines = [], []
    for stream in (True, False):
        for tokens in lengths:
            rates: dict[str, list[Rate]] = {name: [] for name in starts}
            for _ in range(repeat):
                for name, start in starts.items():
                    rate = measure_requests(start, tokens, seconds, stream=stream)
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
    print(f"{_CLIENTS} clients, a whole core, no pace, {seconds:g} s, {repeat} times")
    print(table(["tokens", "answer", "server", "requests/s", "CPU us/request", "failed", "ours of it"], lines))
    return rows


def run_full_speed(repeat: int, half: bool) -> Any:
    waits = [wait * 1e3 for _ in range(repeat) for wait in measure_new_clients(ours, half=half)]
    found = {"neighbours": _NEIGHBOURS, **percentiles(waits), "max": max(waits)}
    print(f"a new client beside {_NEIGHBOURS} streams without a pace, {len(waits)} times; first token after ms:")
    print(table(["p50", "p90", "max"], [[f"{found[name]:,.0f}" for name in ("p50", "p90", "max")]]))
    return found


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
    starts: dict[str, Start] = {"ours": ours}
    if given.rust:
        starts["vllm-rs"] = rust(given.rust, given.model)
    if given.requests:
        found = {"requests": run_requests(starts, _numbers(given.tokens), given.seconds, given.repeat)}
    elif given.full_speed:
        found = {"full_speed": run_full_speed(given.repeat, not given.whole)}
    else:
        half = not given.whole
        found = {"streams": run_streams(starts, _numbers(given.clients), given.seconds, given.repeat, half)}
    print(json.dumps({**found, **describe()}))
    return 0


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main())
