"""DJL's calls in each mode, without Java: its `djl_python` is a stand-in here."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import re
import time
from collections.abc import AsyncGenerator
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from handler.config.loader import read_config
from handler.core.errors import InvalidParameter, ServingError
from handler.djl import modes, wire, worker
from handler.djl.modes import Rolling
from handler.djl.startup import MetricLines
from handler.djl.turns import ResponseOrder, Unsent
from handler.djl.wire import PieceWriter, Reader, installed_version
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.errors import ErrorFormat, Headers
from handler.protocols.registry import dialects
from handler.scheduler.lora import AdapterRegistry
from handler.serving.metrics.tracing import RequestRecord
from tests.doubles import djl_python
from tests.doubles.djl_java import Request, RollingBatch
from tests.doubles.djl_python import Connection, Output
from tests.stepped import Bench, ask, benches, item, text_of

__all__ = ["benches"]
# -- what DJL is answered when something has a bug, without Java: its `djl_python` is a stand-in here ------------------


class Input(djl_python.Input):
    """A call about an adapter, unless it is told otherwise."""

    def __init__(self, properties: dict[str, str] | None = None, body: bytes = b"") -> None:
        super().__init__(properties or {"name": "a", "src": "a"}, {"data": body})


def fail(*arguments: object) -> NoReturn:
    raise RuntimeError("a bug")


def outputs_of(mode: modes.Async) -> AsyncGenerator[Output, None]:
    """Return what djl_python reads as the response to the load call, which it may close."""
    outputs = mode.outputs(Output())
    assert isinstance(outputs, AsyncGenerator)
    return outputs


def step(mode: Rolling, body: Any = None, *, size: int = 1, **more: str) -> bytes:
    """Have Java make a step, in which a body is that of a new request, and return what it reads."""
    properties, content = {"batch_size": str(size), **more}, b""
    if body is not None:
        properties["batch_000.seed"], content = "1", item(body).body
    java = Connection()
    mode.answer(djl_python.Input(properties, {"batch_000.data": content})).send(java)
    return java.written


def test_a_bug_in_an_adapters_call_puts_no_answer_among_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step after it would get that answer for its own, and every later step that of the one before."""
    bench = Bench()
    has_next = [False]
    turns = ResponseOrder(lambda seconds: has_next[0])
    rolling = modes.Rolling(bench.model, bench.loop, installed_version(), turns)
    monkeypatch.setattr(AdapterRegistry, "check", fail)
    assert rolling.change_adapter(Input(), "register").code == 500
    step(rolling, ask("a b", 50, stream=True))
    refused = rolling.change_adapter(Input(), "register")
    assert (refused.code, refused.contents) == (503, [])
    has_next[0] = True
    assert isinstance(rolling.change_adapter(Input(), "register"), Unsent)
    step(rolling, size=0, reset_rollingbatch="true")
    assert bench.model.num_requests == 0


def test_while_a_model_is_loaded_again_an_adapters_call_is_refused_without_contents() -> None:
    loaded = futures.Future[Any]()
    mode = modes.Reloading(loaded, installed_version(), lambda: 0.0, ResponseOrder(lambda seconds: False))
    refused = mode.change_adapter(Input(), "register")
    assert (refused.code, refused.contents) == (503, [])
    loaded.set_exception(modes.LoadFailed())
    with pytest.raises(SystemExit, match="1"):
        mode.change_adapter(Input(), "register")


def test_java_forgets_an_adapter_that_the_worker_never_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """In async mode Java lists a name whose registration failed. An error here would leave it in the list for good."""
    bench = Bench()
    monkeypatch.setattr(AdapterRegistry, "check", lambda self: None)
    mode = modes.Async(bench.model, installed_version())
    answer = bench.loop.run(mode.change_adapter(Input(), "unregister"))
    assert (b"Adapter a unregistered" in answer.data, b"not found" in answer.data) == (True, False), answer.data
    assert b"not found" in bench.loop.run(mode.change_adapter(Input({"name": "a"}), "update")).data


def test_an_adapters_alias_is_its_name_in_the_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """Java passes the alias as a property and as a field, which is no unknown parameter."""
    bench = Bench()
    bench.model.config = replace(bench.model.config, unknown_parameters="refuse")
    monkeypatch.setattr(AdapterRegistry, "check", lambda self: None)
    mode = modes.Async(bench.model, installed_version())
    for properties, content, message in (
        ({"name": "a", "alias": "mine"}, {}, b"Adapter mine unregistered"),
        ({"name": "a"}, {"alias": b"mine"}, b"Adapter a unregistered"),
        ({"name": "a"}, {"other": b"x"}, b"'other'"),
    ):
        call = djl_python.Input(properties, content)
        assert message in bench.loop.run(mode.change_adapter(call, "unregister")).data


def test_a_bug_in_async_mode_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Java waits for a last piece."""
    bench = Bench()
    mode = modes.Async(bench.model, installed_version())

    async def answer(id: str) -> bytes:
        """What Java gets when it asks with this id of its own."""
        outputs, java = outputs_of(mode), Connection()
        await anext(outputs)
        call = Input({"request_tracking_id": id}, item(ask("a b", 3, stream=True)).body)
        assert [output async for output in await mode.answer(call)] == []
        while b"true" not in java.written:
            (await anext(outputs)).send(java)
        await outputs.aclose()
        return java.written

    pieces = bench.loop.run(answer("one"))
    assert pieces.count(b"request_tracking_id\0\0\0\3one") == pieces.count(b"\0\0\0\4last") > 0
    assert b"error" not in pieces
    monkeypatch.setattr(AdapterRegistry, "check", fail)
    assert b"internal error: RuntimeError" in bench.loop.run(mode.change_adapter(Input(), "register")).data
    headers_of = wire.headers_of
    monkeypatch.setattr(wire, "headers_of", lambda task: fail() if task.error is None else headers_of(task))
    failure = bench.loop.run(answer("two"))
    assert b"internal error: RuntimeError" in failure
    assert failure.count(b"\0\0\0\3two") == 1
    assert not bench.model.driver.sinks


@pytest.mark.parametrize("json_errors", [False, True])
@pytest.mark.parametrize("name", dialects())
def test_java_gets_a_failure_of_every_dialect(name: str, json_errors: bool) -> None:
    """In a rolling batch, one that cannot be written would fail the requests of others too."""
    dialect = dialects()[name]
    writer = PieceWriter(installed_version()._replace(json_errors=json_errors))
    error = InvalidParameter("top_k=0: must be at least 1")
    for format in (dialect.errors, dialect.errors_of(None, ServerContext("echo"))):
        assert b"top_k=0: must be at least 1" in writer.failure(format.whole(error), error)


def _trial(self: ErrorFormat, error: ServingError) -> Headers:
    return (("x-trial", str(self.status(error))),)


@pytest.mark.parametrize("streaming", [False, True])
def test_java_gets_the_headers_of_a_refusal(monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    """In a dynamic batch alone it does not: such a batch has one set of headers for all its requests."""
    monkeypatch.setattr(ErrorFormat, "headers", _trial)
    properties = {"request_tracking_id": "one", "content-type": "application/json"}
    rolling, dynamic = Bench(), Bench("disable")
    dynamic.model.config = replace(dynamic.model.config, enable_streaming=streaming)
    writer = PieceWriter(installed_version())
    for body in (b"{", b'{"inputs": 1}', b'{"inputs": "a", "parameters": {"top_p": 2}}'):
        assert b"batch_0_x-trial" not in writer.step(rolling.step(ask("a", 1)), fail)
        assert writer.step(rolling.step(body), fail).count(b"batch_0_x-trial") == 1
        answer = modes.Dynamic(dynamic.model, dynamic.loop).answer(Input(properties, body))
        assert (answer.code, answer.properties["x-trial"]) == (424, "424")
    mode = modes.Async(rolling.model, installed_version())
    call = rolling.loop.run(mode.change_adapter(Input(), "register"))
    assert call.properties["x-trial"] == "400", "no adapters are enabled"
    answer = modes.Rolling(rolling.model, rolling.loop, installed_version()).answer(Input())
    assert (answer.code, answer.properties["x-trial"]) == (424, "424"), "it is no batch"


def test_no_answer_is_whole_before_java_waits_for_it() -> None:
    """It would take one that comes just then for an empty one, and its client would wait for ever."""
    bench = Bench()
    mode = modes.Async(bench.model, installed_version())

    async def story(body: Any) -> float:
        outputs, java = outputs_of(mode), Connection()
        await anext(outputs)
        asked = time.monotonic()
        await mode.answer(Input({"request_tracking_id": "one"}, item(body).body))
        while b"true" not in java.written:
            (await anext(outputs)).send(java)
        await outputs.aclose()
        return time.monotonic() - asked

    rolling = modes.Rolling(bench.model, bench.loop, installed_version())
    for body in ({"inputs": 1}, ask("a b", 3)):
        assert bench.loop.run(story(body)) >= 0.005
        asked = time.monotonic()
        written = step(rolling, body)
        while b"true" not in written:
            written = step(rolling)
        assert time.monotonic() - asked >= 0.005


def test_in_async_mode_a_request_is_open_until_its_last_piece_is_written() -> None:
    bench = Bench()
    mode = modes.Async(bench.model, installed_version())

    async def story() -> list[int]:
        outputs, java, counts = outputs_of(mode), Connection(), list[int]()
        await anext(outputs)
        await mode.answer(Input({"request_tracking_id": "one"}, item(ask("a b", 3, stream=True)).body))
        while b"true" not in java.written:
            answer = await anext(outputs)
            counts.append(bench.model.num_requests)
            answer.send(java)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(anext(outputs), 0.05)
        return [*counts, bench.model.num_requests]

    *under_way, after = bench.loop.run(story())
    assert (set(under_way), after) == ({1}, 0)


@pytest.mark.parametrize("body", [ask("a b", 3), {"inputs": 1}])
def test_in_a_dynamic_batch_no_request_is_open_after_its_answer(body: Any) -> None:
    bench = Bench("disable")
    mode = modes.Dynamic(bench.model, bench.loop)
    answer = mode.answer(Input({"request_tracking_id": "one"}, item(body).body))  # it may keep the task
    assert (answer.code == 200, bench.model.num_requests) == ("inputs" in body and body["inputs"] != 1, 0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_start_is_the_first_calls_answer(monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    monkeypatch.setattr(worker, "mode", None)
    monkeypatch.setattr(djl_python.Input, "read", None, raising=False)

    async def load_async(call: djl_python.Input) -> Any:
        return await worker.load(call)

    def load(properties: dict[str, str]) -> Any:
        call = djl_python.Input(properties)
        return asyncio.run(load_async(call)) if asynchronous else worker.load(call)

    answer = load({"model_dir": "/nothing", "rolling_batch": "disable", "dtype": "wrong"})
    assert (answer.code, "dtype=wrong" in answer.message) == (500, True), answer.message
    answer = load({})
    assert (answer.code, answer.message) == (500, "KeyError: 'model_dir'")
    assert worker.mode is None

    async def awaited() -> Any:
        return await worker.adapters(Input(), "register")

    if asynchronous:
        answer = asyncio.run(awaited())
        assert (answer.code, answer.message) == (503, "Model is not ready"), answer.message
    else:  # the load call comes yet
        assert isinstance(worker.adapters(Input(), "register"), Unsent)


BUGS = {
    "open": "handler.serving.model.ServedModel.open",
    "run": "handler.serving.request.task.RequestTask.run",
    "accept": "handler.serving.request.task.RequestTask._accept",
    "piece": "handler.djl.batches.next_piece",
    "close": "handler.serving.request.task.RequestTask.close",
    "headers": "handler.djl.wire.headers_of",
    "take": "handler.serving.request.task.RequestTask.take",
}
"""What has a bug, by its place in a request's life."""


@pytest.fixture
def bug(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Have a place raise for the one request with a header `bug`; return the place's name."""
    name: str = request.param
    place, _, function = BUGS[name].rpartition(".")
    module, _, kind = place.rpartition(".")
    owner = getattr(importlib.import_module(module), kind) if kind[0].isupper() else importlib.import_module(place)
    works = getattr(owner, function)

    def breaks(*arguments: Any, **more: Any) -> Any:
        is_bad = arguments[1].get("bug") if name == "open" else arguments[0].header("bug")
        if is_bad and name != "close":
            fail()
        result = works(*arguments, **more)
        return fail() if is_bad else result

    for place_of_name in (owner, modes):
        if getattr(place_of_name, function, None) is works:
            monkeypatch.setattr(place_of_name, function, breaks)
    return name


@pytest.mark.parametrize("bug", BUGS, indirect=True)
@pytest.mark.parametrize("streams", [False, True])
def test_a_bug_in_one_request_of_a_step_fails_that_one_alone(
    bug: str, streams: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bench, version = Bench(), installed_version()
    java = RollingBatch(Reader(version.length).read, modes.Rolling(bench.model, bench.loop, version).answer)
    old, good, bad, other = (
        Request(item(ask(text, 4, stream=streams)).body, headers)
        for text, headers in [("a b", {}), ("c d", {}), ("e f", {"bug": "yes"}), ("g h", {})]
    )
    java.step(old)
    java.step(good, bad, other)
    while java.live:
        java.step()
    assert [text_of(request.answer) for request in (old, good, other)] == [" a b a b", " c d c d", " g h g h"]
    assert {request.status for request in (old, good, other)} == {200}
    assert (b"internal error: RuntimeError" if bug != "close" else b" e f e f") in bad.answer
    assert ["a bug" in record.message for record in caplog.records].count(True) == 1
    assert bench.model.num_inferences == 0


@pytest.mark.parametrize("bug", sorted(set(BUGS) - {"piece", "headers"}), indirect=True)
def test_a_bug_in_one_request_of_a_dynamic_batch_fails_that_one_alone(
    bug: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench("disable")
    mode = modes.Dynamic(bench.model, bench.loop)
    properties = {"batch_size": "3", "batch_001.bug": "yes"}
    bodies = {f"batch_{index:03d}.data": item(ask(text, 2)).body for index, text in enumerate(("a b", "c d", "e f"))}
    one, bad, other = mode.answer(djl_python.Input(properties, bodies)).contents
    assert (b" a b" in one, b" e f" in other) == (True, True)
    assert (b"internal error: RuntimeError" if bug != "close" else b" c d") in bad
    assert ["a bug" in record.message for record in caplog.records].count(True) == 1
    assert bench.model.num_inferences == 0


@pytest.mark.parametrize("bug", BUGS, indirect=True)
def test_a_bug_in_one_request_of_async_mode_fails_that_one_alone(bug: str, caplog: pytest.LogCaptureFixture) -> None:
    bench, java = Bench(), Connection()
    mode = modes.Async(bench.model, installed_version())

    async def story() -> None:
        outputs = outputs_of(mode)
        await anext(outputs)
        for id, more in (("one", {}), ("bad", {"bug": "yes"}), ("two", {})):
            body = item(ask(f"{id} {id}", 2)).body
            await mode.answer(Input({"request_tracking_id": id, **more}, body))
        while java.written.count(b"true") < 3:
            (await anext(outputs)).send(java)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(anext(outputs), 0.05)
        await outputs.aclose()

    bench.loop.run(story())
    assert (b" one one" in java.written, b" two two" in java.written) == (True, True)
    assert java.written.count(b"internal error: RuntimeError") == (bug != "close")
    assert ["a bug" in record.message for record in caplog.records].count(True) == 1
    assert bench.model.num_inferences == 0


# -- the lines that DJL Serving reads as metrics -----------------------------------------------------------------------


NEW: Any = SimpleNamespace(metric_types=True)
OLD: Any = SimpleNamespace(metric_types=False)
DONE = RequestRecord("id", {}, "ok", "length", "", 7, 3, 0.25, 1e-7, 2.0)

JAVAS = re.compile(r"([\w\s]+)\.([\w\s]+):([0-9\-,.e]+)(?:\|#([^|]*))?(?:\|(\d+))?(?:\|([cgh]))?")
"""What ai.djl.metric.Metric takes; of a line that does not fit, its reader of stdout makes a null."""

UNITS = {"Count", "None"}
"""Those that we need of ai.djl.metric.Unit; it has microseconds and milliseconds, and no seconds."""


def written(version: Any, *requests: RequestRecord, name: str = "m") -> list[str]:
    stream = io.StringIO()
    lines = MetricLines(name, version, stream)
    for request in requests:
        lines.write(request)
    return stream.getvalue().splitlines()


def test_a_request_has_its_tokens_and_times() -> None:
    assert written(NEW, DONE) == [
        "[METRICS]LmiPromptTokens.Count:7|#Model:m",
        "[METRICS]LmiGeneratedTokens.Count:3|#Model:m",
        "[METRICS]LmiTimeToFirstTokenSeconds.None:0.000000|#Model:m|h",
        "[METRICS]LmiEngineQueueTimeSeconds.None:0.250000|#Model:m|h",
    ]
    assert [line.removesuffix("|h") for line in written(NEW, DONE)] == written(OLD, DONE)


def test_one_without_a_token_has_no_times() -> None:
    assert written(NEW, DONE._replace(num_tokens=0)) == ["[METRICS]LmiPromptTokens.Count:7|#Model:m"]
    assert written(NEW, DONE._replace(num_tokens=0, num_prompt_tokens=0, outcome="refused")) == []


@pytest.mark.parametrize("name", ["owner/model-1.5_b", "a|b,c:d\n#e", "modèle", ""])
def test_java_can_read_every_line(name: str) -> None:
    for version in (NEW, OLD):
        for line in written(version, DONE, name=name):
            found = JAVAS.fullmatch(line.removeprefix("[METRICS]"))
            assert found is not None, line
            assert found[2] in UNITS
            assert "," not in found[4]
            assert found[4].count(":") == 1


def test_a_closed_stdout_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    stream.close()
    MetricLines("m", NEW, stream).write(DONE)
    assert "cannot write metrics for DJL Serving" in caplog.text


def test_the_embedded_server_says_that_it_has_no_use_for_them(tmp_path: Path) -> None:
    for java, told in ((False, 1), (True, 0)):
        config = read_config(overrides=["option.djl_metrics=true"], environ={}, java=java).checked()
        assert sum("option.djl_metrics" in warning for warning in config.warnings) == told
