"""A server of OpenAI's API that does what a test says, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tests.doubles.listener import on_thread

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PAUSE = 0.01
"""Between two writes."""

HANG = b"hang"
"""In a script: send nothing more, and wait until the client leaves."""


def event(*ids: int, finish: str | None = None, **more: Any) -> bytes:
    """One of vLLM's events."""
    choice = {"index": 0, "text": "x" * len(ids), "token_ids": list(ids), "finish_reason": finish, **more}
    return b"data: " + json.dumps({"id": "cmpl-1", "choices": [choice]}).encode() + b"\n\n"


def count(cached: Any, **more: Any) -> bytes:
    """vLLM's event behind the last token, for `include_usage`; `cached` comes with --enable-prompt-tokens-details."""
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    counts = {"prompt_tokens": 2, "total_tokens": 4, "completion_tokens": 2, **details, **more}
    return b"data: " + json.dumps({"id": "cmpl-1", "choices": [], "usage": counts}).encode() + b"\n\n"


def status(code: int, body: Any = "", headers: str = "Connection: close\r\n") -> bytes:
    """A whole answer; `Server` closes its connection, which the client must not use again."""
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    head = f"HTTP/1.1 {code} Status\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n{headers}\r\n"
    return head.encode() + data


DONE = b"data: [DONE]\n\n"
GOOD = (HEAD, event(5), event(6), event(7, finish="length") + DONE)


class Received(NamedTuple):
    """A request."""

    headers: dict[str, str]
    body: dict[str, Any]


class Server:
    """Answers each completion by the next script, then by GOOD.

    Attributes:
        received: the completions' requests.
        models: the body of /models; or that answer, byte for byte.
        num_asked: how often it was asked for them.
        always: answers each completion without a script of its own; or makes the answer to one from its request.
        resets: it resets a connection that has had an answer as soon as another request comes by it.
        left: how many clients have left a script that hangs.
        ended: how many scripts have ended, and their connections.
    """

    def __init__(self, scripts: Sequence[Sequence[bytes]] = (), owner: str = "vllm") -> None:
        self.scripts = list(scripts)
        self.received: list[Received] = []
        self.left = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)
        self.models: Any = {"data": [{"id": "served", "owned_by": owner, "max_model_len": 64}]}
        self.num_asked = 0
        self.always: Sequence[bytes] | Callable[[Received], Sequence[bytes]] = GOOD
        self.resets = False
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gone = (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError)
        with contextlib.suppress(*gone), contextlib.closing(writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            if first.startswith("GET"):
                self.num_asked += 1
                is_whole = isinstance(self.models, bytes)
                writer.write(self.models if is_whole else status(200 if " /v1/" in first else 404, self.models))
                await writer.drain()
                return
            self.received.append(Received(headers, json.loads(body)))
            script = self.scripts.pop(0) if self.scripts else self._usual()
            try:
                for part in script:
                    if part is HANG:
                        await reader.read()
                        return
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(PAUSE)
            finally:
                if HANG in script:  # whether the client leaves then or, on a busy machine, before
                    self.left.release()
            if self.resets:
                await reader.read(1)
                writer.transport.abort()
                self.ended.release()
                return
            writer.close()
            await writer.wait_closed()
            self.ended.release()

    def _usual(self) -> Sequence[bytes]:
        return self.always(self.received[-1]) if callable(self.always) else self.always


@contextlib.contextmanager
def listening(*scripts: Sequence[bytes], owner: str = "vllm", tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    """A server on loopback, on a thread."""
    server = Server(scripts, owner)
    with on_thread(server.answer, ssl=tls) as port:
        server.url = f"http{'s' if tls else ''}://localhost:{port}/v1"
        yield server


def ruled(body: dict[str, Any]) -> str:
    """The first choice in a request's structured output, or its text; "" if there is none."""
    rule = body.get("structured_outputs") or {name: body[name] for name in body if name.startswith("guided_")}
    if not rule:
        return ""
    value = next(iter(rule.values()))
    return str(value[0]) if isinstance(value, list) else json.dumps(value)


def enforcing(received: Received, *, thought_end: int | None = None) -> Sequence[bytes]:
    """Answer by the ids of the rule's characters if there is a rule.

    Args:
        thought_end: the id that has to stand in the prompt, as vLLM's --reasoning-parser has it.
    """
    most, text = received.body["max_tokens"], ruled(received.body)
    applies = bool(text) and thought_end in (None, *received.body["prompt"])
    ids = ([ord(one) for one in text] if applies else [5] * most)[:most]
    return (HEAD, *map(event, ids), event(finish="length"), DONE)
