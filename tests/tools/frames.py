"""Print how many Python frames lie between a request's bytes and the command that the engine's process gets.

    python -m tests.tools.frames [--names] [--json]

Four walks, each on the echo engine in this process: an LMI stream by HTTP and by DJL's rolling batch, a chat with
tools, and embeddings. `frames` are those on the stack where the command is written, ours or not, from the coroutine
of an HTTP request, or the function that djl_python calls. `calls` are the calls of Python functions
from the socket's bytes (HTTP) or djl_python's call to that place, resumed coroutines included.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import sys
import tempfile
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import handler
from handler.engines.process.supervisor import EngineInstance
from tests.app.server import serve
from tests.doubles.djl_python import Connection, Input, stand_in
from tests.servers import http, options

_OURS = str(Path(handler.__file__).parent)
_ROUNDS = 20
"""Requests of each walk: of timers and the like, which come in between, the least disturbed one has none."""

_BEGINS = {"data_received": "http/protocol", "handle": "entry"}
"""Where calls are counted from: function -> module."""

_FIRST = {"http/exchange.run", "entry.handle"}
"""The bottom of the stack: the task of an HTTP request, and the function that DJL calls."""

STREAM = {"inputs": "a b c", "parameters": {"max_new_tokens": 3}, "stream": True}
_FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CHAT = {
    "messages": [{"role": "user", "content": "a b c"}],
    "tools": [{"type": "function", "function": _FUNCTION}],
    "max_tokens": 3,
    "stream": True,
}


class Walk(NamedTuple):
    """What was seen of one request.

    Attributes:
        stack: the functions on the stack where the engine's command is written, the first of ours first.
        calls: of Python functions up to there.
    """

    stack: tuple[str, ...]
    calls: int


class Watch:
    """Counts calls on the threads that begin while it is installed, and looks at the stack at each command."""

    def __init__(self) -> None:
        self.walks: list[Walk] = []
        self._calls = Counter[int]()  # by thread
        self._put = EngineInstance.put

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        def put(instance: EngineInstance, command: Any) -> bool:
            self._see(sys._getframe(1))
            return self._put(instance, command)

        threading.setprofile(self._count)
        sys.setprofile(self._count)
        with mock.patch.object(EngineInstance, "put", put):
            try:
                yield
            finally:
                sys.setprofile(None)
                threading.setprofile(None)

    def best(self, send: Callable[[], object]) -> Walk:
        """Of several requests."""
        self.walks.clear()
        for _ in range(_ROUNDS):
            send()
        return min(self.walks, key=lambda walk: (len(walk.stack), walk.calls))

    def _count(self, frame: types.FrameType, event: str, argument: object) -> None:
        if event == "call":
            thread = threading.get_ident()
            if frame.f_code.co_name in _BEGINS and _place(frame) == _BEGINS[frame.f_code.co_name]:
                self._calls[thread] = 0
            self._calls[thread] += 1

    def _see(self, frame: types.FrameType | None) -> None:
        stack = ["engines/process/supervisor.put"]
        while frame is not None and stack[-1] not in _FIRST:
            stack.append(f"{_place(frame)}.{frame.f_code.co_name}")
            frame = frame.f_back
        self.walks.append(Walk(tuple(reversed(stack)), self._calls[threading.get_ident()]))


def _place(frame: types.FrameType) -> str:
    """The module's path, relative to `handler/` where it lies there; else it begins with a slash."""
    name = frame.f_code.co_filename.removesuffix(".py")
    return name.removeprefix(f"{_OURS}/") if name.startswith(_OURS) else f"/{Path(name).name}"


def measure() -> dict[str, Walk]:
    """Take all walks."""
    logging.disable(logging.WARNING)
    watch = Watch()
    with watch.installed():
        with serve("--engine", "echo") as server:
            walks = {
                "LMI stream, HTTP": watch.best(lambda: http.post(f"{server.url}/invocations", json=STREAM)),
                "LMI stream, DJL": watch.best(_djl_stream()),
                "chat with tools, HTTP": watch.best(lambda: http.post(f"{server.url}/v1/chat/completions", json=CHAT)),
            }
        with serve("--engine", "echo", *options("option.task=text-embedding")) as server:
            walks["embeddings, HTTP"] = watch.best(
                lambda: http.post(f"{server.url}/v1/embeddings", json={"input": "a"})
            )
    return walks


def _djl_stream() -> Callable[[], object]:
    """Load a model as DJL does; return what sends a request and takes its answer."""
    sys.modules["djl_python"] = stand_in()
    handle: Callable[[Input], Any] = importlib.import_module("handler.entry").handle
    properties = {"model_dir": tempfile.mkdtemp(), "engine": "Python", "option.llm_engine": "echo"}
    loaded = handle(Input({**properties, "option.rolling_batch": "auto"}, {}))
    assert loaded.code == 200, loaded.message
    body = json.dumps(STREAM).encode()

    def send() -> None:
        batch = {"batch_size": "1", "batch_000.content-type": "application/json"}
        java = Connection()
        handle(Input(batch, {"batch_000.data": body})).send(java)
        while b"\0\0\0\4true" not in java.written:
            handle(Input({"batch_size": "1"}, {"batch_000.data": b""})).send(java)

    return send


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="print the functions on each stack too")
    parser.add_argument("--json", action="store_true", help="print the stacks and calls as one JSON object")
    given = parser.parse_args()
    walks = measure()
    if given.json:
        print(json.dumps({name: walk._asdict() for name, walk in walks.items()}))
        return 0
    print(f"{'walk':24}{'frames':>8}{'calls':>8}")
    for name, walk in walks.items():
        print(f"{name:24}{len(walk.stack):8}{walk.calls:8}")
        if given.names:
            print(*(f"    {number:2} {function}" for number, function in enumerate(walk.stack, 1)), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
