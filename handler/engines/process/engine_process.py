"""The engine process. It receives commands, sends a message after each step, and ends when its host ends.

An engine has its own process because it holds the GIL during steps and must be killable. An engine with short steps can
run on a thread instead. The counterpart in the host is `supervisor.py`.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import socket
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from handler.core import log, loop
from handler.core.child_processes import serving_host
from handler.core.errors import ConfigError
from handler.core.values import Adapter, Finish
from handler.engines import load
from handler.engines.base import (
    Engine,
    EngineConfig,
    EngineRequest,
    EngineStatistics,
    Interrupted,
    Interruptible,
    Output,
    OwnServerLost,
    OwnsServer,
    Reporting,
    RunsLoop,
    Step,
    describe,
    failed,
    pack_step,
    unpack,
)
from handler.engines.process.ipc import ChannelClosed, ChannelReader, Messages, arrivals, send

_REPORT_INTERVAL = 1.0  # seconds


class ChangeAdapter(NamedTuple):
    """Command to load or drop an adapter. The reply is an Output without tokens, with `error` if the command failed."""

    key: int
    adapter: Adapter
    drop: bool = False


class Cancel(NamedTuple):
    """Command to end a request without further output."""

    key: int


class EngineFailed(NamedTuple):
    """Message that the engine raised an exception during loading or during a step.

    Attributes:
        trace: "" if the reason is written for users.
        lost_server: whether the engine has lost the server that it had started.
    """

    reason: str
    trace: str
    lost_server: bool = False


class Spec(NamedTuple):
    """An engine's name and configuration; the first message to an engine process."""

    engine: str
    config: EngineConfig


def run(load: Callable[[], Engine], channel: socket.socket) -> None:
    """Load the engine, then step it until it raises an exception or `channel` is closed at the other end."""
    engine = None
    with contextlib.suppress(ChannelClosed), contextlib.closing(channel):
        try:
            engine = load()
            send(channel, engine.info)  # the engine is loaded
            if isinstance(engine, RunsLoop) and threading.current_thread() is threading.main_thread():
                with ThreadPoolExecutor(1, "engine-loop") as thread:
                    thread.submit(_step_forever, engine, channel).result()
            else:
                _step_forever(engine, channel)
        except ChannelClosed:
            raise  # the host has ended, or has given up on this engine
        except ConfigError as error:  # its message is written for the user
            send(channel, EngineFailed(str(error), ""))
        except OwnServerLost as error:
            send(channel, EngineFailed(str(error), "", lost_server=True))
        except Exception as error:  # the engine is foreign code: report it, so that the host can start another
            send(channel, EngineFailed(describe(error), traceback.format_exc()))
        finally:
            if engine is not None:
                engine.close()


def _step_forever(engine: Engine, channel: socket.socket) -> None:
    reader = ChannelReader()
    arrived = arrivals(channel)
    reporter = _Reporter(engine, channel)
    active: set[int] = set()
    interruptible = isinstance(engine, Interruptible) and engine.interrupt_on(channel.fileno())
    end_of_server = engine.end_of_server() if isinstance(engine, OwnsServer) else None
    looping = engine if isinstance(engine, RunsLoop) else None  # the check is slow, and steps are many
    receive = True

    def deliver(step: Step) -> None:
        """Send a step to the host."""
        for output in step.others:
            if output.finish is not None:
                active.discard(output.key)
        send(channel, pack_step(step))

    def deliver_in_loop(step: Step) -> bool:
        """Send a step to the host. Return whether the engine should go on without a report or a command."""
        deliver(step)
        return bool(active) and not reporter.is_due

    while True:
        answers: list[Output] = []
        commands: list[Any] | None = None
        if end_of_server is not None and not active:
            while not _waits_for_command(channel, end_of_server):
                with contextlib.suppress(Interrupted):
                    engine.step()
        if not active or (receive and arrived(0)):
            # Wait only while there is nothing to do. Between steps, read only commands that have arrived.
            commands = reader.receive(channel)
        while commands is not None:
            for command in commands:
                if isinstance(command, Cancel):
                    engine.cancel(command.key)
                    active.discard(command.key)
                    continue
                if type(command) is tuple:
                    command = unpack(command)
                if (output := _start(engine, command)) is None:
                    active.add(command.key)
                else:
                    answers.append(output)
            commands = reader.receive(channel) if arrived(0) else None
        if looping is not None:
            if answers or not active:
                deliver(Step.of(answers))
            with contextlib.suppress(Interrupted):
                if active:
                    looping.run_steps(deliver_in_loop)
            reporter.report(idle=not active)
            continue
        receive = not interruptible  # an interruptible engine raises Interrupted instead
        try:
            step = engine.step() if active else Step.of([])
        except Interrupted:
            receive = True
            if not answers:
                continue  # no step was made, so none is reported
            step = Step.of([])
        receive = receive or not (step.keys or step.others)  # an empty step did not wait, and the engine may never wait
        step.others.extend(answers)
        deliver(step)  # even if it is empty: a command without a reply would start the supervisor's hang timer
        reporter.report(idle=not active)


def _waits_for_command(channel: socket.socket, end_of_server: int) -> bool:
    """Wait until a command arrives, or the engine's own server ends. Return whether a command has arrived."""
    ready = multiprocessing.connection.wait([channel, end_of_server])
    return channel in ready and end_of_server not in ready


class _Reporter:
    """Sends the engine's statistics at the start, then regularly and when the last request ends, if they changed."""

    def __init__(self, engine: Engine, channel: socket.socket) -> None:
        self._engine = engine if isinstance(engine, Reporting) else None
        self._channel = channel
        self._sent: EngineStatistics | None = None
        self._next = 0.0
        self.report(idle=True)

    @property
    def is_due(self) -> bool:
        return self._engine is not None and time.monotonic() >= self._next

    def report(self, *, idle: bool) -> None:
        if self._engine is None or not (idle or self.is_due):
            return
        self._next = time.monotonic() + _REPORT_INTERVAL
        statistics = self._engine.statistics()
        if statistics != self._sent:
            self._sent = statistics
            send(self._channel, statistics)


def _start(engine: Engine, command: EngineRequest | ChangeAdapter) -> Output | None:
    """Run a command. Return the reply, or None if the engine will return outputs later."""
    try:
        if isinstance(command, EngineRequest):
            engine.add(command)
            return None
        change = engine.drop_adapter if command.drop else engine.load_adapter
        change(command.adapter)
    except Exception as error:  # the engine is foreign code: a refusal ends this request only
        return failed(command.key, error)
    return Output(command.key, finish=Finish.STOP)


# -- the engine loop as a process that ends with its host; `supervisor.py` starts it -----------------------------------


def main(fd: str) -> None:
    """Read the Spec from the host's socket, then run the engine."""
    with serving_host(fd) as channel:
        log.set_up_child()
        spec: Spec = Messages(channel).next()

        def load_engine() -> Engine:
            engine = load(spec.engine, spec.config)
            loop.keep_collecting()
            return engine

        run(load_engine, channel)
