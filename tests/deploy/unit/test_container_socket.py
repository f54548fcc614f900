"""Pings and the life of a bidirectional stream, on a clock that skips what nothing happens in."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from websockets.frames import Frame, Opcode
from websockets.server import ServerProtocol

from deploy.emulator.container_socket import MAX_SECONDS, MAX_UNANSWERED, PING_SECONDS, ContainerSocket, StreamError
from deploy.emulator.relay import BROKEN, STALLED
from tests.deploy.doubles.bidirectional import Deaf, FakeContainer, Script, closing, echo, silent


class Skipping(selectors.DefaultSelector):
    """Waits for a moment only, and counts the rest of the time as waited."""

    skipped = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0.001 if timeout else timeout)
        if not ready and timeout:
            self.skipped += timeout
        return ready


class FastLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = Skipping()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.skipped


Body = Callable[[FakeContainer, ContainerSocket], Awaitable[Any]]


def run(script: Script, body: Body) -> tuple[FakeContainer, StreamError | None, float, Any]:
    """The container, the stream's error, the seconds that passed, and what `body` returns."""
    container = FakeContainer({"/": script})

    async def main() -> Any:
        began = loop.time()
        async with container.listening() as url:
            opened = await ContainerSocket.open(f"ws{url.removeprefix('http')}/", {})
            try:
                returned = await body(container, opened)
            finally:
                opened.abort()
            return opened.error, loop.time() - began, returned

    loop = FastLoop()
    try:
        return container, *loop.run_until_complete(main())
    finally:
        loop.close()


async def alive(container: FakeContainer, opened: ContainerSocket) -> list[Frame]:
    """The frames of a socket that is kept alive until its end."""
    pinging = asyncio.ensure_future(opened.keep_alive())
    frames = [frame async for frame in opened.frames()]
    pinging.cancel()
    await asyncio.gather(pinging, return_exceptions=True)
    return frames


def pings(container: FakeContainer) -> int:
    return sum(opcode is Opcode.PING for opcode, _, _ in container.frames)


def test_a_silent_stream_is_pinged_until_its_life_ends() -> None:
    container, error, seconds, frames = run(silent, alive)
    assert frames == []
    assert error == StreamError("ModelInvocationTimeExceeded", STALLED)
    assert seconds == pytest.approx(MAX_SECONDS, abs=1)
    assert MAX_SECONDS == 30 * 60
    assert pings(container) == MAX_SECONDS / PING_SECONDS - 1
    opcode, data, _ = container.frames[-1]
    assert (opcode, data[:2]) == (Opcode.CLOSE, b"\x03\xe9")


def test_a_container_without_pongs_is_left_after_five_pings() -> None:
    async def muted(container: FakeContainer, opened: ContainerSocket) -> Any:
        container.mute = True
        return await alive(container, opened)

    container, error, seconds, _ = run(silent, muted)
    assert pings(container) == MAX_UNANSWERED == 5
    assert error is not None
    assert error.code == "StreamBroken"
    assert "5 pings" in error.message
    assert seconds == pytest.approx(6 * PING_SECONDS, abs=1)


def test_one_pong_is_enough() -> None:
    """The container misses four pings, and answers the next one."""

    async def waking(container: FakeContainer, opened: ContainerSocket) -> Any:
        container.mute = True
        asyncio.get_running_loop().call_later(4.5 * PING_SECONDS, setattr, container, "mute", False)
        return await alive(container, opened)

    container, error, seconds, _ = run(silent, waking)
    assert error == StreamError("ModelInvocationTimeExceeded", STALLED)
    assert seconds == pytest.approx(MAX_SECONDS, abs=1)
    assert pings(container) == MAX_SECONDS / PING_SECONDS - 1


def test_a_ping_of_the_container_is_answered_between_fragments() -> None:
    def script(protocol: ServerProtocol, frame: Frame | None) -> None:
        if frame is not None and frame.opcode is Opcode.TEXT:
            protocol.send_frame(Frame(Opcode.TEXT, b"a", False))
            protocol.send_ping(b"here")
            protocol.send_frame(Frame(Opcode.CONT, b"b", True))

    async def body(container: FakeContainer, opened: ContainerSocket) -> list[Frame]:
        await opened.send(Frame(Opcode.TEXT, b"x"))
        frames = []
        async for frame in opened.frames():
            frames.append(frame)
            if frame.fin:
                opened.close()
        return frames

    container, error, _, frames = run(script, body)
    assert frames == [Frame(Opcode.TEXT, b"a", False), Frame(Opcode.CONT, b"b", True)]
    assert (Opcode.PONG, b"here", True) in container.frames
    assert error is None


@pytest.mark.parametrize(
    ("code", "reason"), [(1000, ""), (1001, "going"), (1008, "no"), (1011, "engine failed"), (4999, "own")]
)
def test_the_container_s_close_code_is_the_error(code: int, reason: str) -> None:
    _, error, _, frames = run(closing(code, reason, at_once=True), alive)
    assert (frames, error) == ([], StreamError(str(code), reason))


def test_frames_come_before_the_close_that_follows_them() -> None:
    def script(protocol: ServerProtocol, frame: Frame | None) -> None:
        protocol.send_text(b"last words")
        protocol.send_close(1011, "")

    _, error, _, frames = run(script, alive)
    assert [frame.data for frame in frames] == [b"last words"]
    assert error == StreamError("1011", "")


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([Frame(Opcode.CONT, b"x")], "1002"),
        ([Frame(Opcode.TEXT, b"x", False), Frame(Opcode.TEXT, b"y")], "1002"),
        ([Frame(Opcode.BINARY, bytes((16 << 20) + 1))], "1009"),
    ],
)
def test_a_broken_frame_of_the_container_is_an_error(frames: list[Frame], code: str) -> None:
    def script(protocol: ServerProtocol, frame: Frame | None) -> None:
        for item in frames if frame is None else ():
            protocol.send_frame(item)

    _, error, _, _ = run(script, alive)
    assert error is not None
    assert error.code == code


def test_a_connection_that_breaks_is_an_error() -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        protocol = ServerProtocol()
        protocol.receive_data(await reader.readuntil(b"\r\n\r\n"))
        [request] = protocol.events_received()
        protocol.send_response(protocol.accept(request))  # type: ignore[arg-type]
        writer.writelines(protocol.data_to_send())
        await writer.drain()
        await reader.read(1)
        writer.transport.abort()

    async def main() -> StreamError | None:
        server = await asyncio.start_server(reset, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        opened = await ContainerSocket.open(f"ws://127.0.0.1:{port}/", {})
        await opened.send(Frame(Opcode.TEXT, b"x" * 100_000))
        assert [frame async for frame in opened.frames()] == []
        await opened.send(Frame(Opcode.TEXT, b"x" * 100_000))  # into the broken connection
        opened.abort()
        server.close()
        return opened.error

    assert asyncio.run(main()) == StreamError("StreamBroken", BROKEN)


def test_a_client_s_close_is_no_error() -> None:
    async def body(container: FakeContainer, opened: ContainerSocket) -> list[bytes]:
        await opened.send(Frame(Opcode.TEXT, b"x"))
        opened.close()
        opened.close()  # a second one does nothing
        await opened.send(Frame(Opcode.TEXT, b"late"))
        return [bytes(frame.data) async for frame in opened.frames()]

    container, error, _, frames = run(echo, body)
    assert (frames, error) == ([b"x"], None)
    assert [data for _, data, _ in container.frames] == [b"x", b"\x03\xe8"]


def test_a_container_that_does_not_read_gets_pings_and_is_left() -> None:
    """A sender that waits for it does not hold the pings."""

    def deaf(protocol: ServerProtocol, frame: Frame | None) -> None:
        if frame is not None:
            raise Deaf

    async def flood(opened: ContainerSocket) -> None:
        for _ in range(64):
            await opened.send(Frame(Opcode.BINARY, bytes(1 << 20)))

    async def body(container: FakeContainer, opened: ContainerSocket) -> list[Frame]:
        flooding = asyncio.ensure_future(flood(opened))
        frames = await alive(container, opened)
        await flooding
        return frames

    container, error, seconds, _ = run(deaf, body)
    assert len(container.frames) == 1
    assert error is not None
    assert "5 pings" in error.message
    assert seconds == pytest.approx(6 * PING_SECONDS, abs=30)
