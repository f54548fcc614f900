"""The driver: sinks that fail and answers that are long hold up no neighbour."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from handler.core.errors import GenerationFailed, InternalError, Overloaded
from handler.core.values import Delta, Finish, Request, Sampling, Token
from handler.engines.base import EngineConfig, Step
from handler.engines.process.engine_process import Spec
from handler.engines.process.supervisor import EngineSupervisor, LoopHooks, State
from handler.protocols.lmi.response import DocumentReply
from handler.scheduler.batcher import Batcher, ClientChannel, FastPath
from handler.serving.engine_driver import EngineDriver
from handler.serving.model import ServedModel
from tests.doubles.scripted_engine import Scripted, prompt
from tests.services import begin, echo_service, load_echo

# -- the driver: a sink that fails is told so, and its neighbours do not notice ----------------------------------------


class Silent(Scripted):
    """An engine that counts its steps and never answers."""

    num_steps = 0

    def step(self, timeout: float = 0.0) -> list[Step]:
        self.num_steps += 1
        return []


@pytest.mark.parametrize(
    ("error", "kind"),
    [(TypeError("cannot be written"), InternalError), (GenerationFailed("the model computed NaN"), GenerationFailed)],
)
def test_a_failing_sink_is_ended_with_an_error_and_the_others_go_on(error: Exception, kind: type[Exception]) -> None:
    bad: list[Delta] = []
    good: list[Delta] = []

    def fail_once(delta: Delta) -> None:
        bad.append(delta)
        if len(bad) == 1:
            raise error

    async def story() -> None:
        driver = EngineDriver(Batcher(Scripted()))
        for sink in (fail_once, good.append):
            driver.submit(Request("ab", Sampling(max_new_tokens=2)), prompt("ab"), sink)
        for _ in range(3):
            driver.step()
        driver.close()

    asyncio.run(story())
    assert (bad[1].finish, type(bad[1].error), len(bad)) == (Finish.ERROR, kind, 2)
    assert [delta.finish for delta in good] == [None, Finish.LENGTH]


def test_a_dead_engine_is_restarted_without_waiting_for_the_long_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("handler.serving.engine_driver._TICK", 60.0)

    async def story() -> float:
        engine = EngineSupervisor(Spec("echo", EngineConfig()), isolated=False)
        driver = EngineDriver(Batcher(engine))
        ready = asyncio.Event()
        engine.attach(LoopHooks(driver.watch, lambda state: ready.set() if state is State.READY else ready.clear()))
        await asyncio.wait_for(ready.wait(), 30)
        await asyncio.sleep(0.5)  # by now the long tick is under way
        assert engine._instance is not None
        with contextlib.suppress(OSError):
            engine._instance.channel.shutdown(socket.SHUT_RDWR)
        died = time.monotonic()
        while engine.state is State.READY:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(ready.wait(), 30)
        took = time.monotonic() - died
        driver.close()
        engine.close()
        return took

    assert asyncio.run(story()) < 30


@pytest.mark.parametrize(
    ("phase", "tick"),  # when it comes between the driver's ticks, and the long tick, which may be under way by then
    [(0.0, 60.0), (0.35, 1.0), (0.7, 1.0)],
)
def test_who_waits_too_long_is_told_though_the_engine_says_nothing(
    phase: float, tick: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handler.serving.engine_driver._TICK", tick)

    async def story() -> float:
        driver = EngineDriver(Batcher(Silent(), max_active=1, queue_timeout=0.5))
        await asyncio.sleep(phase)
        told: asyncio.Future[Delta] = asyncio.get_running_loop().create_future()
        began = time.monotonic()
        for sink in (lambda delta: None, told.set_result):
            driver.submit(Request("ab", Sampling(max_new_tokens=2)), prompt("ab"), sink)
        assert isinstance((await asyncio.wait_for(told, 30)).error, Overloaded)
        driver.close()
        return time.monotonic() - began

    assert asyncio.run(story()) < 30  # at most a tick late, on a busy machine too


def test_only_the_engines_present_descriptor_is_watched() -> None:
    async def story() -> None:
        driver = EngineDriver(Batcher(Scripted()))
        first, second = socket.socketpair()
        with first, second:
            driver.watch(first.fileno())
            driver.watch(second.fileno())
            assert not driver.loop.remove_reader(first.fileno()), "it is no longer watched"
            driver.watch(None)
            assert not driver.loop.remove_reader(second.fileno())
        driver.close()

    asyncio.run(story())


class Taking:
    """A channel that takes all chunks."""

    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = chunks

    def write_chunk(self, data: bytes) -> bool:
        self._chunks.append(data)
        return True


class Full:
    """A channel that takes none."""

    def write_chunk(self, data: bytes) -> bool:
        return False


class Closed:
    """A channel whose client has gone."""

    def write_chunk(self, data: bytes) -> bool:
        raise OSError("closed")


def test_tokens_go_to_their_receivers_and_ends_to_the_sinks() -> None:
    def text(token: Token) -> bytes:
        return token.text.encode()

    def fail(token: Token) -> bytes:
        raise TypeError("cannot be written")

    written: list[bytes] = []
    kept: list[bytes] = []
    ends: list[list[Delta]] = [[], [], [], [], []]

    async def story() -> tuple[int, list[int]]:
        driver = EngineDriver(Batcher(Scripted()))
        ways: list[tuple[Callable[[Token], bytes], ClientChannel | None]]
        ways = [(text, Taking(written)), (text, Full()), (text, None), (text, Closed()), (fail, Taking(written))]
        fast_paths = []
        for (line, channel), mine in zip(ways, ends, strict=True):
            id = driver.submit(Request("abc", Sampling(max_new_tokens=3)), prompt("abc"), mine.append)
            fast_paths.append(FastPath(id, line, channel, kept.append))
            driver.set_fast_path(fast_paths[-1])
        for _ in range(3):
            driver.step()
        driver.close()
        return driver.batcher.num_tokens, [one.num_tokens for one in fast_paths]

    num_tokens, counts = asyncio.run(story())
    assert (written, kept, counts) == ([b"a", b"b"], [b"a"] * 3 + [b"b"] * 3, [2, 2, 2, 2, 0])
    assert num_tokens == 13  # with the one that could not be written
    direct, full, without, closed, failed = ends
    assert [(delta.finish, delta.tokens[0].text) for delta in (*direct, *full, *without, *closed)] == [
        (Finish.LENGTH, "c")
    ] * 4
    assert [type(delta.error) for delta in failed] == [InternalError]


def test_joined_tokens_of_a_stream_are_one_write() -> None:
    class Joined(Scripted):
        def step(self, timeout: float = 0.0) -> list[Step]:
            return [step for _ in range(2) for step in Scripted.step(self)]

    written: list[bytes] = []

    async def story() -> int:
        driver = EngineDriver(Batcher(Joined()))
        id = driver.submit(Request("abc", Sampling(max_new_tokens=9)), prompt("abc"), lambda delta: None)
        driver.set_fast_path(FastPath(id, lambda token: token.text.encode(), Taking(written), len))
        for _ in range(2):
            driver.step()
        driver.close()
        return driver.batcher.num_tokens

    assert asyncio.run(story()) == 4
    assert written == [b"ab", b"ca"]


@contextlib.asynccontextmanager
async def woken_in_each_turn(engine: Silent, *, places: int = 1000, rests: bool = True) -> AsyncIterator[EngineDriver]:
    """A driver that has stepped once, and whose engine always has something to say."""
    driver = EngineDriver(Batcher(engine, max_active=places), rests=rests)
    first, second = socket.socketpair()
    with first, second:
        driver.watch(first.fileno())
        second.send(b"x")  # never read
        while not engine.num_steps:
            await asyncio.sleep(0)
        yield driver
        driver.watch(None)
    driver.close()


def is_resting(driver: EngineDriver) -> bool:
    """Tell whether the driver leaves its engine unwatched for now."""
    fd = driver.fd
    assert fd is not None
    was_watched = driver.loop.remove_reader(fd)
    if was_watched:
        driver.watch(fd)
    return not was_watched


@pytest.mark.parametrize(("short", "rests", "resting"), [(60.0, True, False), (-1.0, True, True), (-1.0, False, False)])
def test_the_driver_rests_after_a_long_step(
    short: float, rests: bool, resting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handler.serving.engine_driver._SHORT_STEP", short)

    async def story() -> bool:
        engine = Silent()
        async with woken_in_each_turn(engine, rests=rests) as driver:
            before, was_resting = engine.num_steps, is_resting(driver)
            while engine.num_steps < before + 2:
                await asyncio.sleep(0.001)
        return was_resting

    assert asyncio.run(story()) == resting


def test_a_rest_ends_with_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handler.serving.engine_driver._SHORT_STEP", -1.0)
    monkeypatch.setattr("handler.serving.engine_driver._SHORT_TICK", 60.0)  # a tick steps too

    async def story() -> tuple[bool, int, int | None]:
        engine = Silent()
        async with woken_in_each_turn(engine) as driver:
            was_resting, fd = is_resting(driver), driver.fd
            driver.watch(None)
            await asyncio.sleep(0.15)  # longer than any rest
            assert fd is not None
            assert not driver.loop.remove_reader(fd)
        return was_resting, engine.num_steps, driver.fd

    assert asyncio.run(story()) == (True, 1, None)


@pytest.mark.parametrize(("rest", "least"), [(0.0, 3), (60.0, 1)])
def test_a_tick_leaves_a_rest_alone_and_rests_after_a_long_step(
    rest: float, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is a long one, and each message of the engine's is seen by a tick."""
    monkeypatch.setattr("handler.serving.engine_driver._SHORT_STEP", -1.0)
    monkeypatch.setattr("handler.serving.engine_driver._REST", 1e9)
    monkeypatch.setattr("handler.serving.engine_driver._MAX_REST", rest)
    monkeypatch.setattr("handler.serving.engine_driver._SHORT_TICK", 0.001)

    async def story() -> int:
        engine = Silent()
        engine.ready = False
        async with woken_in_each_turn(engine):
            for _ in range(50):
                await asyncio.sleep(0.002)
        return engine.num_steps

    found = asyncio.run(story())
    assert found >= least
    assert rest == 0.0 or found == 1


def test_a_step_that_raises_does_not_end_the_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handler.serving.engine_driver._SHORT_TICK", 0.001)
    monkeypatch.setattr("handler.serving.engine_driver._TICK", 0.001)

    class Raising(Batcher):
        def step(self, timeout: float = 0.0) -> list[Delta]:
            raise ValueError(super().step(timeout))

    async def story() -> list[str]:
        engine, raised = Silent(), []
        driver = EngineDriver(Raising(engine))
        driver.loop.set_exception_handler(lambda loop, context: raised.append(repr(context["exception"])))
        while engine.num_steps < 3:
            await asyncio.sleep(0.001)
        driver.close()
        return raised

    raised = asyncio.run(asyncio.wait_for(story(), 30))
    assert len(raised) >= 2
    assert all("ValueError" in error for error in raised)


def test_nothing_ticks_once_a_model_is_closed() -> None:
    async def story() -> bool:
        model = await echo_service()
        model.close()
        return model.driver._timer.cancelled()

    assert asyncio.run(story())


async def submit(driver: EngineDriver, requests: int) -> None:
    """Submit so many in one turn of the loop, and wait for the next."""
    for _ in range(requests):
        driver.submit(Request("ab"), prompt("ab"), lambda delta: None)
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("gap", "places", "rests", "num_steps"),
    [
        pytest.param(60.0, 1000, True, [1, 1, 2], id="until none comes"),
        pytest.param(-1.0, 1000, True, [2, 3, 4], id="the last step was too long ago"),
        pytest.param(60.0, 1, True, [1, 2, 3], id="while they begin: the second turn's find no place"),
        pytest.param(60.0, 1000, False, [2, 3, 4], id="not where it runs in a host's calls"),
    ],
)
def test_a_step_waits_while_each_turn_brings_requests_that_begin(
    gap: float, places: int, rests: bool, num_steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handler.serving.engine_driver._MAX_GAP", gap)
    monkeypatch.setattr("handler.serving.engine_driver._SHORT_STEP", 60.0)
    monkeypatch.setattr("handler.serving.engine_driver._SHORT_TICK", 60.0)  # a tick steps too

    async def story() -> list[int]:
        engine, seen = Silent(), []
        async with woken_in_each_turn(engine, places=places, rests=rests) as driver:
            for requests in (1, 2, 0):
                await submit(driver, requests)
                seen.append(engine.num_steps)
        return seen

    assert asyncio.run(story()) == num_steps


def test_a_line_that_waits_for_a_batchs_room_does_not_hold_up_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handler.serving.engine_driver._MAX_GAP", 60.0)
    monkeypatch.setattr("handler.serving.engine_driver._SHORT_STEP", 60.0)
    monkeypatch.setattr("handler.serving.engine_driver._SHORT_TICK", 60.0)

    async def story() -> list[int]:
        engine, seen = Silent(), []
        async with woken_in_each_turn(engine) as driver:
            for _ in range(17):
                line = Request("a", Sampling(max_new_tokens=9), background="ann")
                driver.submit(line, prompt("a"), lambda delta: None)
                await asyncio.sleep(0)
                seen.append(engine.num_steps)
        return seen

    seen = asyncio.run(story())
    assert seen[-1] > seen[-2], "the last one does not begin"


def test_requests_without_end_do_not_hold_up_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handler.serving.engine_driver._SHORT_TICK", 60.0)

    async def story() -> int:
        engine, turns = Silent(), 0
        async with woken_in_each_turn(engine) as driver:
            while engine.num_steps < 2 and turns < 500:
                await submit(driver, 1)
                time.sleep(0.001)
                turns += 1
        return turns

    assert asyncio.run(story()) < 500


# -- a long answer is written on a thread, so that the event loop serves others meanwhile ------------------------------


async def service() -> ServedModel:
    model = await load_echo("option.max_model_len=100000")
    model.start()
    await model.availability.opened
    return model


def ask(num_tokens: int) -> dict[str, Any]:
    return {"inputs": "a b", "parameters": {"max_new_tokens": num_tokens, "details": True}}


class Document:
    """Notes the threads on which documents are made; `hold` keeps a document from ending."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[threading.Thread] = []
        self.begun, self.free = threading.Event(), threading.Event()
        self.free.set()
        self.error: Exception | None = None
        make = DocumentReply._document

        def document(reply: DocumentReply) -> object:
            self.threads.append(threading.current_thread())
            self.begun.set()
            self.free.wait(5)
            if self.error is not None:
                raise self.error
            return make(reply)

        monkeypatch.setattr(DocumentReply, "_document", document)


def test_a_long_answer_is_written_on_a_thread_and_a_short_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    document = Document(monkeypatch)

    async def story() -> None:
        model = await service()
        for num_tokens in (3, 5000):
            task, begun = begin(model, ask(num_tokens))
            await begun
            answer = task.take_whole()
            assert task.finished
            assert answer.status == 200
            assert len(json.loads(answer.body)["details"]["tokens"]) == num_tokens
            task.close()
        model.close()

    asyncio.run(story())
    main = threading.main_thread()
    assert [thread is main for thread in document.threads] == [True, False]


def test_a_failure_of_writing_is_the_answer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    document = Document(monkeypatch)
    document.error = ZeroDivisionError("secret")

    async def story() -> None:
        model = await service()
        task, begun = begin(model, ask(5000))
        await begun
        answer = task.take_whole()
        assert answer.status == 500
        assert b"secret" not in answer.body
        task.close()
        model.close()

    asyncio.run(story())
    assert "ZeroDivisionError" in caplog.text


def test_a_client_that_goes_meanwhile_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    document = Document(monkeypatch)
    document.free.clear()

    async def story() -> None:
        model = await service()
        task, _ = begin(model, ask(5000))
        while not document.begun.is_set():
            await asyncio.sleep(0.01)
        assert not task.finished
        task.close()
        document.free.set()
        await asyncio.sleep(0.2)
        assert task.unsent == []
        model.close()

    asyncio.run(story())
