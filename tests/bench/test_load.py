"""The load generator: requests under way, servers that misbehave, tokens that are counted, and figures."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import socket
import statistics
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from handler.cli import main
from handler.core.errors import ConfigError
from proof.bench import processes
from proof.bench.client import (
    BodyReader,
    Closed,
    Connections,
    Open,
    ResponseReader,
    Result,
    Target,
    closed_loop,
    open_loop,
    percentiles,
    poisson_times,
    prompt,
)
from proof.bench.processes import WARM_UP_TOKENS, Run, measure
from proof.bench.report import Point, Repetition, show, summarize, tokens_per_second
from tests.servers import PATIENCE

# -- the load generator against a server that misbehaves ---------------------------------------------------------------


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
    saved = tmp_path / "out" / "a.json"
    arguments = ["--clients", "1", "--requests", "5", "--repeat", "1", "--tokens", "4", "--output", str(saved)]
    assert main(["bench", faulty.url, "--quiet", "99", *arguments]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sum(found["results"][0]["errors"].values()) == 4
    assert json.loads(saved.read_text()) == found


def test_a_locked_server_gets_the_key_that_the_environment_has(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target("http://127.0.0.1:1", TOKENS)
    assert b"authorization" not in target.request(0)
    monkeypatch.setenv("LMI_API_KEY", "one, two")
    head, _, body = target.request(0).partition(b"\r\n\r\n")
    assert head.endswith(b"\r\nauthorization: Bearer one")
    assert json.loads(body)["stream"] is True


# -- the load generator: how many requests are under way, and when they are sent ---------------------------------------


def test_a_closed_loop_has_so_many_under_way() -> None:
    numbers: list[int] = []
    active = most = 0

    async def ask(number: int) -> Result:
        nonlocal active, most
        numbers.append(number)
        active += 1
        most = max(most, active)
        await asyncio.sleep(0)
        active -= 1
        return Result(0.0, (), 0.0, counted=number)

    shared = iter(range(10, 16))
    results = asyncio.run(closed_loop(ask, [shared] * 3))
    assert sorted(numbers) == sorted(result.num_tokens for result in results) == list(range(10, 16))
    assert most == 3


def test_a_client_sends_its_next_request_after_its_last_answer() -> None:
    under_way: set[int] = set()

    async def ask(number: int) -> Result:
        client = number % 2
        assert client not in under_way
        under_way.add(client)
        await asyncio.sleep(0.001)
        under_way.remove(client)
        return Result(0.0, (), 0.0, counted=number)

    load = Closed(clients=2, requests=3)
    results = asyncio.run(closed_loop(ask, [load.numbers(client, 0.0) for client in range(2)]))
    assert [result.num_tokens for result in results] == [0, 2, 4, 1, 3, 5]


def test_a_closed_loop_goes_on_after_a_failure() -> None:
    async def ask(number: int) -> Result:
        return Result(0.0, (), 0.0, "status 503" if number == 0 else "")

    results = asyncio.run(closed_loop(ask, [Closed(1, requests=3).numbers(0, 0.0)]))
    assert [result.error for result in results] == ["status 503", "", ""]


def test_a_closed_loop_with_seconds_ends_with_them() -> None:
    begin = time.monotonic()
    numbers = Closed(clients=4, seconds=0.02).numbers(1, begin)
    assert [next(numbers), next(numbers)] == [1, 5]
    time.sleep(0.03)
    assert list(numbers) == []


def test_an_open_loop_does_not_wait_for_answers() -> None:
    async def run() -> list[Result]:
        release = asyncio.Event()
        under_way = 0

        async def ask(number: int) -> Result:
            nonlocal under_way
            under_way += 1
            if under_way == 5:  # only all five at once get past it
                release.set()
            await asyncio.wait_for(release.wait(), PATIENCE)
            return Result(0.0, (), time.monotonic(), counted=number)

        return await open_loop(ask, zip(range(1, 6), poisson_times(1000.0, seed=1), strict=False), time.monotonic())

    results = asyncio.run(run())
    assert [result.num_tokens for result in results] == [1, 2, 3, 4, 5]
    starts = [result.start for result in results]
    assert starts == sorted(starts)


def test_a_result_of_an_open_loop_starts_when_it_was_due() -> None:
    async def ask(number: int) -> Result:
        return Result(-1.0, (), time.monotonic())

    begin = time.monotonic() - 5  # late, as a generator under load is
    results = asyncio.run(open_loop(ask, [(0, 0.5), (1, 1.5)], begin))
    assert [result.start for result in results] == [begin + 0.5, begin + 1.5]


def test_arrivals_are_random_and_the_same_in_every_run() -> None:
    times = list(itertools.islice(poisson_times(10.0, seed=3), 200))
    assert times == list(itertools.islice(poisson_times(10.0, seed=3), 200))
    assert 0.07 < times[-1] / 200 < 0.13
    assert times == sorted(times)
    due = Open(rate=10.0, seconds=5.0, seed=3).due()
    assert due == times[: len(due)]
    assert due[-1] <= 5.0 < times[len(due)]
    assert Open(rate=2, seconds=2, poisson=False).due() == pytest.approx([0.5, 1.0, 1.5, 2.0])


# -- counting tokens: the same however the bytes are cut ---------------------------------------------------------------


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


JSONLINES = HEAD % b"application/jsonlines" + chunked(
    b'{"token":{"text":"a"}}\n',
    b'{"token":{"text":"b"}}\n{"token":{"te',  # a chunk need not end where a line does
    b'xt":"}\\n"}}\n{"token":{"text":"d"},"generated_text":"abcd"}\n',
)
EVENTS = HEAD % b"text/event-stream" + chunked(
    b": hello\n\n",
    b'data: {"token":{"text":"a"}}\n\nda',
    b'ta: {"token":{"text":"b"},"generated_text":"ab"}\n\n',
    b"data: [DONE]\n\n",
)


def read(answer: bytes, size: int) -> ResponseReader:
    reader = ResponseReader()
    for at in range(0, len(answer), size):
        assert not reader.complete
        reader.feed(answer[at : at + size], float(at))
    return reader


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
@pytest.mark.parametrize(("answer", "tokens"), [(JSONLINES, 4), (EVENTS, 2)])
def test_tokens_are_counted_in_any_pieces(answer: bytes, tokens: int, size: int) -> None:
    reader = read(answer, size)
    assert reader.complete
    assert len(reader.arrivals) == tokens
    assert list(reader.arrivals) == sorted(reader.arrivals)
    assert reader.verdict(tokens) == ""
    assert reader.verdict(tokens + 1) == "wrong number of tokens"


def test_an_error_line_and_a_status_are_errors() -> None:
    failing = HEAD % b"application/jsonlines" + chunked(b'{"token":{"text":"a"}}\n', b'{"error":"no","code":424}\n')
    assert read(failing, 5).verdict(2) == "failed in the stream"
    refusing = b'HTTP/1.1 503 Service Unavailable\r\ncontent-length: 14\r\n\r\n{"error":"no"}'
    assert read(refusing, 5).verdict(2) == "status 503"
    assert read(HEAD % b"application/jsonlines" + chunked(b"<html>\n"), 5).verdict(1) == "not JSON"


def test_an_answer_that_ends_early_is_not_complete() -> None:
    assert not read(JSONLINES[:-3], 10).complete


def test_an_errors_lines_are_no_tokens() -> None:
    reader = ResponseReader()
    body = b"<html>\n<p>no\n</html>\n"
    reader.feed(b"HTTP/1.1 501 Unsupported\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body), 1.0)
    assert (reader.complete, len(reader.arrivals), reader.verdict(4)) == (True, 0, "status 501")


@pytest.mark.parametrize("answers", [2, 1])
def test_a_request_is_sent_again_where_its_idle_connection_was_closed(answers: int) -> None:
    """The server closes each connection after an answer, and does not say so before; then it answers nobody."""
    left = answers
    served: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        served.append(asyncio.current_task())
        with contextlib.closing(writer):
            await reader.readuntil(b"}}")
            if left:
                left -= 1
                line = b'{"token":{}}\n'
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(line), line))
                await reader.read(1)

    async def run() -> list[str]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connections = Connections(Target(f"http://127.0.0.1:{port}", tokens=1))
        results = [await connections.ask(number) for number in range(2)]
        connections.close()
        server.close()
        await asyncio.gather(*filter(None, served))
        await asyncio.sleep(0.05)  # the transports' own ends
        return [result.error for result in results]

    assert asyncio.run(run()) == ["", "" if answers == 2 else "connection cut"]


@pytest.mark.parametrize("more", [b"{}", b"H", HEAD % b"text/plain" + b"0\r\n\r\n"])
def test_what_comes_behind_an_answer_is_no_part_of_it(more: bytes) -> None:
    reader = BodyReader()
    reader.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + more, 0.0)
    assert (reader.complete, bytes(reader.body), reader.keep_alive) == (True, b"ok", False)
    assert reader.headers == {"content-length": "2"}


def test_the_times_of_tiny_pieces_are_bounded() -> None:
    reader = BodyReader()
    reader.feed(HEAD % b"text/plain", 0.0)
    for _ in range(40):
        reader.feed(b"1\r\na\r\n" * 5_000, 0.0)
    assert (len(reader.body), len(reader.pieces)) == (200_000, 1 << 17)


# -- figures from results ----------------------------------------------------------------------------------------------


def result(start: float, *arrivals: float, error: str = "") -> Result:
    return Result(start, array("d", arrivals), arrivals[-1] if arrivals else start, error)


def test_percentiles() -> None:
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None}
    assert percentiles([2.0, 1.0]) == pytest.approx({"p50": 1.5, "p90": 1.9, "p99": 1.99})
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0}
    assert percentiles([float(value) for value in range(101)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}


def test_a_rate_covers_all_from_the_first_start_to_the_last_end() -> None:
    assert tokens_per_second([result(1.0, 1.5, 2.0), result(1.0, 2.0, 3.0)]) == pytest.approx(2.0)


def test_summary_has_milliseconds_errors_by_kind_and_the_median_ratio() -> None:
    good = [result(0.0, 0.1, 0.2, 0.4)]
    bad = [*good, result(0.0, error="status 503"), result(0.0, error="status 503")]
    engines = [Run(3, 0.2), Run(3, 0.4), Run(3, 0.8)]
    point = Point(Closed(1), [Repetition(bad if engine is engines[0] else good, engine) for engine in engines])
    value = summarize(point)
    assert value["ttft_ms"]["p50"] == pytest.approx(100)
    assert value["itl_ms"]["p50"] == pytest.approx(150)
    assert value["errors"] == {"status 503": 2}
    assert value["served_over_engine"] == pytest.approx(statistics.median([0.5, 1.0, 2.0]))
    shown = show([point], [value])
    assert "2 status 503" in shown
    assert "1 client " in shown


def test_open_loop_keeps_its_rate() -> None:
    assert Open(rate=4, seconds=1, poisson=False).due() == [0.25, 0.5, 0.75, 1.0]
    due = Open(rate=100, seconds=50).due()
    assert len(due) == pytest.approx(5000, rel=0.05)
    assert due == Open(rate=100, seconds=50).due()
    assert statistics.pstdev(b - a for a, b in itertools.pairwise(due)) == pytest.approx(0.01, rel=0.1)
