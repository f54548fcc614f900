"""Adapters beside requests on a scripted engine: loads, drops after the last request, lost engines."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from handler.core.errors import AdapterFailed, Conflict, GenerationFailed, InvalidPayload, Unavailable
from handler.core.values import Adapter, Finish, Request, Sampling
from handler.engines.base import EngineRequest, Output, Step
from handler.scheduler.batcher import Batcher
from handler.scheduler.lora import AdapterRegistry, Outcome, Registered
from tests.unit.scheduler.test_batcher import Scripted, prompt, run, submit, text


@dataclass
class Adapting(Scripted):
    """Answers changes of adapters in the next step; a `broken` name can be neither loaded nor dropped."""

    broken: set[str] = field(default_factory=set)
    changes: list[tuple[str, str]] = field(default_factory=list)
    used: list[str] = field(default_factory=list)
    used_ids: list[int] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    due: list[Output] = field(default_factory=list)

    def add(self, request: EngineRequest) -> None:
        super().add(request)
        adapter = request.adapter
        self.used.append(adapter.name if adapter else "")
        self.used_ids.append(adapter.id if adapter else 0)

    def change_adapter(self, key: int, adapter: Adapter, *, drop: bool) -> None:
        self.drops += [adapter.id] if drop else []
        self.changes.append(("drop" if drop else "load", adapter.name))
        error = "ValueError: rank 64 is too large" if adapter.name in self.broken else None
        self.due.append(Output(key, (), (), Finish.ERROR if error else Finish.STOP, error=error))

    def step(self, timeout: float = 0.0) -> list[Step]:
        due, self.due = self.due, []
        steps = super().step(timeout)
        steps[-1].others.extend(due)
        return steps


class Rig:
    """A batcher with adapters, on a scripted engine."""

    def __init__(self, *names: str, max_active: int = 32, **engine: Any) -> None:
        self.engine = Adapting(**engine)
        self.adapters = AdapterRegistry()
        self.batcher = Batcher(self.engine, self.adapters, max_active=max_active)
        self.outcomes: list[Outcome] = []
        for name in names:
            self.adapters.register(name, Path(f"/{name}"), self.outcomes.append, preload=False)

    def find(self, name: str) -> Adapter:
        return self.adapters.get(name).adapter

    def load(self, name: str) -> None:
        self.adapters.register(name, Path(f"/{name}"), self.outcomes.append)

    def update(self, name: str, path: str | None = None) -> Adapter:
        self.adapters.update(name, self.outcomes.append, Path(path or f"/{name}"), preload=False)
        return self.find(name)

    def submit(self, letters: str, adapter: Adapter | str, tokens: int = 4) -> int:
        adapter = self.find(adapter) if isinstance(adapter, str) else adapter
        request = Request(letters, Sampling(max_new_tokens=tokens), adapter=adapter)
        return self.batcher.submit(request, prompt(letters))


def test_a_load_disturbs_no_tokens_and_makes_the_adapter_known() -> None:
    rig = Rig()
    request = submit(rig.batcher, "abcdef", max_new_tokens=6)
    rig.load("a")
    assert rig.adapters.find("a") is None
    with pytest.raises(Conflict):
        rig.load("a")
    outputs = run(rig.batcher)
    assert rig.outcomes == [Registered(rig.find("a"), 1)]
    assert text(outputs[request]) == "abcdef"
    assert list(outputs) == [request]


def test_a_load_that_fails_says_so_in_the_engines_words_and_disturbs_no_tokens() -> None:
    rig = Rig(broken={"a"})
    request = submit(rig.batcher, "abcdef", max_new_tokens=6)
    rig.load("a")
    outputs = run(rig.batcher)
    (error,) = rig.outcomes
    assert isinstance(error, AdapterFailed)
    assert error.message == "the engine could not load the adapter a: ValueError: rank 64 is too large"
    assert text(outputs[request]) == "abcdef"
    assert rig.adapters.find("a") is None
    rig.load("a")  # the name is free again


def test_without_an_engine_nothing_can_be_loaded() -> None:
    rig = Rig(ready=False)
    for _ in range(2):  # the name stays free
        with pytest.raises(Unavailable, match="not ready"):
            rig.load("a")
    assert rig.engine.changes == []


def test_a_load_is_lost_with_its_engine() -> None:
    rig = Rig(fail=GenerationFailed("engine failure: it died"))
    rig.load("a")
    assert rig.batcher.step() == []
    assert [str(outcome) for outcome in rig.outcomes] == ["engine failure: it died"]
    assert rig.batcher.step() == []  # the next engine's answers have other keys
    assert len(rig.outcomes) == 1
    rig.load("a")  # the name is free again
    rig.engine.fail = GenerationFailed("engine failure: so did this one")
    assert rig.batcher.step() == []
    assert [str(outcome) for outcome in rig.outcomes[1:]] == ["engine failure: so did this one"], "each load ends once"


def test_an_adapter_is_dropped_when_the_last_request_for_it_has_ended() -> None:
    rig = Rig("a", "b", max_active=2)
    for adapter, tokens in (("a", 2), ("a", 5), ("a", 3), ("b", 20)):  # two in the engine, two queued
        rig.submit("xyz", adapter, tokens)
    rig.adapters.unregister("a")
    while rig.engine.used.count("a") < 3 or rig.batcher.num_active > 1:
        assert rig.engine.changes == []
        rig.batcher.step()
    rig.batcher.step()
    assert rig.engine.changes == [("drop", "a")]
    run(rig.batcher)
    assert rig.engine.changes == [("drop", "a")]


@pytest.mark.parametrize("how", ["cancelled", "cancelled in the queue", "none"])
def test_an_adapter_is_dropped_however_its_requests_end(how: str) -> None:
    rig = Rig("a", max_active=1)
    if how == "cancelled in the queue":
        submit(rig.batcher, "abc", max_new_tokens=50)
    id = 0 if how == "none" else rig.submit("xyz", "a", 50)
    rig.adapters.unregister("a")
    assert rig.engine.changes == ([("drop", "a")] if how == "none" else [])
    rig.batcher.cancel(id)
    rig.batcher.step()
    assert rig.engine.changes == [("drop", "a")]


def test_an_engine_that_died_has_nothing_to_drop() -> None:
    rig = Rig("a", "b", "c", max_active=2)
    for adapter in "abb":  # the last one waits, and the next engine gets it
        rig.submit("xyz", adapter, 5)
    for adapter in "ab":
        rig.adapters.unregister(adapter)
    rig.engine.fail, rig.engine.ready = GenerationFailed("engine failure: it died"), False
    rig.batcher.step()
    rig.adapters.unregister("c")
    rig.engine.ready = True
    run(rig.batcher)
    assert rig.engine.used == ["a", "b", "b"]
    assert rig.engine.changes == [("drop", "b")]


def test_an_engine_that_is_replaced_before_the_next_step_drops_nothing() -> None:
    rig = Rig("a")
    rig.submit("xyz", "a", 5)
    rig.batcher.step()
    rig.adapters.unregister("a")
    rig.engine.fail = GenerationFailed("engine failure: it died")
    rig.batcher.step()
    assert run(rig.batcher) == {}
    assert rig.engine.changes == []


def test_a_drop_that_fails_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig("a", broken={"a"})
    rig.adapters.unregister("a")
    assert run(rig.batcher) == {}
    assert "could not drop the adapter a" in caplog.text


def test_a_request_that_comes_after_the_drop_is_refused_by_name() -> None:
    rig = Rig("a", "b")
    early = rig.find("a")
    rig.adapters.unregister("a")
    with pytest.raises(InvalidPayload, match="the adapter a was unregistered"):
        rig.submit("xyz", early)
    assert rig.engine.used == []
    rig.submit("xyz", "b")
    assert rig.engine.used == ["b"]


def test_a_request_that_comes_after_an_update_gets_the_new_one_earlier_ones_keep_theirs() -> None:
    rig = Rig("a")
    first = rig.find("a")
    rig.submit("xyz", first)
    second = rig.update("a")
    rig.submit("xyz", first)
    third = rig.update("a")
    rig.submit("xyz", first)
    rig.submit("xyz", second)
    assert rig.engine.used_ids == [first.id, second.id, third.id, third.id]
    run(rig.batcher)
    assert sorted(rig.engine.drops) == [first.id, second.id]
    rig.adapters.unregister("a")
    for adapter in (first, second, third):
        with pytest.raises(InvalidPayload):
            rig.submit("xyz", adapter)


def test_an_earlier_adapter_is_forgotten_with_the_last_request_that_was_read_before() -> None:
    rig = Rig("a")
    late = Request("xyz", Sampling(max_new_tokens=1), adapter=rig.find("a"))
    earlier: list[weakref.ref[Adapter]] = []
    for _ in range(1000):
        earlier.append(weakref.ref(rig.find("a")))
        rig.update("a")
        rig.outcomes.clear()
        rig.batcher.step()
        rig.batcher.step()  # which takes the engine's answer to the drop
    assert sum(adapter() is not None for adapter in earlier) == 1
    rig.batcher.submit(late, prompt("xyz"))
    assert rig.engine.used_ids == [rig.find("a").id]
    del late
    assert sum(adapter() is not None for adapter in earlier) == 0
