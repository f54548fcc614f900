"""The plan of a server: its rule about stages that wait for the client, and which stages a server has."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from handler.config.loader import read_config
from handler.core.framing import dumps
from handler.http.inference import Inference
from handler.serving.model import ServedModel
from handler.serving.request import stages
from handler.serving.request.plan import Plan, Resource, Stage, Time
from handler.serving.start import running
from tests.doubles import djl_python
from tests.doubles.djl_modules import modes, wire
from tests.one_test import in_one_test
from tests.services import begin, load_echo
from tests.stepped import Bench, ask, benches
from tests.unit.serving.hosts import Client

__all__ = ["benches"]

GATE = Stage("gate", Time.LOOP, keeps=frozenset({Resource.GATE}))


@in_one_test("resource", list(Resource))
@in_one_test("field", ["holds", "keeps"])
def test_a_stage_on_the_clients_time_holds_nothing_that_others_need(field: str, resource: Resource) -> None:
    held: Any = {field: frozenset({resource})}
    with pytest.raises(ValueError, match=f"'upload' waits for the client: it must not hold {resource.value}"):
        Plan([Stage("upload", Time.CLIENT, **held)])
    for time in (Time.LOOP, Time.THREAD):
        Plan([Stage("upload", time, **held)])


def test_a_stage_on_the_clients_time_comes_before_what_the_request_keeps() -> None:
    upload = Stage("upload", Time.CLIENT)
    Plan([upload, GATE])
    with pytest.raises(
        ValueError, match="'upload' waits for the client: it must come before 'gate', which holds a dyn"
    ):
        Plan([GATE, upload])
    Plan([GATE, Stage("writer", Time.CLIENT, follows=True)])


def test_a_hook_that_would_never_be_called_is_refused() -> None:
    with pytest.raises(ValueError, match="'tag' has a hook 'parsed', which is called only for special headers"):
        Plan([Stage("tag", Time.LOOP, parsed=lambda call, head: call)])
    Plan([Stage("tag", Time.LOOP, headers=frozenset({"x-tag"}), parsed=lambda call, head: call)])


def test_a_server_with_a_stage_that_breaks_the_rule_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def parts(admission: object) -> Stage:
        return Stage("parts", Time.CLIENT, holds=frozenset({Resource.CALL}))

    monkeypatch.setattr(stages, "STAGES", (*stages.STAGES, parts))

    async def start() -> None:
        async with running(read_config(overrides=["option.llm_engine=echo"], environ={}).checked()):
            raise AssertionError("the server has started")

    with pytest.raises(ValueError, match=r"'parts' waits for the client: it must not hold the call of handle"):
        asyncio.run(start())


PLAIN = ["target model", "session", "adapter", "encoding", "tensors", "content type"]


def test_what_is_not_configured_has_no_stage(tmp_path: Path) -> None:
    async def names(*options: str) -> list[str]:
        service = await load_echo(*options)
        service.close()
        return [stage.name for stage in service.admission.plan.stages]

    plain = [*PLAIN, "body", "decompress", "decode", "parse", "media", "tokenize", "submit", "writer"]
    assert asyncio.run(names()) == plain
    gated = asyncio.run(names("option.rolling_batch=disable"))
    assert gated == [*plain[:-2], "gate", *plain[-2:]]
    captured = asyncio.run(names(f"option.capture_requests={tmp_path}"))
    assert captured == [*plain[:9], "capture", *plain[9:]]
    formatted = asyncio.run(names("option.enable_lora=true"))
    assert formatted == [*plain[:10], "formatters", *plain[10:]]


HOSTS = ("rolling", "dynamic", "async", "whole task", "http")
"""DJL's three modes, a task as the runner of batch files and Predictor use it, and the HTTP and gRPC routes."""


@in_one_test("host", list(HOSTS))
def test_each_host_runs_the_stages_of_the_plan(host: str) -> None:
    bench = Bench("disable" if host == "dynamic" else "auto")
    passed = list[str]()

    def note(hook: str) -> Any:
        return lambda *arguments: passed.append(hook)

    plan = bench.model.admission.plan
    plan.body.insert(0, note("body"))
    plan.encode.insert(0, note("encode"))
    plan.queue.insert(0, note("queue"))
    body = dumps(ask("a", 1))
    if host == "rolling":
        bench.finish(bench.step(ask("a", 1)))
    elif host == "dynamic":
        modes.Dynamic(bench.model, bench.loop).answer(djl_python.Input({}, {"data": body}))
    else:
        bench.loop.run(respond(bench.model, host, body))
    assert passed == ["body", "encode", "queue"]


async def respond(model: ServedModel, host: str, body: bytes) -> None:
    if host == "async":
        await modes.Async(model, wire.installed_version()).answer(djl_python.Input({}, {"data": body}))
    elif host == "http":
        client = Client(Inference(model), body, patience=False, cancels=False)
        while not client.closed:
            await asyncio.sleep(0.01)
    else:
        task, begun = begin(model, body)
        await begun
        task.close()


def test_a_stepped_host_has_the_body_with_the_head() -> None:
    stages_of_bench = [stage.name for stage in Bench().model.admission.plan.stages]
    assert stages_of_bench == [*PLAIN, "decompress", "decode", "parse", "tokenize", "submit", "writer"]
