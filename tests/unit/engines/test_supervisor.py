"""The supervisor, with a scripted engine instance and a clock that jumps: failures, restarts and pauses."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from handler.core.errors import GenerationFailed
from handler.core.values import Finish, Sampling
from handler.engines.base import EngineConfig, EngineInfo, EngineRequest, Output, Step
from handler.engines.process.engine_process import Cancel, Failed, Ready, Spec
from handler.engines.process.ipc import encode
from handler.engines.process.supervisor import EngineSupervisor, Place, State

READY = encode(Ready(EngineInfo("scripted", "1", "none", "none", 100)))
TOKEN = encode(tuple(Step([1], [65], [-0.1], [])))
LAST = encode(tuple(Step([], [], [], [Output(1, [65], [-0.1], Finish.LENGTH)])))
TIMEOUT = 5.0
LOAD_TIMEOUT = 20.0


class Instance:
    """An engine instance that says what the test has it say."""

    def __init__(self, spec: Spec, *, isolated: bool) -> None:
        self.channel, self._theirs = socket.socketpair()
        self.channel.setblocking(False)
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

        def start(spec: Spec, *, isolated: bool, place: Place) -> Instance:
            self.instances.append(Instance(spec, isolated=isolated))
            return self.instances[-1]

        monkeypatch.setattr("handler.engines.process.supervisor.EngineInstance", start)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.engine = EngineSupervisor(Spec("scripted", EngineConfig()), timeout=TIMEOUT, load_timeout=LOAD_TIMEOUT)
        self.be_ready()

    @property
    def instance(self) -> Instance:
        return self.instances[-1]

    def be_ready(self) -> None:
        self.instance.say(READY)
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
    supervised.instance.say(TOKEN, encode(Failed("broken", "")))
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
