"""Adapters in the batcher, on a scripted engine: loads beside requests, drops after the last of them, lost engines."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from handler.core.errors import AdapterFailed, GenerationFailed, InvalidPayload, Unavailable
from handler.core.values import Adapter, Delta, Finish, Request, Sampling
from handler.engines.base import Output, Step
from handler.scheduler.batcher import Batcher
from tests.unit.scheduler.test_batcher import Scripted, prompt, run, submit, text

A, B, C = (Adapter(name, id, f"/{name}") for id, name in enumerate("abc", 1))


@dataclass
class Adapting(Scripted):
    """Answers changes of adapters in the next step; what is `broken` cannot be loaded, nor dropped."""

    broken: set[Adapter] = field(default_factory=set)
    changes: list[tuple[str, str]] = field(default_factory=list)
    used: list[str] = field(default_factory=list)
    due: list[Output] = field(default_factory=list)

    def add(self, key, ids, sampling, adapter=None):  # type: ignore[no-untyped-def]
        super().add(key, ids, sampling, adapter)
        self.used.append(adapter.name if adapter else "")

    def change_adapter(self, key: int, adapter: Adapter, *, drop: bool) -> None:
        self.changes.append(("drop" if drop else "load", adapter.name))
        error = "ValueError: rank 64 is too large" if adapter in self.broken else None
        self.due.append(Output(key, (), (), Finish.ERROR if error else Finish.STOP, error=error))

    def step(self, timeout: float = 0.0) -> list[Step]:
        due, self.due = self.due, []
        steps = super().step(timeout)
        steps[-1].others.extend(due)
        return steps


def with_adapter(batcher: Batcher, letters: str, adapter: Adapter, tokens: int = 4) -> int:
    return batcher.submit(Request(letters, Sampling(max_new_tokens=tokens), adapter=adapter), prompt(letters))


def test_a_load_ends_in_one_delta_and_disturbs_no_tokens() -> None:
    batcher = Batcher(Adapting())
    request = submit(batcher, "abcdef", max_new_tokens=6)
    load = batcher.load_adapter(A)
    found = run(batcher)
    assert found[load] == [Delta(load, 0, (), Finish.STOP)]
    assert text(found[request]) == "abcdef"


def test_a_load_that_fails_says_so_in_the_engines_words_and_disturbs_no_tokens() -> None:
    batcher = Batcher(Adapting(broken={A}))
    request = submit(batcher, "abcdef", max_new_tokens=6)
    load = batcher.load_adapter(A)
    found = run(batcher)
    (delta,) = found[load]
    assert isinstance(delta.error, AdapterFailed)
    assert delta.error.message == "the engine could not load the adapter a: ValueError: rank 64 is too large"
    assert text(found[request]) == "abcdef"


def test_without_an_engine_nothing_can_be_loaded() -> None:
    engine = Adapting(ready=False)
    with pytest.raises(Unavailable, match="not ready"):
        Batcher(engine).load_adapter(A)
    assert engine.changes == []


def test_a_load_is_lost_with_its_engine() -> None:
    engine = Adapting(fail=GenerationFailed("engine failure: it died"))
    batcher = Batcher(engine)
    load = batcher.load_adapter(A)
    (delta,) = batcher.step()
    assert (delta.id, str(delta.error)) == (load, "engine failure: it died")
    assert batcher.step() == []  # the next engine's answers have other keys


def test_an_adapter_is_dropped_when_the_last_request_for_it_has_ended() -> None:
    engine = Adapting()
    batcher = Batcher(engine, max_active=2)
    for adapter, tokens in ((A, 2), (A, 5), (A, 3), (B, 20)):  # two in the engine, two queued
        with_adapter(batcher, "xyz", adapter, tokens)
    batcher.drop_adapter(A)
    while engine.used.count("a") < 3 or batcher.num_active > 1:
        assert engine.changes == []
        batcher.step()
    batcher.step()
    assert engine.changes == [("drop", "a")]
    run(batcher)
    assert engine.changes == [("drop", "a")]


@pytest.mark.parametrize("how", ["cancelled", "cancelled in the queue", "reset", "none"])
def test_an_adapter_is_dropped_however_its_requests_end(how: str) -> None:
    engine = Adapting()
    batcher = Batcher(engine, max_active=1)
    if how == "cancelled in the queue":
        submit(batcher, "abc", max_new_tokens=50)
    id = 0 if how == "none" else with_adapter(batcher, "xyz", A, 50)
    batcher.drop_adapter(A)
    assert engine.changes == ([("drop", "a")] if how == "none" else [])
    batcher.reset() if how == "reset" else batcher.cancel(id)
    batcher.step()
    assert engine.changes == [("drop", "a")]


def test_an_engine_that_died_has_nothing_to_drop() -> None:
    engine = Adapting()
    batcher = Batcher(engine, max_active=2)
    for adapter in (A, B, B):  # the last one waits, and the next engine gets it
        with_adapter(batcher, "xyz", adapter, 5)
    for adapter in (A, B):
        batcher.drop_adapter(adapter)
    engine.fail, engine.ready = GenerationFailed("engine failure: it died"), False
    batcher.step()
    batcher.drop_adapter(C)
    engine.ready = True
    run(batcher)
    assert engine.used == ["a", "b", "b"]
    assert engine.changes == [("drop", "b")]


def test_a_drop_that_fails_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    batcher = Batcher(Adapting(broken={A}))
    batcher.drop_adapter(A)
    assert run(batcher) == {}
    assert "could not drop the adapter a" in caplog.text


def test_a_request_that_comes_after_the_drop_is_refused_by_name() -> None:
    engine = Adapting()
    batcher = Batcher(engine)
    batcher.drop_adapter(A)
    with pytest.raises(InvalidPayload, match="the adapter a was unregistered"):
        with_adapter(batcher, "xyz", A)
    assert engine.used == []
    with_adapter(batcher, "xyz", B)
    assert engine.used == ["b"]


def test_a_request_that_comes_after_an_update_gets_the_new_one_earlier_ones_keep_theirs() -> None:
    engine = Adapting()
    batcher = Batcher(engine)
    with_adapter(batcher, "xyz", A)
    batcher.drop_adapter(A, B)
    with_adapter(batcher, "xyz", A)
    batcher.drop_adapter(B, C)
    with_adapter(batcher, "xyz", A)
    with_adapter(batcher, "xyz", B)
    assert engine.used == ["a", "b", "c", "c"]
    run(batcher)
    assert sorted(engine.changes) == [("drop", "a"), ("drop", "b")]
    batcher.drop_adapter(C)
    for adapter in (A, B, C):
        with pytest.raises(InvalidPayload):
            with_adapter(batcher, "xyz", adapter)


def test_a_dropped_adapter_is_forgotten_with_the_last_request_that_was_read_before() -> None:
    engine = Adapting()
    batcher = Batcher(engine)
    late = Request("xyz", Sampling(max_new_tokens=1), adapter=Adapter("a", 1, "/a"))
    adapter = late.adapter
    for id in range(2, 1000):
        successor = Adapter(f"a{id}", id, "/a")
        assert adapter is not None
        batcher.drop_adapter(adapter, successor)
        batcher.step()
        adapter = successor
    assert len(batcher._adapters._successors) == 1
    batcher.submit(late, prompt("xyz"))
    assert engine.used == ["a999"]
    del late
    assert not batcher._adapters._successors
