"""Dynamic batching: lists, order, who shares a batch, who waits, and who fails alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from handler.core.errors import GenerationFailed, Unavailable
from handler.serving.engine_driver import DynamicBatcher
from tests.app.http.connection import settle
from tests.app.server import serve
from tests.servers import LiveServer, wait_for
from tests.services import begin, load_echo

DYNAMIC = ("--engine", "echo", "-o", "option.rolling_batch=disable")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serve(*DYNAMIC, "-o", "batch_size=4", "-o", "max_batch_delay=50") as found:
        yield found


def test_a_list_is_answered_in_order(server: LiveServer) -> None:
    found = server.post({"inputs": ["a", "b c", "d"], "parameters": {"max_new_tokens": 2}})
    assert found.json() == [{"generated_text": text} for text in (" a a", " b c", " d d")]


def test_requests_with_different_parameters_share_a_batch_and_a_bad_one_fails_alone(server: LiveServer) -> None:
    bodies = [
        {"inputs": "a", "parameters": {"max_new_tokens": 1}},
        {"inputs": "b", "parameters": {"max_new_tokens": 3}},
        {"inputs": "c", "parameters": {"top_p": 9}},
        {"inputs": ["d", "   "], "parameters": {"max_new_tokens": 3}},
        {"inputs": ["e"], "parameters": {"max_new_tokens": 2, "do_sample": True}},
    ]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(server.post, bodies))
    assert [answer.status_code for answer in answers] == [200, 200, 424, 424, 200]
    assert answers[1].json() == [{"generated_text": " b b b"}]
    assert "top_p" in answers[2].json()["error"]
    assert "no tokens" in answers[3].json()["error"]


def test_details_are_refused_with_the_route_that_has_them(server: LiveServer) -> None:
    body = {"inputs": "a", "parameters": {"details": True, "max_new_tokens": 1}}
    assert "route=/generate" in server.post(body).json()["error"]
    routed = server.post(body, headers={"X-Amzn-SageMaker-Custom-Attributes": "route=/generate"})
    assert routed.json()["details"]["generated_tokens"] == 1


def test_streaming_lines() -> None:
    with serve(*DYNAMIC, "-o", "option.enable_streaming=true") as server:
        found = server.post({"inputs": "a b", "parameters": {"max_new_tokens": 3}})
        assert found.headers["content-type"] == "application/jsonlines"
        assert found.text == '{"outputs":[" a"]}\n{"outputs":[" b"]}\n{"outputs":[" a"]}\n'


def test_a_list_streams_a_line_a_step_with_the_next_token_of_each_prompt() -> None:
    with serve(*DYNAMIC, "-o", "option.enable_streaming=true") as server:
        found = server.post({"inputs": ["a b", "c", "d"], "parameters": {"max_new_tokens": 2}})
        assert found.headers["content-type"] == "application/jsonlines"
        assert found.text == '{"outputs":[" a"," c"," d"]}\n{"outputs":[" b"," c"," d"]}\n'


def gate(size: int = 2, delay: float = 0.05, max_queued: int = 10) -> DynamicBatcher:
    return DynamicBatcher(size, delay, max_queued)


async def enter(found: DynamicBatcher, log: list[str], name: str, hold: float) -> None:
    await found.join()
    try:
        log.append(f"+{name}")
        await asyncio.sleep(hold)
    finally:
        found.leave()
    log.append(f"-{name}")


def test_a_full_batch_starts_at_once_and_the_next_when_it_has_ended() -> None:
    async def story() -> None:
        found, log = gate(delay=60), list[str]()
        began = time.monotonic()
        await asyncio.gather(
            *(enter(found, log, name, hold) for name, hold in (("a", 0.01), ("b", 0.05), ("c", 0), ("d", 0)))
        )
        assert (set(log[:2]), log[2:4]) == ({"+a", "+b"}, ["-a", "-b"])
        assert set(log[4:]) == {"+c", "+d", "-c", "-d"}
        assert time.monotonic() - began < 30  # nobody waited for the delay

    asyncio.run(story())


def test_a_batch_that_does_not_fill_starts_after_the_delay() -> None:
    async def story() -> None:
        log: list[str] = []
        began = time.monotonic()
        await enter(gate(), log, "a", 0)
        assert time.monotonic() - began > 0.04

    asyncio.run(story())


def test_one_that_goes_away_while_waiting_or_running_leaves_no_trace() -> None:
    async def story() -> None:
        found, log = gate(size=1), list[str]()
        running = asyncio.ensure_future(enter(found, log, "a", 60))
        waiting = asyncio.ensure_future(enter(found, log, "b", 60))
        await settle()
        waiting.cancel()
        running.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        await asyncio.wait_for(enter(found, log, "c", 0), 30)
        assert log == ["+a", "+c", "-c"]

    asyncio.run(story())


def test_the_queue_is_bounded() -> None:
    async def story() -> None:
        found, log = gate(size=1, max_queued=1), list[str]()
        tasks = [asyncio.ensure_future(enter(found, log, name, 0.05)) for name in "ab"]
        await settle()
        with pytest.raises(Unavailable, match="job_queue_size"):
            await enter(found, log, "c", 0)
        await asyncio.gather(*tasks)

    asyncio.run(story())


def test_waiting_too_long_for_a_batch_is_an_error() -> None:
    async def story() -> None:
        found = DynamicBatcher(1, 0.0, 10, timeout=0.05)
        log: list[str] = []
        running = asyncio.ensure_future(enter(found, log, "a", 60))
        await settle()
        with pytest.raises(Unavailable, match="predict_timeout"):
            await enter(found, log, "b", 0)
        assert found.num_waiting == 0
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.wait_for(enter(found, log, "c", 0), 30)

    asyncio.run(story())


def test_a_client_that_goes_away_as_its_batch_starts_leaves_no_trace() -> None:
    """Cancelled between being let in and noticing it."""

    async def story() -> None:
        found, log = gate(size=1, delay=60), list[str]()
        going = asyncio.ensure_future(enter(found, log, "a", 0))
        await asyncio.sleep(0)
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await going
        await asyncio.wait_for(enter(found, log, "b", 0), 30)

    asyncio.run(story())


def test_the_queue_is_seen_from_outside() -> None:
    slow = ("-o", "option.echo_tokens_per_second=20", "-o", "job_queue_size=1", "-o", "max_batch_delay=0")
    with serve(*DYNAMIC, *slow) as server, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(server.post, {"inputs": "a", "parameters": {"max_new_tokens": 30}}) for _ in range(2)]
        wait_for(lambda: server.metric("lmi_queued_requests") == 1, 5, "nobody waits")
        assert server.post({"inputs": "a"}).status_code == 503
        assert [future.result().status_code for future in running] == [200, 200]


def test_one_that_fails_while_it_waits_is_not_computed_and_lets_the_next_batch_begin() -> None:
    def ask(tokens: int) -> dict[str, Any]:
        return {"inputs": "a", "parameters": {"max_new_tokens": tokens}}

    async def story() -> None:
        options = ("option.rolling_batch=disable", "batch_size=1", "option.echo_tokens_per_second=100")
        model = await load_echo(*options)
        model.start()
        await model.opened
        try:
            running, ran = begin(model, ask(10))
            while not running.begun:
                await settle()
            waiting, failed = begin(model, ask(5))
            following, followed = begin(model, ask(3))
            await asyncio.sleep(0.02)
            assert not ran.done(), "the others wait for it"
            waiting.fail(GenerationFailed("gone"))
            await asyncio.wait_for(asyncio.gather(ran, failed, followed), 10)
            assert (running.status, waiting.status, following.status) == (200, 424, 200)
            assert model.driver.num_tokens == 10 + 3
        finally:
            model.close()

    asyncio.run(story())
