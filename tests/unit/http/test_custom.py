"""Requests to a user's handlers: their results, and clients that disconnect."""

from __future__ import annotations

import asyncio
from typing import Any

from handler.http import custom


class Leaving:
    """An exchange whose client disconnects when the work has begun."""

    def __init__(self) -> None:
        self.is_over = False
        self.begun = asyncio.Event()

    def wake(self) -> None: ...

    async def wait(self) -> None:
        await self.begun.wait()
        self.is_over = True


def test_work_for_a_client_that_disconnects_is_cancelled() -> None:
    async def run() -> None:
        client: Any = Leaving()
        cancelled = asyncio.Event()

        async def work() -> str:
            client.begun.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                cancelled.set()
            return "never"

        assert await custom._unless_gone(work(), client) is None
        await asyncio.wait_for(cancelled.wait(), 20)  # the end of `run` would cancel it too

    asyncio.run(run())


def test_a_handlers_result_is_sent_as_json() -> None:
    request: Any = None
    response = asyncio.run(custom._answer(lambda: {"a": 1}, request))
    assert (response.status_code, bytes(response.body)) == (200, b'{"a":1}')


def test_the_answer_to_head_has_the_length_that_custom_code_declares() -> None:
    sent: list[Any] = []

    async def run() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        framed = custom._Framed({"method": "HEAD"}, send)
        await framed.send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await framed.send({"type": "http.response.body", "body": b"hello"})

    asyncio.run(run())
    start, body = sent
    assert (start["headers"], body["body"]) == ([(b"content-length", b"5")], b"")
