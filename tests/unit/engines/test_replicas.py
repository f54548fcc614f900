"""Several engines behind one batcher: which one gets a request, and what becomes of one that fails."""

from __future__ import annotations

import copy
import itertools
import logging
import os
import random
import select
import selectors
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from handler.core.errors import AdapterFailed, GenerationFailed
from handler.core.media import MediaFile, Medium, SharedMedia
from handler.core.text import Prompt, Vocabulary
from handler.core.values import Adapter, Delta, Finish, Pooling, Request, Sampling
from handler.engines.base import EngineInfo, EngineRequest, Output, Step
from handler.engines.process.replicas import Replica, ReplicaSet, Router, Workload
from handler.engines.process.supervisor import LoopHooks, State
from handler.scheduler.batcher import Batcher
from handler.scheduler.lora import AdapterRegistry, Outcome
from tests.doubles.scripted_engine import Scripted, prompt, run, text
from tests.one_test import in_one_test
from tests.user_files import write_adapter

# -- replicas ----------------------------------------------------------------------------------------------------------
# Several engines behind one batcher: one that fails, hangs or lags takes nobody with it, and adapters are on all.


PLACES = 2


class Engine(Scripted):
    """A scripted engine with what a supervisor has beside; it answers changes of adapters when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.info, self.statistics = State.READY, None, None
        self.silence, self.restarts, self.reason = 0.0, 0, ""
        self.changes: list[tuple[int, str, bool]] = []
        self.answers: list[Output] = []
        self.restarts_wanted = 0
        self.frozen = False
        self.order: list[int] = []
        self.added: list[EngineRequest] = []
        self.host = LoopHooks()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "state":
            super().__setattr__("ready", value is State.READY)
            if "host" in vars(self):
                self.host.on_change(value)

    def attach(self, host: LoopHooks) -> None:
        self.host = host
        host.on_change(self.state)

    def die(self) -> None:
        self.fail = GenerationFailed("engine failure: it died", detail="CUDA said why")
        self.state, self.reason = State.RESTARTING, "it died"

    def change_adapter(self, key: int, adapter: Adapter, *, drop: bool) -> None:
        self.changes.append((key, adapter.name, drop))

    def answer(self, error: str | None = None, detail: str = "") -> None:
        for key, _, _ in self.changes:
            finish = Finish.ERROR if error else Finish.STOP
            self.answers.append(Output(key, (), (), finish, error=error, detail=detail))
        self.changes.clear()

    def add(self, request: EngineRequest) -> None:
        self.order.append(request.key)
        self.added.append(request)
        super().add(request)

    def step(self, timeout: float = 0.0) -> list[Step]:
        if self.frozen:
            return []
        steps = super().step(timeout)
        steps[0].others.extend(self.answers)
        self.answers.clear()
        return steps

    def restart_when_idle(self) -> None:
        self.restarts_wanted += 1

    def close(self, grace: float) -> None:
        self.state = State.CLOSED


class Rig:
    def __init__(self, count: int = 2, patience: float = 15.0) -> None:
        self.engines = [Engine() for _ in range(count)]
        self.set = ReplicaSet(self.engines, PLACES, patience=patience)  # type: ignore[arg-type]
        self.states: list[State] = []
        self.set.attach(LoopHooks(on_change=self.states.append))
        self.adapters = AdapterRegistry()
        self.batcher = Batcher(self.set, self.adapters, max_active=PLACES * count)

    def submit(self, name: str, tokens: int = 3, **sampling: Any) -> int:
        sampling = {"max_new_tokens": tokens, **sampling}
        return self.batcher.submit(Request(name, Sampling(**sampling)), prompt(name))

    def send(self, replica: int, *requests: EngineRequest) -> None:
        """Add the sequences of one request to a replica, while all others are in a long step."""
        silences = [engine.silence for engine in self.engines]
        for number, engine in enumerate(self.engines):
            engine.silence = 0.0 if number == replica else 5.0
        assert self.set.admits(Request("x", Sampling()), prompt("x"))
        for request in requests:
            self.set.add(request)
        for engine, silence in zip(self.engines, silences, strict=True):
            engine.silence = silence

    def runs(self) -> list[int]:
        return [len(engine.active) for engine in self.engines]

    def register(self, path: Path) -> list[Outcome]:
        found: list[Outcome] = []
        self.adapters.register("a", path, found.append)
        return found


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "a")


def errors(found: dict[int, list[Delta]]) -> dict[int, list[str]]:
    return {id: [str(one.error) for one in deltas if one.error] for id, deltas in found.items()}


@pytest.mark.parametrize("count", [2, 4])
def test_requests_spread_and_keep_their_own_tokens(count: int) -> None:
    rig = Rig(count)
    ids = {rig.submit(letter, tokens): (letter, tokens) for tokens, letter in enumerate("abcdefghijkl", 1)}
    assert rig.runs() == [PLACES] * count
    found = run(rig.batcher)
    assert {id: text(deltas) for id, deltas in found.items()} == {id: name * num for id, (name, num) in ids.items()}
    assert sum(report.num_tokens for report in rig.set.reports) == sum(range(1, 13))
    assert sum(report.num_requests for report in rig.set.reports) == 12
    assert rig.runs() == [0] * count
    assert not any(report.num_active for report in rig.set.reports)


def test_a_lost_replica_ends_its_requests_once_and_others_get_the_waiting() -> None:
    rig = Rig()
    first = [rig.submit(letter, 5) for letter in "abcd"]
    waiting = [rig.submit(letter) for letter in "ef"]
    rig.batcher.step()
    rig.engines[1].die()
    found = run(rig.batcher)
    lost = [id for id, texts in errors(found).items() if texts]
    assert len(lost) == 2
    assert set(lost) < set(first)
    said = [one for id in lost for one in errors(found)[id]]
    assert [one.partition("replica 1: ")[2] for one in said] == ["engine failure: it died"] * 2
    assert all(text(found[id]) for id in {*first, *waiting} - set(lost))
    assert rig.states == [State.READY], "the set can serve all the time"
    assert [report.ready for report in rig.set.reports] == [True, False]
    assert rig.set.reason == "replica 1: it died"
    rig.engines[1].reason, rig.engines[1].state = "", State.READY
    for letter in "gh":
        rig.submit(letter)
    assert rig.runs() == [1, 1], "it is back beside the other"


def test_requests_without_a_token_move_first_to_a_replica_with_room() -> None:
    rig = Rig(3)
    first = [rig.submit(letter, 4) for letter in "abcdef"]
    waiting = [rig.submit(letter, 4) for letter in "gh"]
    rig.engines[1].die()
    found = run(rig.batcher, 1)
    assert rig.runs() == [2, 0, 2], "the others are full"
    for id, deltas in run(rig.batcher).items():
        found.setdefault(id, []).extend(deltas)
    assert {id: text(found[id]) for id in (*first, *waiting)} == {
        id: letter * 4 for id, letter in zip((*first, *waiting), "abcdefgh", strict=True)
    }
    assert not any(one.error for deltas in found.values() for one in deltas)
    ends = [id for deltas in found.values() for id in [deltas[-1].id] if deltas[-1].finish]
    assert sorted(ends) == sorted((*first, *waiting)), "each is answered once"
    order = [key for engine in rig.engines for key in engine.order]
    assert order.index(2) < order.index(7), "before those who wait"
    assert [report.num_requests for report in rig.set.reports] != [0, 0, 0]


def test_a_request_that_kills_its_replicas_is_moved_once() -> None:
    rig = Rig(3)
    id = rig.submit("p", 5)
    failed: set[int] = set()
    while not failed:
        (victim,) = (engine for engine in rig.engines if engine.active)
        victim.die()
        victim.active.clear()
        failed = {one.key for step in rig.set.step() for one in step.others if one.error}
    assert id in failed
    assert sum(engine.state is State.RESTARTING for engine in rig.engines) == 2


def test_a_silent_replica_returns_unstarted_requests_and_is_then_ignored() -> None:
    rig = Rig()
    ids = [rig.submit(letter, 3) for letter in "abc"]
    silent = rig.engines[0]
    held = list(silent.active)
    silent.frozen, silent.silence = True, 100.0
    found = run(rig.batcher, 1)
    assert len(silent.cancelled) == 1, "there is room for one"
    silent.frozen, silent.silence = False, 0.0
    silent.active.update({key: list(b"z") for key in held if key in silent.cancelled})  # it has not read that yet
    silent.left.update(dict.fromkeys(silent.cancelled, 3))
    for id, deltas in run(rig.batcher).items():
        found.setdefault(id, []).extend(deltas)
    assert {id: text(found[id]) for id in ids} == dict(zip(ids, ("aaa", "bbb", "ccc"), strict=True))
    assert [sum(one.finish is not None for one in found[id]) for id in ids] == [1, 1, 1]
    assert [report.num_active for report in rig.set.reports] == [0, 0]
    silent.silence = 100.0
    assert run(rig.batcher, 1) == {}, "nothing is left to move"
    silent.silence = 0.0
    (again,) = silent.cancelled
    rig.send(0, EngineRequest(again, [65], Sampling(max_new_tokens=1)))
    assert again in [output.key for step in rig.set.step() for output in step.others], "it is heard again"


def test_a_request_never_moves_to_the_replica_that_it_is_on() -> None:
    rig = Rig(patience=0.1)
    id = rig.submit("a", 3)
    silent, other = rig.engines
    silent.frozen, silent.silence, other.state = True, 0.5, State.RESTARTING
    run(rig.batcher, 2)
    assert not silent.cancelled
    silent.frozen, silent.silence = False, 0.0
    assert text(run(rig.batcher)[id]) == "aaa"


def test_who_leaves_while_a_replica_is_lost_is_not_moved() -> None:
    rig = Rig()
    ids = [rig.submit(letter, 5) for letter in "abcd"]
    rig.engines[1].die()
    rig.set.step()  # the others are full: two wait to be moved
    for id in ids:
        rig.batcher.cancel(id)
    assert run(rig.batcher) == {}
    assert (rig.runs(), rig.batcher.idle) == ([0, 0], True)
    id = rig.submit("e")
    assert text(run(rig.batcher)[id]) == "eee", "nothing that moves is ahead of it"


def test_what_moves_ends_with_the_reason_where_no_replica_is_left() -> None:
    rig = Rig()
    ids = [rig.submit(letter, 5) for letter in "abcd"]
    for engine in rig.engines:
        engine.die()
    found = run(rig.batcher)
    assert [len(texts) for texts in errors(found).values()] == [1] * 4
    public = [delta.error.public for deltas in found.values() for delta in deltas if delta.error]
    assert all("CUDA said why" in reason for reason in public), "the log has it"
    assert (rig.batcher.idle, len(ids)) == (True, 4)


def test_a_session_follows_a_request_that_moves() -> None:
    rig = Rig(3)

    def ask(name: str) -> int:
        return rig.batcher.submit(Request(name, Sampling(max_new_tokens=3), session="s"), prompt(name))

    ask("a")
    first = rig.runs().index(1)
    rig.engines[first].die()
    run(rig.batcher, 1)
    second = rig.runs().index(1)
    assert second != first
    run(rig.batcher)
    rig.engines[first].state = State.READY
    ask("b")
    assert rig.runs().index(1) == second, "its cache is there"


def test_adapters_images_and_rules_move_too() -> None:
    rig = Rig()
    seen: list[EngineRequest] = []
    for engine in rig.engines:
        engine.added = seen
    sampling = Sampling(max_new_tokens=2, seed=7)
    request = EngineRequest(5, [1, 2], sampling, Adapter("a", 3, ""), MediaFile("", "", "", ()))
    assert rig.set.admits(Request("x", sampling), prompt("x"))
    rig.set.add(request)
    rig.engines[0].die()
    rig.set.step()
    assert seen == [request] * 2


def test_a_request_of_several_sequences_is_lost_once_and_on_one_replica() -> None:
    rig = Rig()
    id = rig.submit("a", 5, n=2)
    assert sorted(rig.runs()) == [0, 2]
    rig.batcher.step()
    rig.engines[rig.runs().index(2)].die()
    assert [len(texts) for texts in errors(run(rig.batcher)).values()] == [1]
    assert rig.batcher.idle, id


def test_a_silent_replica_gets_nothing_and_nobody_waits_behind_it() -> None:
    rig = Rig()
    rig.engines[0].silence = 5.0
    for letter in "abc":
        rig.submit(letter)
    assert rig.runs() == [0, 2]
    assert rig.batcher.num_queued == 1
    rig.engines[0].silence = 0.0
    rig.batcher.step()
    assert rig.runs()[0] == 1


def test_all_lost_is_a_set_that_waits_for_the_first_one_back() -> None:
    rig = Rig()
    for engine in rig.engines:
        engine.die()
    id = rig.submit("a")
    assert (run(rig.batcher), rig.states) == ({}, [State.READY, State.RESTARTING])
    rig.engines[1].state = State.READY
    assert text(run(rig.batcher)[id]) == "aaa"
    assert rig.states[-1] is State.READY


def test_the_first_start_needs_all_of_them() -> None:
    engines = [Engine() for _ in range(2)]
    for engine in engines:
        engine.state = State.LOADING
    made = ReplicaSet(engines, PLACES)  # type: ignore[arg-type]
    states: list[State] = []
    made.attach(LoopHooks(on_change=states.append))
    engines[0].state = State.READY
    assert made.state is State.LOADING
    engines[1].reason, engines[1].state = "no memory", State.CLOSED
    assert (states, made.reason) == ([State.LOADING, State.CLOSED], "replica 1: no memory")


def test_cancelled_requests_leave_their_replica() -> None:
    rig = Rig()
    ids = [rig.submit(letter) for letter in "abcd"]
    for id in (*ids, 99):
        rig.batcher.cancel(id)
    assert rig.runs() == [0, 0]
    assert [len(engine.cancelled) for engine in rig.engines] == [2, 2]


def test_an_adapter_is_loaded_when_all_have_it_and_by_new_engines(adapter: Path) -> None:
    rig = Rig(3)
    outcome = rig.register(adapter)
    for engine in rig.engines[:2]:
        engine.answer()
        rig.batcher.step()
        assert not outcome
    rig.engines[2].die()  # so it need not answer
    run(rig.batcher, 1)
    (registered,) = outcome
    assert registered is rig.adapters.get("a")
    rig.engines[2].changes.clear()
    rig.engines[2].state = State.READY
    assert [(name, drop) for _, name, drop in rig.engines[2].changes] == [("a", False)]
    rig.engines[2].answer()
    run(rig.batcher, 1)
    rig.adapters.unregister("a")
    assert [[drop for _, _, drop in engine.changes] for engine in rig.engines] == [[True]] * 3
    for engine in rig.engines:
        engine.answer()
    run(rig.batcher, 1)
    rig.engines[0].state = State.RESTARTING
    rig.engines[0].state = State.READY
    assert not rig.engines[0].changes, "it was dropped"


def test_one_refusal_takes_an_adapter_from_all(adapter: Path) -> None:
    rig = Rig()
    outcome = rig.register(adapter)
    rig.engines[0].answer()
    rig.engines[1].answer("no room", "8 MiB are free")
    run(rig.batcher, 1)
    (refusal,) = outcome
    assert isinstance(refusal, AdapterFailed)
    assert "no room" in refusal.message
    assert "8 MiB" not in refusal.message
    assert refusal.public == f"{refusal.message} (8 MiB are free)", "the log has all"
    assert [(name, drop) for _, name, drop in rig.engines[0].changes] == [("a", True)]
    rig.engines[0].state = State.RESTARTING
    rig.engines[0].changes.clear()
    rig.engines[0].state = State.READY
    assert not rig.engines[0].changes


def test_an_adapter_that_no_engine_lived_to_load_is_refused(adapter: Path) -> None:
    rig = Rig()
    outcome = rig.register(adapter)
    for engine in rig.engines:
        engine.die()
    run(rig.batcher, 1)
    assert "it died" in str(outcome[0])
    assert len(rig.adapters) == 0


def test_replicas_that_hold_memory_restart_one_after_another() -> None:
    rig = Rig(3)
    for replica in range(3):
        rig.set.restart_when_idle(replica)

    def wanted() -> Sequence[int]:
        return [engine.restarts_wanted for engine in rig.engines]

    for number in (1, 2, 3):
        run(rig.batcher, 3)
        assert sum(wanted()) == number, "the next one waits until this one has been idle"
        restarted = next(engine for engine in rig.engines if engine.restarts_wanted and not engine.restarts)
        restarted.restarts, restarted.state = 1, State.RESTARTING
        run(rig.batcher, 3)
        assert sum(wanted()) == number, "not while one is missing"
        restarted.state = State.READY
    run(rig.batcher, 3)
    assert wanted() == [1, 1, 1]


def test_closing_ends_all() -> None:
    rig = Rig()
    rig.set.close()
    assert [engine.state for engine in rig.engines] == [State.CLOSED] * 2
    assert rig.states[-1] is State.CLOSED


def test_a_part_goes_to_the_replica_that_has_the_request() -> None:
    rig = Rig()
    rig.submit("a", tokens=1)
    rig.submit("b", tokens=3)
    first, second = (next(iter(engine.active)) for engine in rig.engines)
    rig.set.step()  # "a" ends
    for key, engine in ((first, rig.engines[0]), (second, rig.engines[1])):
        assert rig.set.continues(key)
        rig.set.add(EngineRequest(100 + key, [1], Sampling(max_new_tokens=2)))
        assert 100 + key in engine.active
    rig.engines[0].die()
    rig.set.step()
    assert not rig.set.continues(100 + first), "its beginning is lost"
    assert not rig.set.continues(first), "it ended before the last step"


def test_an_adapter_that_was_unregistered_while_none_was_ready_stays_away(adapter: Path) -> None:
    rig = Rig()
    outcome = rig.register(adapter)
    for engine in rig.engines:
        engine.answer()
    run(rig.batcher, 1)
    outcome.clear()
    for engine in rig.engines:
        engine.die()
    run(rig.batcher, 1)
    rig.adapters.unregister("a")
    for engine in rig.engines:
        engine.state = State.READY
    assert [engine.changes for engine in rig.engines] == [[], []]


def test_a_replicas_work_is_its_prompts_and_the_tokens_to_come() -> None:
    replica = Replica(0, Engine(), PLACES)  # type: ignore[arg-type]
    vars(replica.engine)["add"] = lambda request: None
    replica.add(EngineRequest(1, [1, 2, 3], Sampling(max_new_tokens=5)), None)
    replica.add(EngineRequest(2, [1, 2], Pooling("embed")), None)
    assert replica.load() == Workload(replica=0, num_sequences=2, num_tokens=3 + 5 + 2)
    replica.num_steps += 1
    assert replica.load().num_tokens == 4 + 1, "prompts are read in the first step"
    replica.num_steps += 3
    replica.add(EngineRequest(3, [1] * 7, Sampling(max_new_tokens=5)), None)
    assert replica.load().num_tokens == 1 + 1 + 12
    replica.num_steps += 9
    assert replica.load().num_tokens == 3, "each has one more at least"


def test_a_prompt_counts_as_work_until_its_replicas_first_step() -> None:
    rig = Rig()
    rig.send(0, EngineRequest(1, [65] * 50, Sampling(max_new_tokens=2)))
    rig.send(1, EngineRequest(2, [65], Sampling(max_new_tokens=20)))
    rig.set.step()
    assert rig.set.admits(Request("y", Sampling()), prompt("y"))
    rig.set.add(EngineRequest(3, [65], Sampling()))
    assert rig.engines[0].order == [1, 3], "1 token is to come there, 19 are at the other one"


def test_a_busy_replica_takes_what_fits_and_an_idle_one_takes_all() -> None:
    engine = Engine()
    replica = Replica(0, engine, PLACES)  # type: ignore[arg-type]
    assert replica.takes(PLACES + 5), "else it would wait for ever"
    replica.add(EngineRequest(1, [1], Sampling()), None)
    assert replica.takes(PLACES - 1)
    assert not replica.takes(PLACES)
    engine.silence = 0.999
    assert replica.takes(1)
    engine.silence = 1.0
    assert not replica.takes(1)


def test_an_adapter_that_a_new_engine_cannot_load_is_told(adapter: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.register(adapter)
    for engine in rig.engines:
        engine.answer()
    run(rig.batcher, 1)
    for error, detail, told in (("no room", "8 MiB are free", "8 MiB are free"), ("no room", "", "no room")):
        rig.engines[1].state = State.RESTARTING
        rig.engines[1].state = State.READY
        rig.engines[1].answer(error, detail)
        assert run(rig.batcher, 1) == {}
        assert caplog.messages[-1] == f"replica 1 could not load or drop an adapter: {told}"


def test_what_a_silent_replica_says_beside_what_has_left_is_heard() -> None:
    rig = Rig()
    silent, other = rig.engines
    other.frozen = True
    rig.send(0, *(EngineRequest(key, [65], Sampling()) for key in (1, 2, 9)))
    rig.send(1, EngineRequest(3, [65], Sampling()))
    silent.step = lambda timeout=0.0: [Step([1], [4], [-0.75], [Output(2, [3], [None])])]  # type: ignore[method-assign]
    rig.set.step()
    silent.step, silent.silence = lambda timeout=0.0: [], 100.0  # type: ignore[method-assign]
    rig.set.step()
    assert (silent.cancelled, other.order) == ([9], [3, 9]), "the others had output"
    heard = Step([1, 9], [5, 6], [-0.5, -0.25], [Output(9, [7], [None]), Output(2, [8], [None], Finish.EOS)])
    silent.step = lambda timeout=0.0: [heard]  # type: ignore[method-assign]
    step, *_ = rig.set.step()
    assert (step.keys, step.ids, step.logprobs) == ([1], [5], [-0.5])
    assert [(output.key, list(output.ids)) for output in step.others] == [(2, [8])]
    assert (rig.set.reports[0].num_active, rig.set.reports[0].num_tokens) == (1, 4)


def test_a_replica_is_silent_after_its_patience(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.submit("a")
    rig.engines[0].frozen = True
    rig.engines[0].silence = 15.0
    run(rig.batcher, 1)
    assert rig.runs() == [1, 0]
    rig.engines[0].silence = 15.1
    run(rig.batcher, 1)
    assert rig.engines[0].cancelled
    assert "replica 0 is silent: a sequence moves to replica 1" in caplog.text


def test_a_later_part_of_a_request_moves_to_the_least_busy_replica() -> None:
    rig = Rig(3)
    rig.send(0, EngineRequest(1, [65], Sampling(max_new_tokens=4)))
    assert rig.set.continues(1)
    rig.set.add(EngineRequest(3, [65], Sampling(max_new_tokens=4)))
    rig.set.cancel(1)
    rig.send(1, EngineRequest(2, [65] * 50, Sampling(max_new_tokens=4)))
    rig.engines[0].frozen, rig.engines[0].silence = True, 100.0
    rig.set.step()
    assert [list(engine.order) for engine in rig.engines] == [[1, 3], [2], [3]]
    assert [report.num_requests for report in rig.set.reports] == [1, 1, 0], "it was counted with its first part"


def test_a_lost_replicas_sequences_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    for letter in "abcd":
        rig.submit(letter, 5)
    rig.set.step()
    assert rig.set.continues(rig.engines[0].order[0])
    rig.set.add(EngineRequest(50, [65], Sampling()))
    rig.engines[0].die()
    rig.set.step()
    assert "replica 0 failed with 3 sequences; 1 of them can move" in caplog.messages


def test_a_replica_that_comes_back_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig = Rig()
    assert "ready" not in caplog.text
    rig.engines[1].die()
    rig.set.step()
    rig.engines[1].restarts, rig.engines[1].state = 1, State.READY
    assert "replica 1 is ready again" in caplog.messages
    assert (rig.set.restarts, list(rig.set.replica_restarts)) == (1, [0, 1])


def test_a_step_waits_for_the_engines_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    waited: list[float] = []
    monkeypatch.setattr(selectors.DefaultSelector, "select", lambda selector, timeout: waited.append(timeout))
    rig.set.step()
    rig.set.step(0.5)
    assert waited == [0.5]


def test_a_host_watches_one_descriptor_for_all_channels() -> None:
    rig = Rig()
    ours, theirs = socket.socketpair()
    watched: list[Any] = []
    rig.set.attach(LoopHooks(watched.append))
    with ours, theirs:
        rig.engines[0].host.watch(ours.fileno())
        assert select.select(watched, [], [], 0)[0] == []
        theirs.send(b"!")
        assert select.select(watched, [], [], 0)[0] == watched
        rig.engines[0].host.watch(None)
        assert select.select(watched, [], [], 0)[0] == []
    rig.set.close()
    assert watched[1:] == [None]


def test_a_closed_set_gives_its_descriptor_back() -> None:
    rig = Rig()
    watched: list[int | None] = []
    rig.set.attach(LoopHooks(watched.append))
    (descriptor,) = watched
    assert descriptor is not None
    os.fstat(descriptor)
    rig.set.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_replicas_are_closed_with_the_given_grace() -> None:
    for given, grace in ({}, 2.0), ({"grace": 5.0}, 5.0):
        rig, graces = Rig(), list[float]()
        for engine in rig.engines:
            vars(engine)["close"] = graces.append
        rig.set.close(**given)
        assert graces == [grace] * 2


def test_a_lost_replicas_next_engine_has_none_of_what_left_it() -> None:
    rig = Rig()
    rig.submit("a")
    rig.engines[0].frozen, rig.engines[0].silence = True, 100.0
    rig.set.step()
    (key,) = rig.engines[0].cancelled
    rig.engines[0].frozen = False
    rig.engines[0].die()
    rig.set.step()
    rig.engines[0].state, rig.engines[1].frozen = State.READY, True
    rig.send(0, EngineRequest(key, [65], Sampling(max_new_tokens=1)))
    rig.engines[0].silence = 0.0
    assert key in [output.key for step in rig.set.step() for output in step.others]


def test_replicas_with_the_same_figures_are_not_the_same() -> None:
    engine = Engine()
    first, second = (Replica(0, engine, PLACES) for _ in range(2))  # type: ignore[arg-type]
    assert len({first, second, first}) == 2


def test_the_information_is_that_of_the_first_replica_that_has_any() -> None:
    rig = Rig()
    assert rig.set.info is None
    info = EngineInfo(name="a", version="1", device="none", dtype="none", max_total_tokens=1)
    vars(rig.engines[1])["info"] = info
    assert rig.set.info is info


def test_a_failed_request_may_be_cancelled_before_it_has_moved() -> None:
    rig = Rig()
    for letter in "abcd":
        rig.submit(letter, 5)
    moving = list(rig.engines[0].active)
    assert len(moving) == 2
    rig.engines[0].die()
    rig.set.step()
    rig.set.cancel(rig.engines[1].order[0])
    assert not rig.set.admits(Request("x", Sampling()), prompt("x")), "those that move go first"
    for key in moving:
        rig.set.cancel(key)
    assert rig.set.admits(Request("x", Sampling()), prompt("x"))
    rig.set.step()
    assert rig.engines[1].order[2:] == [], "none of them has moved"


# -- which replica gets a request --------------------------------------------------------------------------------------


NO_WORDS = Vocabulary([])
IDLE = [Workload(0, 0, 0), Workload(1, 0, 0)]


def choose(router: Router, text: str, loads: list[Workload] = IDLE, **fields: Any) -> int:
    return router.choose(Request(text, **fields), Prompt(text, [], NO_WORDS), loads)


def remembers(router: Router, text: str, replica: int, **fields: Any) -> bool:
    """Return whether a request goes to this one of two replicas although the other one has less to do."""
    loads = [Workload(replica, 0, 1000), Workload(1 - replica, 0, 0)]
    return choose(copy.deepcopy(router), text, loads, **fields) == replica


def test_the_fewest_coming_tokens_decide_then_the_longest_pause() -> None:
    router = Router(16)
    assert [choose(router, str(number)) for number in range(4)] == [0, 1, 0, 1]
    assert choose(router, "x", [Workload(0, 1, 500), Workload(1, 4, 400)]) == 1
    assert choose(router, "y", [Workload(1, 9, 900)]) == 1, "the only one that takes it"


@in_one_test(("slots", "ahead", "stays"), [(16, 4, True), (16, 5, False), (2, 0, True), (2, 1, False), (256, 64, True)])
def test_a_conversation_stays_unless_its_replica_is_far_busier(slots: int, ahead: int, stays: bool) -> None:
    router = Router(slots)
    first = choose(router, "user: hi\nassistant:")
    loads = [Workload(first, ahead, 1000), Workload(1 - first, 0, 0)]
    assert (choose(router, "user: hi\nassistant: hello\nuser: and?\nassistant:", loads) == first) is stays


@pytest.mark.parametrize("opening", ["", "<think>\n", "<think>\n\n</think>\n\n"])
def test_a_thought_that_the_template_opened_is_not_in_the_next_turn(opening: str) -> None:
    router = Router(16)
    assert choose(router, f"system\nuser one<a>\n{opening}") == 0
    assert choose(router, f"system\nuser two<a>\n{opening}") == 1, "another conversation with the same beginning"
    assert choose(router, f"system\nuser one<a>\nyes\nuser more<a>\n{opening}") == 0


def test_another_adapter_is_another_cache_and_prompts_of_ids_are_prompts() -> None:
    router = Router(16)
    assert choose(router, "a b", adapter=Adapter("one", 1, "/one")) == 0
    assert choose(router, "a b c", adapter=Adapter("two", 2, "/two")) == 1
    assert choose(router, "a b d", adapter=Adapter("one", 1, "/one")) == 0
    assert choose(router, "a b e") == 1, "of no adapter"
    ids = [router.choose(Request(""), Prompt("", list(range(length)), NO_WORDS), IDLE) for length in (5, 6, 70, 71)]
    assert len(set(ids)) == 1


def test_pairs_of_one_query_spread() -> None:
    router = Router(16)
    assert [choose(router, "query", pooling=Pooling("score"), pair=str(number)) for number in range(4)] == [0, 1, 0, 1]


def test_an_empty_prompt_is_the_beginning_of_none() -> None:
    router = Router(16)
    assert [choose(router, text) for text in (" ", "a", "b", "", "c")] == [0, 1, 0, 1, 0]


def test_without_a_cache_prompts_do_not_count() -> None:
    router = Router(16, follows_prompts=False)
    assert [choose(router, "same") for _ in range(4)] == [0, 1, 0, 1]


def test_a_session_stays_while_its_replica_takes_requests() -> None:
    router = Router(4)
    first = choose(router, "a", session="s")
    busy = [Workload(first, 3, 900), Workload(1 - first, 0, 0)]
    assert choose(router, "b", busy, session="s") == first
    assert choose(router, "c", [Workload(1 - first, 0, 0)], session="s") == 1 - first
    assert choose(router, "d", session="s") == 1 - first, "it lives there now"


def test_what_is_remembered_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handler.engines.process.replicas._MAX_CHARACTERS", 100)
    monkeypatch.setattr("handler.engines.process.replicas._MAX_SESSIONS", 2)
    router = Router(16)
    prompts = [f"{number:03}" + "x" * (number % 40) for number in range(50)]
    went = [choose(router, prompt, session=str(number)) for number, prompt in enumerate(prompts)]
    known = [number for number in range(50) if remembers(router, prompts[number], went[number])]
    lengths = itertools.accumulate(len(prompt) for prompt in reversed(prompts))
    assert known == list(range(50 - sum(length <= 100 for length in lengths), 50)), "as many of the last ones as fit"
    assert [number for number in range(50) if remembers(router, "", went[number], session=str(number))] == [48, 49]
    choose(router, "y" * 101)
    assert not any(remembers(router, prompts[number], went[number]) for number in known)


def test_as_many_prompts_and_sessions_are_remembered_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handler.engines.process.replicas._MAX_PROMPTS", 2)
    monkeypatch.setattr("handler.engines.process.replicas._MAX_CHARACTERS", len("first prompt") + len("second"))
    router = Router(16)
    went = {prompt: choose(router, prompt) for prompt in ("first prompt", "second", "first prompt", "third")}
    assert [prompt for prompt in went if remembers(router, prompt, went[prompt])] == ["first prompt", "third"]
    first = went["first prompt"]
    assert choose(router, "first prompt goes on", [Workload(first, 1, 900), Workload(1 - first, 0, 0)]) == first
    monkeypatch.setattr("handler.engines.process.replicas._MAX_SESSIONS", 2)
    went = {session: choose(router, "", session=session) for session in ("a", "b", "a", "c")}
    assert [session for session in went if remembers(router, "", went[session], session=session)] == ["a", "c"]


def test_a_router_remembers_a_thousand_prompts_and_ten_thousand_sessions() -> None:
    router = Router(16)
    went = [choose(router, f"{number:04} prompt") for number in range(1025)]
    assert [remembers(router, f"{number:04} prompt", went[number]) for number in (0, 1, 1024)] == [False, True, True]
    went = [choose(router, "", session=str(number)) for number in range(10_001)]
    known = [remembers(router, "", went[number], session=str(number)) for number in (0, 1, 10_000)]
    assert known == [False, True, True]


@pytest.mark.parametrize(("length", "kept"), [(1 << 24, True), ((1 << 24) + 1, False)])
def test_a_router_remembers_so_many_characters(length: int, kept: bool) -> None:
    router = Router(16)
    replica = choose(router, "x" * length)
    assert remembers(router, "x" * length, replica) is kept


def test_the_longest_earlier_prompt_decides() -> None:
    router = Router(16)
    assert choose(router, "system: ") == 0
    assert choose(router, "system: user one", [Workload(1, 0, 0)]) == 1
    assert choose(router, "system: user one and more") == 1
    assert choose(router, "system: user two") == 0


@in_one_test("shared", ["", "system: You are a helpful assistant that answers at length\n"])
@in_one_test("order", ["one after another", "in turns", "at random"])
def test_ten_conversations_of_ten_turns_stay_and_spread_in_engines(order: str, shared: str) -> None:
    router, rng = Router(16), random.Random(order)
    turns = [number for number in range(10) for _ in range(10)]
    if order == "in turns":
        turns = list(range(10)) * 10
    elif order == "at random":
        rng.shuffle(turns)
    texts = [f"{shared}user: conversation {number}\nassistant:" for number in range(10)]
    went: list[list[int]] = [[] for _ in range(10)]
    running: list[int] = []  # the replicas of requests that have not ended
    for number in turns:
        counts = [running.count(replica) for replica in range(2)]
        replica = choose(router, texts[number], [Workload(at, count, 50 * count) for at, count in enumerate(counts)])
        went[number].append(replica)
        texts[number] += f" {number} words\nuser: and then?\nassistant:"
        running = [*running, replica][-4:] if order != "one after another" else []
    stayed = sum(one == next for of in went for one, next in itertools.pairwise(of))
    assert stayed >= 81, "of 90 turns that had one before"
    assert min(sum(of[0] == replica for of in went) for replica in range(2)) >= 3


def test_a_conversation_with_another_image_is_another_one() -> None:
    router = Router(16)

    def ask(text: str, *digests: str) -> int:
        media = SharedMedia(text, [Medium("image", (1, 1), b"rgb", digest) for digest in digests])
        return router.choose(Request(text), Prompt(text, [], NO_WORDS, media), IDLE)

    assert [ask("user: <image>", "a"), ask("user: <image>", "b")] == [0, 1]
    assert [ask("user: <image> one: and?", "b"), ask("user: <image> one: and <image>?", "a", "c")] == [1, 0]
