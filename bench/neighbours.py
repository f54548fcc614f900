"""Measure how long others wait for a large body, or a long prompt: the longest gap of a stream, the slowest `/ping`.

A server with the echo engine serves a stream of 100 tokens a second, a `/ping` every 10 ms, and one body after another.
Run it with nothing else on the machine.

    python bench/neighbours.py [--megabytes 60] [--only numbers,keys] [--repeat 3] [--most 100]
    python bench/neighbours.py --tokenizer DIRECTORY    # prompts of 16,000 and 40,000 tokens

DIRECTORY: a Hugging Face model's, whose tokenizer the server then has. Its engine has its own process, as models do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import socket
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

_REQUEST = (
    "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {media}\r\nContent-Length: {size}\r\n"
    "Connection: close\r\n\r\n"
)

_SENDER = """
import socket, sys
port, head, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
with socket.create_connection(("127.0.0.1", port)) as connection, open(path, "rb") as file:
    connection.sendall(head.encode())
    connection.sendfile(file)
    answer = b""
    while data := connection.recv(1 << 20):
        answer = (answer + data)[:4096]
    print(answer.split(b" ", 2)[1].decode(), answer.partition(b"\\r\\n\\r\\n")[2][:200].decode("utf-8", "replace"))
"""


class Kind(NamedTuple):
    """A kind of body; `make` takes its size in bytes."""

    make: Callable[[int], bytes]
    path: str = "/invocations"
    media: str = "application/json"


def _filled(before: bytes, unit: bytes, after: bytes) -> Callable[[int], bytes]:
    return lambda size: before + unit * ((size - len(before) - len(after)) // len(unit)) + after


def _keys(size: int) -> bytes:
    return b'{"inputs":"a"' + b"".join(b',"%07x":1' % number for number in range(size // 12)) + b"}"


def _prompts(size: int) -> bytes:
    prompts = 100_000
    return json.dumps({"inputs": ["a b " * (size // prompts // 4)] * prompts}).encode()


_MESSAGE = b'{"role":"user","content":"hello"},'
_TOOL = b'{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{}}}},'
_CHAT = "/v1/chat/completions"

_PROMPTS = (16_000, 40_000)  # tokens

KINDS = {
    "deep lists": Kind(lambda size: b"[" * (size // 2) + b"]" * (size // 2)),
    "deep objects": Kind(_filled(b"", b'{"a":', b"")),
    "numbers": Kind(_filled(b'{"inputs":"a","x":[1', b",1", b"]}")),
    "ids": Kind(_filled(b'{"parameters":{"input_ids":[1', b",1", b"]}}")),
    "ids in a prompt": Kind(_filled(b'{"prompt":[100000', b",100000", b"]}"), "/v1/completions"),
    "keys": Kind(_keys),
    "empty objects": Kind(_filled(b'{"inputs":"a","x":[{}', b",{}", b"]}")),
    "one string": Kind(_filled(b'{"inputs":"', b"a", b'"}')),
    "escapes": Kind(_filled(b'{"inputs":"', b"\\u00e9", b'"}')),
    "wide characters": Kind(_filled(b'{"inputs":"', b"a", b'\xf0\x9f\x98\x80"}')),
    "commas in a string": Kind(_filled(b'{"inputs":"', b"a,", b'"}')),
    "words": Kind(_filled(b'{"inputs":"', b"a ", b'"}')),
    "plain text": Kind(_filled(b"", b"hello, ", b""), media="text/plain"),
    "prompts": Kind(_prompts),
    "messages": Kind(_filled(b'{"messages":[' + _MESSAGE, _MESSAGE, _MESSAGE[:-1] + b"]}"), _CHAT),
    "one message": Kind(_filled(b'{"messages":[{"role":"user","content":"', b"a ", b'"}]}'), _CHAT),
    "tools": Kind(_filled(b'{"messages":[' + _MESSAGE[:-1] + b'],"tools":[' + _TOOL, _TOOL, _TOOL[:-1] + b"]}"), _CHAT),
    "tokenize": Kind(_filled(b'{"inputs":"', b"a ", b'"}'), "/tokenize"),
    "no end": Kind(_filled(b'{"inputs":"a","x":[1', b",1", b"")),
    "a wrong end": Kind(_filled(b'{"inputs":"', b"a", b'"}]')),
    "spaces": Kind(_filled(b"{", b" ", b'"inputs":"a"}')),
    "not UTF-8": Kind(_filled(b'{"inputs":"', b"a", b'\xff"}')),
}


def long_prompts(directory: Path) -> dict[str, Kind]:
    """Return prompts of random words, which share no token sequences that a tokenizer could have cached."""
    from tokenizers import Tokenizer

    letters = random.Random(0)
    words = ["".join(letters.choices(string.ascii_lowercase, k=letters.randint(2, 9))) for _ in range(_PROMPTS[-1])]
    text = " ".join(words)
    ends = [end for _, end in Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).offsets]
    return {f"{tokens} tokens": Kind(partial(_long_prompt, text[: ends[tokens - 1]])) for tokens in _PROMPTS}


def _long_prompt(text: str, size: int) -> bytes:
    return json.dumps({"inputs": text, "parameters": {"max_new_tokens": 1}}).encode()


class Neighbour:
    """A stream and a pinger, each with the longest wait since `reset`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.gap = self.ping = 0.0
        self._stopped = False
        for target in (self._stream, self._pings):
            threading.Thread(target=target, daemon=True).start()

    def reset(self) -> None:
        self.gap = self.ping = 0.0

    def stop(self) -> None:
        self._stopped = True

    def _stream(self) -> None:
        body = b'{"inputs":"a b c","stream":true,"parameters":{"max_new_tokens":1000000}}'
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            head = _REQUEST.format(path="/invocations", media="application/json", size=len(body))
            connection.sendall(head.encode() + body)
            last = time.perf_counter()
            while not self._stopped and connection.recv(1 << 16):
                now = time.perf_counter()
                self.gap, last = max(self.gap, now - last), now

    def _pings(self) -> None:
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            while not self._stopped:
                began = time.perf_counter()
                connection.sendall(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
                connection.recv(1 << 16)
                self.ping = max(self.ping, time.perf_counter() - began)
                time.sleep(0.01)


@contextlib.contextmanager
def server(*arguments: str, tokenizer: Path | None = None) -> Iterator[tuple[int, int]]:
    """Its port and process id."""
    words = () if tokenizer is None else ("-o", f"option.echo_tokenizer={tokenizer}")
    command = [sys.executable, "-m", "handler", "serve", "--port", "0", "--engine", "echo", *words, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if found := re.search(r"listening on http://[^:]+:(\d+)", line):
                    break
            else:
                raise SystemExit("the server did not start")
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield int(found[1]), process.pid
        finally:
            process.terminate()


def resident(pid: int) -> float:
    """MiB that a process holds."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def measure(kind: Kind, size: int, port: int, neighbour: Neighbour, path: Path) -> tuple[float, float, float, str]:
    """Seconds: of the request, of the stream's longest silence, of the longest ping; and the answer's beginning."""
    head = _REQUEST.format(path=kind.path, media=kind.media, size=path.stat().st_size)
    time.sleep(0.5)
    neighbour.reset()
    began = time.perf_counter()
    sent = subprocess.run(
        [sys.executable, "-c", _SENDER, str(port), head, str(path)], capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - began
    time.sleep(0.5)  # what is freed afterwards counts too
    return seconds, neighbour.gap, neighbour.ping, (sent.stdout or sent.stderr[-100:]).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--megabytes", type=float, default=60.0, help="of each body (default %(default)s)")
    add("--only", default="", help="kinds, separated by commas")
    add("--repeat", type=int, default=1, help="times that each body is sent (default %(default)s)")
    add("--most", type=float, default=100.0, help="milliseconds that a neighbour may wait (default %(default)s)")
    add("--tokenizer", type=Path, metavar="DIRECTORY", help="send long prompts in the place of large bodies")
    given = parser.parse_args()
    size = int(given.megabytes * 1e6)
    kinds = long_prompts(given.tokenizer) if given.tokenizer else KINDS
    names = [name for name in given.only.split(",") if name] or list(kinds)
    worst = 0.0
    options = ["-o", "option.echo_tokens_per_second=100"]
    if given.tokenizer:
        options += ["-o", "option.engine_isolation=process"]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        port, pid = stack.enter_context(server(*options, tokenizer=given.tokenizer))
        neighbour = Neighbour(port)
        time.sleep(1)
        neighbour.reset()
        time.sleep(2)
        gap, ping = neighbour.gap * 1000, neighbour.ping * 1000
        print(f"at rest: stream {gap:.0f} ms, ping {ping:.0f} ms, {resident(pid):.0f} MiB")
        print(f"{'body':20} {'seconds':>8} {'stream ms':>10} {'ping ms':>8} {'MiB after':>10}  answer")
        for name in names:
            path = Path(folder) / "body"
            path.write_bytes(kinds[name].make(size))
            for _ in range(given.repeat):
                seconds, gap, ping, answer = measure(kinds[name], size, port, neighbour, path)
                worst = max(worst, gap, ping)
                row = f"{name:20} {seconds:8.2f} {gap * 1000:10.0f} {ping * 1000:8.0f} {resident(pid):10.0f}"
                print(f"{row}  {answer[:110]}", flush=True)
        neighbour.stop()
    print(f"longest wait: {worst * 1000:.0f} ms")
    return 0 if worst * 1000 <= given.most else 1


if __name__ == "__main__":
    raise SystemExit(main())
