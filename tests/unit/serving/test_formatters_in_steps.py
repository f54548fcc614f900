"""A model.py's formatters in a host without an event loop: the steps go on, whatever the user's functions do."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from handler.formatters import Input, TextGenerationOutput, TextInput
from handler.plugins import formatter_thread
from handler.plugins.functions import Formatters, InputFormatter, OutputFormatter, Style
from tests.stepped import Bench, ask, benches, item

__all__ = ["benches"]

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
