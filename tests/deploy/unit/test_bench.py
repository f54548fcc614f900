"""Figures and advice of results that are known, and requests of a measurement by the OpenAI route."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from proof.bench.client import Result
from proof.bench.endpoint import advice, by_openai, rows, summary
from tests.deploy.local.servers import Loop


def test_a_levels_figures() -> None:
    results = [
        Result(10.0, (10.5, 10.6, 10.8), 11.0),
        Result(10.0, (10.7, 11.7), 12.0, counted=6),
        Result(10.0, (10.1,), 10.2, "StreamBroken"),
    ]
    level = summary({"clients": 2}, results)
    assert level["requests"] == 3
    assert level["errors"] == {"StreamBroken": 1}
    assert level["requests_per_second"] == 1.0
    assert level["tokens_per_second"] == 4.5
    assert level["ttft_ms"] == {"p50": 600.0, "p90": 680.0, "p99": 698.0}
    assert level["itl_ms"] == {"p50": 200.0, "p90": 840.0, "p99": 984.0}
    assert level["latency_ms"] == {"p50": 1500.0, "p90": 1900.0, "p99": 1990.0}
    assert level["mean_latency_ms"] == 1500.0
    head, row = rows([level])
    assert len(head) == len(row)
    assert row[:5] == ["2 at once", "3", "1 StreamBroken", "1.00", "4.5"]


def test_a_level_without_an_answer() -> None:
    level = summary({"rate": 0.5}, [Result(0.0, (), 1.0, "TimedOut")])
    assert level["requests_per_second"] == 0
    assert level["mean_latency_ms"] is None
    assert rows([level])[1][0] == "0.5/s"
    assert rows([level])[1][-1] == "-"


def level(clients: int, rate: float, latency: float, **errors: int) -> dict[str, Any]:
    return {"clients": clients, "requests_per_second": rate, "mean_latency_ms": latency, "errors": errors}


def test_the_knee_is_where_the_bounds_meet() -> None:
    """Alone a second; at most 10 a second: 10 at once."""
    levels = [level(1, 1.0, 1000), level(4, 4.0, 1000), level(16, 9.8, 1600), level(64, 10.0, 6400)]
    found = advice(levels)
    assert found.knee == 10.0
    assert found.concurrency == 7.0
    assert found.text == "Latency grows beyond about 10.0 concurrent requests. Use scaling.concurrency: 7."


def test_a_knee_beyond_what_was_measured_is_not_believed() -> None:
    found = advice([level(1, 1.0, 2000), level(4, 4.0, 1000)])
    assert found.knee == 4.0
    assert "Measure with more clients" in found.text


def test_a_model_that_does_one_at_a_time() -> None:
    found = advice([level(1, 1.0, 900), level(2, 1.0, 2000)])
    assert (found.knee, found.concurrency) == (1.0, 1.0)


@pytest.mark.parametrize("levels", [[], [level(1, 1.0, 1000)], [level(1, 1.0, 1000), level(2, 1.0, 1000, TimedOut=1)]])
def test_no_advice_without_figures(levels: list[dict[str, Any]]) -> None:
    found = advice(levels)
    assert found.knee is found.concurrency is None
    assert "at least two levels without errors" in found.text


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
