"""The calls of a user's `handle` that is a coroutine function."""

from __future__ import annotations

import asyncio
import threading

import pytest

from handler.core.errors import Unavailable
from handler.core.user_functions import Role
from handler.plugins.handle import Call, Handle
from handler.serving.custom_handle import _SideBySide


def test_the_end_of_the_server_ends_the_watch_of_a_hung_loop() -> None:
    free = threading.Event()

    async def hang(item: Call) -> None:
        free.wait()

    async def run() -> None:
        calls = _SideBySide(Handle(hang, Role.ALONE, {}, {}), 600, 1)
        with pytest.raises(Unavailable):
            await calls.call([Call({}, {})], 0.01)
        watch = calls._watching
        assert watch is not None
        calls.close()
        await asyncio.wait([watch], timeout=20)
        free.set()
        assert watch.cancelled()

    asyncio.run(run())
