"""Measurements of one server: streams at a pace, requests a second."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from counting import Clients, Count
from front_ends import FrontEnd, chat, started
from pings import Pings
from throughput import Askers

PACE = 50  # tokens a second of each stream
BEGIN_SECONDS = 20.0  # for all streams to begin
CLIENTS = 64  # that ask for short answers
_LONG = 1_000_000  # tokens; no stream ends while it is measured
_SETTLE = 1.5  # seconds between the last stream's begin and the window
_PING_LIMIT = 10.0  # seconds
_WARM_UP = 1.0


class Window(NamedTuple):
    """Streams at a pace.

    Attributes:
        begun: streams that began within the time for it.
        begun_seconds: from the first client's connecting to the begin of the last of them.
        kept: share of the pace, over all clients.
        cpu_us: of what runs on the server's core, a token.
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
    """Requests a second, and CPU microseconds a request of what runs on the server's core."""

    per_second: float
    cpu_us: float
    failed: int


def measure_streams(front_end: FrontEnd, number: int, seconds: float, *, half: bool) -> Window:
    with started(front_end, PACE, half=half) as server:
        clients = Clients(server.url, chat(_LONG), number, heads=front_end.heads)
        with contextlib.closing(clients):
            counts = clients.wait(BEGIN_SECONDS)
            begun = _streaming(counts)
            time.sleep(_SETTLE)
            pings = Pings(server.url + front_end.ping, seconds, _PING_LIMIT)
            before, cpu_before = clients.counts(), front_end.cpu(server.pid)
            time.sleep(seconds)
            after, cpu_after = clients.counts(), front_end.cpu(server.pid)
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
        raise RuntimeError(f"no stream began within {BEGIN_SECONDS:g} s: {counts}")
    return streams


def _begun_seconds(counts: Sequence[Count]) -> float:
    return max(count.last for count in counts) - min(count.first for count in counts)


def measure_requests(front_end: FrontEnd, tokens: int, seconds: float, *, stream: bool) -> Rate:
    with started(front_end, 0, half=False) as server:
        askers = Askers(server.url, chat(tokens, stream=stream), CLIENTS)
        with contextlib.closing(askers):
            time.sleep(_WARM_UP)
            before, cpu_before = askers.answers(), front_end.cpu(server.pid)
            time.sleep(seconds)
            after, cpu_after = askers.answers(), front_end.cpu(server.pid)
    whole = after.whole - before.whole
    return Rate(whole / (after.at - before.at), (cpu_after - cpu_before) / whole * 1e6, after.failed)
