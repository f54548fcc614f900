"""A server in several APIs whose answers to chosen requests can be spoilt.

    python -m tests.moving.replay.double DIRECTORY [--requests 10000] [--differences 40] [--concurrency 16]

plants differences of every class among many requests, and says which were found, missed and invented.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from handler.cli import main
from proof.replay.comparison import Class
from tests.doubles.downloads import serving

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
HANG = 3.0  # seconds that a stream without an end goes on, unless its client leaves


@dataclass
class Reply:
    """An answer before it is written."""

    documents: list[Any]
    status: int = 200
    content_type: str = "application/json"
    before: str = ""
    after: str = ""
    end: str = ""
    cut: bool = False
    endless: bool = False

    @property
    def body(self) -> bytes:
        return ("".join(f"{self.before}{json.dumps(one)}{self.after}" for one in self.documents) + self.end).encode()


Spoil = Callable[[Reply], None]


# -- the answers -----------------------------------------------------------------------------------------------------


def said(body: Mapping[str, Any]) -> list[str]:
    """Return the tokens of an answer: always the same, unless the request samples."""
    number = int(body["n"])
    chosen = random.Random() if body.get("temperature") else random.Random(number)
    return [f" {chosen.choice(WORDS)}" for _ in range(chosen.randint(3, 6) if body.get("temperature") else 4)]


def reply(path: str, body: Mapping[str, Any]) -> Reply:
    if "bad" in body:
        return Reply([{"error": {"message": f"bad is {body['bad']} in {secrets.token_hex(4)}", "code": 7}}], 400)
    tokens = said(body)
    if path == "/invocations":
        return _native(body, tokens)
    return _chat(body, tokens)


def _native(body: Mapping[str, Any], tokens: list[str]) -> Reply:
    details = {"finish_reason": "length", "generated_tokens": len(tokens), "seed": secrets.randbits(30)}
    if not body.get("stream"):
        return Reply([{"generated_text": "".join(tokens), "details": details}])
    lines: list[Any] = [{"token": {"id": len(text), "text": text, "log_prob": -0.5}} for text in tokens]
    lines[-1] = {**lines[-1], "generated_text": "".join(tokens), "details": details}
    return Reply(lines, content_type="application/jsonlines", after="\n")


def _chat(body: Mapping[str, Any], tokens: list[str]) -> Reply:
    head = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": "double"}
    usage = {"prompt_tokens": 5, "completion_tokens": len(tokens)}
    logprobs = [{"token": text, "logprob": -0.7, "top_logprobs": []} for text in tokens]
    if not body.get("stream"):
        message: dict[str, Any] = {"role": "assistant", "content": "".join(tokens)}
        if "tools" in body:
            call = {"name": "look", "arguments": json.dumps({"at": tokens[0]})}
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": secrets.token_hex(4), "function": call}],
            }
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": {"content": logprobs}}
        return Reply([{**head, "choices": [choice], "usage": usage}])
    events: list[Any] = [
        {**head, "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]} for text in tokens
    ]
    events[0]["choices"][0]["delta"]["role"] = "assistant"
    events[-1]["choices"][0]["finish_reason"] = "stop"
    events.append({**head, "choices": [], "usage": usage})
    return Reply(events, content_type="text/event-stream", before="data: ", after="\n\n", end="data: [DONE]\n\n")


# -- what is planted -------------------------------------------------------------------------------------------------


def _choice(one: Reply) -> Any:
    return one.documents[0]["choices"][0]


def set_in(*path: Any, to: Any) -> Spoil:
    """Set a value of an answer, whose first document the path begins with."""

    def spoil(one: Reply) -> None:
        place: Any = one.documents
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = to

    return spoil


def remove(*path: Any) -> Spoil:
    def spoil(one: Reply) -> None:
        place: Any = one.documents
        for name in path[:-1]:
            place = place[name]
        del place[path[-1]]

    return spoil


def put(**values: Any) -> Spoil:
    def spoil(one: Reply) -> None:
        for name, value in values.items():
            setattr(one, name, value)

    return spoil


def say(logprob: float) -> Spoil:
    """Say another third token, and another text from there."""

    def spoil(one: Reply) -> None:
        choice = _choice(one)
        choice["logprobs"]["content"][2].update(token=" other", logprob=logprob)
        tokens = [token["token"] for token in choice["logprobs"]["content"]]
        choice["message"]["content"] = "".join(tokens)

    return spoil


def two_in_one(one: Reply) -> None:
    """Send two tokens in one event."""
    first, second, *rest = one.documents
    first["choices"][0]["delta"]["content"] += second["choices"][0]["delta"]["content"]
    one.documents = [first, *rest]


def nearly(one: Reply) -> None:
    for token in _choice(one)["logprobs"]["content"]:
        token["logprob"] += 0.01


NATIVE, NATIVE_STREAM = {"path": "/invocations"}, {"path": "/invocations", "stream": True}
CHAT, CHAT_STREAM = {"path": "/v1/chat/completions"}, {"path": "/v1/chat/completions", "stream": True}
TOOLS, BAD = {**CHAT, "tools": []}, {**CHAT, "bad": 1}
SAMPLED, SAMPLED_STREAM = {**CHAT, "temperature": 1}, {**NATIVE_STREAM, "temperature": 1}
KINDS = (NATIVE, NATIVE_STREAM, CHAT, CHAT_STREAM, TOOLS, BAD, SAMPLED, SAMPLED_STREAM)
_CALL = (0, "choices", 0, "message", "tool_calls", 0, "function")

PLANTED: list[tuple[dict[str, Any], Class, Spoil]] = [
    (NATIVE, Class.TEXT, set_in(0, "generated_text", to=" other words")),
    (NATIVE, Class.TEXT, set_in(0, "details", "generated_tokens", to=9)),
    (NATIVE, Class.TEXT, set_in(0, "details", "finish_reason", to="eos_token")),
    (NATIVE, Class.SHAPE, remove(0, "details", "seed")),
    (NATIVE, Class.SHAPE, set_in(0, "details", "generated_tokens", to="4")),
    (NATIVE, Class.FRAMING, put(content_type="text/plain")),
    (NATIVE, Class.FRAMING, put(end="\n")),
    (NATIVE, Class.STATUS, put(status=500)),
    (NATIVE_STREAM, Class.TEXT, set_in(1, "token", "text", to=" other")),
    (NATIVE_STREAM, Class.TIE, set_in(1, "token", "log_prob", to=-0.51)),
    (NATIVE_STREAM, Class.TEXT, set_in(1, "token", "log_prob", to=-3.0)),
    (NATIVE_STREAM, Class.SHAPE, remove(2, "token", "id")),
    (NATIVE_STREAM, Class.FRAMING, put(after="\r\n")),
    (NATIVE_STREAM, Class.LOST, put(cut=True)),
    (CHAT, Class.TIE, say(-0.75)),
    (CHAT, Class.TEXT, say(-0.05)),
    (CHAT, Class.TIE, nearly),
    (CHAT, Class.TEXT, set_in(0, "model", to="other")),
    (CHAT, Class.TEXT, set_in(0, "usage", "prompt_tokens", to=6)),
    (CHAT, Class.SHAPE, set_in(0, "choices", 0, "message", "refusal", to=None)),
    (CHAT, Class.SHAPE, set_in(0, "choices", 0, "finish_reason", to=None)),
    (CHAT_STREAM, Class.TEXT, set_in(0, "choices", 0, "delta", "content", to=" other")),
    (CHAT_STREAM, Class.FRAMING, put(end="")),
    (CHAT_STREAM, Class.FRAMING, put(before="data:")),
    (CHAT_STREAM, Class.FRAMING, two_in_one),
    (CHAT_STREAM, Class.SHAPE, remove(0, "choices", 0, "delta", "role")),
    (CHAT_STREAM, Class.LOST, put(endless=True)),
    (TOOLS, Class.TEXT, set_in(*_CALL, "name", to="find")),
    (TOOLS, Class.TEXT, set_in(*_CALL, "arguments", to='{"at": "there"}')),
    (BAD, Class.STATUS, put(status=422)),
    (BAD, Class.STATUS, set_in(0, "error", "code", to=8)),
    (BAD, Class.STATUS, set_in(0, to={"message": "bad is 1"})),
    (SAMPLED, Class.SHAPE, remove(0, "usage")),
    (SAMPLED, Class.SHAPE, set_in(0, "choices", 0, "message", "content", to=[])),
    (SAMPLED_STREAM, Class.SHAPE, remove(-1, "details")),
    (SAMPLED_STREAM, Class.FRAMING, put(after="\n\n")),
]
"""What is planted: the request that it is planted in, the class that it must get, and how."""


# -- the server ------------------------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """Answers; requests of `spoilt` by their number with a difference, those of `busy` 429 as often as it says.

    Args:
        delay: seconds before each answer.
        dies_at: the number of the request at which it stops to listen and to answer; None: it does not.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        spoilt: Mapping[int, Spoil] | None = None,
        busy: Mapping[int, int] | None = None,
        delay: float = 0.0,
        dies_at: int | None = None,
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spoilt = spoilt or {}
        self.busy = dict(busy or {})
        self.asked: list[int] = []
        self._delay = delay
        self._dies_at = dies_at
        self.is_dead = False

    def reply(self, path: str, body: Mapping[str, Any]) -> Reply:
        number = int(body["n"])
        self.asked.append(number)
        time.sleep(self._delay)
        if number == self._dies_at:
            self.is_dead = True
            self.socket.shutdown(socket.SHUT_RDWR)  # at once: a closed one may take a connection more
        if self.busy.get(number):
            self.busy[number] -= 1
            return Reply([{"error": "later"}], 429)
        one = reply(path, body)
        if number in self.spoilt:
            self.spoilt[number](one)
        return one

    def handle_error(self, *_: Any) -> None: ...


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        one = self.server.reply(self.path, body)
        if self.server.is_dead:
            self.wfile.write(b"HTTP/1.1 ")  # else the connection could have been closed before the request came
            self.close_connection = True
            return
        self.send_response(one.status)
        self.send_header("content-type", one.content_type)
        self.send_header("content-length", str(len(one.body) + one.cut + (1 << 40) * one.endless))
        self.end_headers()
        self.wfile.write(one.body)
        if one.endless:
            self._go_on(one)
        if one.cut:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True

    def _go_on(self, one: Reply) -> None:
        until = time.monotonic() + HANG
        with contextlib.suppress(OSError):
            while time.monotonic() < until:
                self.wfile.write(b": on and on\n\n")
                time.sleep(0.02)
        self.close_connection = True

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


# -- requests --------------------------------------------------------------------------------------------------------


def line(number: int, kind: Mapping[str, Any]) -> str:
    body = {"n": number, **kind}
    path = body.pop("path")
    if path == "/invocations":
        body["inputs"] = "x"
    else:
        body = {"temperature": 0, **body, "messages": []}
    return json.dumps({"id": str(number), "path": path, "headers": {"content-type": "application/json"}, "body": body})


def write_requests(path: Path, total: int, planted: int) -> dict[int, tuple[Class, Spoil]]:
    """Write requests of all kinds; return what is planted in which, far apart and in the order of `PLANTED`."""
    found: dict[int, tuple[Class, Spoil]] = {}
    step = total // planted
    with path.open("w", encoding="utf-8") as file:
        for number in range(total):
            kind = KINDS[number % len(KINDS)]
            if number % step == step - 1 and len(found) < planted:
                kind, cls, spoil = PLANTED[len(found) % len(PLANTED)]
                found[number] = cls, spoil
            print(line(number, kind), file=file)
    return found


def outcomes(directory: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Yield number, class and findings of each request of a run."""
    for text in (directory / "journal.jsonl").read_text(encoding="utf-8").splitlines():
        one = json.loads(text)
        if isinstance(one, list) and len(one) == 5:
            yield one[0], one[1], [name for _, name in one[2]]


def run(arguments: argparse.Namespace) -> int:
    requests, output = arguments.directory / "requests.jsonl", arguments.directory / "out"
    arguments.directory.mkdir(parents=True, exist_ok=True)
    planted = write_requests(requests, arguments.requests, arguments.differences)
    spoilt = {number: spoil for number, (_, spoil) in planted.items()}
    with serving(Server()) as old, serving(Server(spoilt)) as new:
        command = ["replay", str(requests), "--to", new, "--against", old, "--output", str(output), "--restart"]
        main([*command, "--timeout", "2", "--concurrency", str(arguments.concurrency)])
    found = {number: cls for number, cls, _ in outcomes(output) if cls != Class.EQUAL.value}
    wanted = {number: cls.value for number, (cls, _) in planted.items()}
    for number in sorted(wanted.keys() | found.keys()):
        if wanted.get(number) != found.get(number):
            print(f"request {number}: planted {wanted.get(number)}, found {found.get(number)}")
    print(f"planted {len(wanted)}, found {len(wanted.items() & found.items())}, in all {len(found)}")
    return int(wanted != found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--differences", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=16)
    raise SystemExit(run(parser.parse_args()))
