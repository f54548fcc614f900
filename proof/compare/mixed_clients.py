"""Clients of several dialects on one event loop: they leave in the middle, read slowly, or send wrong requests.

Answers to repeated greedy requests must be the same, apart from ids, times and the digits of log-probabilities. An
answer with another request's tokens counts as crossed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import random
import re
import socket
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from proof.bench.client import BodyReader, Connection, prompt

REPEATED = 9
"""Numbers of the prompts that every client repeats; each has its own prompt and answer length."""
_WORDS, _TOKENS = (8, 24, 96), (4, 16, 64)

_LEAVE, _READ_SLOWLY, _WRONG, _NEW = 0.25, 0.1, 0.05, 0.3  # shares of the requests
_SMALL_BUFFER = 4096  # bytes of a slow reader's socket
_PAUSE = 0.2  # seconds between a slow reader's reads
_PATIENCE = 3600.0  # seconds of a client that stays
_LEFT = "left"
_VARYING = re.compile(rb'"(?:id|x-request-id)":"[^"]*"|"created":\d+|"log_?prob":[^,}]+')


class Kind(NamedTuple):
    """A dialect's request; `body` takes a prompt and the answer's length in tokens."""

    name: str
    path: str
    body: Callable[[str, int], dict[str, Any]]
    stream: bool


def _lmi(framing: str) -> Callable[[str, int], dict[str, Any]]:
    return lambda text, tokens: {
        "inputs": text,
        "parameters": {"max_new_tokens": tokens, "details": True, "output_formatter": framing},
    }


def _tgi(text: str, tokens: int) -> dict[str, Any]:
    return {"inputs": text, "parameters": {"max_new_tokens": tokens, "details": True}}


def _chat(stream: bool) -> Callable[[str, int], dict[str, Any]]:
    return lambda text, tokens: {
        "model": "model",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": stream,
    }


def _triton(stream: bool) -> Callable[[str, int], dict[str, Any]]:
    return lambda text, tokens: {"text_input": text, "max_tokens": tokens, "stream": stream}


KINDS = (
    Kind("lmi json", "/invocations", _lmi("json"), False),
    Kind("lmi jsonlines", "/invocations", _lmi("jsonlines"), True),
    Kind("lmi sse", "/invocations", _lmi("sse"), True),
    Kind("tgi", "/generate", _tgi, False),
    Kind("tgi stream", "/generate_stream", _tgi, True),
    Kind("openai chat", "/v1/chat/completions", _chat(False), False),
    Kind("openai chat stream", "/v1/chat/completions", _chat(True), True),
    Kind("triton", "/v2/models/model/generate", _triton(False), False),
    Kind("triton stream", "/v2/models/model/generate_stream", _triton(True), True),
)

_WRONG_REQUESTS = (
    ("/invocations", b'{"inputs": "a"'),
    ("/invocations", b'{"inputs": "a", "parameters": {"max_new_tokens": "many"}}'),
    ("/invocations", json.dumps({"inputs": "a b " * 10_000}).encode()),
    ("/generate", b'{"inputs": "a", "parameters": {"temperature": -1}}'),
    ("/v1/chat/completions", b'{"model": "model", "messages": []}'),
    ("/v2/models/other/generate", b'{"text_input": "a"}'),
    ("/nowhere", b"{}"),
)


class Lengths(NamedTuple):
    """A request's lengths: words of its prompt, maximum tokens of its answer."""

    words: int
    tokens: int


def lengths(number: int) -> Lengths:
    return Lengths(_WORDS[number % 3], _TOKENS[number // 3 % 3])


def choose(random: random.Random, fresh: Iterator[int]) -> tuple[int, int | None]:
    """Return a request's number, and after how many tokens its client disconnects; None: never."""
    number = next(fresh) if random.random() < _NEW else random.randrange(REPEATED)
    leaves = random.randrange(lengths(number).tokens // 2) if random.random() < _LEAVE else None
    return number, leaves


class Clients:
    """`number` clients that ask until they are cancelled.

    Attributes:
        counts: requests by their end: done, abandoned, refused (as they should be), failed, crossed.
        slow: the slowly read ones among these.
        surprises: the first failed and crossed answers.
    """

    def __init__(self, url: str, number: int) -> None:
        where = urllib.parse.urlsplit(url)
        self._address = where.hostname or "", where.port or 80
        self._number = number
        self._fresh = itertools.count(REPEATED)
        self._answers: dict[tuple[str, int], bytes] = {}
        self.counts: Counter[str] = Counter()
        self.slow = 0
        self.surprises: list[str] = []

    async def run(self) -> None:
        await asyncio.gather(*(self._client(random.Random(seed)) for seed in range(self._number)))

    async def _client(self, random: random.Random) -> None:
        while True:
            slow = random.random() < _READ_SLOWLY
            with contextlib.closing(await self._connect(slow)) as connection:
                try:
                    while not connection.closed:
                        await self._request(connection, random)
                        self.slow += slow
                        if random.random() < _READ_SLOWLY:
                            break  # the next connection may be a slow one
                except OSError as error:
                    self._count("failed", str(error))
                    await asyncio.sleep(1)

    async def _connect(self, slow: bool) -> _Connection:
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(lambda: _Connection(slow), *self._address))[1]

    async def _request(self, connection: _Connection, random: random.Random) -> None:
        if random.random() < _WRONG:
            path, data = random.choice(_WRONG_REQUESTS)
            answer = await connection.ask(_http(path, data))
            refused = answer is not None and 400 <= answer.status < 500
            self._count("refused" if refused else "failed", f"{path} {data[:80]!r}: {answer}")
            return
        kind = random.choice(KINDS)
        number, leaves = choose(random, self._fresh)
        words, tokens = lengths(number)
        request = _http(kind.path, json.dumps(kind.body(prompt(number, words), tokens)).encode())
        if leaves is not None and kind.stream:
            answer = await connection.ask(request, pieces=leaves)
        elif leaves == 0:
            answer = await connection.ask(request[:-1], seconds=0.1)  # leaves before the request's end
        elif leaves is not None:
            answer = await connection.ask(request, seconds=random.uniform(0, 3))
        else:
            answer = await connection.ask(request)
        if answer is None:
            self.counts["abandoned"] += 1
        else:
            self._judge(kind, number, answer)

    def _judge(self, kind: Kind, number: int, answer: Answer) -> None:
        if answer.status != 200 or b'"error"' in answer.body:
            self._count("failed", f"{kind.name} {number}: {answer}")
            return
        self.counts["done"] += 1
        if number < REPEATED:
            body = _comparable(answer.body)
            first = self._answers.setdefault((kind.name, number), body)
            if body != first:
                self._count("crossed", f"{kind.name} {number}: {body!r}, before {first!r}")

    def _count(self, end: str, what: str) -> None:
        self.counts[end] += 1
        if end in ("failed", "crossed") and len(self.surprises) < 20:
            self.surprises.append(f"{end}: {what[:4000]}")


def _comparable(body: bytes) -> bytes:
    """Drop what differs between equal answers: ids, times, digits of log-probabilities, comments of an event stream."""
    return b"\n".join(line for line in _VARYING.sub(b"", body).split(b"\n") if line and not line.startswith(b":"))


class Answer(NamedTuple):
    status: int
    body: bytes


class _Reader(BodyReader):
    """Reads an answer until its end, or until the client disconnects after a number of pieces; None: never."""

    def __init__(self, pieces: int | None = None) -> None:
        super().__init__()
        self._leaves_after = pieces

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self._leaves_after is not None and len(self.pieces) > self._leaves_after:
            self.refused = _LEFT


class _Connection(Connection[_Reader]):
    """A connection for one request at a time; a slow one has a small buffer, and pauses after each read."""

    def __init__(self, slow: bool) -> None:
        super().__init__(_Reader)
        self._slow = slow

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._slow:
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._slow and not self.closed:
            self._transport.pause_reading()
            self._loop.call_later(_PAUSE, self._resume)

    def _resume(self) -> None:
        if not self.closed:
            self._transport.resume_reading()

    async def ask(self, request: bytes, pieces: int | None = None, seconds: float | None = None) -> Answer | None:
        """Send a request and read its answer.

        Args:
            pieces: disconnect after so many; None: never.
            seconds: disconnect after so many; None: never.

        Returns:
            None if the client disconnected.

        Raises:
            OSError: the connection broke, or the answer is not HTTP.
        """
        self._new_reader = functools.partial(_Reader, pieces)  # type: ignore[assignment]
        error = await self.exchange(request, _PATIENCE if seconds is None else seconds)
        if error == _LEFT or (error and seconds is not None):
            return None
        if error:
            raise OSError(error)
        return Answer(self.reader.status, bytes(self.reader.body))


def _http(path: str, data: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
