"""Adapters, loaded when the container is ready."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from deploy.emulator.endpoint import Endpoint
from deploy.emulator.serving import Plan, load_adapters
from deploy.errors import Failed
from tests.deploy.local.servers import Loop


@pytest.mark.parametrize(
    ("ending", "said"), [("cut", "the container gave no answer"), ("bytes", "answers 500: \ufffd")]
)
def test_one_that_the_container_cannot_load(loop: Loop, ending: str, said: str) -> None:
    async def load(request: web.Request) -> web.Response:
        if ending == "cut":
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=500, body=b"\xff", content_type="text/plain")

    app = web.Application()
    app.router.add_post("/adapters", load)
    with loop.serving(app) as url, pytest.raises(Failed, match=f"adapter one: .*{said}"):
        asyncio.run(load_adapters(Plan(Endpoint(url), adapters={"one": "/adapters/one"})))
