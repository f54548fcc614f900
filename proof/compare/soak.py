"""Serve mixed clients for an hour, and watch the memory of the host and its engine.

The server has the demo model on OpenVINO in fp32, where greedy answers do not depend on other requests.

    python -m proof.compare.soak [--minutes 60] [--clients 64] [--out FILE]
    python -m proof.compare.soak --echo     # the echo engine: a hundred times as many requests for the host

The exit status is 1 if an answer was crossed or a request failed, or if the host grew by 2 % after the warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from proof.bench import machine
from proof.bench.processes import lmi_serve
from proof.compare.mixed_clients import Clients
from proof.compare.processes import child_by_command

_DEMO = ("option.model_id=demo", "option.dtype=fp32")
_ECHO = ("option.llm_engine=echo", "option.engine_isolation=process", "option.max_model_len=8192")
# The soak may run beside other work, or be stopped for a while; neither is a fault of the engine or of a client.
_PATIENCE = ("option.engine_timeout=3600", "option.predict_timeout=3600", "option.client_timeout=3600")
_INTERVAL = 10.0  # seconds between samples
_ENGINE = b"handler.engines.process.engine_process"
_ALLOWED = 2.0  # percent that the host may grow


class Memory(NamedTuple):
    """A process's memory in MiB: all that is resident, and the anonymous part (heap and stacks)."""

    resident: float
    anonymous: float


def read_memory(pid: int) -> Memory:
    values = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, size = line.split()[:2]
        values[name] = int(size) / 1024
    return Memory(values["Rss:"], values["Anonymous:"])


class Watch:
    """Samples of some processes' memory, `_INTERVAL` apart; while this process is stopped there are none."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self.samples: list[dict[str, Memory]] = []

    @property
    def minutes(self) -> float:
        return len(self.samples) * _INTERVAL / 60

    def sample(self) -> None:
        self.samples.append({name: read_memory(pid) for name, pid in self._pids.items()})

    def growth(self, warm_up: float) -> dict[str, dict[str, Any]]:
        """Compare the last minute with the one that ends at minute `warm_up`, or with itself before then."""
        each = round(60 / _INTERVAL)
        after = min(max(each, round(warm_up * each)), len(self.samples))
        return {name: self._growth(name, self.samples[after - each : after], each) for name in self._pids}

    def _growth(self, name: str, before: Sequence[dict[str, Memory]], each: int) -> dict[str, Any]:
        values = {}
        for index, field in enumerate(Memory._fields):
            begin = statistics.mean(sample[name][index] for sample in before)
            end = statistics.mean(sample[name][index] for sample in self.samples[-each:])
            values[field] = {"begin": begin, "end": end, "percent": (end / begin - 1) * 100}
        return values


async def soak(url: str, watch: Watch, given: argparse.Namespace) -> dict[str, Any]:
    """Run the clients and take samples; write the result so far to `--out` every minute, and return the last one."""
    clients = Clients(url, given.clients)
    running = asyncio.ensure_future(clients.run())
    result: dict[str, Any] = {}
    while watch.minutes < given.minutes and not running.done():
        await asyncio.sleep(_INTERVAL)
        watch.sample()
        if len(watch.samples) % round(60 / _INTERVAL):
            continue
        ends = {end: clients.counts[end] for end in ("done", "abandoned", "refused", "failed", "crossed")}
        result = {"minutes": watch.minutes, "clients": given.clients, "requests": {**ends, "slow": clients.slow}}
        result |= {"memory": watch.growth(given.warm_up), "surprises": clients.surprises}
        _print(result, watch)
        samples = [{name: memory._asdict() for name, memory in sample.items()} for sample in watch.samples]
        given.out.write_text(json.dumps({**result, "samples": samples, **machine.describe()}))
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    return result


def _print(result: dict[str, Any], watch: Watch) -> None:
    requests = " ".join(f"{end} {number:,}" for end, number in result["requests"].items())
    memory = "  ".join(f"{name} {last.resident:.1f} ({last.anonymous:.1f})" for name, last in watch.samples[-1].items())
    print(f"{watch.minutes:5.1f} min  {requests}  resident (anonymous) MiB: {memory}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="(default: %(default)s)")
    add("--warm-up", type=float, default=10.0, help="minutes after which growth counts (default: %(default)s)")
    add("--clients", type=int, default=64, help="(default: %(default)s)")
    add("--echo", action="store_true", help="serve the echo engine instead of the demo model")
    add("--out", type=Path, default=Path("soak.json"), help="the result, with all samples (default: %(default)s)")
    given = parser.parse_args()
    if given.minutes < 1:
        parser.error("--minutes: must be at least 1, as memory is compared by the minute")
    options = (*(_ECHO if given.echo else _DEMO), *_PATIENCE)
    with lmi_serve([part for option in options for part in ("-o", option)]) as server:
        pids = {"host": server.pid, "engine": child_by_command(server.pid, _ENGINE)}
        result = asyncio.run(soak(server.url, Watch(pids), given))
    for name, memory in result["memory"].items():
        for field, values in memory.items():
            print(f"{name}, {field}: {values['begin']:.1f} to {values['end']:.1f} MiB, {values['percent']:+.2f} %")
    for surprise in result["surprises"]:
        print(surprise)
    requests, grown = result["requests"], result["memory"]["host"]["resident"]["percent"]
    return int(bool(requests["failed"] or requests["crossed"]) or not requests["done"] or grown >= _ALLOWED)


if __name__ == "__main__":
    raise SystemExit(main())
