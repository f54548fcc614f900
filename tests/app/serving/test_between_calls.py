"""Between DJL's calls the worker's loop stands still, for any time: what happens meanwhile is right at the next call.

The clock jumps; nobody waits.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from handler.config.loader import read_config
from handler.djl.batches import Piece, RollingBatch
from handler.djl.worker_loop import WorkerLoop
from handler.engines.base import Step
from handler.engines.process.ipc import ChannelReader, encode
from handler.engines.process.supervisor import EngineInstance, EngineSupervisor
from handler.plugins.functions import Formatters
from handler.serving.model import ServedModel
from handler.serving.start import load_model
from tests.servers import wait_for
from tests.stepped import ask, item, text_of

GAPS = pytest.mark.parametrize("seconds", [0, 1, 30])  # between two calls

TIMEOUT = 5  # option.engine_timeout


class Stepped:
    """A rolling batch over echo in a thread, supervised as in earnest, and a clock that can jump."""

    def __init__(self, jump: Callable[[float], None], *options: str) -> None:
        self.jump = jump
        self.loop = WorkerLoop()
        given = ["llm_engine=echo", "engine_isolation=thread", "echo_cues=true", f"engine_timeout={TIMEOUT}", *options]
        config = read_config(overrides=[f"option.{one}" for one in given], environ={}).checked()

        async def load() -> ServedModel:
            model = await load_model(config, Formatters(), stepped=True)
            model.start()
            await model.availability.opened
            return model

        self.model = self.loop.run(load())
        self.batch = RollingBatch(self.model, self.loop)

    def step(self, *bodies: Any) -> list[Piece]:
        live = self.batch.num_requests
        return self.batch.step(live + len(bodies), {live + i: item(body) for i, body in enumerate(bodies)})

    def until_ended(self, piece: Piece) -> bytes:
        """The whole body of the one request there is."""
        body = piece.data
        while not piece.last:
            (piece,) = self.step()
            body += piece.data
        return body

    def worker(self) -> EngineInstance:
        engine = self.model.availability.engine
        assert isinstance(engine, EngineSupervisor)
        assert engine._instance is not None
        return engine._instance

    def wait_for_steps(self, count: int) -> None:
        """Until the engine has told of so many steps that nobody has read."""
        worker = self.worker()
        size = count * len(encode(Step([1], [5], [None], [])))

        def there() -> bool:
            with contextlib.suppress(BlockingIOError):
                return len(worker.channel.recv(1 << 16, socket.MSG_PEEK)) >= size
            return False

        wait_for(there, 10, "the engine says nothing")

    def kill_engine(self) -> None:
        worker = self.worker()
        worker.channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self.loop.lock:
            self.batch.reset()
            self.model.close()
            self.loop.poll()
            self.loop.close()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stepped]]:
    clock, ahead, started = time.monotonic, [0.0], list[Stepped]()
    monkeypatch.setattr(time, "monotonic", lambda: clock() + ahead[0])

    def jump(seconds: float) -> None:
        ahead[0] += seconds

    def begin(*options: str) -> Stepped:
        started.append(Stepped(jump, *options))
        return started[-1]

    yield begin
    for one in started:
        one.close()


@GAPS
def test_tokens_that_came_meanwhile_are_delivered_and_no_engine_is_hung(
    start: Callable[..., Stepped], seconds: float
) -> None:
    stepped = start("echo_tokens_per_second=100")
    (first,) = stepped.step(ask("a b", 60, stream=True))
    stepped.wait_for_steps(10)
    stepped.jump(seconds)
    (second,) = stepped.step()
    assert second.data.count(b"\n") > 5, "they lay there"
    assert text_of(first.data + stepped.until_ended(second)) == " a b" * 30


def test_the_engine_is_told_between_calls_that_nobody_wants_a_request(start: Callable[..., Stepped]) -> None:
    stepped = start("echo_tokens_per_second=100")
    stepped.step(ask("a b", 100_000, stream=True))
    stepped.batch.reset()
    worker = stepped.worker()
    heard = list[Any]()

    def at_rest() -> bool:
        with contextlib.suppress(BlockingIOError):
            heard.extend(ChannelReader().feed(worker.channel.recv(1 << 16, socket.MSG_PEEK)))
        return heard[-1:] == [tuple(Step([], [], [], []))]

    wait_for(at_rest, 10, "the engine goes on")


@GAPS
def test_an_engine_that_hangs_is_told_by_the_clock(start: Callable[..., Stepped], seconds: int) -> None:
    stepped = start()
    (piece,) = stepped.step(ask("<hang>", 3, stream=True))
    assert not piece.last
    for _ in range(seconds):
        stepped.jump(1)
        stepped.loop.poll()  # as `look_after` does
    (piece,) = stepped.step()
    if seconds < TIMEOUT:
        assert not piece.last
        return
    assert f"no step for {TIMEOUT} s" in json.loads(piece.data)["error"]
    stepped.jump(seconds)
    assert text_of(stepped.until_ended(*stepped.step(ask("a b", 2, stream=True)))) == " a b"


def test_an_engine_does_not_count_as_hung_where_nobody_looked_at_the_clock(start: Callable[..., Stepped]) -> None:
    stepped = start()
    (piece,) = stepped.step(ask("<hang>", 3, stream=True))
    stepped.jump(30)
    (later,) = stepped.step()
    assert not piece.last
    assert not later.last


@GAPS
def test_an_engine_that_died_meanwhile_takes_no_newcomer_along(start: Callable[..., Stepped], seconds: float) -> None:
    stepped = start("echo_tokens_per_second=20")
    stepped.step(ask("a b", 500, stream=True))
    stepped.kill_engine()
    stepped.jump(seconds)
    dead, new = stepped.step(ask("c d", 2, stream=True))
    assert "engine failure" in json.loads(dead.data.splitlines()[-1])["error"]
    *ends, more = stepped.step()
    assert [(end.data, end.last) for end in ends] == [(b"", True)] * (not dead.last)
    assert text_of(new.data + stepped.until_ended(more)) == " c d"


@GAPS
def test_what_a_thread_has_made_meanwhile_is_there(start: Callable[..., Stepped], seconds: float) -> None:
    """A long prompt's tokens; the thread's word wakes a loop that does not run."""
    stepped = start()
    body = item(ask("word " * 10_000, 2))
    task = stepped.model.open(body.headers, on_bytes=stepped.loop.stop)
    task.begin(task.run(body.body))
    stepped.loop.poll()  # the thread has it
    time.sleep(0.3)
    stepped.jump(seconds)
    assert stepped.loop.wait_until(lambda: task.finished, 20)
    assert text_of(task.take()) == " word word"


@GAPS
def test_a_request_that_takes_too_long_is_ended_by_the_clock(start: Callable[..., Stepped], seconds: float) -> None:
    stepped = start("echo_tokens_per_second=20", "request_time_limit=10")
    stepped.step(ask("a b", 500, stream=True))
    stepped.wait_for_steps(2)  # the engine does not count as hung
    stepped.jump(seconds)
    (piece,) = stepped.step()
    while not piece.data:
        (piece,) = stepped.step()
    assert stepped.step()[0].last == (seconds > 10)
    assert (b"option.request_time_limit" in piece.data) == (seconds > 10)


def test_an_engine_that_dies_at_rest_is_back_without_a_call(start: Callable[..., Stepped]) -> None:
    stepped = start()
    threading.Thread(target=stepped.loop.look_after, args=(0.02,), daemon=True).start()
    with stepped.loop.lock:
        stepped.kill_engine()
    deadline = time.monotonic() + 20
    while stepped.model.availability.engine.restarts == 0 or not stepped.model.availability.healthy:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with stepped.loop.lock:
        assert text_of(stepped.until_ended(*stepped.step(ask("a b", 2, stream=True)))) == " a b"


def test_a_stop_that_nobody_waited_for_harms_no_other_run(start: Callable[..., Stepped]) -> None:
    """Bytes of one request come while the loop runs for another call: an adapter's, say."""
    stepped = start()
    stepped.step(ask("a b", 3, stream=True))

    async def answer() -> int:
        stepped.loop.stop()
        return 7

    stepped.loop.stop()
    assert stepped.loop.run(answer()) == 7
