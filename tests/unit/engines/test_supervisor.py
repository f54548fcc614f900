"""An engine's process: the supervisor of it, and the loop within."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import multiprocessing
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest

from handler.core import log, loop
from handler.core.child_processes import Child
from handler.core.errors import ConfigError, GenerationFailed
from handler.core.media import MediaPrompt, Medium, SharedMedia
from handler.core.text import Prompt, Vocabulary
from handler.core.values import Adapter, Extras, Finish, Pooling, Request, Sampling
from handler.engines.base import (
    Engine,
    EngineConfig,
    EngineInfo,
    EngineRequest,
    EngineStatistics,
    Interrupted,
    Output,
    Step,
    pack,
    pack_step,
    unpack,
    unpack_step,
    warm_up,
)
from handler.engines.process import engine_process
from handler.engines.process.engine_process import Cancel, EngineFailed, Spec, run
from handler.engines.process.ipc import ChannelClosed, ChannelReader, Messages, encode, send, wait
from handler.engines.process.supervisor import (
    ANYWHERE,
    EngineInstance,
    EngineSupervisor,
    LoopHooks,
    Placement,
    State,
    descendants,
    end_with_children,
    end_with_descendants,
    end_with_process,
    end_with_this_process,
    on_cores,
    on_devices,
)
from tests.one_test import in_one_test
from tests.servers import PATIENCE

# -- the supervisor, with a scripted engine instance and a clock that jumps: failures, restarts and pauses -------------


TOKEN = encode(tuple(Step([1], [65], [-0.1], [])))
LAST = encode(tuple(Step([], [], [], [Output(1, [65], [-0.1], Finish.LENGTH)])))
TIMEOUT = 5.0
LOAD_TIMEOUT = 20.0


class Instance:
    """An engine instance that says what the test has it say."""

    def __init__(self, spec: Spec, *, isolated: bool) -> None:
        self.channel, self._theirs = socket.socketpair()
        self.channel.setblocking(False)
        self.isolated = isolated
        self.reader, self.failure, self.restart_requested = ChannelReader(), None, False
        self.lost_server = False
        self.commands: list[Any] = []
        self.pid = None

    def put(self, command: Any) -> bool:
        self.commands.append(command)
        return True

    def flush(self) -> None:
        pass

    def say(self, *messages: bytes) -> None:
        self._theirs.sendall(b"".join(messages))

    def die(self) -> None:
        self._theirs.close()

    def failure_reason(self, failure: str) -> str:
        return failure

    def stop(self, grace: float = 0.0) -> None:
        self.channel.close()
        self._theirs.close()

    def exit_reason(self) -> str:
        return "it died"


class Supervised:
    """A supervisor, its instances in order, and its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.instances: list[Instance] = []
        self.now = 1000.0

        def start(spec: Spec, *, isolated: bool, placement: Placement) -> Instance:
            self.instances.append(Instance(spec, isolated=isolated))
            return self.instances[-1]

        monkeypatch.setattr("handler.engines.process.supervisor.EngineInstance", start)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.engine = EngineSupervisor(Spec("scripted", EngineConfig()), timeout=TIMEOUT, load_timeout=LOAD_TIMEOUT)
        self.be_ready()

    @property
    def instance(self) -> Instance:
        return self.instances[-1]

    def be_ready(self, longest_step: float = 0.0) -> None:
        info = EngineInfo("scripted", "1", "none", "none", 100, longest_step=longest_step)
        self.instance.say(encode(info))
        self.engine.step()
        assert self.engine.ready

    def add(self, key: int = 1) -> None:
        self.engine.add(EngineRequest(key, [65], Sampling()))

    def wait(self, seconds: float) -> None:
        """Look at the clock each second, as the driver does; nothing is said."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1
            assert self.engine.step() == []

    def fail(self) -> float:
        """End the instance; return the seconds until the next one is started."""
        self.instance.die()
        with pytest.raises(GenerationFailed, match="it died"):
            self.engine.step()
        died, known = self.now, len(self.instances)
        while len(self.instances) == known:
            self.now += 0.125
            self.engine.step()
        return self.now - died


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervised]:
    made = Supervised(monkeypatch)
    yield made
    made.engine.close()


def test_pauses_grow_with_each_failure_in_a_row_and_a_step_ends_the_row(supervised: Supervised) -> None:
    pauses = [supervised.fail() for _ in range(8)]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30]
    supervised.be_ready()
    assert supervised.fail() == 30, "it can be loaded; that it works has not been seen"
    supervised.be_ready()
    supervised.add()
    supervised.instance.say(TOKEN)
    supervised.engine.step()
    assert supervised.fail() == 0.5


def test_silence_is_a_hang_only_while_a_step_is_due(supervised: Supervised) -> None:
    supervised.wait(100)
    supervised.add()
    for _ in range(3):
        supervised.wait(TIMEOUT - 1)
        supervised.instance.say(TOKEN)
        assert len(supervised.engine.step()) == 1, "a token in time"
    with pytest.raises(GenerationFailed, match=r"no step for 5 s \(option\.engine_timeout\)"):
        supervised.wait(TIMEOUT + 1)


LIMITS = {
    "fast": (1.0, 5, "option.engine_timeout"),
    "slow": (12.0, 12, "its longest step as measured while loading"),
    "slower than loading": (100.0, 20, "option.model_loading_timeout"),
}


@in_one_test(("longest", "limit", "setting"), LIMITS.values(), ids=LIMITS)
def test_a_step_may_take_as_long_as_the_engine_has_measured(longest: float, limit: int, setting: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        supervised = Supervised(monkeypatch)
        supervised.fail()
        supervised.be_ready(longest)
        supervised.add()
        supervised.wait(limit - 1)
        with pytest.raises(GenerationFailed, match=re.escape(f"no step for {limit} s ({setting})")):
            supervised.wait(2)


def test_the_first_request_measures_a_step_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.accumulate([0.0, 7.0, 2.0, 3.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    ending = Step([], [], [], [Output(0, [5], [None], Finish.LENGTH)])
    steps = iter([Step([0], [5], [None], []), Step([], [], [], []), ending])
    engine = cast(Engine, SimpleNamespace(add=lambda request: None, step=lambda: next(steps)))
    assert warm_up(engine, [1]) == 3.0


def test_a_standstill_of_the_machine_is_no_hang_of_the_engine(supervised: Supervised) -> None:
    supervised.add()
    supervised.wait(1)
    supervised.now += 100
    supervised.wait(TIMEOUT - 1)
    supervised.instance.say(TOKEN)
    assert len(supervised.engine.step()) == 1


def test_a_hang_is_told_though_the_machine_stands_still_again_and_again(supervised: Supervised) -> None:
    supervised.add()
    for _ in range(5):
        supervised.now += 100
        supervised.wait(2)  # the first second belongs to the standstill
    supervised.now += 100
    with pytest.raises(GenerationFailed, match="no step for 5 s"):
        supervised.wait(2)


@pytest.mark.parametrize("is_seen", [True, False], ids=["by a host that runs", "not by one that stood still"])
def test_loading_takes_too_long(supervised: Supervised, is_seen: bool) -> None:
    supervised.fail()
    supervised.now += 0 if is_seen else LOAD_TIMEOUT + 1
    supervised.wait(LOAD_TIMEOUT - 1)
    if is_seen:
        with pytest.raises(GenerationFailed, match=r"not loaded after 20 s"):
            supervised.wait(2)
    else:
        supervised.be_ready()


def test_what_a_failed_engine_had_in_flight_is_not_expected_of_the_next(supervised: Supervised) -> None:
    supervised.add()
    supervised.fail()
    supervised.be_ready()
    supervised.wait(2 * TIMEOUT)
    supervised.engine.cancel(1)
    assert supervised.instance.commands == [], "nor is it cancelled there"


def test_half_a_message_of_a_failed_engine_does_not_garble_the_next_ones(supervised: Supervised) -> None:
    supervised.add()
    supervised.instance.say(TOKEN[:-1])
    assert supervised.engine.step() == []
    supervised.fail()
    supervised.be_ready()


def test_steps_before_a_failure_are_delivered_first(supervised: Supervised) -> None:
    supervised.add()
    supervised.instance.say(TOKEN, encode(EngineFailed("broken", "")))
    assert len(supervised.engine.step()) == 1
    with pytest.raises(GenerationFailed, match="broken"):
        supervised.engine.step()


def test_a_request_that_has_ended_is_neither_expected_nor_cancelled(supervised: Supervised) -> None:
    supervised.add()
    supervised.instance.say(LAST)
    supervised.engine.step()
    supervised.engine.cancel(1)
    supervised.wait(2 * TIMEOUT)
    assert [type(command) for command in supervised.instance.commands] == [tuple]


def test_a_restart_waits_for_the_last_request(supervised: Supervised) -> None:
    supervised.add()
    supervised.add(2)
    supervised.engine.restart_when_idle()
    supervised.instance.say(LAST)
    supervised.engine.step()
    assert supervised.engine.ready
    supervised.engine.cancel(2)
    supervised.engine.step()
    assert (supervised.engine.state, supervised.engine.restarts) == (State.RESTARTING, 1)
    assert [type(command) for command in supervised.instance.commands] == [tuple, tuple, Cancel]


def test_a_restart_waits_for_a_request_that_follows_the_last_one(supervised: Supervised) -> None:
    supervised.add()
    supervised.engine.restart_when_idle()
    supervised.instance.say(LAST)
    assert len(supervised.engine.step()) == 1
    supervised.add(2)
    supervised.engine.step()
    assert supervised.engine.ready
    supervised.engine.cancel(2)
    supervised.engine.step()
    assert supervised.engine.state is State.RESTARTING


def test_a_lone_engines_restarts_are_its_only_replicas(supervised: Supervised) -> None:
    assert list(supervised.engine.replica_restarts) == [0]
    supervised.fail()
    assert (list(supervised.engine.replica_restarts), supervised.engine.restarts) == ([1], 1)


def test_an_engine_takes_requests_and_goes_on_with_them_while_it_is_ready(supervised: Supervised) -> None:
    engine = supervised.engine
    request, prompt = Request(""), Prompt("", [], Vocabulary([]))
    assert (engine.admits(request, prompt), engine.continues(1)) == (True, True)
    supervised.fail()
    assert (engine.admits(request, prompt), engine.continues(1)) == (False, False)


def test_an_engine_at_rest_that_is_to_restart_does_so(supervised: Supervised, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    supervised.engine.restart_when_idle()
    supervised.engine.step()
    assert (supervised.engine.state, supervised.engine.restarts) == (State.RESTARTING, 1)
    assert "no request is running: restarting the engine" in caplog.text
    supervised.engine.step()
    supervised.now += 3
    supervised.be_ready()
    assert "the engine is ready again after 3.0 s" in caplog.text


def test_a_failed_engine_is_not_also_restarted_for_its_memory(supervised: Supervised) -> None:
    supervised.engine.restart_when_idle()
    supervised.instance.say(encode(EngineFailed("broken", "")))
    with pytest.raises(GenerationFailed, match="broken"):
        supervised.engine.step()
    assert supervised.engine.restarts == 1


def test_an_engine_that_cannot_be_started_is_tried_again(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launch = supervised.engine._launch
    outcomes: list[Exception] = [OSError("no descriptors")] * 2

    def refuse() -> EngineInstance:
        if outcomes:
            raise outcomes.pop()
        return launch()

    supervised.engine._launch = refuse
    assert supervised.fail() == 0.5 + 1 + 2
    assert "engine lost: it could not be started: no descriptors; restarting it in 2 s" in caplog.text
    assert supervised.engine.restarts == 3
    supervised.be_ready()
    assert supervised.engine.reason == ""


def test_a_host_that_has_nothing_else_to_do_waits_for_the_next_start(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    supervised.instance.die()
    with pytest.raises(GenerationFailed):
        supervised.engine.step()
    assert supervised.engine.step(timeout=0.125) == []
    assert supervised.engine.step(timeout=60) == []
    supervised.engine.step()
    assert waited == [0.125, 0.5]
    supervised.now += 0.5
    supervised.engine.step(timeout=60)
    assert len(waited) == 2
    supervised.be_ready()


def test_an_engines_failure_is_told_with_its_trace(supervised: Supervised, caplog: pytest.LogCaptureFixture) -> None:
    supervised.instance.say(encode(EngineFailed("broken", "Traceback: deep within")))
    with pytest.raises(GenerationFailed, match="engine failure: broken"):
        supervised.engine.step()
    assert "Traceback: deep within" in caplog.text
    assert "engine lost: broken; restarting it in 0.5 s" in caplog.text
    assert (supervised.engine.reason, supervised.engine.ready) == ("broken", False)


def test_statistics_are_those_of_the_running_engine(supervised: Supervised) -> None:
    assert supervised.engine.statistics is None
    supervised.instance.say(encode(EngineStatistics(num_waiting=3)))
    assert supervised.engine.step() == []
    statistics = supervised.engine.statistics
    assert statistics is not None
    assert statistics.num_waiting == 3
    supervised.fail()
    assert supervised.engine.statistics is None


def test_a_host_is_told_of_each_channel_and_each_state(supervised: Supervised) -> None:
    watched: list[int | None] = []
    states: list[State] = []
    supervised.engine.attach(LoopHooks(watched.append, states.append))
    first = supervised.instance.channel.fileno()
    supervised.fail()
    supervised.be_ready()
    assert watched == [first, None, supervised.instance.channel.fileno()]
    assert states == [State.READY, State.RESTARTING, State.READY]
    supervised.engine.close()
    supervised.engine.close()
    assert watched[3:] == [None]
    assert states[3:] == [State.CLOSED]


def test_commands_of_one_turn_are_sent_together(supervised: Supervised) -> None:
    soon: list[Callable[[], None]] = []
    supervised.engine.attach(LoopHooks(soon=soon.append))
    flushed: list[int] = []
    commands = supervised.instance.commands

    def put(command: Any) -> bool:
        commands.append(command)
        return len(commands) == 1

    vars(supervised.instance).update(flush=lambda: flushed.append(len(commands)), put=put)
    supervised.add(1)
    supervised.add(2)
    (flush,) = soon
    flush()
    assert flushed == [2]
    supervised.fail()
    flush()
    assert flushed == [2, 2], "by the step, and not by an instance that has ended"


def test_an_engines_silence_counts_while_a_step_is_due(supervised: Supervised) -> None:
    supervised.now += 3
    assert supervised.engine.silence == 0.0
    supervised.add()
    supervised.now += 2
    supervised.add(2)
    assert supervised.engine.silence == 2.0, "of the first command"
    supervised.instance.say(TOKEN)
    supervised.engine.step()
    supervised.now += 1
    assert supervised.engine.silence == 1.0


def test_an_engine_has_a_minute_for_a_step_and_four_to_load() -> None:
    for ready, limit, told in ((True, 60, "no step for 60 s"), (False, 240, "not loaded after 240 s")):
        with pytest.MonkeyPatch.context() as context:
            supervised = Supervised(context)
            supervised.engine.close()
            supervised.engine = EngineSupervisor(Spec("scripted", EngineConfig()))
            assert (len(supervised.instances), supervised.instance.isolated) == (2, True)
            if ready:
                supervised.be_ready()
                supervised.add()
            supervised.wait(limit)
            with pytest.raises(GenerationFailed, match=told):
                supervised.wait(1)


# -- one start of an engine: its process, and how that ends ------------------------------------------------------------


class Program:
    """A process that ends as told: by a code, or not within the time for which it is waited."""

    def __init__(self, code: int | None = None) -> None:
        self.pid, self.code = 1234, code
        self.stdout = self.stderr = None
        self.calls: list[Any] = []

    def wait(self, timeout: float | None = None) -> int:
        self.calls.append(("wait", timeout))
        if timeout is not None and self.code is None:
            raise subprocess.TimeoutExpired("program", timeout)
        return self.code or 0

    def kill(self) -> None:
        self.calls.append("kill")

    status = Child.status


class Launched(NamedTuple):
    instance: EngineInstance
    program: Program
    theirs: socket.socket
    environ: Mapping[str, str]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Launched]]:
    made: list[Launched] = []

    def make(code: int | None = None, placement: Placement = ANYWHERE) -> Launched:
        started: list[Any] = []

        def start(function: str, channel: socket.socket, environ: Mapping[str, str], *, captured: bool) -> Program:
            assert function == "handler.engines.process.engine_process:main"
            started.extend((Program(code), channel.dup(), environ))
            return started[0]  # type: ignore[no-any-return]

        monkeypatch.setattr("handler.engines.process.supervisor.start", start)
        instance = EngineInstance(Spec("echo", EngineConfig()), isolated=True, placement=placement)
        made.append(Launched(instance, *started))
        return made[-1]

    yield make
    for one in made:
        one.instance.stop()
        one.theirs.close()


Launch = Callable[..., Launched]


def test_an_engines_process_gets_its_place_and_its_spec(launched: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Any] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: pinned.append((pid, set(cores))))
    monkeypatch.setenv("PLACE", "host")
    monkeypatch.setenv("OTHER", "kept")
    one = launched(placement=Placement({"PLACE": "engine"}, frozenset({1, 3})))
    assert (one.environ["PLACE"], one.environ["OTHER"]) == ("engine", "kept")
    assert pinned == [(1234, {1, 3})]
    assert one.instance.pid == 1234
    one.theirs.settimeout(PATIENCE)
    assert Messages(one.theirs).next() == Spec("echo", EngineConfig())
    launched()
    assert len(pinned) == 1, "anywhere"


def test_a_process_that_cannot_be_started_leaves_no_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[socket.socket] = []
    pair = socket.socketpair

    def noted() -> tuple[socket.socket, socket.socket]:
        found = pair()
        pairs.extend(found)
        return found

    def start(*arguments: Any, captured: bool) -> Program:
        raise OSError("no memory")

    monkeypatch.setattr(socket, "socketpair", noted)
    monkeypatch.setattr("handler.engines.process.supervisor.start", start)
    with pytest.raises(OSError, match="no memory"):
        EngineInstance(Spec("echo", EngineConfig()), isolated=True)
    assert [channel.fileno() for channel in pairs] == [-1, -1]


@in_one_test(
    ("code", "reason"),
    [(-9, "it was killed by signal 9"), (0, "it exited with code 0"), (3, "it exited with code 3")],
)
def test_how_an_engines_process_ended_is_told(code: int, reason: str) -> None:
    assert exit_reason(Program(code)) == reason


def test_an_engine_may_close_its_channel_before_it_ends() -> None:
    assert exit_reason(Program(None)) == "it closed its channel"
    assert exit_reason(None) == "its thread ended"


def exit_reason(program: Program | None) -> str:
    instance = EngineInstance.__new__(EngineInstance)
    instance._process, instance._output = program, None  # type: ignore[assignment]
    return instance.exit_reason()


@pytest.mark.parametrize(("code", "grace"), [(None, 0.0), (None, 2.0), (0, 2.0)])
def test_a_stopped_engine_is_killed_after_its_grace(launched: Launch, code: int | None, grace: float) -> None:
    one = launched(code)
    one.instance.stop(**({"grace": grace} if grace else {}))
    thread_of_the_wait = [found for found in threading.enumerate() if found.name == "engine-reaper"]
    for found in thread_of_the_wait:
        found.join(PATIENCE)
    assert one.program.calls == [("wait", grace), "kill", ("wait", None)]
    one.theirs.settimeout(PATIENCE)
    messages = Messages(one.theirs)
    messages.next()
    with pytest.raises(ChannelClosed):
        messages.next()


# -- the worker's loop around an engine whose steps can be interrupted -------------------------------------------------


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


NOTHING, ENGINE_LOOP_TOKEN = Step([], [], [], []), Step([1], [5], [None], [])


@contextlib.contextmanager
def _running(engine: Waiting) -> Iterator[socket.socket]:
    """The channel to the worker of `engine`, which is loaded."""
    channel, workers = socket.socketpair()
    channel.settimeout(30)
    thread = threading.Thread(target=run, args=(lambda: engine, workers))
    thread.start()
    with channel:
        assert isinstance(Messages(channel).next(), EngineInfo)
        yield channel
    thread.join(30)
    assert not thread.is_alive()


@in_one_test(
    ("script", "interruptible"),
    [
        ([NOTHING], True),  # it returns without having waited, so it tells of no command
        ([ENGINE_LOOP_TOKEN, NOTHING], True),
        ([ENGINE_LOOP_TOKEN], False),
        ([Interrupted], True),
        ([Interrupted, Interrupted, ENGINE_LOOP_TOKEN, Interrupted], True),  # also where there was none
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
    engine = Scripted(theirs, ENGINE_LOOP_TOKEN)
    shared = SharedMedia("text", [Medium("image", (1, 1), b"rgb", "digest")])
    request = EngineRequest(1, [4], Sampling(seed=7), Adapter("a", 1, "/"), shared.file)
    with ours, _running(engine) as channel:
        send(channel, request)
        _wait_for(1, engine.seen)
    assert engine.requests == [request]
    assert engine.requests[0].read_media() == MediaPrompt("text", (Medium("image", (1, 1), b"rgb", "digest"),))


@pytest.mark.parametrize("interruptible", [True, False])
def test_after_the_last_request_an_engine_makes_no_more_steps(interruptible: bool) -> None:
    ours, theirs = socket.socketpair()
    last = Step([], [], [], [Output(1, [5], [None], Finish.LENGTH)])
    with ours, _running(Scripted(theirs, last, interruptible=interruptible)) as channel:
        send(channel, EngineRequest(1, [4], Sampling()))
        messages = Messages(channel)
        assert unpack_step(messages.next()).others[0].finish is Finish.LENGTH
        assert not wait(channel, timeout=0.05)
        send(channel, EngineRequest(1, [4], Sampling()))
        assert unpack_step(messages.next()).others[0].finish is Finish.LENGTH


def test_a_packed_step_is_the_same_step_again() -> None:
    outputs = [
        Output(1, (5,), (0.5,)),
        *[
            Output(key, [5], [None], finish, 1, error="no", extras=Extras(stop="s"))
            for key, finish in enumerate(Finish)
        ],
    ]
    for step in (Step([1], [5], [None], []), Step([1], [5], [-0.5], outputs), Step.of(outputs)):
        packed = pack_step(step)
        found = unpack_step(pickle.loads(encode(packed)[4:]))
        assert found == step
        assert [type(output) for output in found.others] == [Output] * len(step.others)
        assert [type(output.finish) for output in found.others] == [type(output.finish) for output in step.others]
        assert b"Output" not in encode(packed), "the names of classes would cost more than the values"


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
    assert [(output.key, output.finish) for output in unpack_step(Messages(channel).next()).others] == [
        (2, Finish.ERROR)
    ]


def test_an_interruption_is_no_sign_of_life(waiting: tuple[Waiting, socket.socket, socket.socket]) -> None:
    _, core, channel = waiting
    send(channel, EngineRequest(1, [4], Sampling()))
    for key in range(2, 5):
        send(channel, EngineRequest(key, [4], Sampling()))
        assert not wait(channel, timeout=0.1), "else an engine that hangs is never found out while requests come"
    core.send(b"!")
    assert unpack_step(Messages(channel).next()).keys == [1]


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
        (failed,) = ChannelReader().receive(host) or []
    assert failed == EngineFailed(reason, failed.trace)
    assert bool(failed.trace) == traced


@pytest.mark.parametrize("parameters", [Sampling(seed=3, stop=("a",)), Pooling("embed", dimensions=2)])
def test_a_request_arrives_as_it_was_sent(parameters: Sampling | Pooling) -> None:
    request = EngineRequest(1, [2, 3], parameters, Adapter("a", 1, "/a"))
    arrived = unpack(pickle.loads(pickle.dumps(pack(request))))
    assert arrived == request
    assert (type(arrived), type(arrived.parameters)) == (EngineRequest, type(parameters))


# -- the ends of processes and threads ---------------------------------------------------------------------------------


def thread(name: str) -> threading.Thread:
    *_, found = [one for one in threading.enumerate() if one.name == name]
    return found


@pytest.mark.parametrize(("stopped", "exits"), [(False, [1]), (True, [])])
def test_an_engine_ends_with_a_process_that_it_watches(
    stopped: bool, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(os, "_exit", found.append)
    with subprocess.Popen(["sleep", "600"]) as child:
        stop = end_with_process(child.pid, "child")
        watch = thread("engine-processes")
        if stopped:
            stop()
        child.kill()
    watch.join(PATIENCE)
    assert (found, watch.is_alive()) == (exits, False)


def test_a_stop_ends_the_wait_for_an_engine_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    channels: list[socket.socket] = []
    monkeypatch.setattr("handler.engines.process.supervisor.run", lambda load, channel: channels.append(channel))
    waits = threading.Event()

    def waiting(channel: socket.socket, **more: Any) -> bool:
        waits.set()
        return wait(channel, **more)

    monkeypatch.setattr("handler.engines.process.ipc.wait", waiting)
    instance = EngineInstance(Spec("echo", EngineConfig()), isolated=False)
    sender = thread("engine-commands")
    instance.put(bytes(1 << 23))
    instance.flush()
    assert waits.wait(PATIENCE)
    time.sleep(0.05)  # until it does
    instance.stop()
    sender.join(PATIENCE)
    assert not sender.is_alive()
    channels[0].close()


def test_a_place_is_not_changed_once_processes_have_it() -> None:
    with pytest.raises(FrozenInstanceError):
        ANYWHERE.cores = frozenset({1})  # type: ignore[misc]
    assert Placement() == ANYWHERE


@in_one_test(
    ("cores", "count", "parts"),
    [
        ([], 2, [[], []]),
        ([3, 1, 2, 0], 2, [[0, 1], [2, 3]]),
        ([0, 1, 2], 2, [[0], [1, 2]]),
        ([0, 1], 2, [[0], [1]]),
        ([5, 7], 3, [[5], [7], [5]]),
        ([4], 1, [[4]]),
    ],
)
def test_cores_are_divided_among_engines(cores: list[int], count: int, parts: list[list[int]]) -> None:
    assert [sorted(placement.cores) for placement in on_cores(cores, count)] == parts


def test_devices_are_divided_among_engines() -> None:
    places = on_devices(["0", "1", "2", "3", "4"], 2)
    assert [placement.environ for placement in places] == [{"CUDA_VISIBLE_DEVICES": pair} for pair in ("0,1", "2,3")]


def test_descendants_of_a_process_are_all_below_it() -> None:
    program = "import subprocess, sys; subprocess.run(['sleep', '600'])"
    with subprocess.Popen([sys.executable, "-c", program]) as child:
        deadline = time.monotonic() + PATIENCE
        while len(below := list(descendants(child.pid))) < 1:
            assert time.monotonic() < deadline
        assert child.pid in list(descendants(os.getpid()))
        assert set(below) <= set(descendants(os.getpid()))
        for pid in below:
            os.kill(pid, signal.SIGKILL)
    assert list(descendants(child.pid)) == []


# -- an engine's statistics --------------------------------------------------------------------------------------------


class Counting(Scripted):
    """An engine that reports how many steps it has made, by tens."""

    num_steps = 0

    def step(self) -> Step:
        self.num_steps += 1
        return super().step()

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(num_waiting=self.num_steps)


def test_statistics_are_sent_when_there_is_no_more_work() -> None:
    ours, theirs = socket.socketpair()
    last = Step([], [], [], [Output(1, [5], [None], Finish.LENGTH)])
    engine = Counting(theirs, *[ENGINE_LOOP_TOKEN] * 3, last, interruptible=False)
    with ours, _running(engine) as channel:
        messages = Messages(channel)
        send(channel, EngineRequest(1, [4], Sampling()))
        found = [messages.next() for _ in range(5)]
        while found[-1] != EngineStatistics(num_waiting=4):
            found.append(messages.next())


def test_statistics_that_have_not_changed_are_not_sent_again() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.closing(theirs):
        engine: Any = Counting(theirs)
        sent: list[Any] = []
        with pytest.MonkeyPatch.context() as context:
            context.setattr(engine_process, "send", lambda channel, message: sent.append(message))
            now = [100.0]
            context.setattr(time, "monotonic", lambda: now[0])
            reporter = engine_process._Reporter(engine, theirs)
            reporter.report(idle=True)
            assert len(sent) == 1
            for seconds, number in ((0.5, 1), (0.5, 2), (0.9, 2), (0.1, 3)):
                now[0] += seconds
                engine.num_steps += 1
                reporter.report(idle=False)
                assert len(sent) == number


# -- the engine's process, as it begins --------------------------------------------------------------------------------


def test_an_engines_process_loads_what_its_host_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    done: list[Any] = []
    monkeypatch.setattr(engine_process, "serving_host", lambda fd: contextlib.nullcontext({"5": theirs}[fd]))

    def load(*spec: Any) -> str:
        done.append(spec)
        return "engine"

    monkeypatch.setattr(log, "set_up_child", lambda: done.append("log"))
    monkeypatch.setattr(loop, "keep_collecting", lambda: done.append("garbage"))
    monkeypatch.setattr(engine_process, "load", load)
    monkeypatch.setattr(engine_process, "run", lambda load, channel: done.append((load(), channel)))
    with ours, theirs:
        send(ours, Spec("echo", EngineConfig()))
        engine_process.main("5")
    assert done == ["log", ("echo", EngineConfig()), "garbage", ("engine", theirs)]


class Adapting(Scripted):
    def load_adapter(self, adapter: Adapter) -> None:
        self.seen.append(f"load {adapter.name}")
        if adapter.name == "bad":
            raise ValueError("no room")

    def drop_adapter(self, adapter: Adapter) -> None:
        self.seen.append(f"drop {adapter.name}")


def test_changes_of_adapters_are_answered_with_their_keys() -> None:
    ours, theirs = socket.socketpair()
    engine = Adapting(theirs, NOTHING)
    found: list[Output] = []
    with ours, _running(engine) as channel:
        messages = Messages(channel)
        for key, name, drop in ((7, "a", False), (8, "bad", False), (9, "a", True)):
            send(channel, engine_process.ChangeAdapter(key, Adapter(name, 1, "/"), drop))
            found += unpack_step(messages.next()).others
    assert engine.seen == ["load a", "load bad", "drop a"]
    assert [(output.key, output.finish) for output in found] == [
        (7, Finish.STOP), (8, Finish.ERROR), (9, Finish.STOP),
    ]  # fmt: skip
    assert [output.error for output in found] == [None, "no room", None]
    assert engine_process.ChangeAdapter(1, Adapter("a", 1, "/")).drop is False


# -- processes that end together ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("leads", [True, False])
def test_only_the_leader_of_a_session_has_it_ended(monkeypatch: pytest.MonkeyPatch, leads: bool) -> None:
    started: list[Any] = []
    monkeypatch.setattr(os, "getsid", lambda pid: os.getpid() if leads else 1)
    monkeypatch.setattr("handler.engines.process.supervisor.Child", lambda command: started.append(command[-1]))
    end_with_this_process()
    assert started == ([str(os.getpid())] if leads else [])


def test_an_engine_ends_with_its_children(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    alive, end = os.pipe()
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [SimpleNamespace(sentinel=alive, name="core")])
    end_with_children()
    watch = thread("engine-processes")
    os.close(end)
    watch.join(PATIENCE)
    os.close(alive)
    assert exits == [1]
    assert "the engine's process core has ended" in capfd.readouterr().err


def test_an_engine_ends_with_a_descendant_of_that_name(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    with subprocess.Popen(["sleep", "612"]) as child, subprocess.Popen(["sleep", "613"]) as other:
        deadline = time.monotonic() + PATIENCE
        while b"612" not in Path(f"/proc/{child.pid}/cmdline").read_bytes():
            assert time.monotonic() < deadline
        end_with_descendants("612")
        watch = thread("engine-processes")
        other.kill()
        other.wait()
        assert watch.is_alive()
        child.kill()
    watch.join(PATIENCE)
    assert exits == [1]
    assert f"the engine's process 612 (pid {child.pid}) has ended" in capfd.readouterr().err


def test_a_process_that_cannot_be_watched_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    errors: list[OSError] = [OSError(1, "Operation not permitted"), ProcessLookupError(3, "No such process")]

    def refuse(pid: int) -> int:
        raise errors.pop(0)

    monkeypatch.setattr(os, "pidfd_open", refuse)
    before = threading.active_count()
    end_with_process(77, "child")()
    assert threading.active_count() == before
    assert "the engine's process 77 is not watched: [Errno 1] Operation not permitted" in capfd.readouterr().err
    with pytest.raises(ProcessLookupError):
        end_with_process(77, "child")
