"""The worker's socket as Java would use it, and as it would not: requests in any pieces, places that disagree."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.djl import jars
from tests.djl.servers import newer, skipped_without_java
from tests.djl.worker import start
from tests.process_tree import descendants
from tests.servers import wait_for

pytestmark = pytest.mark.djl

OPTIONS = {
    "entryPoint": "handler.entry",
    "llm_engine": "echo",
    "lmi_version": "0.28",
    "rolling_batch": "auto",
    "echo_tokens_per_second": "100",
}


@contextlib.contextmanager
def start_worker(version: str, model: Path, options: dict[str, str]) -> Iterator[Any]:
    """A worker that has loaded, and us at the other end of its socket."""
    with skipped_without_java():
        engine = jars.engine(version) / "python" / version
    with start(Path(sys.executable), engine, model, options) as worker:
        worker.version = version
        yield worker


@pytest.fixture(scope="module", params=jars.VERSIONS)
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with start_worker(request.param, tmp_path_factory.mktemp("model"), OPTIONS) as worker:
        yield worker


def new(index: int, text: Any, tokens: int = 3) -> list[tuple[str, bytes]]:
    """The contents of a request that is offered for the first time."""
    body = {"inputs": text, "parameters": {"max_new_tokens": tokens}, "stream": True}
    return [(f"batch_{index:03}.data", json.dumps(body).encode()), (f"batch_{index:03}.seed", b"7")]


def old(index: int) -> list[tuple[str, bytes]]:
    return [(f"batch_{index:03}.data", b"")]


def step(
    worker: Any, *contents: list[tuple[str, bytes]], size: int | None = None, **properties: str
) -> list[dict[str, str]]:
    """One step; what each place's map says."""
    return read(worker, worker.call(*asked(*contents, size=size, **properties)))


def asked(
    *contents: list[tuple[str, bytes]], size: int | None = None, **properties: str
) -> tuple[dict[str, str], list[tuple[str, bytes]]]:
    return {"batch_size": str(len(contents) if size is None else size), **properties}, [
        pair for one in contents for pair in one
    ]


def read(worker: Any, reply: Any) -> list[dict[str, str]]:
    assert (reply.code, reply.message) == (200, "OK")
    return [said(worker, value) for _, value in reply.contents]


def said(worker: Any, value: bytes) -> dict[str, str]:
    """A map of strings; before 0.29 a failure is JSON."""
    if value.startswith(b"{"):
        legacy = json.loads(value)
        inner = json.loads(legacy["data"])
        return {
            "data": legacy["data"],
            "last": str(legacy["last"]).lower(),
            "code": str(inner["code"]),
            "error": inner["error"],
        }
    return dict(worker.string_map(value))


def to_the_end(worker: Any, first: list[dict[str, str]]) -> list[str]:
    """The bodies of requests that were all new in one step."""
    bodies = [one["data"] for one in first]
    live = [index for index, one in enumerate(first) if one["last"] != "true"]
    while live:
        for index, one in zip(list(live), step(worker, *(old(place) for place in range(len(live)))), strict=True):
            bodies[index] += one["data"]
            if one["last"] == "true":
                live.remove(index)
    return bodies


def text(body: str) -> str:
    return str(json.loads(body.splitlines()[-1])["generated_text"])


def test_a_request_may_come_byte_by_byte(worker: Any) -> None:
    message = worker.encode(*asked(new(0, "a ü 🙂")))
    for at in range(len(message)):
        worker.socket.sendall(message[at : at + 1])
    assert text(to_the_end(worker, read(worker, worker.reply()))[0]) == " a ü 🙂"


@pytest.mark.parametrize("cut", [1, 3, 17, 40, -1])
def test_requests_may_come_together_and_cut_anywhere(worker: Any, cut: int) -> None:
    """What is received beyond one request is the beginning of the next. Java then expects one response, to the next."""
    first = worker.encode(*asked(new(0, "a b", 1)))
    second = worker.encode(*asked(new(0, "c d", 1)))
    worker.socket.sendall(first + second[:cut])
    worker.socket.settimeout(0.5)
    with pytest.raises(TimeoutError):
        worker.socket.recv(1)
    worker.socket.settimeout(None)
    worker.socket.sendall(second[cut:])
    # The first may not have ended in its step: then the second, which calls its place new, ends all.
    other = read(worker, worker.reply())
    assert text(other[0]["data"]) == " c"
    assert text(step(worker, new(0, "e f", 1))[0]["data"]) == " e"


MANY = {**OPTIONS, "echo_tokens_per_second": "0", "max_rolling_batch_size": "1100"}
WANTED = [f" w{index} w{index}" for index in range(1100)]
"""Java writes three digits of a place, and more where it needs them: test_isolation.py has both versions' Java."""


def test_a_rolling_batch_may_have_more_than_999_requests(tmp_path: Path) -> None:
    with start_worker(jars.VERSIONS[0], tmp_path, MANY) as worker:
        first = step(worker, *(new(index, f"w{index}", 2) for index in range(1100)))
        assert [text(body) for body in to_the_end(worker, first)] == WANTED


def test_a_dynamic_batch_may_have_more_than_999_requests(tmp_path: Path) -> None:
    bodies = [json.dumps({"inputs": f"w{i}", "parameters": {"max_new_tokens": 2}}).encode() for i in range(1100)]
    dynamic = {name: value for name, value in MANY.items() if name != "rolling_batch"} | {"batch_size": "1100"}
    with start_worker(jars.VERSIONS[-1], tmp_path, dynamic) as worker:
        reply = worker.call({"batch_size": "1100"}, [(f"batch_{i:03}.data", body) for i, body in enumerate(bodies)])
        assert [json.loads(body)[0]["generated_text"] for _, body in reply.contents] == WANTED


def test_a_large_body_comes_whole(worker: Any) -> None:
    words = "word " * 100_000
    assert text(to_the_end(worker, step(worker, new(0, words, 2)))[0]) == " word word"


def test_content_types_are_told_once(worker: Any) -> None:
    reply = worker.call(*asked(new(0, "a b", 3), new(1, "c d", 3)))
    told = list(reply.properties)
    while live := sum(said(worker, value)["last"] != "true" for _, value in reply.contents):
        reply = worker.call(*asked(*(old(index) for index in range(live))))
        told += reply.properties
    assert len(told) == 2
    assert all(name.endswith("_Content-Type") for name in told)


def test_answers_name_their_requests_as_lmis_rolling_batch_does(worker: Any) -> None:
    """Since 0.30, with the id that Java gives a request (djl_python/utils.py)."""
    ids = {f"batch_{index:03}.requestId": f"id-{index}" for index in range(2)}
    properties, contents = asked(new(0, "a b", 3), new(1, 5, 3))  # the second is refused
    reply = worker.call({**properties, **ids}, contents)
    told = dict(reply.properties)
    while live := sum(said(worker, value)["last"] != "true" for _, value in reply.contents):
        reply = worker.call(*asked(*(old(index) for index in range(live))))
        told.update(reply.properties)
    wanted = {"batch_0_requestId": "id-0", "batch_1_requestId": "id-1"} if newer(worker.version, "0.30") else {}
    assert {name: value for name, value in told.items() if name.endswith("requestId")} == wanted


@pytest.mark.parametrize(
    "contents",
    [[old(0)], [old(0), old(1), old(2)], [new(0, "x y"), old(1)], [old(0), old(1), old(2), new(3, "x y")]],
    ids=["one lost", "one too many", "a live one is new", "a hole"],
)
def test_places_that_disagree_end_loudly_and_cross_nothing(worker: Any, contents: list[Any]) -> None:
    step(worker, new(0, "a b", 500), new(1, "c d", 500))
    ended = step(worker, *contents)
    assert [one["last"] for one in ended] == ["true"] * len(contents)
    for one in ended:
        assert (one["code"], "disagreed" in one["error"]) == ("500", True)
    assert text(to_the_end(worker, step(worker, new(0, "e f", 2)))[0]) == " e f"


def test_a_reset_comes_before_the_requests_of_its_step(worker: Any) -> None:
    step(worker, new(0, "a b", 500), new(1, "c d", 500))
    first = step(worker, new(0, "e f", 2), reset_rollingbatch="true")
    assert text(to_the_end(worker, first)[0]) == " e f"


def test_a_client_past_the_rolling_batch_touches_nobody(worker: Any) -> None:
    """With a `handler` property that the front end let through; its headers are properties without Java's prefix."""
    first = step(worker, new(0, "a b", 20), new(1, "c d", 20))
    forged = {"host": "x", "batch_size": "2", "reset_rollingbatch": "true"}
    worker.socket.sendall(worker.encode(forged, [("batch_000.data", b"{}"), ("batch_001.data", b"{}")]))
    assert worker.reply().code == 424
    worker.socket.sendall(
        worker.encode({"batch_size": "1", "reset_rollingbatch": "true"}, [("batch_000.data", b""), ("data", b"{}")])
    )
    assert worker.reply().code == 424
    worker.socket.sendall(worker.encode({"content-length": "2"}, [("data", b"{}")]))
    assert worker.reply().code == 424
    assert [text(body) for body in to_the_end(worker, first)] == [" a b" * 10, " c d" * 10]


def test_an_error_of_many_lines_is_one_line(worker: Any) -> None:
    """It becomes an HTTP reason phrase."""
    ended = step(
        worker, new(0, "a", 3), [("batch_001.data", b'{"inputs": "a", "inputs\\nx": 1,\n}'), ("batch_001.seed", b"1")]
    )
    assert "\n" not in ended[1]["error"]
    worker.call({"batch_size": "1", "reset_rollingbatch": "true"}, new(0, "bye", 1))


@pytest.mark.parametrize(
    ("version", "seconds", "tokens"),
    [(jars.VERSIONS[0], 0, 1), (jars.VERSIONS[0], 0.4, 500), (jars.VERSIONS[-1], 0.4, 1), (jars.VERSIONS[-1], 0, 500)],
)
def test_sigterm_ends_the_worker_and_its_engine(version: str, seconds: float, tokens: int, tmp_path: Path) -> None:
    """`seconds` after the last call, whose loop stands still or was looked at; at rest, or amid a stream of 500."""
    with start_worker(version, tmp_path, {**OPTIONS, "engine_isolation": "process"}) as worker:
        step(worker, new(0, "a b", tokens))
        time.sleep(seconds)
        processes = descendants(worker.pid)
        assert any("engine_process" in command for command in processes.values())
        os.kill(worker.pid, signal.SIGTERM)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), 20, "the engine lives on")
