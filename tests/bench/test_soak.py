"""The parts of `proof.compare.soak`; the soak itself takes an hour."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from proof.compare import mixed_clients, soak
from tests.servers import serve

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, binds processes to cores")


def ask(url: str, until: Callable[[dict[str, int]], bool], change: Callable[[bytes], bytes] = bytes) -> Any:
    """Let eight clients ask; `change` has each answer's body before it is judged."""
    clients: Any = mixed_clients.Clients(url, 8)
    judge = clients._judge
    clients._judge = lambda kind, number, answer: judge(kind, number, answer._replace(body=change(answer.body)))

    async def run() -> None:
        running = asyncio.ensure_future(clients.run())
        while not until(clients.counts) and not running.done():
            await asyncio.sleep(0.02)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(run())
    return clients


def test_mixed_clients_leave_and_are_refused_and_notice_an_answer_that_is_not_theirs() -> None:
    with serve("--engine", "echo", "-o", "option.max_model_len=4096") as server:

        def each_end(counts: dict[str, int]) -> bool:
            return counts["done"] >= 100 and min(counts["abandoned"], counts["refused"]) >= 5

        clients = ask(server.url, each_end)
        assert clients.surprises == []
        assert clients.slow > 0
        numbers = iter(range(1_000_000))
        clients = ask(
            server.url, lambda counts: counts["crossed"] > 0, lambda body: body + b"%d" % (next(numbers) // 200)
        )
        assert clients.surprises[0].startswith("crossed: ")


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ('{"id":"cmpl-1","created":5,"text":"a"}', '{"id":"cmpl-2","created":6,"text":"a"}', True),
        ('data: {"id":12,"log_prob":-0.12}\n\n', ':\n\ndata: {"id":12,"log_prob":-0.13}\n\n', True),
        ('{"id":12,"text":"a","logprob":null}', '{"id":13,"text":"a","logprob":-1.5}', False),
        ('{"id":12,"text":"a"}', '{"id":12,"text":"b"}', False),
    ],
)
def test_answers_are_compared_without_ids_and_times(one: str, other: str, equal: bool) -> None:
    comparable = mixed_clients._comparable
    assert (comparable(one.encode()) == comparable(other.encode())) is equal


def test_growth_is_from_the_minute_before_the_warm_up_ends_to_the_last() -> None:
    watch = soak.Watch({"host": 1})
    for minute, size in enumerate([50.0, 100.0, 120.0, 102.0]):
        watch.samples += [{"host": soak.Memory(size, size / 2)}] * 6
        assert watch.minutes == minute + 1
    host = watch.growth(2.0)["host"]
    assert host["resident"] == {"begin": 100.0, "end": 102.0, "percent": pytest.approx(2.0)}
    assert host["anonymous"] == {"begin": 50.0, "end": 51.0, "percent": pytest.approx(2.0)}
    assert watch.growth(60.0)["host"]["resident"]["percent"] == 0


def test_a_process_has_memory_of_its_own() -> None:
    memory = soak.read_memory(os.getpid())
    assert 0 < memory.anonymous < memory.resident
