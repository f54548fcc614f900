"""One request in flight: what its host is told and may take, however it ends."""

from __future__ import annotations

import json
from typing import Any

from handler.core.errors import GenerationFailed
from handler.core.framing import dumps
from handler.serving.request_task import RequestTask
from tests.stepped import Bench, ask, benches, text_of

__all__ = ["benches"]


class Begun:
    """A request that has begun: its first token has come. `told` counts the host's callbacks."""

    def __init__(self, bench: Bench, body: dict[str, Any]) -> None:
        self.bench = bench
        self.told = 0
        self.task = bench.model.open({}, on_bytes=self._on_bytes)
        self.task.start(dumps(body))
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
    answer = json.loads(request.end())
    assert (answer["code"], answer["error"], answer["generated_text"]) == (424, "gone", "")
    assert request.task.status == 424


def test_nothing_comes_after_the_end() -> None:
    bench = Bench()
    for stream in (True, False):
        request = Begun(bench, ask("a b", 2, stream=stream))
        body, told = request.end(), request.told
        assert text_of(body) == " a b"
        for end in (request.task.fail, request.task.refuse):
            end(GenerationFailed("gone"))
        request.task.cancel()
        assert (request.task.take(), request.task.status, request.task.error, request.told) == (b"", 200, None, told)
        assert bench.model.metrics.requests.labels("ok")._value.get() == 1 + (not stream)
        assert bench.model.metrics.requests.labels("failed")._value.get() == 0


def test_a_cancelled_request_leaves_the_engine() -> None:
    bench = Bench()
    request = Begun(bench, ask("a b", 8, stream=True))
    request.task.cancel()
    bench.loop.poll()
    assert bench.batcher.idle
