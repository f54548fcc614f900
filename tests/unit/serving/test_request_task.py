"""One request in flight: what its host is told and may take, however it ends."""

from __future__ import annotations

import json
from typing import Any

from handler.core.errors import GenerationFailed, ServingError, Unavailable
from handler.core.framing import dumps
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.registry import ROUTES
from handler.serving.task import RequestTask
from tests.one_test import in_one_test
from tests.stepped import Bench, ask, benches, text_of

__all__ = ["benches"]

OUTCOMES = ("ok", "failed", "refused", "overloaded", "cancelled")


class Begun:
    """A request that has begun: its first token has come. `told` counts the host's callbacks."""

    def __init__(self, bench: Bench, body: Any, schema: Dialect | None = None) -> None:
        self.bench = bench
        self.told = 0
        self.task = bench.model.open({}, schema, on_bytes=self._on_bytes)
        self.task.start(body if isinstance(body, bytes) else dumps(body))
        while not self.task.begun:
            bench.loop.wait(0.05)

    def _on_bytes(self, task: RequestTask) -> None:
        self.told += 1
        self.bench.loop.stop()

    def end(self) -> bytes:
        while not self.task.finished:
            self.bench.loop.wait(0.05)
        return self.task.take()


def test_the_host_of_a_whole_answer_is_told_when_it_begins_and_when_it_ends() -> None:
    request = Begun(Bench(), ask("a b", 8))
    assert (request.told, request.task.finished, request.task.unsent) == (1, False, [])
    assert json.loads(request.end()) == {"generated_text": " a b" * 4}
    assert request.told == 2


def test_a_stream_that_fails_before_its_bytes_are_taken_keeps_them() -> None:
    request = Begun(Bench(), ask("a b", 8, stream=True))
    request.task.fail(GenerationFailed("gone"))
    token, error = map(json.loads, request.end().splitlines())
    assert token["token"]["text"] == " a"
    assert error["details"]["finish_reason"] == "error"
    assert (request.task.status, request.task.error) == (200, None)


def test_a_whole_answer_that_fails_is_a_refusal_alone() -> None:
    request = Begun(Bench(), ask("a b", 8))
    request.task.fail(GenerationFailed("gone"))
    assert request.told == 2, "not at the engine's next step"
    answer = json.loads(request.end())
    assert (answer["code"], answer["error"], answer["generated_text"]) == (424, "gone", "")
    assert request.task.status == 424


def test_a_refusal_takes_the_place_of_bytes_that_nobody_took() -> None:
    request = Begun(Bench(), ask("a b", 8, stream=True))
    assert request.task.unsent
    request.task.refuse(GenerationFailed("gone"))
    assert request.told == 2
    (line,) = request.end().splitlines()
    assert (json.loads(line)["error"], request.task.status) == ("gone", 424)


def test_a_refusal_while_the_body_is_parsed_on_a_thread_stands() -> None:
    bench = Bench()
    task = bench.model.open({})
    task.start(dumps(ask("word " * 20_000, 2, stream=True)))
    bench.loop.poll()
    task.refuse(GenerationFailed("gone"))
    assert task._background is not None
    while not task._background.done():
        bench.loop.wait(0.05)
    assert (task.parsed, task.status, json.loads(task.take())["error"]) == (None, 424, "gone")


def test_a_refusal_has_none_of_the_dialects_headers() -> None:
    request = Begun(Bench(), ask("a b", 8), ROUTES["/generate"])
    assert dict(request.task.dialect_headers())["x-compute-characters"] == "3"
    request.task.fail(GenerationFailed("gone"))
    assert request.task.dialect_headers() == ()


@in_one_test(
    ("body", "error", "outcome"),
    [
        (b"{", None, "refused"),
        (ask("a b", 8), GenerationFailed("gone"), "failed"),
        (ask("a b", 8, stream=True), GenerationFailed("gone"), "failed"),
        (ask("a b", 8), Unavailable("stopping"), "overloaded"),
        (ask("a b", 2), None, "ok"),
    ],
)
def test_each_request_is_counted_once_by_its_outcome(body: Any, error: ServingError | None, outcome: str) -> None:
    bench = Bench()
    request = Begun(bench, body)
    if error is not None:
        request.task.fail(error)
    request.end()
    requests = bench.model.metrics.requests
    counts = {label: int(requests.labels(label)._value.get()) for label in OUTCOMES}
    assert counts == {label: int(label == outcome) for label in OUTCOMES}


def test_the_tokens_of_all_prompts_are_counted() -> None:
    bench = Bench("disable")
    Begun(bench, ask(["a b", "c d e"], 2)).end()
    assert bench.model.metrics.prompt_tokens._value.get() == 5


def test_nothing_comes_after_the_end() -> None:
    for stream in (True, False):
        request = Begun(Bench(), ask("a b", 2, stream=stream))
        body, told = request.end(), request.told
        assert text_of(body) == " a b"
        for end in (request.task.fail, request.task.refuse):
            end(GenerationFailed("gone"))
        request.task.close()
        assert (request.task.take(), request.task.status, request.task.error, request.told) == (b"", 200, None, told)


def test_a_cancelled_request_leaves_the_engine() -> None:
    bench = Bench()
    request = Begun(bench, ask("a b", 8, stream=True))
    request.task.close()
    bench.loop.poll()
    assert bench.batcher.idle
    assert bench.model.metrics.requests.labels("cancelled")._value.get() == 1
