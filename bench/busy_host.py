"""Measure a server on one core that a busy process shares: begun streams, pace, `/ping`, CPU and writes a token.

The server's whole process tree has one core, the clients the other. Beside ours runs vLLM's Rust front end, in turns,
with a mock engine core, which the clients' core has. `--requests` measures ours twice: with its engine on the server's
core, and apart, with its engine on the clients' core too. Two measurements; run each with nothing else on the machine:

    python bench/busy_host.py [--whole] [--clients 256,512,768,1024] [--rust PATH/vllm-rs --model DIRECTORY]
    python bench/busy_host.py --requests         # requests a second, on a whole core

PATH: the wheel of `pip download --no-deps vllm==0.33.0` has the file `vllm/vllm-rs`.
DIRECTORY: `python bench/dummy_model.py tiny DIRECTORY` makes it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from front_ends import CLIENT_CORE, OURS, OURS_APART, SERVER_CORE, FrontEnd, rust
from measurements import BEGIN_SECONDS, CLIENTS, PACE, Rate, Window, measure_requests, measure_streams

from proof.bench.machine import describe
from proof.bench.report import table

T = TypeVar("T")


def _in_turns(
    front_ends: dict[str, FrontEnd], repeat: int, title: str, measure: Callable[[FrontEnd], T]
) -> dict[str, list[T]]:
    """Measure each front end `repeat` times, one after the other; return each one's results by its name."""
    found: dict[str, list[T]] = {name: [] for name in front_ends}
    for _ in range(repeat):
        for name, front_end in front_ends.items():
            found[name].append(measure(front_end))
            print(f"{title}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    return found


def _medians(values: Sequence[tuple[float, ...]]) -> list[float]:
    return [statistics.median(column) for column in zip(*values, strict=True)]


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
    reference = [*front_ends][-1]
    for stream in (True, False):
        for tokens in lengths:
            measure = functools.partial(measure_requests, tokens=tokens, seconds=seconds, stream=stream)
            rates = _in_turns(front_ends, repeat, f"{tokens} tokens, stream {stream}", measure)
            for name, each in rates.items():
                middle = Rate(*_medians(each))  # type: ignore[arg-type]
                ratio = statistics.median(
                    rate.per_second / other.per_second for rate, other in zip(each, rates[reference], strict=True)
                )
                rows.append({"tokens": tokens, "stream": stream, "server": name, **middle._asdict(), "each": each})
                answer = "streamed" if stream else "whole"
                cells = [f"{middle.per_second:,.0f}", f"{middle.cpu_us:.0f}", f"{middle.failed:g}", f"{ratio:.2f}"]
                lines.append([str(tokens), answer, name, *cells])
    print(f"{CLIENTS} clients, {_core(False)}, no pace, {seconds:g} s, {repeat} times")
    print(table(["tokens", "answer", "server", "requests/s", "CPU us/request", "failed", f"of {reference}"], lines))
    return rows


def _core(half: bool) -> str:
    return "half a core" if half else "a whole core"


def _begun(begun: float, number: int, seconds: float) -> str:
    return f"{seconds:.1f}" if begun == number else f"{begun:,.0f} in {BEGIN_SECONDS:g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--clients", default="256,512,768,1024", help="(default %(default)s)")
    add("--seconds", type=float, default=30.0, help="of each window (default %(default)s)")
    add("--repeat", type=int, default=3, help="medians are of so many (default %(default)s)")
    add("--whole", action="store_true", help="without the busy process")
    add("--tokens", default="1,8", help="of each answer of --requests (default %(default)s)")
    add("--rust", type=Path, help="vLLM's Rust front end; needs --model")
    add("--model", type=Path, help="a Hugging Face directory; only tokenizer and config are read")
    add("--requests", action="store_true", help="measure requests a second")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server is left
    if not {SERVER_CORE, CLIENT_CORE} <= os.sched_getaffinity(0):
        parser.error(f"needs cores {SERVER_CORE} and {CLIENT_CORE}")
    if given.rust and not given.model:
        parser.error("--rust needs --model")
    if given.whole and given.requests:
        parser.error("--requests has a whole core anyway, without --whole")
    front_ends: dict[str, FrontEnd] = {"ours": OURS}
    if given.rust:
        front_ends["vllm-rs"] = rust(given.rust, given.model)
    if given.requests:
        front_ends = {"ours": OURS, "ours, engine apart": OURS_APART, **front_ends}
        found = {"requests": run_requests(front_ends, _numbers(given.tokens), given.seconds, given.repeat)}
    else:
        half = not given.whole
        found = {"streams": run_streams(front_ends, _numbers(given.clients), given.seconds, given.repeat, half)}
    print(json.dumps({**found, **describe()}))
    return 0


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main())
