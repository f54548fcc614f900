"""Requests whose reply needs a second pass of the engine: a summary of the conversation before the response."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest

from handler.core.framing import dumps
from handler.engines.base import EngineInfo
from handler.protocols.assistant.summary import Summarizing
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.registry import ROUTES
from handler.serving.request.task import RequestTask
from tests.stepped import Bench, benches, requests_ended

__all__ = ["benches"]

COMPACT = {"edits": [{"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 1}}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {
        "input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "max_output_tokens": 4,
        "context_management": [{"type": "compaction", "compact_threshold": 1}],
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
    for _ in range(20_000):
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
    with mock.patch.object(Summarizing, "follow_up", side_effect=RuntimeError("a bug")):
        task = begin(bench, path, stream=stream)
    data = run(bench, task)
    assert b"internal error: RuntimeError" in data
    assert bench.batcher.idle
    assert (task.status == 500) is not stream


# -- a conversation whose prompt always exceeds the threshold ----------------------------------------------------------


def num_passes(
    bench: Bench, path: str, items: list[Any], threshold: int, max_tokens: int = 40
) -> tuple[int, list[Any]]:
    """Return how often the engine runs for the next response in a conversation, and the conversation after it."""
    submit, passes = bench.model.driver.submit, list[int]()

    def counted(*arguments: Any, **more: Any) -> int:
        passes.append(1)
        return submit(*arguments, **more)

    if path == "/v1/responses":
        management: Any = [{"type": "compaction", "compact_threshold": threshold}]
        body = {"input": items, "max_output_tokens": max_tokens, "context_management": management}
    else:
        edit = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": threshold}}
        body = {"messages": items, "max_tokens": max_tokens, "context_management": {"edits": [edit]}}
    with mock.patch.object(bench.model.driver, "submit", counted):
        value = json.loads(run(bench, begin(bench, path, stream=False, **body)))
    output = value["output"] if path == "/v1/responses" else [{"role": "assistant", "content": value["content"]}]
    assert (len(passes) == 2) is ("compaction" in json.dumps(output))
    return len(passes), [*items, *output, {"role": "user", "content": "next"}]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("first", "threshold"), [("a", 30), ("a " * 300, 100)], ids=["summary", "user"])
def test_a_conversation_is_not_summarized_at_every_request(path: str, first: str, threshold: int) -> None:
    """The summary or the user's messages alone exceed the threshold, but the prompt must grow before the next one."""
    bench = Bench(info=EngineInfo("scripted", "1", "none", "none", 4000))
    items: list[Any] = [{"role": "user", "content": first}]
    summarized = []
    for turn in range(16):
        passes, items = num_passes(bench, path, items, threshold)
        summarized += [turn] if passes == 2 else []
    assert summarized[0] <= 1
    assert 2 <= len(summarized) <= 3, "the second one is due when the prompt has grown by a quarter"
    assert summarized[1] - summarized[0] > 8


def test_what_no_summary_would_replace_is_not_summarized(bench: Bench) -> None:
    """Messages of the system and the newest ones of the user stay beside a summary."""
    users = [{"role": "user", "content": "a " * 60}, {"role": "developer", "content": "b"}]
    for items in (users, [{"role": "system", "content": "c " * 60}, *users]):
        assert num_passes(bench, "/v1/responses", items, 5)[0] == 1
    passes, items = num_passes(bench, "/v1/responses", [*users, {"role": "assistant", "content": "c"}], 5)
    assert passes == 2
    compacted = [item for item in items if item.get("type") == "compaction" or item["role"] == "developer"]
    assert num_passes(bench, "/v1/responses", [*compacted, items[-1]], 5)[0] == 1


def test_a_prompt_without_room_for_its_response_is_summarized_however_little_it_has_grown() -> None:
    bench = Bench(info=EngineInfo("scripted", "1", "none", "none", 4000))
    said = {"role": "assistant", "content": "b"}
    passes, items = num_passes(bench, "/v1/responses", [{"role": "user", "content": "a"}, said], 1)
    assert passes == 2
    assert num_passes(bench, "/v1/responses", items, 1)[0] == 1
    assert num_passes(bench, "/v1/responses", items, 1, max_tokens=3000)[0] == 2
