"""Cycles that nobody needs are gone soon, in short pauses; what requests leave is no garbage in the first place."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from handler.core import loop
from handler.core.values import Request
from handler.serving.model import ServedModel
from handler.serving.request.task import RequestTask
from tests.environment import clean_environment
from tests.servers import LiveServer, options, serve, wait_for
from tests.services import begin, echo_service

_STORY = """
import gc, sys, time, weakref
from handler.core import loop as garbage
garbage.YOUNG_SECONDS, garbage.FULL_SECONDS, garbage.CROWD = 0.02, 0.1, int(sys.argv[1])

class Cycle:
    def __init__(self):
        self.itself = self

old = Cycle()
garbage.keep_collecting()
made = [Cycle() for _ in range(100)]
seen = [weakref.ref(one) for one in made]
time.sleep(0.2)  # by now they are old
crowd = [[] for _ in range(1000)]
del made
deadline = time.monotonic() + float(sys.argv[2])
while any(one() for one in seen) and time.monotonic() < deadline:
    time.sleep(0.01)
print(sum(one() is not None for one in seen))
"""


@pytest.mark.parametrize(("crowd", "seconds", "left"), [(80_000, 30, 0), (500, 0.5, 100)])
def test_old_garbage_is_found_by_the_clock_unless_that_takes_too_long(crowd: int, seconds: float, left: int) -> None:
    command = [sys.executable, "-c", _STORY, str(crowd), str(seconds)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=clean_environment())
    assert int(found.stdout) == left


_IMPORTS = """
import gc, sys
from handler import cli
with open("/dev/null", "w") as sys.stdout:
    assert cli.main(["serve", "--check", "--engine", "echo"]) == 0
sys.stdout = sys.__stdout__
print(gc.isenabled(), gc.get_freeze_count() > 2 * len(gc.get_objects()))
"""


def test_modules_are_frozen_once_they_are_imported() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=True, env=clean_environment()
    )
    assert found.stdout.split() == ["True", "True"]


def test_a_crowd_is_counted_as_rarely_as_all_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both pause; it is 100 seconds old."""
    now, counted, collected = [0.0], [], []

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 100:
            raise TimeoutError

    def count(generation: int) -> range:
        counted.append(now[0])
        return range(loop.CROWD + 1)

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(loop, "gc", SimpleNamespace(collect=lambda *of: collected.append(of), get_objects=count))
    with pytest.raises(TimeoutError):
        loop._collect()
    assert counted == [20, 40, 60, 80, 100]
    assert collected == [(1,)] * 50


_WATCHED = """
import gc, sys, time
from handler.core import loop as garbage
from handler.serving.request import task as request_task
garbage.YOUNG_SECONDS, garbage.FULL_SECONDS = 0.1, 0.3
keep = garbage.keep_collecting
began, most, made = 0.0, 0.0, []

class Cycle:
    def __init__(self):
        self.itself, self.kept = self, bytearray(1 << 20)

    def __del__(self):
        made.remove(id(self))
        if not made:
            print("all cycles are gone", file=sys.stderr, flush=True)

def watch(phase, info):
    global began, most
    if phase == "start":
        began = time.thread_time()
    elif (pause := time.thread_time() - began) > most:
        most = pause
        print(f"longest pause {most * 1000:.1f} ms", file=sys.stderr, flush=True)

def keep_and_watch():
    keep()
    gc.callbacks.append(watch)

refuse = request_task.RequestTask.refuse
def refuse_with_a_cycle(self, error, body=None):
    made.append(id(Cycle()))
    return refuse(self, error, body)

garbage.keep_collecting = keep_and_watch
request_task.RequestTask.refuse = refuse_with_a_cycle
from handler.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_server_finds_what_failed_requests_leave_in_short_pauses() -> None:
    """Pauses as computing, which a busy machine does not lengthen; with 100 streams in flight."""
    given = options("option.echo_tokens_per_second=20", "option.max_rolling_batch_size=100")
    with serve("--engine", "echo", *given, program=("-c", _WATCHED)) as server:
        server.wait_ready()
        asyncio.run(_load(server))
        wait_for(lambda: "all cycles are gone" in server.log, 30, "cycles are left")
    pauses = [float(line.split()[2]) for line in server.lines if line.startswith("longest pause")]
    assert 0 < max(pauses) < 50


async def _load(server: LiveServer) -> None:
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:

        async def stream() -> None:
            body = {"inputs": "a b c", "stream": True, "parameters": {"max_new_tokens": 60}}
            assert (await client.post(server.url + "/invocations", json=body)).status_code == 200

        async def fail() -> None:
            for _ in range(20):
                found = await client.post(server.url + "/invocations", json={"inputs": 1})
                assert found.status_code == 424

        await asyncio.gather(fail(), *[stream() for _ in range(100)])


@pytest.mark.parametrize(
    ("parameters", "stream"),
    [({"max_new_tokens": 3}, False), ({"max_new_tokens": 3}, True), ({"max_new_tokens": 1 << 30}, False)],
    ids=["whole", "streamed", "refused"],
)
def test_a_request_that_has_ended_is_freed_without_a_collection(parameters: dict[str, Any], stream: bool) -> None:
    async def story() -> None:
        service = await echo_service()
        body = {"inputs": "a b", "parameters": parameters, "stream": stream}
        await _answer(service, body)  # LMI's dialect remembers what it reads from these parameters
        gc.collect()
        gc.disable()
        try:
            before = _count_requests()
            await _answer(service, body)
            deadline = time.monotonic() + 10
            while _count_requests() > before and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            assert _count_requests() == before
        finally:
            gc.enable()
            service.close()

    asyncio.run(story())


def _count_requests() -> int:
    return sum(type(one) is Request for one in gc.get_objects())


async def _answer(model: ServedModel, body: dict[str, Any]) -> None:
    task, begun = begin(model, body)
    await begun
    assert _count_requests()
    if task.streams:
        sent: list[bytes] = []
        ended = asyncio.Event()

        def take(task: RequestTask) -> None:
            sent.append(task.take())
            if task.finished:
                ended.set()

        task.on_bytes = take
        take(task)
        await ended.wait()
        assert any(sent)
    else:
        assert task.take_whole().body
