"""Engines that run as in their own process, but on a thread of the test's."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from handler.engines.base import Engine, EngineInfo, EngineRequest, Step, pack, unpack_step
from handler.engines.process import engine_process
from handler.engines.process.ipc import ChannelClosed, Messages, send


class EngineThread:
    """The host of an engine: it sends commands, and receives messages."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._messages = Messages(channel)

    def send(self, *commands: Any) -> None:
        for command in commands:
            send(self._channel, pack(command) if isinstance(command, EngineRequest) else command)

    def receive(self) -> Any:
        """Return the next message, or None if the engine has ended."""
        try:
            message = self._messages.next()
        except ChannelClosed:
            return None
        return unpack_step(message) if type(message) is tuple else message

    def until_end(self, key: int) -> list[Any]:
        """Return the messages up to the end of a request, or of the engine."""
        received: list[Any] = []
        while not received or received[-1] is not None:
            received.append(self.receive())
            others = received[-1].others if isinstance(received[-1], Step) else ()
            if any(output.key == key and output.finish is not None for output in others):
                break
        return received


@contextlib.contextmanager
def engine_thread(load: Callable[[], Engine], timeout: float = 30.0) -> Iterator[EngineThread]:
    """Run an engine until the end of the context. Each wait for a message takes at most `timeout` seconds."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=engine_process.run, args=(load, theirs))
    thread.start()
    try:
        with ours:
            ours.settimeout(timeout)
            host = EngineThread(ours)
            assert isinstance(host.receive(), EngineInfo)
            yield host
    finally:
        thread.join(timeout)
        assert not thread.is_alive()
