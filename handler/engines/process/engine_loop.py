"""The loop that owns an engine: commands in, one message a step out.

It runs in a process of its own (`engines/process/engine_process.py`), because engines hold the GIL while they step
and must be killable, or on a thread for engines that cost nothing. The other end is `engines/process/supervisor.py`.
"""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from handler.core.errors import ConfigError
from handler.core.values import Adapter, Finish, Sampling
from handler.engines.base import Engine, EngineConfig, EngineInfo, Interrupted, Interruptible, Output, Step
from handler.engines.process.ipc import ChannelClosed, MessageReader, send


class Add(NamedTuple):
    key: int
    ids: Sequence[int]
    sampling: Sampling
    adapter: Adapter | None = None


class ChangeAdapter(NamedTuple):
    """Load an adapter, or drop it; answered by an Output that is nothing but an end, with an error where it failed."""

    key: int
    adapter: Adapter
    drop: bool = False


class Cancel(NamedTuple):
    key: int


class Ready(NamedTuple):
    info: EngineInfo


class Failed(NamedTuple):
    """The engine raised while it loaded or stepped; the worker ends after this. A ConfigError has no `trace`."""

    reason: str
    trace: str


class Spec(NamedTuple):
    """What to load: the name of an engine and its configuration; the first message that a worker process gets."""

    engine: str
    config: EngineConfig


def run(load: Callable[[], Engine], channel: socket.socket) -> None:
    """Load the engine, then step it until the other end of `channel` closes."""
    try:
        _load_and_step(load, channel)
    except ChannelClosed:
        pass  # or it has given this worker up
    finally:
        channel.close()


def _load_and_step(load: Callable[[], Engine], channel: socket.socket) -> None:
    engine = None
    try:
        engine = load()
        send(channel, Ready(engine.info))
        _step_forever(engine, channel)
    except ChannelClosed:
        raise
    except Exception as error:  # the engine is foreign code: say why, then make room for a new one
        known = isinstance(error, ConfigError)  # it says what to change, and where
        send(channel, Failed(str(error) if known else _reason(error), "" if known else traceback.format_exc()))
    finally:
        if engine is not None:
            engine.close()


def _step_forever(engine: Engine, channel: socket.socket) -> None:
    reader = MessageReader()
    active: set[int] = set()
    interruptible = isinstance(engine, Interruptible) and engine.interrupt_on(channel.fileno())
    look = True  # for commands
    while True:
        answers: list[Output] = []
        commands: list[Any] | None = None
        if look or not active:
            # Wait for them only when there is nothing to do; between steps take what lies there.
            commands = reader.receive(channel, socket.MSG_DONTWAIT if active else 0)
        while commands is not None:
            for command in commands:
                if isinstance(command, Cancel):
                    engine.cancel(command.key)
                    active.discard(command.key)
                elif (output := _start(engine, command)) is None:
                    active.add(command.key)
                else:
                    answers.append(output)
            commands = reader.receive(channel, socket.MSG_DONTWAIT)
        look = not interruptible  # else the engine says when
        try:
            step = engine.step() if active else Step([], [], [], [])
        except Interrupted:
            look = True
            if not answers:
                continue  # no sign of life of the engine's
            step = Step([], [], [], [])
        look = look or not (step.keys or step.others)  # it did not wait, and may never
        step.others.extend(answers)
        for output in step.others:
            if output.finish is not None:
                active.discard(output.key)
        send(channel, tuple(step))  # bare (`remote.py`); also when it holds nothing: every command is answered


def _start(engine: Engine, command: Add | ChangeAdapter) -> Output | None:
    """Do what is asked; None when its outputs are to come. What the engine refuses ends alone."""
    try:
        if isinstance(command, Add):
            engine.add(*command)
            return None
        change = engine.drop_adapter if command.drop else engine.load_adapter
        change(command.adapter)
    except Exception as error:
        return Output(command.key, (), (), Finish.ERROR, error=_reason(error))
    return Output(command.key, (), (), Finish.STOP)


def _reason(error: BaseException) -> str:
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text}"
