"""Rolling batch step by step, without Java: places, order, failures, formatters and routes."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from handler.core.errors import GenerationFailed, InvalidPayload
from handler.core.text import Prompt
from handler.djl import batches
from handler.djl.batches import Item
from handler.djl.worker_loop import WorkerLoop
from handler.engines.base import EngineInfo
from handler.engines.echo.engine import EchoTokenizer
from handler.formatters import Input, TextGenerationOutput, TextInput
from handler.plugins import formatter_thread
from handler.plugins.functions import Formatters, InputFormatter, OutputFormatter, Style
from handler.protocols.registry import routes
from handler.serving.admission import InferenceRoutes
from handler.serving.head import in_attributes
from tests.one_test import in_one_test
from tests.stepped import Bench, ask, benches, item, text_of

__all__ = ["benches"]
# -- rolling -----------------------------------------------------------------------------------------------------------
# Rolling batch step by step, without Java: places, order, resets, failures, pieces that must not grow too long.


IDLE = batches.IDLE
"""As it is outside of `benches`."""


def test_each_place_gets_its_own_tokens_whoever_comes_and_goes() -> None:
    bench = Bench()
    first = bench.step(ask("a b c d", 9, stream=True), ask("e f g h", 2, stream=True))
    assert [piece.first for piece in first] == [True, True]
    second = bench.step(ask("i j k l", 3, stream=True))
    assert [piece.first for piece in second] == [False, False, True]
    assert b'" e"' not in second[0].data
    assert text_of(first[1].data + second[1].data) == " g h"
    third, fourth, fifth = bench.step(), bench.step(), bench.step()
    assert [piece.last for piece in third] == [False, True, False]
    assert [piece.last for piece in fifth] == [False, True]
    assert text_of(second[2].data + third[2].data + fourth[1].data) == " j k l"
    assert bench.batch.num_requests == 1


def test_no_bytes_of_a_begun_answer_come_with_its_end() -> None:
    """Java marks the answer as ended before these bytes are in its queue: a client would lose them now and then."""
    bench = Bench()
    pieces = [*bench.step(ask("a b c d", 3, stream=True))]
    while not pieces[-1].last:
        pieces += bench.step()
    assert text_of(b"".join(piece.data for piece in pieces)) == " b c d"
    assert [bool(piece.data) for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert len(pieces) > 2


def test_a_request_is_open_until_its_last_piece_is_taken() -> None:
    bench = Bench()
    bench.step(ask("a b", 3, stream=True), ask("c d", 1, stream=True), {"inputs": 1})
    assert bench.model.num_requests == bench.batch.num_requests > 0
    while bench.batch.num_requests:
        bench.step()
        assert bench.model.num_requests == bench.batch.num_requests
    bench.step(ask("a b", 9, stream=True))
    assert bench.model.num_requests == 1
    bench.batch.reset()
    assert bench.model.num_requests == 0


def test_a_document_comes_whole_and_nothing_before_it() -> None:
    bench = Bench()
    (piece,) = bench.step(ask("a b c", 3))
    assert json.loads(piece.data) == {"generated_text": " a b c"}
    assert (piece.first, piece.last) == (True, True)
    assert bench.batch.num_requests == 0


@pytest.mark.parametrize("media", ["application/jsonlines", "application/jsonl", "application/x-ndjson"])
def test_lines_of_json_are_read_as_without_djl(media: str) -> None:
    bench, line = Bench(), json.dumps(ask("a b c", 3)).encode() + b"\n"
    asked = {index: Item(line * (index + 1), {"content-type": media}) for index in range(2)}
    good, bad = bench.finish(bench.batch.step(2, asked))
    assert json.loads(good) == {"generated_text": " a b c"}
    assert f"{media}: a request must be one line of JSON, but this body has 2 lines" in bad.decode()


@in_one_test(
    ("body", "told"),
    [
        (b"{nope", "not valid JSON"),
        (b"", "the body is empty"),
        ({"inputs": ["a", "b"]}, "must be one string"),
        (ask("a", 0), "max_new_tokens"),
        (ask("a " * 200, 1), "tokens"),
    ],
)
def test_a_bad_request_ends_alone_in_its_place(body: Any, told: str) -> None:
    bench = Bench()
    bench.step(ask("a b", 9, stream=True))
    pieces = bench.step(body, ask("c d", 3, stream=True))
    bad = pieces[1]
    assert (bad.first, bad.last, bad.task.status) == (True, True, 424)
    assert told in json.loads(bad.data)["error"]
    assert not pieces[0].last
    assert not pieces[2].last
    assert bench.batch.num_requests == 2


def test_what_the_engine_refuses_ends_alone_in_rolling() -> None:
    bench = Bench()
    bench.engine.refuse = bytes([4]).decode()  # the echo tokenizer's first word
    refused, other = bench.step(ask("x", 3, stream=True), ask("x y", 3, stream=True))
    assert (refused.task.status, refused.last) == (424, True)
    assert "cannot do that" in json.loads(refused.data)["error"]
    assert other.task.error is None


def test_a_dead_engine_ends_each_client_in_its_format_and_later_are_served() -> None:
    bench = Bench()
    bench.step(ask("a b", 9, stream=True))
    bench.engine.fail = GenerationFailed("engine failure: gone")
    pieces = bench.step()
    line = json.loads(pieces[0].data)
    assert (line["error"], line["details"]["finish_reason"]) == ("engine failure: gone", "error")
    assert [piece.last for piece in bench.step()] == [True]
    assert text_of(bench.finish(bench.step(ask("c d", 2, stream=True)))[0]) == " c d"


def test_an_engine_that_died_in_between_takes_no_newcomer_along() -> None:
    bench = Bench()
    bench.engine.fail = GenerationFailed("engine failure: gone")
    (piece,) = bench.step(ask("a b", 2))
    assert json.loads(piece.data) == {"generated_text": " a b"}


@in_one_test(
    ("size", "new"),
    [
        (1, {}),
        (3, {}),
        (0, {}),
        (2, {0: item(ask("z", 2))}),
        (3, {0: item(ask("z", 2))}),
        (4, {2: item(ask("z", 2))}),
    ],
    ids=["one lost", "one too many", "all lost", "a live one is new", "a new one before the live ones", "a hole"],
)
def test_places_that_disagree_end_all_and_cross_nothing(size: int, new: dict[int, Item]) -> None:
    bench = Bench()
    bench.step(ask("a b", 9, stream=True), ask("c d", 9, stream=True))
    pieces = bench.batch.step(size, new)
    assert len(pieces) == size
    for piece in pieces:
        assert (piece.last, piece.task.status) == (True, 500)
        assert "disagreed" in json.loads(piece.data)["error"]
    assert bench.batcher.idle
    assert text_of(bench.finish(bench.step(ask("e f", 2, stream=True)))[0]) == " e f"


def test_a_reset_forgets_all_before_the_step() -> None:
    bench = Bench()
    bench.step(ask("a b", 9, stream=True), ask("c d", 9, stream=True))
    bench.batch.reset()
    assert bench.batcher.idle
    assert text_of(bench.finish(bench.step(ask("e f", 2, stream=True)))[0]) == " e f"


@pytest.mark.parametrize("limit", [7, 8, 9, 10])
def test_long_answers_come_in_pieces_of_whole_characters(limit: int) -> None:
    bench = Bench(max_piece=limit)
    pieces = bench.step(ask("中文字 é ü", 3))
    sizes = []
    body = b""
    while True:
        sizes.append(len(pieces[0].data))
        body += pieces[0].data.decode().encode()  # each piece is UTF-8 by itself
        if pieces[0].last:
            break
        pieces = bench.step()
    assert json.loads(body) == {"generated_text": " 中文字 é ü"}
    assert max(sizes) <= limit
    assert len(sizes) > 3


def test_a_token_longer_than_a_piece_comes_in_several() -> None:
    whole, cut = Bench(), Bench(max_piece=8)
    asked = ask("a b", 3, stream=True)
    (expected,) = whole.finish(whole.step(asked))
    pieces = cut.step(asked)
    data = pieces[0].data
    while not pieces[0].last:
        assert len(pieces[0].data) <= 8
        pieces = cut.step()
        data += pieces[0].data
    assert data == expected


def test_an_error_comes_whole_however_long() -> None:
    (piece,) = Bench(max_piece=8).step(b"{nope")
    assert piece.last
    assert json.loads(piece.data)["code"] == 424


def test_an_early_commitment_waits_for_the_first_word() -> None:
    """Where an empty piece would settle the status, the engine's refusal comes in time to be one."""
    bench = Bench(commits_early=True)
    slow, engine_step = [3], bench.engine.step

    def step(timeout: float = 0.0) -> list[Any]:
        slow[0] -= 1
        return engine_step() if slow[0] < 0 else []

    bench.engine.step = step  # type: ignore[method-assign]
    bench.engine.refuse = bytes([4]).decode()
    (piece,) = bench.step(ask("x", 3))
    assert (piece.first, piece.last, piece.task.status) == (True, True, 424)


def test_after_an_early_commitment_a_failure_is_a_line_of_the_stream() -> None:
    bench = Bench(commits_early=True)
    bench.engine.step = lambda timeout=0.0: []  # type: ignore[method-assign]
    (piece,) = bench.silent_step(ask("x y", 3, stream=True))
    assert (piece.first, piece.data) == (True, b"")
    del bench.engine.step
    bench.engine.fail = GenerationFailed("gone")
    (piece,) = bench.step()
    assert not piece.first
    assert json.loads(piece.data)["details"]["finish_reason"] == "error"


def test_a_long_prompt_is_read_beside_the_steps() -> None:
    bench = Bench(info=EngineInfo("scripted", "1", "none", "none", 1 << 20))
    text = "word " * 4000
    pieces = bench.step(ask(text, 2, stream=True), ask("a b", 2, stream=True))
    assert [text_of(body) for body in bench.finish(pieces)] == [" word word", " a b"]


def test_dynamic_batches_through_steps_hold_several_prompts() -> None:
    bench = Bench("disable")
    (piece,) = bench.step(ask(["a b", "c d"], 2))
    assert json.loads(piece.data) == [{"generated_text": " a b"}, {"generated_text": " c d"}]


def test_a_whole_batch_ends_in_time() -> None:
    bench = Bench()
    bench.engine.step = lambda timeout=0.0: []  # type: ignore[method-assign]
    tasks = bench.dynamic(0.2).run([item(ask("a b", 2)), item(b"{")])
    assert [task.status for task in tasks] == [424, 424]
    assert "within 0.2 s" in json.loads(tasks[0].take())["error"]
    assert bench.batcher.idle


def test_a_request_that_is_dropped_while_it_is_tokenized_is_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its body may be large, and in a crowd the garbage collector waits for minutes. Nothing is submitted later."""
    bench = Bench()
    reached, go_on = threading.Event(), threading.Event()

    encode = EchoTokenizer.encode

    def wait_and_encode(tokenizer: EchoTokenizer, text: str) -> Prompt:
        reached.set()
        assert go_on.wait(10)
        return encode(tokenizer, text)

    monkeypatch.setattr(EchoTokenizer, "encode", wait_and_encode)
    gc.disable()
    try:
        (piece,) = bench.silent_step(ask("word " * 2000, 2, stream=True))
        assert reached.wait(10)
        task = weakref.ref(piece.task)
        bench.batch.reset()
        del piece
        bench.loop.poll()
        assert task() is None
        go_on.set()
        bench.loop.wait(0.05)
        assert bench.batcher.idle
    finally:
        go_on.set()
        gc.enable()


def test_a_whole_response_is_held_back_in_a_later_step_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Java does not yet wait for a response that comes whole so soon after its request, whichever step it is in."""
    bench, pauses, go_on = Bench(), list[float](), threading.Event()
    encode = EchoTokenizer.encode

    def wait_and_encode(tokenizer: EchoTokenizer, text: str) -> Prompt:
        assert go_on.wait(10)
        return encode(tokenizer, text)

    monkeypatch.setattr(EchoTokenizer, "encode", wait_and_encode)
    monkeypatch.setattr(batches, "_SETTLED", 60.0)
    monkeypatch.setattr(time, "sleep", pauses.append)
    try:
        (piece,) = bench.silent_step(ask("word " * 2000, 1))
        assert (piece.last, pauses) == (False, [])
    finally:
        go_on.set()
    while not piece.last:
        (piece,) = bench.step()
    (pause,) = pauses
    assert 0 < pause <= 60


def test_a_token_comes_before_the_failure_of_its_step() -> None:
    bench = Bench()
    (piece,) = bench.step(ask("a b", 50, stream=True))
    while not piece.data:
        (piece,) = bench.step()
    (running,) = bench.batcher._running.values()
    running.end_by = bench.batcher._expire_at = 0.0
    (piece,) = bench.step()
    token, failure = map(json.loads, piece.data.splitlines())
    assert token["token"]["text"] in {" a", " b"}
    assert "option.request_time_limit" in failure["error"]
    assert [piece.last for piece in bench.step()] == [True]


def test_an_engine_without_a_descriptor_is_waited_for() -> None:
    loop, heard = WorkerLoop(), threading.Event()

    async def begin() -> None:
        for callback in (heard.set, loop.stop):
            asyncio.get_running_loop().call_later(0.01, callback)

    loop.run(begin())
    loop.step(mock.Mock(fd=None), 60)
    assert heard.is_set()
    loop.close()


def test_a_step_waits_for_words_no_longer_than_a_new_request_may_wait() -> None:
    assert 0 < IDLE <= 0.05


def test_a_dynamic_batchs_stream_waits_but_soon_reports_that_nothing_came() -> None:
    bench = Bench()
    batch, waited = bench.dynamic(60), list[float]()
    with mock.patch.object(WorkerLoop, "wait", lambda self, seconds: waited.append(seconds)):
        assert batch.next_bytes(mock.Mock(unsent=b"", finished=False, take=lambda: b"")) == (b"", False)
        assert batch.next_bytes(mock.Mock(unsent=b"a", finished=False, take=lambda: b"a")) == (b"a", False)
    assert len(waited) == 1
    assert 0 < waited[0] < 1


# -- formatters in steps -----------------------------------------------------------------------------------------------
# A model.py's formatters in a host without an event loop: the steps go on, whatever the user's functions do.


LIMIT = 0.6
FREE = threading.Event()
"""What `wait` waits for."""


def read(item: Input) -> TextInput:
    body = item.get_as_json()
    if "read" in body:
        act(body["read"])
    return TextInput(input_text=body["inputs"], parameters={**body["parameters"], "stream": body.get("stream", False)})


def write(output: TextGenerationOutput) -> str:
    token, index, *_ = output.sequences[0].get_next_token()
    assert token is not None
    if index == 1 and (how := output.input.parameters.get("ignored")):
        act(how)
    return str(token.text)


def act(how: str) -> None:
    if how == "raise":
        raise ValueError("as asked")
    if how == "wait":
        FREE.wait()
    else:
        time.sleep(float(how))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Gives a function up after LIMIT."""
    monkeypatch.setattr(formatter_thread.FormatterThread.__init__, "__defaults__", (LIMIT,))
    return make()


@pytest.fixture
def bench() -> Iterator[Bench]:
    FREE.clear()
    yield make()
    FREE.set()


def make() -> Bench:
    formatters = Formatters(InputFormatter("r", read, False, frozenset()), OutputFormatter("w", write, Style.OUTPUT))
    return Bench(formatters=formatters)


def asked(how: str, *, stream: bool = True, **more: Any) -> dict[str, Any]:
    return {"inputs": "a b", "parameters": {"max_new_tokens": 3, "ignored": how}, "stream": stream, **more}


def test_tokens_come_as_written(bench: Bench) -> None:
    assert bench.finish(bench.step(ask("a b", 3, stream=True), ask("c", 2))) == [b" b a b", b" c c"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_is_one_requests(bench: Bench, stream: bool) -> None:
    bad, worse, good = bench.finish(
        bench.step(asked("raise", stream=stream), ask("a", 1, read="raise"), ask("a b", 3, stream=True))
    )
    assert b"output formatter 'w' of model.py raised ValueError: as asked" in bad
    assert b"input formatter 'r' of model.py raised ValueError: as asked" in worse
    assert good == b" b a b"


@pytest.mark.parametrize(("stream", "kind"), [(True, "application/jsonlines"), (False, "application/json")])
def test_what_an_input_formatter_made_is_refused_in_the_form_of_its_answer(
    bench: Bench, stream: bool, kind: str
) -> None:
    asked = ask("a", 1, parameters={"top_p": 7}, stream=stream)
    (piece,) = bench.step(asked)
    while not piece.last:
        (piece,) = bench.step()
    assert (piece.task.status, piece.task.content_type) == (424, kind)
    assert (b'"token":{"id":-1' in piece.data) == stream


@pytest.mark.parametrize("hung", [asked("wait"), asked("wait", stream=False), ask("a b", 3, read="wait")])
def test_steps_go_on_while_one_hangs(bench: Bench, hung: dict[str, Any]) -> None:
    """A step that waited for it would wait until it is given up."""
    plain = ask("a b", 0, parameters={"max_new_tokens": 40, "output_formatter": "jsonlines"})
    pieces = bench.step(plain, hung)
    lines = pieces[0].data
    while not pieces[0].last:
        pieces = bench.step()
        lines += pieces[0].data
    assert len(lines.splitlines()) == 40
    assert not pieces[1].last
    FREE.set()
    assert bench.finish(bench.step(ask("a b", 3)))[-1] == b" b a b"


@pytest.mark.parametrize("hung", [asked("60"), asked("60", stream=False), ask("a", 3, read="60")])
def test_what_hangs_is_given_up_and_those_behind_it_are_answered(hasty: Bench, hung: dict[str, Any]) -> None:
    *given_up, behind = hasty.finish(hasty.step(*[hung] * 2, ask("a b", 3, stream=True)))
    assert ["did not end within 0.6 s" in body.decode() for body in given_up] == [True, True]
    assert behind == b" b a b"


def test_a_whole_batch_is_answered(hasty: Bench) -> None:
    tasks = hasty.dynamic(30).run([item(ask("a", 2)), item(ask("a", 2, read="60"))])
    assert [task.status for task in tasks] == [200, 424]
    assert tasks[0].take() == b" a a"


def test_a_request_that_has_ended_is_freed_at_once(bench: Bench) -> None:
    """In a crowd the garbage collector waits for minutes."""
    gc.disable()
    try:
        pieces = bench.step(ask("a b", 3, stream=True))
        task = weakref.ref(pieces[0].task)
        bench.finish(pieces)
        del pieces
        bench.loop.poll()
        assert task() is None
    finally:
        gc.enable()


# -- which dialect a request gets that names a route under DJL ---------------------------------------------------------


ALL = routes("mindie")


def found(path: str) -> str | None:
    schema = InferenceRoutes("mine", ALL).dialect(path)
    return None if schema is None else schema.name


def test_without_one_it_is_the_configured_dialect() -> None:
    for path in ("/invocations", "/predictions/mine", "/predictions/mine/1", "/models/mine/invoke"):
        assert found(path) is None


def test_every_route_can_be_named() -> None:
    for path, schema in ALL.items():
        assert found(path.format(model="mine", version="1")) == schema.name
    assert found("/") == "mindie"
    assert found("/v2/models/mine/generate_stream") == "triton_generate_stream"


@in_one_test("path", ["", "/ping", "/adapters", "/v2/models/other/generate", "/v2/models/mine", "x"])
def test_what_is_no_route_for_inference_is_refused(path: str) -> None:
    with pytest.raises(
        InvalidPayload, match=r"is not a route for inference; available routes: /invocations, .*/v1/completions"
    ):
        found(path)


@in_one_test(
    ("attributes", "path"),
    [
        ("route=/v1/completions", "/v1/completions"),
        ("a=b;route=/;c", "/"),
        ("x, route=/generate", "/generate"),
        ("route=", ""),
        ("aroute=/generate", None),
        ("", None),
    ],
)
def test_sagemakers_attributes_name_a_route(attributes: str, path: str | None) -> None:
    assert in_attributes({"x-amzn-sagemaker-custom-attributes": attributes}, "route") == path
    assert in_attributes({}, "route") is None


def test_a_route_matches_whatever_model_it_names() -> None:
    """The embedded server then says that there is no such model."""
    routes = InferenceRoutes("mine", ALL)
    assert routes.has("/v2/models/other/generate")
    assert routes.has("/predictions/other/7")
    assert not routes.has("/ping")
    assert not routes.has("/adapters")
