"""Requests of a measurement by the OpenAI route."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from proof.bench.endpoint import by_openai
from tests.deploy.local.servers import Loop

TOKEN = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n'
ERROR = b'data: {"error": {"message": "out of memory"}}\n\n'
END = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'


def test_a_stream_that_fails_does_not_spoil_the_next() -> None:
    """Its rest is on its way while the next request is sent."""
    answers = [ERROR, TOKEN + END]

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        body = answers.pop(0)
        await reply.write(body)
        if body == ERROR:
            await asyncio.sleep(0.1)
            await reply.write(TOKEN)
        return reply

    app = web.Application()
    app.router.add_post("/chat/completions", answer)
    loop = Loop()
    try:
        with loop.serving(app) as url:
            route: Any = SimpleNamespace(base_url=url, token=lambda: "key")
            predictor: Any = SimpleNamespace(openai_route=lambda: route)
            send = by_openai(predictor, 5, 5, {}, 1)
            assert [send(number).error for number in range(2)] == ["ModelFailed", ""]
    finally:
        loop.close()
