"""What DJL's calls are answered, and how requests are read from them and written, without Java."""

from __future__ import annotations

import asyncio
import io
import json
import select
import struct
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from handler.core.errors import GenerationFailed, NotFound, ServingError
from handler.djl import batches, modes, wire
from handler.djl.batches import DynamicBatch, Item, Piece, RollingBatch
from handler.djl.turns import Unsent
from handler.djl.wire import installed_version
from handler.protocols.kernel.errors import HttpResponse
from handler.scheduler.lora import AdapterRegistry
from handler.serving.head import QUERY_ADAPTER
from tests.doubles.djl_java import message
from tests.doubles.djl_python import Connection, Input, Output
from tests.one_test import in_one_test
from tests.stepped import Bench, ask, benches, item

__all__ = ["benches"]


def fail(*arguments: object, **more: object) -> NoReturn:
    raise RuntimeError("a bug")


async def never(*arguments: object) -> NoReturn:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


# -- adapters ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters are enabled."""
    monkeypatch.setattr(AdapterRegistry, "check", lambda self: None)


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("mode", ["auto", "disable"])
def test_a_change_of_an_adapter_is_answered_with_its_status(mode: str) -> None:
    bench = Bench(mode)
    kind: modes.Dynamic | modes.Rolling = modes.Dynamic(bench.model, bench.loop)
    if mode == "auto":
        kind = modes.Rolling(bench.model, bench.loop, installed_version())
    answer = kind.change_adapter(Input({"name": "a"}), "unregister")
    assert (answer.code, answer.message) == (200, "Adapter a unregistered")
    if mode == "auto":  # Java could take it for the answer to a step
        assert (answer.contents, answer.properties) == ([], {})
    else:
        assert json.loads(answer.data) == {"status": "Adapter a unregistered"}
        assert answer.properties["Content-Type"] == "application/json"


@pytest.mark.usefixtures("free")
def test_a_change_that_takes_too_long_is_given_up_before_java_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes.AdapterCalls, "_change", never)
    bench = Bench("disable")
    bench.model.config = replace(bench.model.config, predict_timeout=0.5)
    answer = modes.Dynamic(bench.model, bench.loop).change_adapter(Input({"name": "a"}), "register")
    assert answer.code == 424
    assert "not finished within 0.1 s (option.predict_timeout)" in answer.message


def test_calls_have_a_second_less_than_java_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    durations: list[float] = []
    monkeypatch.setattr(modes, "DynamicBatch", lambda model, loop, seconds: durations.append(seconds))
    for timeout, seconds in ((240.0, 239.0), (1.05, 0.1), (1.25, 0.25)):
        bench = Bench("disable")
        bench.model.config = replace(bench.model.config, predict_timeout=timeout)
        modes.Dynamic(bench.model, bench.loop)
        assert durations.pop() == pytest.approx(seconds)


@pytest.mark.usefixtures("free")
def test_a_client_cannot_change_adapters_by_a_header(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench("disable")
    answer = modes.Dynamic(bench.model, bench.loop).change_adapter(Input({"name": "a", "Host": "h"}), "unregister")
    assert answer.code == 424
    assert "a request cannot choose the function that answers it" in answer.message
    assert "the call to unregister 'a' failed: property handler" in caplog.text


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize(
    ("body", "headers", "waits"),
    [
        (b'{"adapters": "mine"}', {}, True),
        (b'{"adapters": "mine2"}', {}, False),
        (b"{}", {"x-adapter": "mine"}, True),
        (b"{}", {"x-adapter": "other"}, False),
        (b"mine", {}, False),
    ],
)
def test_a_request_waits_for_the_adapter_that_it_names(
    monkeypatch: pytest.MonkeyPatch, body: bytes, headers: dict[str, str], waits: bool
) -> None:
    bench = Bench()

    async def story() -> bool:
        go_on, calls = asyncio.Event(), modes.AdapterCalls(bench.model)

        async def change(inputs: Any, what: str) -> tuple[str, dict[str, Any]]:
            await go_on.wait()
            return "done", {}

        monkeypatch.setattr(calls, "_change", change)
        names = [{"name": "mine"}, {}]
        changes = [asyncio.ensure_future(calls.answer(Input({"other": "x", **name}), "update")) for name in names]
        await asyncio.sleep(0)
        request = asyncio.ensure_future(calls.catch_up(Item(body, headers)))
        for _ in range(3):
            await asyncio.sleep(0)
        waited = not request.done()
        go_on.set()
        await asyncio.gather(request, *changes)
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "wait", fail)
            await calls.catch_up(Item(body, headers))  # nothing is left to wait for
        return waited

    assert bench.loop.run(story()) == waits


@pytest.mark.usefixtures("free")
def test_an_adapters_parameters_without_effect_are_told(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    mode = modes.Async(bench.model, installed_version())
    bench.loop.run(mode.change_adapter(Input({"name": "a"}, {"other": b"x"}), "unregister"))
    assert "a call about an adapter has parameters without effect: 'other'" in caplog.messages


def test_a_call_about_an_adapter_does_what_it_is_named_for() -> None:
    done: list[Any] = []

    class Adapters:
        registry = SimpleNamespace(check=lambda: None)

        def unregister(self, name: str) -> None:
            done.append(("unregister", name))
            if name == "gone":
                raise NotFound("no such adapter")

        async def update(self, name: str, src: str | None, **more: Any) -> None:
            done.append(("update", name, src, more))

        async def register(self, name: str, src: str, **more: Any) -> Any:
            done.append(("register", name, src, more))
            return SimpleNamespace(number=5)

    model: Any = SimpleNamespace(adapters=Adapters(), config=SimpleNamespace(unknown_parameters="ignore"))
    properties = {"name": "a", "src": "/a"}

    async def story() -> list[Any]:
        calls = modes.AdapterCalls(model)
        return [
            await calls.answer(Input(properties), "register"),
            await calls.answer(Input(properties, {"preload": b"false"}), "register"),
            await calls.answer(Input({"name": "a"}), "update"),
            await calls.answer(Input(properties), "unregister"),
            await calls.answer(Input({"name": "gone"}), "unregister"),
        ]

    answers = asyncio.run(story())
    assert done == [
        ("register", "a", "/a", {"preload": True, "again": True}),
        ("register", "a", "/a", {"preload": False, "again": True}),
        ("update", "a", None, {"preload": None}),
        ("unregister", "a"),
        ("unregister", "gone"),
    ]
    assert [value.get("id") for _, value in answers] == [5, 5, None, None, None]
    verbs = ["a registered", "a registered", "a updated", "a unregistered", "gone unregistered"]
    assert [words for words, _ in answers] == [f"Adapter {verb}" for verb in verbs]


@pytest.mark.parametrize(("missing", "what"), [("name", "register"), ("src", "register"), ("name", "update")])
@pytest.mark.usefixtures("free")
def test_what_a_call_about_an_adapter_needs_is_named(missing: str, what: str) -> None:
    bench = Bench("disable")
    properties = {name: "x" for name in ("name", "src", "device_id") if name != missing}
    answer = modes.Dynamic(bench.model, bench.loop).change_adapter(Input(properties), what)
    assert answer.code == 400
    assert missing in answer.message


# -- steps, batches and single requests --------------------------------------------------------------------------------


def test_java_resets_a_rolling_batch_before_a_step(caplog: pytest.LogCaptureFixture) -> None:
    bench, java = Bench(), Connection()
    mode = modes.Rolling(bench.model, bench.loop, installed_version())
    call = {"batch_size": "1", "batch_000.seed": "1"}
    body = {"batch_000.data": item(ask("a b", 50, stream=True)).body}
    for reset, number in (("false", 0), ("true", 1)):
        mode.answer(Input(call | {"reset_rollingbatch": reset}, body)).send(java)
        assert caplog.text.count("dropping 1 requests") == number
        assert bench.model.num_requests == 1


def test_a_bug_in_a_step_is_each_requests_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench, java = Bench(), Connection()
    mode = modes.Rolling(bench.model, bench.loop, installed_version())
    monkeypatch.setattr(RollingBatch, "step", fail)
    contents = {f"batch_{index:03d}.data": item(ask("a", 1)).body for index in range(3)}
    mode.answer(Input({"batch_size": "3"}, contents)).send(java)
    assert java.written.count(b"internal error: RuntimeError") == 3
    assert "a step of the rolling batch failed because of a bug" in caplog.messages


def test_a_bug_in_a_whole_batch_is_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("disable")
    mode = modes.Dynamic(bench.model, bench.loop)
    monkeypatch.setattr(DynamicBatch, "run", fail)
    answer = mode.answer(Input({"content-type": "application/json"}, {"data": b"{}"}))
    assert answer.code == 500
    assert "internal error: RuntimeError" in answer.message


def test_a_response_in_a_batch_may_be_as_long_as_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("disable")
    mode = modes.Dynamic(bench.model, bench.loop)
    call = Input({"batch_size": "1"}, {"batch_000.data": item(ask("a b", 2)).body})
    whole = mode.answer(call).data
    for most, fits in ((len(whole), True), (len(whole) - 1, False)):
        monkeypatch.setattr(modes, "MAX_FIELD", most)
        answer = mode.answer(call)
        assert (answer.data == whole) == fits
        assert (
            f"the response has {len(whole)} bytes; the maximum in a batch is {most}".encode() in answer.data
        ) != fits
        assert answer.properties["Content-Type"] == "application/json"
    assert bench.model.num_requests == 0


def test_a_batch_with_an_empty_place_has_an_answer_for_it() -> None:
    bench = Bench("disable")
    mode = modes.Dynamic(bench.model, bench.loop)
    answer = mode.answer(Input({"batch_size": "2"}, {"batch_001.data": item(ask("a b", 2)).body}))
    empty, full = answer.contents
    assert b"generated_text" in full
    assert b"error" in empty


def test_a_stream_outside_of_batches_comes_in_chunks() -> None:
    bench = Bench()
    bench.model.config = replace(bench.model.config, enable_streaming=True)
    mode = modes.Dynamic(bench.model, bench.loop)
    answer = mode.answer(Input({"content-type": "application/json"}, {"data": item(ask("a b", 3, stream=True)).body}))
    assert answer.code == 200
    assert bench.model.num_requests == 1
    chunks = list(answer.stream)
    assert len(chunks) > 1
    assert all(chunks)
    tokens = [json.loads(line)["token"]["text"] for line in b"".join(chunks).splitlines()]
    assert tokens == [" b", " a", " b"]
    assert bench.model.num_requests == 0
    assert not bench.loop.lock.locked()


def test_an_async_requests_output_is_in_the_first_answer_alone() -> None:
    bench = Bench()
    mode = modes.Async(bench.model, installed_version())

    async def story() -> list[Output]:
        call = Input({"request_tracking_id": "one"}, {"data": item(ask("a", 1)).body})
        return [output async for output in await mode.answer(call)]

    assert bench.loop.run(story()) == []


@in_one_test(
    ("finished", "committed", "seconds"),
    [(True, False, 0.005), (True, True, 0.0), (False, False, 0.0), (False, True, 0.0)],
)
def test_only_a_complete_response_that_has_not_begun_is_held_back(
    finished: bool, committed: bool, seconds: float
) -> None:
    with pytest.MonkeyPatch.context() as context:
        now = [100.0]
        context.setattr(time, "monotonic", lambda: now[0])
        task: Any = SimpleNamespace(finished=finished, committed=committed, opened_at=100.0)
        assert batches.seconds_early(task) == pytest.approx(seconds)
        now[0] += 1
        assert batches.seconds_early(task) == 0.0


# -- requests in calls -------------------------------------------------------------------------------------------------


def test_a_single_requests_body_is_its_data_or_its_first_content() -> None:
    for contents, body in (
        ({"other": b"x", "data": b"body"}, b"body"),
        ({"first": b"x", "second": b"y"}, b"x"),
        ({}, b""),
    ):
        assert wire.single(Input({"Content-Type": "a"}, contents)) == Item(body=body, headers={"content-type": "a"})


def test_the_query_of_a_call_names_an_adapter() -> None:
    read = wire.single(Input({}, {"data": b"body", "adapter": b"m\xff"}))
    assert read.headers == {QUERY_ADAPTER: "m\ufffd"}
    contents = {"batch_000.data": b"one", "batch_000.adapter": b"mine", "batch_001.data": b"two"}
    requests = wire.batched(Input({"batch_size": "2", "batch_001.X-Name": "x"}, contents))
    assert requests[0] == Item(body=b"one", headers={QUERY_ADAPTER: "mine"})
    assert requests[1] == Item(body=b"two", headers={"x-name": "x"})


def test_in_a_step_only_new_requests_have_something() -> None:
    contents = {"batch_000.data": b"", "batch_001.data": b"", "batch_001.seed": b"7"}
    assert wire.batched(Input({"batch_size": "2"}, contents)) == {1: Item(body=b"", headers={})}
    assert wire.batched(Input({"batch_size": "3"}, contents | {"batch_002.data": b""})) != {}
    assert wire.batched(Input({"batch_size": "3"}, {f"batch_{n:03d}.data": b"" for n in range(3)})) == {}
    assert wire.batched(Input({"batch_size": "1001"}, {"batch_1000.data": b"x"})).keys() == {1000}
    assert wire.batched(Input({"batch_size": "1"}, {"batch_00.data": b"x", "other": b"y"})) == {}


@in_one_test(
    ("properties", "keys", "batch"),
    [
        ({"batch_size": "1"}, ["batch_000.data"], True),
        ({}, ["batch_000.data"], False),
        ({"batch_size": "1"}, [], False),
        ({"batch_size": "1"}, ["batch_000.data", "data"], False),
        ({"batch_size": "1"}, ["data", "batch_000.data"], False),
        ({"batch_size": "1", "Content-Type": "text/plain"}, ["batch_000.data"], False),
    ],
)
def test_what_java_has_batched_is_told_from_a_clients_own_names(
    properties: dict[str, str], keys: list[str], batch: bool
) -> None:
    assert wire.is_batch(Input(properties, dict.fromkeys(keys, b"x"))) == batch


# -- responses ---------------------------------------------------------------------------------------------------------


def answered(body: bytes, error: ServingError | None = None) -> Any:
    return SimpleNamespace(
        take=lambda: body, error=error, status=200 if error is None else 424, content_type="a/b", ignored=(),
        parsed=None, dialect_headers=lambda: (("x-own", "1"),), retry_after=0.0, header=lambda name: "",
    )  # fmt: skip


def test_a_response_longer_than_a_field_is_sent_in_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FIELD", 4)
    answer = wire.whole(answered(b"four"))
    assert (answer.data, answer.stream, answer.message) == (b"four", None, "OK")
    answer = wire.whole(answered(b"123456789"))
    assert list(answer.stream) == [b"1234", b"5678", b"9"]
    assert answer.properties == {"Content-Type": "a/b", "x-own": "1"}


def test_a_failed_response_has_its_reason_on_one_line() -> None:
    answer = wire.whole(answered(b"{}", GenerationFailed("first\nsecond")))
    assert (answer.code, answer.message) == (424, "first second")
    assert wire.on_one_line("x" * 2000) == "x" * 1000


def test_a_request_for_the_engine_keeps_the_apis_own_headers_to_itself() -> None:
    task = answered(b"")
    for requests, error, kept in (([1], None, False), ([], None, True), ([1], GenerationFailed("x"), True)):
        task.parsed, task.error = SimpleNamespace(requests=requests), error
        assert ("x-own" in wire.headers_of(task)) == kept


@pytest.mark.parametrize(("length", "most"), [(">h", 32_000), (">i", None)])
def test_a_piece_is_as_long_as_a_string_may_be(length: str, most: int | None) -> None:
    version = installed_version()._replace(length=struct.Struct(length))
    assert version.max_piece == (most or wire.MAX_FIELD)


def test_a_failure_with_a_good_status_is_the_last_piece() -> None:
    writer = wire.PieceWriter(installed_version())
    for status, last in ((200, True), (399, True), (400, False)):
        answer = HttpResponse(status, "application/json", b'{"error": "no"}')
        written = writer.failure(answer, GenerationFailed("no"))
        assert (written == writer.piece(answer.body, last=True)) == last
        assert (str(status).encode() in written) != last


def test_a_failure_that_has_no_error_is_told_by_its_message() -> None:
    for json_errors in (False, True):
        writer = wire.PieceWriter(installed_version()._replace(json_errors=json_errors))
        answer = HttpResponse(424, "text/event-stream", b'data: {"details": 1}\n\n')
        assert b"the engine ended" in writer.failure(answer, GenerationFailed("the engine ended"))


def test_a_body_that_java_can_read_is_left_as_it_is() -> None:
    writer = wire.PieceWriter(installed_version()._replace(json_errors=True))
    for body, kept in ((b'{"code":424,  "error": "no"}', True), (b'{"error":  "no"}', False)):
        found = json.loads(writer.failure(HttpResponse(424, "application/json", body), GenerationFailed("no")))
        assert found["last"] is True
        assert (found["data"] == body.decode()) == kept
        assert json.loads(found["data"]) == {"code": 424, "error": "no"}


def test_a_request_of_lmis_has_javas_id_from_the_release_that_names_it() -> None:
    task = answered(b"")
    task.header = {"requestid": "java's"}.get
    pieces = [Piece(task, b"", first=True, last=True)]
    version = installed_version()
    header = version.string(b"batch_0_requestId") + version.string(b"java's")
    for names in (True, False):
        writer = wire.PieceWriter(version._replace(names_requests=names))
        assert (header in writer.step(pieces, fail)) is names
    task.header = lambda name: ""
    assert b"requestId" not in wire.PieceWriter(version).step(pieces, fail)


def test_what_java_does_not_wait_for_is_not_sent() -> None:
    java = Connection()
    Unsent().send(java)
    assert java.written == b""
    done: list[bytes] = []
    wire.Sent(b"data", lambda: done.append(java.written)).send(java)
    assert done == [b"data"], "after it was written"
    wire.Sent(b" more").send(java)
    assert java.written == b"data more"


@pytest.mark.parametrize("length", [">h", ">i"])
def test_an_empty_key_is_a_key(length: str) -> None:
    contents: list[tuple[str | None, bytes]] = [("", b"x"), (None, b"y"), ("z", b"")]
    reader, read = wire.Reader(struct.Struct(length)), Input()
    data = io.BytesIO(message(length, {"handler": "handle"}, contents))
    reader.read(read, SimpleNamespace(recv=data.read))
    assert read.content.keys == ["", None, "z"]
    assert [bytes(value) for value in read.content.values] == [b"x", b"y", b""]


def test_more_of_a_call_is_waited_for_only_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def look(reading: Any, writing: Any, failing: Any, seconds: float) -> Any:
        waits.append(seconds)
        return [], [], []

    monkeypatch.setattr(select, "select", look)
    contents: list[tuple[str | None, bytes]] = [("batch_000.data", b"x")]
    call = message(">i", {"batch_size": "2", "handler": "handle"}, contents)
    read = Input()
    wire.Reader(struct.Struct(">i")).read(read, SimpleNamespace(recv=io.BytesIO(call).read))
    assert read.content.keys == ["batch_000.data"], "the last request is empty"
    assert waits == [0.5]
