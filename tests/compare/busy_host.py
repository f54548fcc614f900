"""Measure a server on a core that it shares with a busy process: started streams, pace, `/ping`, CPU time and writes.

The server's processes run on one core, and the clients on the other. `--rust` adds vLLM's Rust front end, which
alternates with our server, and whose mock engine core runs on the clients' core. With `--requests`, our server is
measured twice: with its engine on the server's core, and with its engine on the clients' core. Run nothing else on the
machine. The command has two modes:

    # streams beside a busy process, or without it (--whole)
    python -m tests.compare.busy_host [--whole] [--clients 256,512,768,1024] [--rust PATH/vllm-rs --model DIRECTORY]
    # requests per second, always without the busy process
    python -m tests.compare.busy_host --requests [--rust PATH/vllm-rs --model DIRECTORY]

PATH/vllm-rs is the file `vllm/vllm-rs` in the wheel from `pip download --no-deps vllm==0.33.0`.
`python -m tests.gpu.vllm.checkpoint` creates DIRECTORY and prints its name; it needs torch.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from proof.bench.cli import counts
from proof.bench.machine import describe
from proof.bench.processes import Server, Worker, lmi_serve
from proof.bench.report import table
from tests.compare.clients import Answers, Asking, Clients, Pings, Streaming, Streams, span
from tests.compare.processes import child_by_command, cpu_seconds, free_port, process_seconds, started

SERVER_CORE, CLIENT_CORE = 0, 1
_MAX_RUNNING = 4096  # concurrent requests
_READY_SECONDS = 30.0


def _seconds(pid: int) -> float:
    return cpu_seconds(pid).host


class FrontEnd(NamedTuple):
    """A server to compare.

    Attributes:
        start: a function that starts the server with a pace, in tokens per second for each request, or 0 for no limit.
            All processes of the server run on the current core, except an engine that is moved to the clients' core.
        ping: the path of the health check.
        heads: the number of events in a chat before the first token.
        cpu: a function that returns the CPU seconds of the processes on the server's core.
    """

    start: Callable[[float], AbstractContextManager[Server]]
    ping: str
    heads: int
    cpu: Callable[[int], float] = _seconds


def chat(tokens: int, *, stream: bool = True) -> bytes:
    """Return an HTTP request for a response of exactly `tokens` tokens."""
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": "alpha gamma delta kappa omega sigma theta while"}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
    """Pin this process to a core within this context, and with it all processes that it starts there."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def ours(pace: float, **more: str) -> AbstractContextManager[Server]:
    options = {
        **more,
        "option.echo_tokens_per_second": f"{pace:g}",
        "option.max_rolling_batch_size": _MAX_RUNNING,
        "job_queue_size": _MAX_RUNNING,
    }
    arguments = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
    return lmi_serve(["--engine", "echo", *arguments], variables={"LMI_LOG_LEVEL": "error"})  # the same as for vllm-rs


@contextlib.contextmanager
def _ours_apart(pace: float) -> Iterator[Server]:
    with ours(pace, **{"option.engine_isolation": "process"}) as server:
        for thread in Path(f"/proc/{engine_of(server.pid)}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {CLIENT_CORE})
        yield server


def engine_of(pid: int) -> int:
    """Return the process ID of the engine. `pid` is the process ID of our server."""
    return child_by_command(pid, b"engine_process")


OURS = FrontEnd(ours, "/ping", heads=0)
"""Our server with the engine on a thread, as `lmi serve --engine echo` starts it."""

OURS_APART = FrontEnd(_ours_apart, "/ping", heads=0, cpu=lambda pid: _seconds(pid) - process_seconds(engine_of(pid)))
"""Our server with the engine in a process on the clients' core, like the mock core of vLLM's front end."""


def rust(binary: Path, model: Path) -> FrontEnd:
    """Return vLLM's Rust front end, with a mock core that runs on the clients' core.

    Args:
        binary: the file `vllm/vllm-rs` of vLLM's wheel.
        model: a Hugging Face directory with tokenizer, chat template and config.json.
    """

    @contextlib.contextmanager
    def start(pace: float) -> Iterator[Server]:
        port, handshake = free_port(), free_port()
        url = f"http://127.0.0.1:{port}"
        core = [sys.executable, "-m", "tests.compare.mock_core", f"tcp://127.0.0.1:{handshake}", "--pace", f"{pace:g}"]
        command = [str(binary), "serve", str(model), "--served-model-name", "model", "--port", str(port)]
        command += ["--data-parallel-size-local", "0", "--data-parallel-size", "1"]
        command += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(handshake)]
        quiet = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}  # otherwise it logs a line per request
        with pinned(CLIENT_CORE):
            engine = subprocess.Popen(core, stdin=subprocess.DEVNULL)
        try:
            with started(command, url, _READY_SECONDS, quiet) as pid:
                yield Server(url, pid)
        finally:
            engine.kill()
            engine.wait()

    return FrontEnd(start, "/health", heads=1)


@contextlib.contextmanager
def on_its_core(front_end: FrontEnd, pace: float, *, half: bool) -> Iterator[Server]:
    """Start a server on its core, which it shares with a busy process if `half` is true."""
    with contextlib.ExitStack() as stack:
        with pinned(SERVER_CORE):
            server = stack.enter_context(front_end.start(pace))
            if half:
                stack.callback(Worker("a busy process", _spin).close)
        with pinned(CLIENT_CORE):
            yield server


def _spin(pipe: Connection) -> None:
    while not pipe.poll():
        pass


PACE = 50  # tokens per second of each stream
_BEGIN_SECONDS = 20.0  # limit for all streams to begin
_CLIENTS = 64  # clients of --requests
LONG = 100_000  # tokens of a stream, so that none ends while it is measured
SETTLE = 1.5  # seconds between the beginning of the last stream and the measurement
_PING_LIMIT = 10.0  # seconds
_CONNECT_SECONDS = 3.0  # duration of the health checks while clients connect,
_BEFORE = 0.3  # of which this many seconds precede the first client
_WARM_UP = 1.0


class Window(NamedTuple):
    """The measurement of streams at a fixed pace.

    Attributes:
        begun: number of streams that began in time.
        begun_seconds: seconds from the first client's connection to the beginning of the last stream.
        kept: the tokens that arrived, as a fraction of the tokens that were due at this pace.
        cpu_us: the CPU microseconds per token on the server's core.
        writes: writes per token.
        ping_connect_ms: maximum response time of health checks while all clients connect at once and streams begin.
        ping_p50_ms: median response time of health checks. A missing response counts as the time limit.
        ping_max_ms: maximum response time of health checks.
    """

    begun: int
    begun_seconds: float
    kept: float
    cpu_us: float
    writes: float
    ping_connect_ms: float
    ping_p50_ms: float
    ping_max_ms: float


class Rate(NamedTuple):
    """The measurement of requests per second, and of CPU microseconds per request on the server's core."""

    per_second: float
    cpu_us: float
    failed: int


Totals = TypeVar("Totals", Streams, Answers)


@dataclass(frozen=True)
class Interval(Generic[Totals]):
    """The totals of clients before and after an interval, and the CPU seconds of the server's core in the interval."""

    before: Sequence[Totals]
    after: Sequence[Totals]
    cpu: float

    def gain(self, name: str) -> int:
        return total(self.after, name) - total(self.before, name)

    def cpu_us_per(self, name: str) -> float:
        return self.cpu / self.gain(name) * 1e6


def measure_interval(
    front_end: FrontEnd, server: Server, clients: Clients[Totals], name: str, seconds: float
) -> Interval[Totals]:
    """Measure an interval. On a busy machine it lasts longer than `seconds`, until the total `name` has grown.

    Raises:
        RuntimeError: the total has not grown within further `_BEGIN_SECONDS`.
    """
    before, cpu = clients.totals(), front_end.cpu(server.pid)
    time.sleep(seconds)
    deadline = time.monotonic() + _BEGIN_SECONDS
    while True:
        interval = Interval(before, clients.totals(), front_end.cpu(server.pid) - cpu)
        if interval.gain(name):
            return interval
        if time.monotonic() >= deadline:
            raise RuntimeError(f"{name!r} has not grown within {seconds + _BEGIN_SECONDS:g} s: {interval.after}")
        time.sleep(0.2)


def measure_streams(front_end: FrontEnd, number: int, seconds: float, *, half: bool) -> Window:
    with on_its_core(front_end, PACE, half=half) as server:
        connect_pings = Pings(server.url + front_end.ping, _CONNECT_SECONDS, _PING_LIMIT)
        time.sleep(_BEFORE)
        clients = Clients[Streams](Streaming, server.url, chat(LONG), number, front_end.heads)
        with contextlib.closing(clients):
            begun = wait_begun(clients, number)
            connecting = connect_pings.result()
            time.sleep(SETTLE)
            pings = Pings(server.url + front_end.ping, seconds, _PING_LIMIT)
            interval = measure_interval(front_end, server, clients, "tokens", seconds)
            took = pings.result()
    if total(interval.after, "streaming") < total(begun, "streaming"):
        raise RuntimeError("a stream ended during the measurement")
    return Window(
        begun=total(begun, "streaming"),
        begun_seconds=max(some.last for some in begun) - min(some.first for some in begun),
        kept=interval.gain("tokens") / (number * PACE * span(interval.before, interval.after)),
        cpu_us=interval.cpu_us_per("tokens"),
        writes=interval.gain("segments") / interval.gain("tokens"),
        ping_connect_ms=max(connecting) * 1e3,
        ping_p50_ms=statistics.median(took) * 1e3,
        ping_max_ms=max(took) * 1e3,
    )


def wait_begun(clients: Clients[Streams], number: int) -> list[Streams]:
    """Wait until all streams have begun, at most `_BEGIN_SECONDS`. Raise RuntimeError if no stream has begun."""
    deadline = time.monotonic() + _BEGIN_SECONDS
    while total(totals := clients.totals(), "streaming") < number and time.monotonic() < deadline:
        time.sleep(0.2)
    if not total(totals, "streaming"):
        raise RuntimeError(f"no stream began within {_BEGIN_SECONDS:g} s: {totals}")
    return totals


def total(totals: Sequence[Streams] | Sequence[Answers], name: str) -> int:
    return sum(getattr(some, name) for some in totals)


def measure_requests(front_end: FrontEnd, tokens: int, seconds: float, *, stream: bool) -> Rate:
    with on_its_core(front_end, 0, half=False) as server:
        clients = Clients[Answers](Asking, server.url, chat(tokens, stream=stream), _CLIENTS)
        with contextlib.closing(clients):
            time.sleep(_WARM_UP)
            interval = measure_interval(front_end, server, clients, "whole", seconds)
    per_second = interval.gain("whole") / span(interval.before, interval.after)
    return Rate(per_second, interval.cpu_us_per("whole"), total(interval.after, "failed"))


# -- alternate between servers, and print tables -----------------------------------------------------------------------

T = TypeVar("T")


def _in_turns(
    front_ends: dict[str, FrontEnd], repeat: int, title: str, measure: Callable[[FrontEnd], T]
) -> dict[str, list[T]]:
    """Measure each front end in turn, `repeat` times, and return the results by name."""
    results: dict[str, list[T]] = {name: [] for name in front_ends}
    for _ in range(repeat):
        for name, front_end in front_ends.items():
            results[name].append(measure(front_end))
            print(f"{title}, {name}: {results[name][-1]}", file=sys.stderr, flush=True)
    return results


def _medians(values: Sequence[tuple[float, ...]]) -> list[float]:
    return [statistics.median(column) for column in zip(*values, strict=True)]


_STREAMS_HEAD = ("streams", "server", "all begun, s", "pace kept", "/ping max ms at first", "/ping p50 / max ms",
                 "CPU us/token", "writes/token")  # fmt: skip


def run_streams(
    front_ends: dict[str, FrontEnd], clients: Sequence[int], seconds: float, repeat: int, half: bool
) -> Any:
    rows, lines = [], []
    for number in clients:
        measure = functools.partial(measure_streams, number=number, seconds=seconds, half=half)
        windows = _in_turns(front_ends, repeat, f"{number:5} streams", measure)
        for name, each in windows.items():
            middle = Window(*_medians(each))  # type: ignore[arg-type]
            rows.append({"clients": number, "server": name, **middle._asdict(), "each": each})
            lines.append(
                [
                    f"{number:,}",
                    name,
                    _all_begun(middle, number),
                    f"{middle.kept:.3f}",
                    f"{middle.ping_connect_ms:.0f}",
                    f"{middle.ping_p50_ms:.0f} / {middle.ping_max_ms:.0f}",
                    f"{middle.cpu_us:.1f}",
                    f"{middle.writes:.2f}",
                ]
            )
    print(f"{_core(half)}, {PACE} tokens/s per stream, {seconds:g} s, {repeat} times")
    print(table(_STREAMS_HEAD, lines))
    return rows


def run_requests(front_ends: dict[str, FrontEnd], lengths: Sequence[int], seconds: float, repeat: int) -> Any:
    rows, lines = [], []
    reference = [*front_ends][-1]
    for stream, tokens in itertools.product((True, False), lengths):
        measure = functools.partial(measure_requests, tokens=tokens, seconds=seconds, stream=stream)
        rates = _in_turns(front_ends, repeat, f"{tokens} tokens, stream {stream}", measure)
        for name, each in rates.items():
            middle = Rate(*_medians(each))  # type: ignore[arg-type]
            rows.append({"tokens": tokens, "stream": stream, "server": name, **middle._asdict(), "each": each})
            cells = [f"{middle.per_second:,.0f}", f"{middle.cpu_us:.0f}", f"{middle.failed:g}"]
            pairs = zip(each, rates[reference], strict=True)
            ratio = statistics.median(rate.per_second / other.per_second for rate, other in pairs)
            lines.append([str(tokens), "streamed" if stream else "whole", name, *cells, f"{ratio:.2f}"])
    print(f"{_CLIENTS} clients, {_core(False)}, no pace, {seconds:g} s, {repeat} times")
    print(table(["tokens", "answer", "server", "requests/s", "CPU us/request", "failed", f"of {reference}"], lines))
    return rows


def _core(half: bool) -> str:
    return "half a core" if half else "a whole core"


def _all_begun(window: Window, number: int) -> str:
    if window.begun == number:
        return f"{window.begun_seconds:.1f}"
    return f"{window.begun:,.0f} in {_BEGIN_SECONDS:g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--clients", type=counts, default=[256, 512, 768, 1024], help="numbers of clients (default: 256,512,768,1024)")
    add("--seconds", type=float, default=30.0, help="seconds of each measurement (default: %(default)s)")
    add("--repeat", type=int, default=3, help="repetitions; the tables show medians (default: %(default)s)")
    add("--whole", action="store_true", help="measure without the busy process, on a whole core")
    add("--tokens", type=counts, default=[1, 8], help="numbers of tokens per response, for --requests (default: 1,8)")
    add("--rust", type=Path, help="vLLM's Rust front end; needs --model")
    add("--model", type=Path, help="a Hugging Face directory; only tokenizer and config are read")
    add("--requests", action="store_true", help="measure requests per second")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server keeps running
    if not {SERVER_CORE, CLIENT_CORE} <= os.sched_getaffinity(0):
        parser.error(f"this comparison needs CPU cores {SERVER_CORE} and {CLIENT_CORE}")
    if args.rust and not args.model:
        parser.error("--rust needs --model")
    if args.whole and args.requests:
        parser.error("--requests always uses a whole core; omit --whole")
    front_ends: dict[str, FrontEnd] = {"ours": OURS}
    if args.rust:
        front_ends["vllm-rs"] = rust(args.rust, args.model)
    if args.requests:
        front_ends = {"ours": OURS, "ours, engine apart": OURS_APART, **front_ends}
        results = {"requests": run_requests(front_ends, args.tokens, args.seconds, args.repeat)}
    else:
        half = not args.whole
        results = {"streams": run_streams(front_ends, args.clients, args.seconds, args.repeat, half)}
    print(json.dumps({**results, **describe()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
