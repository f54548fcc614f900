"""The loop of every client script: read a call a line, make it, write a line of JSON with what came of it.

Runs in the client's environment, so it imports the standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from typing import Any, Protocol

_LOOP = asyncio.new_event_loop()  # one for all calls: some libraries keep connections for the next
_ANSWERS, sys.stdout = sys.stdout, sys.stderr  # some libraries write to stdout of their own


class Library(Protocol):
    """A client library's four ways to ask; their values must be ready for JSON."""

    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any: ...

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]: ...

    def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Awaitable[Any]: ...

    def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]: ...


def main(library: Library, *, keeps_connections: bool = False) -> None:
    """Make calls until there are no more.

    Args:
        keeps_connections: whether the loop also runs between two calls, so that pings get pongs. It then runs on a
            thread, where libraries cannot handle signals.
    """
    if keeps_connections:
        threading.Thread(target=_LOOP.run_forever, daemon=True).start()
    for line in sys.stdin:
        print(json.dumps(_outcome(library, json.loads(line))), file=_ANSWERS, flush=True)


def _outcome(library: Library, job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"answer": None, "events": [], "error": None, "message": ""}
    try:
        if job["how"] == "run":
            found["answer"] = _printed(job["prompt"])
        elif job["asynchronous"]:
            _run(_call_async(library, job, found))
        else:
            _call(library, job, found)
    except Exception as error:  # which one it is, is what the test wants to know
        kind = type(error)
        found |= {"error": f"{kind.__module__}.{kind.__name__}", "message": str(error)}
    return found


def _run(call: Coroutine[Any, Any, None]) -> None:
    if _LOOP.is_running():
        asyncio.run_coroutine_threadsafe(call, _LOOP).result()
    else:
        _LOOP.run_until_complete(call)


def _printed(code: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {"__name__": "example"})
    return printed.getvalue()


def _call(library: Library, job: dict[str, Any], found: dict[str, Any]) -> None:
    arguments = job["url"], job["prompt"], job["options"]
    if job["how"] == "generate":
        found["answer"] = library.generate(*arguments)
    else:
        for event in library.stream(*arguments):
            found["events"].append(event)  # one by one: those before an error count


async def _call_async(library: Library, job: dict[str, Any], found: dict[str, Any]) -> None:
    arguments = job["url"], job["prompt"], job["options"]
    if job["how"] == "generate":
        found["answer"] = await library.generate_async(*arguments)
    else:
        async for event in library.stream_async(*arguments):
            found["events"].append(event)
