"""Requests whose reply needs a second pass of the engine: a summary of the conversation before the response."""

from __future__ import annotations

import json
from typing import Any

import pytest

from handler.core.framing import dumps
from handler.engines.base import EngineInfo
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.registry import ROUTES
from handler.serving.request.task import RequestTask
from tests.stepped import Bench, benches, requests_ended

__all__ = ["benches"]

COMPACT = {"edits": [{"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 1}}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {
        "input": "a b", "max_output_tokens": 4, "context_management": [{"type": "compaction", "compact_threshold": 1}],
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": "a b"}], "max_tokens": 4, "context_management": COMPACT,
    },
}  # fmt: skip
CASES = pytest.mark.parametrize(("path", "stream"), [(path, stream) for path in BODIES for stream in (False, True)])


@pytest.fixture
def bench() -> Bench:
    return Bench(info=EngineInfo("scripted", "1", "none", "none", 400))


def begin(bench: Bench, path: str, *, stream: bool, **more: Any) -> RequestTask:
    dialect: Dialect = ROUTES[path]
    task = bench.model.open({}, dialect)
    bench.loop.run(task.parse(dumps({"model": "model", "stream": stream, **BODIES[path], **more})))
    task.begin(task.run())
    return task


def run(bench: Bench, task: RequestTask) -> bytes:
    data = b""
    for _ in range(2000):
        if task.finished:
            break
        bench.loop.poll()
        data += task.take() if task.streams else b""
    assert task.finished
    return data + task.take()


@CASES
def test_both_passes_are_one_request(bench: Bench, path: str, stream: bool) -> None:
    data = run(bench, begin(bench, path, stream=stream)).decode()
    events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: ")] if stream else []
    assert data.count('"type":"compaction"') >= 1
    if path == "/v1/responses":
        response = events[-1]["response"] if stream else json.loads(data)
        assert [item["type"] for item in response["output"]] == ["compaction", "message"]
    else:
        usage = events[-2]["usage"] if stream else json.loads(data)["usage"]
        assert usage["output_tokens"] == 4
    assert bench.batcher.idle
    assert requests_ended(bench.model.metrics, "ok") == 1
    counted = bench.model.metrics.registry.get_sample_value("lmi_prompt_tokens_total")
    assert counted is not None
    assert counted > 70, "both prompts are counted"


@CASES
def test_a_request_is_cancelled_in_each_pass_and_between_them(path: str, stream: bool) -> None:
    info = EngineInfo("scripted", "1", "none", "none", 400)
    num_steps = 0
    while True:
        bench = Bench(info=info)
        task = begin(bench, path, stream=stream)
        for _ in range(num_steps):
            if task.finished:
                break
            bench.loop.poll()
        if task.finished:
            break
        task.close()
        for _ in range(3):
            bench.loop.poll()
        assert bench.batcher.idle, num_steps
        assert not bench.model.driver.sinks
        assert requests_ended(bench.model.metrics, "cancelled") == 1
        num_steps += max(1, num_steps // 8)
    assert num_steps > 20


@CASES
def test_an_engine_that_dies_between_the_passes_ends_the_request(bench: Bench, path: str, stream: bool) -> None:
    task = begin(bench, path, stream=stream)
    assert task.parsed is not None

    def fail() -> None:
        raise RuntimeError("a bug")

    task.parsed = task.parsed._replace(follow_up=fail)
    data = run(bench, task)
    assert b"internal error: RuntimeError" in data
    assert bench.batcher.idle
    assert (task.status == 500) is not stream
