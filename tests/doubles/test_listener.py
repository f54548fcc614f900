"""The listener of doubles: what has connected as it ends."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from tests.doubles.listener import on_thread


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_connection_that_comes_at_the_end_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ending, join = threading.Event(), threading.Event(), threading.Thread.join

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.set()
        ending.wait(30)  # the loop stands still until it has been told to stop
        writer.close()

    def join_after_end(thread: threading.Thread, *args: Any) -> None:
        ending.set()
        join(thread, *args)

    monkeypatch.setattr(threading.Thread, "join", join_after_end)
    with on_thread(answer) as port, socket.create_connection(("127.0.0.1", port)):
        assert begun.wait(30)
        late = socket.create_connection(("127.0.0.1", port))
    with late:
        late.settimeout(30)
        assert late.recv(1) == b""
