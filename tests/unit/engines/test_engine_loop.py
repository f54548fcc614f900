"""The worker's loop around an engine whose steps can be interrupted."""

from __future__ import annotations

import contextlib
import copy
import pickle
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from handler.core.errors import ConfigError
from handler.core.media import MediaPrompt, Medium, SharedMedia
from handler.core.values import Adapter, Finish, Pooling, Sampling
from handler.engines.base import EngineInfo, EngineRequest, Interrupted, Step, pack, unpack
from handler.engines.process.engine_process import Cancel, Failed, Ready, run
from handler.engines.process.ipc import MessageReader, Messages, send, wait
from tests.one_test import in_one_test


class Waiting:
    """Each step waits for a byte on `core`, or for a command; refuses prompts without ids."""

    info = EngineInfo("waiting", "0", "none", "none", 1)

    def __init__(self, core: socket.socket) -> None:
        self._core = core
        self._commands = -1
        self.seen: list[str] = []
        self.requests: list[EngineRequest] = []

    def interrupt_on(self, fd: int) -> bool:
        self._commands = fd
        return True

    def add(self, request: EngineRequest) -> None:
        if not request.ids:
            raise ValueError("no ids")
        self.requests.append(request)
        self.seen.append(f"add {request.key}")

    def cancel(self, key: int) -> None:
        self.seen.append(f"cancel {key}")

    def step(self) -> Step:
        commands = socket.socket(fileno=self._commands)
        try:
            while True:
                if wait(self._core, timeout=0.005):
                    self._core.recv(1)
                    return Step([1], [5], [None], [])
                if wait(commands, timeout=0.005):
                    raise Interrupted
        finally:
            commands.detach()

    def load_adapter(self, adapter: Adapter) -> None: ...
    def drop_adapter(self, adapter: Adapter) -> None: ...
    def close(self) -> None:
        self._core.close()


class Scripted(Waiting):
    """Each step does what the next line says, the last one for ever."""

    def __init__(self, core: socket.socket, *script: Step | type[Interrupted], interruptible: bool = True) -> None:
        super().__init__(core)
        self._script = list(script)
        self._interruptible = interruptible

    def interrupt_on(self, fd: int) -> bool:
        return self._interruptible

    def step(self) -> Step:
        time.sleep(0.001)
        line = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        if isinstance(line, Step):
            return copy.deepcopy(line)
        raise line


NOTHING, TOKEN = Step([], [], [], []), Step([1], [5], [None], [])


@contextlib.contextmanager
def _running(engine: Waiting) -> Iterator[socket.socket]:
    """The channel to the worker of `engine`, which is loaded."""
    channel, workers = socket.socketpair()
    channel.settimeout(30)
    thread = threading.Thread(target=run, args=(lambda: engine, workers))
    thread.start()
    with channel:
        assert isinstance(Messages(channel).next(), Ready)
        yield channel
    thread.join(30)
    assert not thread.is_alive()


@in_one_test(
    ("script", "interruptible"),
    [
        ([NOTHING], True),  # it returns without having waited, so it tells of no command
        ([TOKEN, NOTHING], True),
        ([TOKEN], False),
        ([Interrupted], True),
        ([Interrupted, Interrupted, TOKEN, Interrupted], True),  # also where there was none
    ],
)
def test_commands_are_heard_whatever_the_steps_bring(
    script: list[Step | type[Interrupted]], interruptible: bool
) -> None:
    ours, theirs = socket.socketpair()
    engine = Scripted(theirs, *script, interruptible=interruptible)
    with ours, _running(engine) as channel:
        send(channel, EngineRequest(1, [4], Sampling()))
        _wait_for(1, engine.seen)
        send(channel, Cancel(1))
        _wait_for(2, engine.seen)
    assert engine.seen == ["add 1", "cancel 1"]


def test_a_request_arrives_whole() -> None:
    ours, theirs = socket.socketpair()
    engine = Scripted(theirs, TOKEN)
    shared = SharedMedia("text", [Medium("image", (1, 1), b"rgb", "digest")])
    request = EngineRequest(1, [4], Sampling(seed=7), Adapter("a", 1, "/"), shared.file)
    with ours, _running(engine) as channel:
        send(channel, request)
        _wait_for(1, engine.seen)
    assert engine.requests == [request]
    assert engine.requests[0].read_media() == MediaPrompt("text", (Medium("image", (1, 1), b"rgb", "digest"),))


@pytest.fixture
def waiting() -> Iterator[tuple[Waiting, socket.socket, socket.socket]]:
    """The engine, what lets it step, and the channel to its worker."""
    core, theirs = socket.socketpair()
    engine = Waiting(theirs)
    with core, _running(engine) as channel:
        yield engine, core, channel


def _wait_for(count: int, seen: Sequence[str]) -> None:
    deadline = time.monotonic() + 30
    while len(seen) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_command_reaches_an_engine_in_the_middle_of_a_step(
    waiting: tuple[Waiting, socket.socket, socket.socket],
) -> None:
    engine, core, channel = waiting
    for number, command in enumerate(
        [EngineRequest(1, [4], Sampling()), EngineRequest(2, [4], Sampling()), Cancel(1)], 1
    ):
        send(channel, command)
        _wait_for(number, engine.seen)
    assert engine.seen == ["add 1", "add 2", "cancel 1"]
    core.send(b"!")
    assert Messages(channel).next() == Step([1], [5], [None], [])


def test_a_refusal_survives_an_interruption(waiting: tuple[Waiting, socket.socket, socket.socket]) -> None:
    _, _, channel = waiting
    send(channel, EngineRequest(1, [4], Sampling()))
    send(channel, EngineRequest(2, [], Sampling()))
    assert not wait(channel, timeout=0.1)
    send(channel, EngineRequest(3, [4], Sampling()))
    assert [(output.key, output.finish) for output in Step(*Messages(channel).next()).others] == [(2, Finish.ERROR)]


def test_an_interruption_is_no_sign_of_life(waiting: tuple[Waiting, socket.socket, socket.socket]) -> None:
    _, core, channel = waiting
    send(channel, EngineRequest(1, [4], Sampling()))
    for key in range(2, 5):
        send(channel, EngineRequest(key, [4], Sampling()))
        assert not wait(channel, timeout=0.1), "else an engine that hangs is never found out while requests come"
    core.send(b"!")
    assert Step(*Messages(channel).next()).keys == [1]


def test_what_is_cancelled_in_the_middle_of_a_step_is_answered(
    waiting: tuple[Waiting, socket.socket, socket.socket],
) -> None:
    engine, _, channel = waiting
    send(channel, EngineRequest(1, [4], Sampling()))
    send(channel, Cancel(1))
    assert Messages(channel).next() == Step([], [], [], [])
    assert engine.seen == ["add 1", "cancel 1"]


@pytest.mark.parametrize(
    ("error", "reason", "traced"),
    [
        (ConfigError("model.bin is cut short"), "model.bin is cut short", False),
        (RuntimeError("deep within"), "RuntimeError: deep within", True),
    ],
)
def test_what_says_itself_what_is_wrong_comes_without_a_traceback(error: Exception, reason: str, traced: bool) -> None:
    def load() -> Waiting:
        raise error

    host, worker = socket.socketpair()
    with contextlib.closing(host):
        run(load, worker)
        (failed,) = MessageReader().receive(host) or []
    assert failed == Failed(reason, failed.trace)
    assert bool(failed.trace) == traced


@pytest.mark.parametrize("parameters", [Sampling(seed=3, stop=("a",)), Pooling("embed", dimensions=2)])
def test_a_request_arrives_as_it_was_sent(parameters: Sampling | Pooling) -> None:
    request = EngineRequest(1, [2, 3], parameters, Adapter("a", 1, "/a"))
    arrived = unpack(pickle.loads(pickle.dumps(pack(request))))
    assert arrived == request
    assert (type(arrived), type(arrived.parameters)) == (EngineRequest, type(parameters))
