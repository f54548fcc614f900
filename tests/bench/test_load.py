"""The load generator against a server that misbehaves."""

from __future__ import annotations

import json
import multiprocessing
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from handler.cli import main
from handler.core.errors import ConfigError
from proof.bench import processes
from proof.bench.client import Closed, Open, Target, prompt
from proof.bench.processes import WARM_UP_TOKENS, measure

TOKENS = 4


class Faulty:
    """Answers what is measured by turns: whole, one token short, cut in the middle, 503, an error in the end."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked: list[str] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        try:
            while True:
                self._serve(self._listener.accept()[0])
        except OSError:
            pass

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as reader:
            while (head := reader.readline()) and head.startswith(b"POST"):
                length = 0
                while (line := reader.readline()) != b"\r\n":
                    if line.startswith(b"content-length:"):
                        length = int(line.partition(b":")[2])
                body = json.loads(reader.read(length))
                if not self._answer(connection, body):
                    return

    def _answer(self, connection: socket.socket, body: dict[str, object]) -> bool:
        """False when the connection is to be closed."""
        parameters = body["parameters"]
        assert isinstance(parameters, dict)
        tokens = parameters["max_new_tokens"]
        turn = 0
        if tokens != WARM_UP_TOKENS:
            self.asked.append(str(body["inputs"]))
            turn = (len(self.asked) - 1) % 5
        lines = [b'{"token":{"text":" a"}}\n'] * tokens
        if turn == 1:
            lines.pop()
        if turn == 3:
            connection.sendall(b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\n{}")
            return True
        if turn == 4:
            lines[-1] = b'{"error":"engine failure","code":424}\n'
        connection.sendall(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/jsonlines\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for line in lines[: 2 if turn == 2 else None]:
            connection.sendall(b"%x\r\n%s\r\n" % (len(line), line))
        if turn == 2:
            return False
        connection.sendall(b"0\r\n\r\n")
        return True


@pytest.fixture
def faulty() -> Iterator[Faulty]:
    server = Faulty()
    yield server
    server.close()


def test_every_kind_of_failure_is_counted_and_the_rest_goes_on(faulty: Faulty) -> None:
    target = Target(faulty.url, TOKENS, prompt_words=5)
    results = measure(target, Closed(clients=1, requests=10))
    assert Counter(result.error for result in results) == {
        "": 2,
        "wrong number of tokens": 2,
        "connection cut": 2,
        "status 503": 2,
        "failed in the stream": 2,
    }
    assert [len(result.arrivals) for result in results[:4]] == [4, 3, 2, 0]
    assert all(result.start <= result.end for result in results)
    assert faulty.asked == [prompt(number, 5) for number in range(10)]


def test_open_loop_counts_from_when_a_request_was_due(faulty: Faulty) -> None:
    load = Open(rate=20, seconds=0.5, poisson=False)
    results = measure(Target(faulty.url, TOKENS), load, processes=1)
    assert len(results) == 10
    assert results[1].start - results[0].start == pytest.approx(0.05, abs=1e-6)


def test_nobody_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        target = Target(f"http://127.0.0.1:{bound.getsockname()[1]}", TOKENS)
        with pytest.raises(ConfigError, match="cannot connect"):
            measure(target, Closed(1))
        ours, theirs = multiprocessing.Pipe()
        ours.close()  # after the first process has said so
        processes._process(theirs, processes._Share(target, Closed(2), 1, 2))


def test_prompts_differ_from_their_first_word_on() -> None:
    prompts = [prompt(number, 12) for number in range(200)]
    assert all(len(text.split()) == 12 for text in prompts)
    assert len({text.split()[0] for text in prompts}) == 200


def test_a_failed_request_shows_in_the_exit_status(
    faulty: Faulty, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "out" / "plot.png"
    arguments = ["--clients", "1", "--requests", "5", "--repeat", "1", "--tokens", "4", "--plot", str(picture)]
    assert main(["bench", faulty.url, "--quiet", "99", *arguments]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sum(found["results"][0]["errors"].values()) == 4
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_locked_server_gets_the_key_that_the_environment_has(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target("http://127.0.0.1:1", TOKENS)
    assert b"authorization" not in target.request(0)
    monkeypatch.setenv("LMI_API_KEY", "one, two")
    head, _, body = target.request(0).partition(b"\r\n\r\n")
    assert head.endswith(b"\r\nauthorization: Bearer one")
    assert json.loads(body)["stream"] is True
