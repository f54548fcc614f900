"""Measure background responses: the memory and the disk space of finished ones, and the CPU time of polls.

The server is `lmi serve --engine echo` with its responses in a directory. The command is:

    python -m tests.compare.background [--responses 1000] [--tokens 256] [--pollers 1000] [--polls 10]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
import time
import urllib.parse
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from proof.bench.cli import count
from proof.bench.machine import describe
from proof.bench.processes import lmi_serve
from proof.bench.report import table
from tests.compare.processes import process_seconds
from tests.compare.sockets import memory

_AT_ONCE = 16
_ENDLESS = 100_000  # tokens of a response that runs while it is polled
_PAUSE = 0.05  # seconds between two polls of a response
_ID = re.compile(rb'"id":"(resp_[0-9a-f]+)"')


class Caller:
    """A connection on which one request is sent after another.

    Args:
        url: URL of the server.
    """

    def __init__(self, url: str) -> None:
        self._address = urllib.parse.urlsplit(url)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Send a request, and return the JSON of its response."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._address.hostname, self._address.port)
        reader, writer = self._streams
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        (size,) = [int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:")]
        found: dict[str, Any] = json.loads(await reader.readexactly(size))
        if b" 200 " not in lines[0]:
            raise RuntimeError(f"{method} {path}: {found}")
        return found

    async def generate(self, tokens: int) -> None:
        """Generate a response in the background with its events, and wait for its end."""
        path = f"/v1/responses/{await self._begin(tokens)}"
        while (await self.call("GET", path))["status"] in ("queued", "in_progress"):
            await asyncio.sleep(_PAUSE)

    async def _begin(self, tokens: int) -> str:
        """Begin a response, read its first event on a connection of its own, disconnect, and return the id."""
        reader, writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        body = json.dumps({**_request(tokens), "stream": True}).encode()
        writer.write(b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        found = b""
        while not (match := _ID.search(found)):
            found += await reader.readuntil(b"\n")
        writer.close()
        return match[1].decode()

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


def _request(tokens: int) -> dict[str, Any]:
    """Return a request for a background response."""
    return {"input": "word " * tokens, "max_output_tokens": tokens, "background": True, "store": True}


async def in_parallel(url: str, number: int, callers: int, act: Callable[[Caller], Awaitable[object]]) -> None:
    """Run an action a number of times, distributed over connections."""
    left = iter(range(number))

    async def work() -> None:
        caller = Caller(url)
        for _ in left:
            await act(caller)
        caller.close()

    await asyncio.gather(*(work() for _ in range(callers)))


def disk(directory: str) -> int:
    """Return the size of all files in a directory, in bytes."""
    return sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())


def run(responses: int, tokens: int, pollers: int, polls: int) -> dict[str, float]:
    """Measure a server, and return the figures by their names."""
    with tempfile.TemporaryDirectory() as directory:
        options = {
            "option.responses_store": directory,
            "option.responses_max": str(2 * responses),
            "option.background_max": str(2 * _AT_ONCE),
            "option.echo_tokens_per_second": "5000",
        }
        arguments = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
        with lmi_serve(["--engine", "echo", *arguments], variables={"LMI_LOG_LEVEL": "error"}) as server:
            return {**_finished(server.url, server.pid, directory, responses, tokens), **_polls(server, pollers, polls)}


def _finished(url: str, pid: int, directory: str, responses: int, tokens: int) -> dict[str, float]:
    asyncio.run(in_parallel(url, _AT_ONCE, _AT_ONCE, lambda caller: caller.generate(tokens)))  # imports and pools
    memory_before, disk_before, began = memory(pid), disk(directory), time.monotonic()
    asyncio.run(in_parallel(url, responses, _AT_ONCE, lambda caller: caller.generate(tokens)))
    seconds = time.monotonic() - began
    time.sleep(1.0)  # until the last final states are written
    return {
        "responses/s": responses / seconds,
        "memory, MiB": (memory(pid) - memory_before) / 2**20,
        "disk, MiB": (disk(directory) - disk_before) / 2**20,
    }


def _polls(server: Any, pollers: int, polls: int) -> dict[str, float]:
    """Poll one response that runs all the time."""

    async def poll() -> float:
        owner = Caller(server.url)
        running = await owner.call("POST", "/v1/responses", _request(_ENDLESS))
        path = f"/v1/responses/{running['id']}"
        before = process_seconds(server.pid)
        await in_parallel(server.url, pollers * polls, pollers, lambda caller: caller.call("GET", path))
        used = process_seconds(server.pid) - before
        await owner.call("POST", f"{path}/cancel")
        owner.close()
        return used

    return {"polls": float(pollers * polls), "CPU ms/poll": asyncio.run(poll()) * 1000 / (pollers * polls)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--responses", type=count, default=1000, help="finished responses (default: %(default)s)")
    add("--tokens", type=count, default=256, help="tokens of each (default: %(default)s)")
    add("--pollers", type=count, default=1000, help="connections that poll (default: %(default)s)")
    add("--polls", type=count, default=10, help="polls of each (default: %(default)s)")
    args = parser.parse_args()
    figures = run(args.responses, args.tokens, args.pollers, args.polls)
    print(table(["figure", "value"], [[name, f"{value:.2f}"] for name, value in figures.items()]))
    print(json.dumps({**figures, **describe()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
