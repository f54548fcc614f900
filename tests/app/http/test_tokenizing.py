"""/tokenize and /chat_tokenize beside inference: how many at a time, and what is counted of them."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from handler.http.routes.tgi import MOST_TOKENIZING, TgiRoutes
from handler.serving.model import ServedModel
from tests.services import echo_service


async def ask(routes: TgiRoutes, body: Any) -> tuple[int, Any]:
    (route,) = [route for route in routes.routes if route.path == "/tokenize"]
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers_by_name": {}, "request_id": "one"}
    await route.app(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


def count(service: ServedModel, outcome: str) -> float:
    return service.metrics.requests.labels(outcome)._value.get()  # type: ignore[no-any-return]


def test_what_is_beyond_the_bound_is_told_to_come_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "handler.request")

    async def story() -> None:
        service = await echo_service()
        free, use = asyncio.Event(), service.admission.with_tokenizer

        async def held(wanted: Any) -> Any:
            await free.wait()
            return await use(wanted)

        monkeypatch.setattr(service.admission, "with_tokenizer", held)
        routes = TgiRoutes(service)
        first = [asyncio.ensure_future(ask(routes, {"inputs": "a"})) for _ in range(MOST_TOKENIZING)]
        await asyncio.sleep(0.01)
        said = {"error": "Model is overloaded", "error_type": "overloaded"}
        assert await ask(routes, {"inputs": "a"}) == (429, said)
        free.set()
        assert [status for status, _ in await asyncio.gather(*first)] == [200] * MOST_TOKENIZING
        assert (await ask(routes, {"inputs": "a"}))[0] == 200, "their places are free again"
        assert (await ask(routes, {"inputs": ""}))[0] == 422
        counts = [count(service, outcome) for outcome in ("ok", "overloaded", "refused")]
        assert counts == [MOST_TOKENIZING + 1, 1, 1]
        service.close()

    asyncio.run(story())
    outcomes = [record.getMessage().split("outcome=")[1].split()[0] for record in caplog.records]
    assert sorted(outcomes) == ["ok"] * (MOST_TOKENIZING + 1) + ["overloaded", "refused"]
