"""The steps of a lease. Each result is written at once, so that a cut leaves what was done."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from handler.core.errors import ConfigError
from handler.engines.huggingface.files import prepare_checkpoint
from proof.bench import machine, report
from proof.bench.client import Closed, Connections, percentiles
from proof.bench.processes import Server, Work
from tests.compare.engines import CORE, Completions, sample
from tests.compare.processes import descendants
from tests.gpu.lease.systems import (
    BY_GRPC,
    DEVICES,
    OFFLINE,
    OURS,
    VLLM,
    Offline,
    grpc_command,
    our_command,
    responds,
    serving,
    vllm_command,
    write_model,
)
from tests.process_tree import alive

_PROMPTS_EACH = 1 << 14  # prompt numbers reserved for each turn, as in tests.compare.engines
_PROMPT_WORDS = 48
_TURNS = 3
_ACCEPTANCE = {  # what was not run on a GPU, or failed there for a reason that was not found
    "adapters": ["tests/gpu/vllm/test_served.py", "-k", "TestAdapters"],
    "pooling": ["tests/gpu/vllm/test_pooling.py"],
    "thinking": ["tests/gpu/vllm/test_thinking.py"],
    "deaths": ["tests/gpu/vllm/test_engine.py", "-k", "killed"],
    "images, audio": ["tests/gpu/vllm/test_images.py", "tests/gpu/vllm/test_audio.py"],
}


class TooLong(Exception):
    """A step has used up its time."""


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    def expire(number: int, frame: Any) -> None:
        raise TooLong(f"cut after {seconds:.0f} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


class Lease:
    """A run of the steps on a device.

    Args:
        device: "cuda" or "cpu".
        out: directory of the results and logs: at most eight files.
        work: directory of the model.
    """

    def __init__(self, device: str, out: Path, work: Path) -> None:
        self._name, self._device = device, DEVICES[device]
        self._out, self._model = out, work / "model"
        self._began = time.monotonic()
        self._servers: dict[str, Server] = {}
        self._offline: Offline | None = None
        self._ours, self._others = contextlib.ExitStack(), contextlib.ExitStack()  # which end the systems
        self._numbers = itertools.count()
        self._rates: dict[tuple[int, str], list[float]] = {}

    def run(self, steps: Sequence[str]) -> None:
        """Run the steps in the order of the issue. A step that fails does not stop the others."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a socket for each stream
        self._write("facts", _facts())
        functions: dict[str, Callable[[], None]] = {
            "model": self._make_model,
            "start": self._start,
            "ratio": self._compare,
            "streams": self._stream,
            "acceptance": self._accept,
            "ends": self._end,
        }
        with self._ours, self._others:
            for name in steps:
                begin = time.monotonic()
                try:
                    with _limit(self._device.seconds[name]):
                        functions[name]()
                    verdict = "done"
                except Exception as error:  # each step's error is a result
                    verdict = f"{type(error).__name__}: {error}"
                self._write(name, {"step": verdict, "seconds": round(time.monotonic() - begin, 1)})
                if name == "streams":
                    self._write("summary", self._summary())
                    self._others.close()  # gives back the memory that the tests' engines need

    def _write(self, step: str, values: dict[str, Any]) -> None:
        line = json.dumps({"at": round(time.monotonic() - self._began, 1), "of": step, **values})
        with (self._out / "results.jsonl").open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def _log(self, name: str) -> Path:
        return self._out / f"{name}.log"

    # -- the model, and all systems --------------------------------------------------------------------------------

    def _make_model(self) -> None:
        parameters = write_model(self._model, prepare_checkpoint("demo"), self._name)
        self._write("model", {"parameters": parameters})

    def _start(self) -> None:
        """Start our server first, which compiles what the others find compiled; then the others at once."""
        self._start_server(self._ours, OURS, our_command(self._model, self._device), "/ping")
        others = [
            (VLLM, vllm_command(self._model, self._device), "/health"),
            (BY_GRPC, grpc_command(self._model, self._device), "/ping"),
        ]
        begin = time.monotonic()
        offline = Offline(self._model, self._device, self._log("offline"))
        self._others.callback(offline.close)
        with ThreadPoolExecutor(len(others)) as pool:
            futures = [pool.submit(self._start_server, self._others, *other) for other in others]
            try:
                offline.wait_ready()
                self._offline = offline
                self._write("start", {"system": OFFLINE, "ready_s": round(time.monotonic() - begin, 1)})
            except ConfigError as error:
                self._write("start", {"system": OFFLINE, "error": str(error)})
            for (name, *_), future in zip(others, futures, strict=True):
                if (failure := future.exception()) is not None:
                    self._write("start", {"system": name, "error": str(failure)})

    def _start_server(self, started: contextlib.ExitStack, name: str, command: list[str], health: str) -> None:
        log = self._log(name.replace(", ", "-").replace(" ", "-"))
        seconds = self._device.seconds["start"] * 0.6
        server, ready = started.enter_context(serving(command, health, log, self._device.variables, seconds))
        self._servers[name] = server
        self._write("start", {"system": name, "ready_s": round(ready, 1)})

    # -- speed -------------------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        for name in self._systems():  # a warm-up, which is not measured
            self._measure(name, max(self._device.clients), 1, next(self._numbers))
        names = self._systems()
        for turn in range(_TURNS):
            for clients in self._device.clients:
                number = next(self._numbers)
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    values = self._measure(name, clients, 2, number)
                    self._rates.setdefault((clients, name), []).append(values["tokens_per_second"])
                    self._write("ratio", {"clients": clients, "turn": turn, "system": name, **values})

    def _systems(self) -> list[str]:
        return [*self._servers, *([OFFLINE] if self._offline else [])]

    def _measure(self, name: str, clients: int, requests: int, number: int) -> dict[str, Any]:
        if name == OFFLINE:
            assert self._offline is not None
            work = Work(clients, requests, self._device.tokens, _PROMPT_WORDS, first=number * _PROMPTS_EACH)
            return {"tokens_per_second": round(self._offline.measure(work).rate, 1)}
        load = argparse.Namespace(
            tokens=self._device.tokens, prompt_words=_PROMPT_WORDS, processes=max(1, (os.cpu_count() or 2) // 2)
        )
        measured = sample(load, self._servers[name], number, Closed(clients, requests))
        return {
            "tokens_per_second": round(measured.rate, 1),
            "ttft_ms": _milliseconds(report.first_token_times(measured.results)),
            "itl_ms": _milliseconds(report.gaps(measured.results)),
            "host_cpu_us": round(1e6 * measured.host, 2),
            "engine_cpu_us": round(1e6 * measured.engine, 2),
            "errors": report.errors(measured.results),
        }

    def _stream(self) -> None:
        """Open many streams at once, and send a health request every 50 ms meanwhile."""
        for name in self._servers:
            health = "/health" if name == VLLM else "/ping"
            with _pings(self._servers[name].url + health) as pings:
                values = self._measure(name, self._device.streams, 1, next(self._numbers))
            waits = {"p50": round(statistics.median(pings), 1), "max": round(max(pings), 1), "number": len(pings)}
            self._write("streams", {"streams": self._device.streams, "system": name, "ping_ms": waits, **values})

    def _summary(self) -> dict[str, Any]:
        """Return the medians of tokens per second, and of our rates divided by those of each other system in a turn."""
        rates: dict[int, dict[str, float]] = {}
        ratios: dict[int, dict[str, float]] = {}
        for (clients, name), values in self._rates.items():
            rates.setdefault(clients, {})[name] = statistics.median(values)
            ours = self._rates.get((clients, OURS), [])
            if name != OURS and ours:
                each = [own / other for own, other in zip(ours, values, strict=False)]
                ratios.setdefault(clients, {})[name] = round(statistics.median(each), 3)
        return {"ours_over": ratios, "tokens_per_second": rates}

    # -- acceptance ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        """Run suites side by side. What had ended when the time was up is in the log, whose lines name their suites."""
        environment = {**os.environ, **self._device.variables}
        running: dict[str, subprocess.Popen[str]] = {}
        lines: dict[str, list[str]] = {name: [] for name in _ACCEPTANCE}
        pool = ThreadPoolExecutor(4 if self._name == "cuda" else 1)
        with self._log("acceptance").open("a") as log:

            def run(name: str) -> None:
                running[name] = _pytest(_ACCEPTANCE[name], environment)
                for line in running[name].stdout or ():
                    lines[name].append(line)
                    log.write(f"{name}: {line}")
                    log.flush()
                running[name].wait()
                self._write("acceptance", {"suite": name, **verdicts(lines[name])})

            try:
                futures = [pool.submit(run, name) for name in _ACCEPTANCE]
                for future in futures:
                    future.result()
            finally:
                for future in futures:
                    future.cancel()
                for process in running.values():
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                pool.shutdown()

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Abort half of the streams, kill the engine's core, and end the server under load."""
        server = self._servers[OURS]
        many, tokens = min(64, self._device.streams), self._device.tokens
        kept = asyncio.run(_ends(server, many // 2, tokens, abort=many // 2))
        time.sleep(5)
        self._write("ends", {"what": "abort half", "kept": kept, "after_5_s": _running(server)})

        core = next(pid for pid in descendants(server.pid) if _title(pid).startswith(CORE))
        killed = asyncio.run(_ends(server, 16, 1500, after=2.0, then=lambda: os.kill(core, signal.SIGKILL)))
        begin = time.monotonic()
        while not responds(server.url + "/ping"):
            time.sleep(0.1)
        ready = round(time.monotonic() - begin, 1)
        self._write("ends", {"what": "kill -9 of the core", "streams": killed, "ready_s": ready})
        self._write("ends", {"what": "request after it", "streams": asyncio.run(_ends(server, 1, 8))})

        processes = [server.pid, *descendants(server.pid)]
        begin = time.monotonic()
        drained = asyncio.run(_ends(server, many, tokens, then=lambda: os.kill(server.pid, signal.SIGTERM)))
        while any(map(alive, processes)) and time.monotonic() - begin < 40:
            time.sleep(0.1)
        gone = {"gone_s": round(time.monotonic() - begin, 1), "left": [pid for pid in processes if alive(pid)]}
        self._write("ends", {"what": "SIGTERM under load", "streams": drained, **gone, "gpu": _gpu_processes()})


def _facts() -> dict[str, Any]:
    smi = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(smi, capture_output=True, text=True).stdout.strip()
    except OSError:
        gpu = ""
    return {**machine.describe(), "gpu": gpu}


def _gpu_processes() -> str:
    smi = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    try:
        return subprocess.run(smi, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def _milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    return {name: round(1e3 * value, 2) for name, value in percentiles(seconds).items() if value is not None}


@contextlib.contextmanager
def _pings(url: str) -> Iterator[list[float]]:
    """Yield the milliseconds of requests to `url`, one every 50 ms, each on a connection of its own."""
    waits: list[float] = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.wait(0.05):
            begin = time.monotonic()
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=30):
                pass
            waits.append(1e3 * (time.monotonic() - begin))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield waits
    finally:
        ended.set()
        thread.join()


def _pytest(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "vllm", "--timeout", "300"]
    return subprocess.Popen(
        [*command, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def verdicts(lines: Sequence[str]) -> dict[str, Any]:
    """Return the numbers of tests that passed, failed and so on, and the names of those that did not pass."""
    verdicts = ("PASSED", "FAILED", "ERROR", "SKIPPED")
    ended = [(line.split()[0], verdict) for line in lines for verdict in verdicts if f"{verdict} [" in line]
    return {
        "tests": Counter(verdict for _, verdict in ended),
        "not_passed": [test for test, verdict in ended if verdict in ("FAILED", "ERROR")],
        "last": lines[-1].strip() if lines else "",
    }


async def _ends(
    server: Server,
    streams: int,
    tokens: int,
    *,
    abort: int = 0,
    after: float = 0.3,
    then: Callable[[], object] = lambda: None,
) -> Counter[str]:
    """Open streams, and return how they have ended: complete, or the kind of failure.

    Args:
        tokens: tokens in each response.
        abort: number of further streams, whose clients close their connections after `after` seconds.
        after: seconds from the first request to the call of `then`.
    """
    target = Completions(server.url, tokens, _PROMPT_WORDS, 60.0, 1 << 22)
    connections, aborted = Connections(target), Connections(replace(target, timeout=after, tokens=1500))
    tasks = [asyncio.ensure_future(connections.ask(number)) for number in range(streams)]
    others = [asyncio.ensure_future(aborted.ask(streams + number)) for number in range(abort)]
    await asyncio.sleep(after)
    then()
    results = await asyncio.gather(*tasks)
    await asyncio.gather(*others)
    connections.close()
    return Counter(result.error or "complete" for result in results)


def _running(server: Server) -> dict[str, float]:
    """Return the server's gauges of running and waiting requests."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as response:
        text = response.read().decode()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    rows = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(names)]
    return {name.split("{")[0]: float(value) for name, value in rows}


def _title(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
