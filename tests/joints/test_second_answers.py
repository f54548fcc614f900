"""Clients of ours in front of a server that sends bytes for which nobody asked: they answer no other request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable

import pytest

from handler.config.config import Config
from handler.core.values import Sampling
from handler.engines.base import EngineConfig, EngineRequest
from handler.engines.openai.client import HttpClient
from handler.engines.openai.engine import load
from proof.bench.client import BodyReader, Connection, Pool, address
from tests.servers import PATIENCE


def answer(kind: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def completion(id: int) -> bytes:
    choice = {"index": 0, "text": "x", "token_ids": [id], "finish_reason": "length"}
    return answer("text/event-stream", b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\ndata: [DONE]\n\n")


def models(name: str) -> bytes:
    entry = {"id": name, "owned_by": "vllm", "max_model_len": 64}
    return answer("application/json", json.dumps({"data": [entry]}).encode())


class Server:
    """Answers each request of a connection by what was asked, and then sends more.

    Args:
        more: returns these bytes; its argument is an answer to another request of the same kind.
        at_once: whether they come in one write with the answer, not behind it.

    Attributes:
        sent: released when they have arrived at the client's machine.
        num_connections: how many connections were opened.
    """

    def __init__(self, more: Callable[[bytes], bytes], *, at_once: bool) -> None:
        self._more, self._at_once = more, at_once
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent = threading.Semaphore(0)
        self.num_connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = self._listener.accept()[0]
                self.num_connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as file:
            while line := file.readline().decode():
                head = list(iter(file.readline, b"\r\n"))
                size = sum(int(field[15:]) for field in head if field.lower().startswith(b"content-length:"))
                path, body = line.split()[1], file.read(size)
                if body:
                    own, other = completion(json.loads(body)["prompt"][-1]), completion(99)
                elif path.endswith("/models"):
                    own, other = models(path.split("/")[1]), models("stranger")
                else:
                    own, other = answer("text/plain", path.encode()), answer("text/plain", b"stranger")
                if self._at_once:
                    connection.sendall(own + self._more(other))
                else:
                    connection.sendall(own)
                    connection.sendall(self._more(other))
                self.sent.release()


NUMBERS = (5, 6, 7)
Ask = Callable[[Server, bool], list[object]]


def completions(server: Server, goes_on: bool) -> list[object]:
    """Ask the engine for one token each. `goes_on`: its event loop runs in the meantime."""
    given = {
        "base_url": (f"{server.url}/v1",), "base_url_kind": "vllm", "base_url_timeout": PATIENCE,
        "base_url_connect_timeout": 5.0,
    }  # fmt: skip
    engine, found = load(EngineConfig(Config(engine_options=given))), list[object]()
    assert server.sent.acquire(timeout=PATIENCE)  # behind the list of models
    for number in NUMBERS:
        if goes_on:
            for _ in range(3):
                engine.step()
        engine.add(EngineRequest(number, [1, number], Sampling(max_new_tokens=1)))
        while not (outputs := engine.step().others):
            pass
        found.append(outputs[0].ids[0])
        assert server.sent.acquire(timeout=PATIENCE)
    engine.close()
    return found


def lists_of_models(server: Server, goes_on: bool) -> list[object]:
    async def ask() -> list[object]:
        client, found = HttpClient(5.0, tls=False), list[object]()
        for number in NUMBERS:
            found += [int(model.name) for model in await client.models(f"{server.url}/{number}/v1")]
            assert server.sent.acquire(timeout=PATIENCE)
            if goes_on:
                await asyncio.sleep(0.01)
        await client.close()
        return found

    return asyncio.run(ask())


def exchanges(server: Server, goes_on: bool) -> list[object]:
    """Ask as `lmi bench` and `lmi replay` do."""

    async def ask() -> list[object]:
        pool, found = Pool(BodyReader, address(server.url)), list[object]()
        for number in NUMBERS:
            reader, error = await pool.exchange(f"GET /{number} HTTP/1.1\r\nhost: x\r\n\r\n".encode(), PATIENCE)
            assert server.sent.acquire(timeout=PATIENCE)
            if goes_on:
                await asyncio.sleep(0.01)
            found.append(error or int(reader.body[1:]))
        pool.close()
        return found

    return asyncio.run(ask())


@pytest.fixture(params=["late", "at once"])
def at_once(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "at once")


MORE: dict[str, Callable[[bytes], bytes]] = {
    "an answer": lambda other: other,
    "half a head": lambda other: other[:30],
    "half a body": lambda other: other[:-3],
    "a line": lambda other: b"\r\n",
    "an answer behind a line": lambda other: b"\r\n" + other,
}


@pytest.mark.parametrize("goes_on", [False, True], ids=["unread", "read"])
@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
@pytest.mark.parametrize("ask", [completions, lists_of_models, exchanges])
def test_bytes_that_nobody_asked_for_answer_no_request(
    ask: Ask, more: Callable[[bytes], bytes], at_once: bool, goes_on: bool
) -> None:
    with contextlib.closing(Server(more, at_once=at_once)) as server:
        assert ask(server, goes_on) == list(NUMBERS)
        if b"\r\n\r\n" in more(completion(99)):  # less, read with the answer, may be taken for nothing
            assert server.num_connections == len(NUMBERS) + (ask is completions)


def test_a_connection_on_which_a_server_speaks_first_is_not_used() -> None:
    """`lmi conform` opens one for each request, and may prepare it before."""

    async def ask(url: str, connected: threading.Semaphore) -> str:
        host, port, _ = address(url)
        made = await asyncio.get_running_loop().create_connection(lambda: Connection(BodyReader), host, port)
        assert connected.acquire(timeout=PATIENCE)
        while not made[1].closed:
            await asyncio.sleep(0)
        return await made[1].exchange(b"GET / HTTP/1.1\r\n\r\n", PATIENCE)

    greeted = threading.Semaphore(0)

    def greet() -> None:
        with listener.accept()[0] as connection:
            connection.sendall(answer("text/plain", b"hello"))
            greeted.release()
            connection.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=greet)
        thread.start()
        assert asyncio.run(ask(f"http://127.0.0.1:{listener.getsockname()[1]}", greeted)) == "connection cut"
        thread.join()
