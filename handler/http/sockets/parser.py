"""The input of a WebSocket connection: received bytes, which are parsed into messages."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol

from handler.core.errors import Overloaded
from handler.http.exchange import ConnectionFlow
from handler.http.protocol import LoopTurns
from handler.http.sockets.base import is_utf8
from handler.serving.quota import BODY_MEMORY, Quota, Share

_PIECE = 1 << 14  # bytes to parse in a turn, which takes about 10 ms for frames of two bytes
_MAX_HELD = 1 << 16  # received bytes that may wait for a turn before reading stops
_MAX_FRAGMENTS = 1024  # maximum number of fragments of a message
_TEXT = frozenset({Opcode.TEXT, Opcode.BINARY})


class Consumer(Protocol):
    """The connection whose input is parsed."""

    flow: ConnectionFlow

    def on_message(self, message: bytes) -> None:
        """A message is complete."""

    def on_pong(self) -> None:
        """The client has sent a pong."""

    def flush(self) -> None:
        """Called after bytes are parsed, when the protocol may have frames to send, or have closed it."""


class _Parts:
    """The fragments of the message that is being received.

    Attributes:
        size: total size, in bytes.
        is_text: whether it is a text message.
    """

    def __init__(self) -> None:
        self._fragments: list[bytes] = []
        self.size = 0
        self.is_text = True

    def __len__(self) -> int:
        return len(self._fragments)

    def add(self, frame: Frame) -> None:
        if frame.opcode in _TEXT:
            self.is_text = frame.opcode is Opcode.TEXT
        self._fragments.append(bytes(frame.data))
        self.size += len(frame.data)

    def take(self) -> bytes:
        """Remove the fragments, and return the message."""
        message = b"".join(self._fragments)
        self.clear()
        return message

    def clear(self) -> None:
        self._fragments.clear()
        self.size = 0


class MessageParser:
    """Parses received bytes piece by piece, in turns with the other connections of the server.

    Args:
        protocol: protocol that parses frames.
        turns: turns that the connections of the server share.
        memory: quota in which a message is counted while it is received.
    """

    def __init__(
        self,
        consumer: Consumer,
        protocol: ServerProtocol,
        turns: LoopTurns,
        memory: Quota,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._consumer = consumer
        self._protocol = protocol
        self._turns = turns
        self._loop = loop
        self._memory = Share(memory)
        self._held = bytearray()  # bytes that wait for a turn
        self._parts = _Parts()
        self._messages = deque[bytes]()  # messages that wait for a turn

    def count_in(self, memory: Quota) -> None:
        """Count messages in another quota from now on."""
        size = self._memory.size
        self._memory.close()
        self._memory = Share(memory)
        if not self._count(size):
            self._consumer.flush()

    def add(self, data: bytes) -> None:
        """Add received bytes. The connection is not read while too many of them wait for a turn."""
        is_waiting = bool(self._held or self._messages)
        self._held += data
        if len(self._held) > _MAX_HELD:
            self._consumer.flow.pause_reading("held")
        if not is_waiting:
            self._turns.soon(self._loop, self._advance, quick=len(data) <= _PIECE)

    def close(self) -> None:
        """Release what the input holds. Bytes are no longer parsed."""
        self._held.clear()
        self._messages.clear()
        self._parts.clear()
        self._memory.close()
        self._consumer.flow.resume_reading("held")

    def _advance(self) -> bool:
        """Parse the next received bytes unless messages wait, and pass one message on.

        A message may begin a request, so each takes its own turn. Return whether there was something to do.
        """
        if not (self._held or self._messages):
            return False
        if not self._messages:
            self._parse()
        if self._messages:
            message = self._messages.popleft()
            if not self._messages:
                self._count_held()  # the receiver counts the message now
            self._consumer.on_message(message)
        if self._held or self._messages:
            self._turns.soon(self._loop, self._advance, later=True)
        return True

    def _parse(self) -> None:
        """Parse the next received bytes."""
        piece = bytes(self._held[:_PIECE])
        del self._held[:_PIECE]
        self._turns.note_bytes(self._loop, len(piece))
        if self._count(BODY_MEMORY * len(piece)):
            self._protocol.receive_data(piece)
            for frame in self._protocol.events_received():
                if isinstance(frame, Frame):
                    self._receive(frame)
            self._count_held()
        self._consumer.flush()
        if len(self._held) <= _MAX_HELD:
            self._consumer.flow.resume_reading("held")

    def _count_held(self) -> None:
        """Count the memory of messages, and of the received part of the next one."""
        size = self._parts.size + len(self._protocol.reader.buffer) + sum(map(len, self._messages))
        self._memory.set(BODY_MEMORY * size)

    def _count(self, size: int) -> bool:
        """Count memory for received bytes, before they are parsed. Fail the connection if too much memory is used."""
        try:
            self._memory.take(size)
        except Overloaded as error:
            self._protocol.fail(CloseCode.TRY_AGAIN_LATER, error.public)
            return False
        return True

    def _receive(self, frame: Frame) -> None:
        if frame.opcode is Opcode.PONG:
            self._consumer.on_pong()
        elif frame.opcode in _TEXT or frame.opcode is Opcode.CONT:
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        if self._protocol.state is not State.OPEN:
            return
        if self._protocol.extensions and not self._count_inflated(len(frame.data)):
            return
        self._parts.add(frame)
        if len(self._parts) > _MAX_FRAGMENTS:
            reason = f"a message may have at most {_MAX_FRAGMENTS} fragments"
            return self._protocol.fail(CloseCode.POLICY_VIOLATION, reason)
        if not frame.fin:
            return
        message = self._parts.take()
        if self._parts.is_text and not is_utf8(message):
            return self._protocol.fail(CloseCode.INVALID_DATA, "a text message is not valid UTF-8")
        self._messages.append(message)

    def _count_inflated(self, size: int) -> bool:
        """Count a frame that may have been compressed. Return whether there is enough memory for it."""
        self._turns.note_bytes(self._loop, size)
        return self._count(BODY_MEMORY * size)
