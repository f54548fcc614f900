"""Messages between the handler's processes, whole or in pieces, and commands to an engine that does not read them."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.engines.base import EngineConfig
from handler.engines.process import supervisor
from handler.engines.process.engine_process import Spec
from handler.engines.process.ipc import ChannelClosed, ChannelReader, Messages, encode, send, wait
from handler.engines.process.supervisor import EngineInstance
from tests.servers import wait_for

MESSAGES = st.lists(
    st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.tuples(inner))
)


@given(messages=MESSAGES, size=st.integers(1, 64))
def test_messages_survive_any_cut(messages: list[object], size: int) -> None:
    data = b"".join(encode(message) for message in messages)
    reader = ChannelReader()
    found = [message for start in range(0, len(data), size) for message in reader.feed(data[start : start + size])]
    assert found == messages


@given(messages=MESSAGES, size=st.integers(1, 64))
def test_messages_survive_any_cut_on_a_channel(messages: list[object], size: int) -> None:
    data = b"".join(encode(message) for message in messages)
    reader = ChannelReader()
    found: list[Any] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for start in range(0, len(data), size):
            ours.sendall(data[start : start + size])
            found += reader.receive(theirs) or []
        assert found == messages
        assert reader.receive(theirs, socket.MSG_DONTWAIT) is None


def test_a_rest_that_looks_like_a_message_is_none() -> None:
    message = b"x" * 20 + (16).to_bytes(4, "big") + b"y" * 16  # as it comes alone: a length, and as much as it says
    data = encode(message)
    at = data.index(message) + 20
    reader = ChannelReader()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data[:at])
        assert reader.receive(theirs) == []
        ours.sendall(data[at : at + 20])
        found = reader.receive(theirs)
        ours.sendall(data[at + 20 :])
        assert (found or []) + (reader.receive(theirs) or []) == [message]


def test_a_message_larger_than_the_sockets_buffer_comes_whole() -> None:
    message = bytes(range(256)) * (1 << 13)
    reader = ChannelReader()
    found: list[Any] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=send, args=(ours, message), daemon=True)
        sender.start()
        theirs.settimeout(30)
        while not found:
            found += reader.receive(theirs) or []
        assert found == [message]
        sender.join(30)
        theirs.setblocking(False)
        assert reader.receive(theirs) is None, "nothing is sent twice"


def test_a_message_that_was_cut_off_never_appears() -> None:
    assert ChannelReader().feed(encode("whole") + encode("half")[:-1]) == ["whole"]


def test_commands_to_an_engine_that_reads_nothing_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host never waits for it: nobody reads before all have been sent."""
    ends: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    monkeypatch.setattr(supervisor, "run", lambda load, channel: ends.put(channel))
    engine = EngineInstance(Spec("echo", EngineConfig()), isolated=False)
    reader = ChannelReader()
    found: list[Any] = []
    with ends.get(timeout=30) as theirs, contextlib.closing(engine.channel):
        commands = [bytes([number]) * 100_000 for number in range(50)]
        for command in [*commands, b"short"]:
            engine.put(command)
            engine.flush()
        theirs.settimeout(30)
        while len(found) < len(commands) + 1:
            found += reader.receive(theirs) or []
        assert found == [*commands, b"short"]
        wait_for(lambda: engine._num_late == engine._num_late_sent, 10, "what follows is still sent by the thread")
        assert [engine.put(b"later"), engine.put(b"last")] == [True, False]
        engine.flush()
        assert reader.receive(theirs) == [b"later", b"last"], "together"
        theirs.close()
        engine.put(b"to nobody")
        engine.flush()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


Pair = tuple[socket.socket, socket.socket]


def test_messages_are_read_one_by_one(pair: Pair) -> None:
    ours, theirs = pair
    theirs.settimeout(30)
    ours.sendall(encode("one") + encode("two"))
    messages = Messages(theirs)
    assert [messages.next(), messages.next()] == ["one", "two"]
    send(ours, "three")
    assert messages.next() == "three"


def test_a_closed_channel_is_told_to_both_ends(pair: Pair) -> None:
    ours, theirs = pair
    ours.close()
    with pytest.raises(ChannelClosed):
        Messages(theirs).next()
    with pytest.raises(ChannelClosed):
        send(theirs, "nobody reads this")


def test_a_wait_for_a_message_has_the_channels_own_limit(pair: Pair) -> None:
    pair[1].settimeout(0.001)
    with pytest.raises(ChannelClosed):
        Messages(pair[1]).next()


def test_a_channel_is_waited_for_in_the_direction_that_is_asked_for(pair: Pair) -> None:
    ours, theirs = pair
    assert not wait(ours, timeout=0)
    assert wait(ours, writable=True, timeout=0)
    theirs.send(b"!")
    assert wait(ours)
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(1 << 16))
    assert not wait(ours, writable=True, timeout=0)


def test_a_wait_is_in_seconds(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Poll:
        def register(self, channel: socket.socket, events: int) -> None: ...
        def poll(self, milliseconds: float | None) -> list[Any]:
            asked.append(milliseconds)
            return []

    monkeypatch.setattr(select, "poll", Poll)
    assert not wait(pair[0], timeout=1.5)
    wait(pair[0])
    assert asked == [1500, None]
