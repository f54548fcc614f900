"""Guides that are good, bad, or end what tries them; with a trial that does what the guide says."""

from __future__ import annotations

import functools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handler.core.errors import Unavailable
from handler.core.values import StructuredOutput
from handler.engines.process import sandbox
from handler.engines.process.sandbox import Job, LimitExceeded, Limits, Sandbox, TooBusy
from handler.engines.structured_output import validator
from handler.engines.structured_output.validator import PURPOSE, StructuredOutputValidator, Verdict, make_work
from tests.process_tree import alive
from tests.servers import wait_for
from tests.unit.engines import fake_guides

PATIENCE = 60  # seconds by the clock, for a busy machine


@pytest.fixture(scope="module")
def checks() -> Iterator[StructuredOutputValidator]:
    found = StructuredOutputValidator(fake_guides.make, seconds=1.0, memory=64 << 20)
    yield found
    found.close()


def outcome(checks: StructuredOutputValidator, value: str) -> str:
    return checks.check(StructuredOutput("regex", value)).result(PATIENCE)


def test_a_good_one_is_fine_and_a_wrong_one_says_why(checks: StructuredOutputValidator) -> None:
    assert outcome(checks, "fine") == ""
    assert outcome(checks, "wrong it has no end") == "it has no end"


@pytest.mark.parametrize("value", ["compute 60", "memory 100", "abort", "overflow"])
def test_one_that_takes_too_much_is_given_up_and_the_next_is_not(checks: StructuredOutputValidator, value: str) -> None:
    assert "more than 1 s (option.guide_timeout) or 64 MiB" in outcome(checks, value)
    assert outcome(checks, f"fine after {value}") == ""


def test_one_that_takes_some_computing_is_fine(checks: StructuredOutputValidator) -> None:
    """In a later lane: the first two stop it."""
    assert outcome(checks, "compute 0.4") == ""
    assert outcome(checks, "memory 32") == ""


def test_a_busy_machine_is_not_the_guides_fault(checks: StructuredOutputValidator) -> None:
    """Computing counts, not the clock: this one has a fifth of a second of it at first."""
    assert outcome(checks, "sleep 1.2") == ""


def test_a_machine_that_is_too_busy_for_a_short_limit_is_given_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first lane's patience is a fifth of the last one's."""
    limits: list[float] = []

    def run(self: Sandbox, job: Job, **more: Any) -> list[Verdict]:
        limits.append(job.limits.seconds)
        raise TooBusy("the machine is too busy")

    monkeypatch.setattr(Sandbox, "start", lambda self: None)
    monkeypatch.setattr(Sandbox, "run", run)
    checks = StructuredOutputValidator(fake_guides.make, seconds=5.0)
    with pytest.raises(Unavailable, match="too busy"):
        outcome(checks, "fine")
    assert limits == [0.2, 1.0, 5.0]
    checks.close()


def test_each_is_tried_once(checks: StructuredOutputValidator, tmp_path: Path) -> None:
    count, bad = tmp_path / "count", StructuredOutput("regex", "compute 61")
    together = [checks.check(StructuredOutput("regex", f"count {count}")) for _ in range(5)]
    assert [future.result(PATIENCE) for future in together] == [""] * 5
    assert outcome(checks, f"count {count}") == ""
    assert count.read_text() == "."
    first = checks.check(bad).result(PATIENCE)
    again = checks.check(bad)
    assert again.done()
    assert again.result() == first != ""


def test_what_is_not_the_clients_needs_no_trial() -> None:
    checks = StructuredOutputValidator(fake_guides.broken, seconds=1.0)
    assert checks.check(StructuredOutput("json_object", "")).result(0) == ""
    assert checks.pid is None


def test_nothing_that_libraries_write_of_a_guide_reaches_the_log(
    checks: StructuredOutputValidator, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome(checks, "fine and private")
    assert "private" not in "".join(capfd.readouterr())


def test_one_owners_flood_leaves_anothers_of_the_same_sort_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validator, "_CAPACITY", (8, 8, 8))
    checks = StructuredOutputValidator(fake_guides.make, seconds=1.0)
    flood = [checks.check(StructuredOutput("regex", f"sleep 0.2{number:02}"), "a") for number in range(40)]
    others = [checks.check(StructuredOutput("regex", f"sleep 0.0{number:02}"), "b") for number in range(3)]
    shared = checks.check(StructuredOutput("regex", "sleep 0.239"), "b")
    assert [future.result(PATIENCE) for future in (*others, shared)] == [""] * 4
    refused = [future for future in flood if future.exception(PATIENCE) is not None]
    assert len(refused) >= 28
    assert flood[39] in refused, "the same text goes on for its other owner"
    checks.close()


def test_good_ones_go_past_bad_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Good ones wait for a fifth of a second of each bad one, in either of two places."""
    monkeypatch.setattr(validator, "_CAPACITY", (256, 256, 2))
    checks = StructuredOutputValidator(fake_guides.make, seconds=0.3)
    bad = [checks.check(StructuredOutput("regex", f"compute {60 + n}.5")) for n in range(8)]
    assert outcome(checks, "fine in company") == ""
    assert not all(one.done() for one in bad)
    outcomes = [future.exception(PATIENCE) or future.result() for future in bad]
    assert all(isinstance(one, Unavailable) or "more than 0.3 s" in str(one) for one in outcomes)
    assert any(isinstance(one, Unavailable) for one in outcomes), "the last lane's queue is short"
    checks.close()


def test_a_text_of_another_sort_goes_past_a_row_of_costly_ones() -> None:
    """Sixty of them, with a fifth of a second each in either of two places, would take it six seconds."""
    checks = StructuredOutputValidator(fake_guides.make, seconds=0.3)
    assert outcome(checks, "fine") == ""
    bad = [checks.check(StructuredOutput("regex", f"compute {100 + n}")) for n in range(60)]
    good = checks.check(StructuredOutput("json_schema", "fine in company"))
    assert good.result(PATIENCE) == ""
    assert sum(one.done() for one in bad) < 10
    checks.close()


def test_a_full_lane_has_room_for_a_text_of_another_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validator, "_CAPACITY", (4, 4, 4))
    checks = StructuredOutputValidator(fake_guides.make, seconds=0.3)
    assert outcome(checks, "fine") == ""
    bad = [checks.check(StructuredOutput("regex", f"compute {100 + n}")) for n in range(12)]
    assert checks.check(StructuredOutput("json_schema", "fine in company")).result(PATIENCE) == ""
    assert any(isinstance(one.exception(PATIENCE), Unavailable) for one in bad)
    checks.close()


def test_what_is_prepared_for_all_counts_for_none() -> None:
    checks = StructuredOutputValidator(fake_guides.long_prepared, seconds=0.4)
    assert outcome(checks, "fine") == outcome(checks, "prepared") == ""
    assert "more than 0.4 s" in outcome(checks, "compute 2")
    checks.close()


def test_a_dead_process_is_started_again_and_its_guide_was_not_tried() -> None:
    checks = StructuredOutputValidator(fake_guides.make, seconds=1.0)
    try:
        assert outcome(checks, "fine") == ""
        first = checks.pid
        with pytest.raises(Unavailable, match="has ended"):
            outcome(checks, "orphan")
        assert outcome(checks, "fine again") == ""
        assert checks.pid != first
    finally:
        checks.close()


def test_what_cannot_be_loaded_turns_guides_away(caplog: pytest.LogCaptureFixture) -> None:
    checks = StructuredOutputValidator(fake_guides.broken, seconds=1.0)
    for value in ("one", "two"):
        with pytest.raises(Unavailable, match=r"cannot be checked \(.*guide_timeout=0.*\): no tokenizer"):
            outcome(checks, value)
    assert caplog.text.count("Traceback") == 1, "it is not tried again at once"
    checks.close()


def test_what_cannot_be_sent_to_the_process_turns_guides_away(caplog: pytest.LogCaptureFixture) -> None:
    """All of them: no lane's thread is lost over it."""
    checks = StructuredOutputValidator(lambda: fake_guides.try_guide, seconds=1.0)
    checks.start()
    for value in ("one", "two", "three"):
        with pytest.raises(Unavailable, match=r"cannot be checked .*local object"):
            outcome(checks, value)
    checks.close()


def test_who_waits_is_told_when_it_is_closed_and_who_comes_later_too() -> None:
    checks = StructuredOutputValidator(fake_guides.make, seconds=1000.0)
    assert outcome(checks, "fine") == ""
    waiting = [checks.check(StructuredOutput("regex", f"sleep 100{n}")) for n in range(5)]
    checks.close()
    for future in [*waiting, checks.check(StructuredOutput("regex", "late"))]:
        assert future.done()
        with pytest.raises(Unavailable, match="stopping"):
            future.result()


def test_it_can_be_closed_while_it_loads() -> None:
    """Threads that raise fail the test."""
    before = threading.enumerate()
    checks = StructuredOutputValidator(fake_guides.slow_to_make, seconds=1.0)
    waiting = checks.check(StructuredOutput("regex", "fine"))
    wait_for(lambda: checks.pid is not None, 10, "no process")
    pid = checks.pid
    assert pid is not None
    threads = [
        each for each in threading.enumerate() if each not in before and each.name in ("guides", "trials-reaper")
    ]
    checks.close()
    with pytest.raises(Unavailable, match="stopping"):
        waiting.result(0)
    wait_for(lambda: not alive(pid), 10, "it lives on")
    for thread in threads:
        thread.join(15)  # to load takes twenty seconds
        assert not thread.is_alive()
    assert checks.pid is None or not alive(checks.pid)


def test_a_process_that_does_not_react_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_END_SECONDS", 0.05)
    process = Sandbox(functools.partial(make_work, fake_guides.make), PURPOSE)
    process.start()
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    process.close()
    wait_for(lambda: not alive(pid), PATIENCE, "it lives on")


def test_too_much_in_the_moment_of_the_end_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = StructuredOutputValidator(fake_guides.make, seconds=1.0)

    def run(self: Sandbox, job: Job, **more: Any) -> list[Verdict]:
        checks.close()
        raise LimitExceeded

    monkeypatch.setattr(Sandbox, "run", run)
    with pytest.raises(Unavailable, match="stopping"):
        outcome(checks, "fine")


def test_a_guide_is_not_refused_if_a_process_dies_and_has_a_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Sandbox(functools.partial(make_work, fake_guides.make), PURPOSE)
    process.start()
    first = process.pid
    assert first is not None

    real = process._outcome

    def outcome(channel: socket.socket, job: Job, *more: Any) -> Any:
        if process.pid != first:
            return real(channel, job, *more)
        lost = process._process
        assert lost is not None
        assert process._control is not None
        hangs_up = select.poll()
        hangs_up.register(process._control, 0)
        os.killpg(first, signal.SIGKILL)  # with the job's own process, which may have its socket still
        lost.wait(10)
        assert hangs_up.poll(10_000), "some process has its socket still"
        ours, theirs = socket.socketpair()
        with ours, theirs:
            process._hand_over(theirs)  # another lane's guide
        raise LimitExceeded

    monkeypatch.setattr(process, "_outcome", outcome)
    try:
        assert process.run(Job(StructuredOutput("regex", "fine"), Limits(1.0, 64 << 20, 20.0, 0))) == [Verdict()]
        assert process.pid not in (None, first)
    finally:
        process.close()


def test_a_process_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_FORK_SECONDS", 1.0)
    checks = StructuredOutputValidator(fake_guides.make, seconds=1.0)
    try:
        assert outcome(checks, "fine") == ""
        first = checks.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        assert outcome(checks, "fine again") == ""
        assert checks.pid != first
        wait_for(lambda: not alive(first), 10, "it lives on")
    finally:
        checks.close()


def test_it_can_be_loaded_before_anybody_asks_and_ends_with_its_host() -> None:
    checks = StructuredOutputValidator(fake_guides.make, seconds=1.0)
    checks.start()
    wait_for(lambda: checks.pid is not None, 10, "no process")
    pid = checks.pid
    assert pid is not None
    checks.check(StructuredOutput("regex", "sleep 1000"))
    time.sleep(0.2)
    checks.close()
    wait_for(lambda: not alive(pid), 10, "it lives on")


class Engine:
    """What keeps guides."""

    def __init__(self) -> None:
        self.replica_restarts = [0, 0]
        self.told: list[int] = []

    def restart_when_idle(self, replica: int) -> None:
        self.told.append(replica)


def test_one_owners_guides_leave_an_engine_memory_for_anothers() -> None:
    checks = StructuredOutputValidator(fake_guides.make, seconds=1.0, engine=Engine())

    def result(text: str, owner: str) -> str:
        return checks.check(StructuredOutput("regex", text), owner).result(PATIENCE)

    try:
        assert [result(f"keep 250 {n}", "a") for n in range(2)] == [""] * 2
        for _ in range(2):  # tried, then known
            with pytest.raises(Unavailable, match="already keeps 512 MiB of schemas and grammars of this API key"):
                result("keep 250 more", "a")
        assert [result(f"keep 250 of b {n}", "b") for n in range(2)] == [""] * 2
    finally:
        checks.close()


def test_replicas_that_keep_guides_are_replaced_within_their_limits() -> None:
    engine = Engine()
    checks = StructuredOutputValidator(fake_guides.make, seconds=1.0, engine=engine)
    try:
        for n in range(2):
            assert outcome(checks, f"keep 250 {n}") == ""
            assert outcome(checks, f"keep 250 {n}") == "", "known, and kept already"
        assert engine.told == []
        for n in range(2, 4):
            assert outcome(checks, f"keep 250 {n}") == ""
        assert engine.told == [0, 1], "each once"
        for _ in range(2):  # tried, then known
            with pytest.raises(Unavailable, match="already keeps 1024 MiB"):
                outcome(checks, "keep 250 more")
        assert outcome(checks, "keep 250 3") == outcome(checks, "fine") == outcome(checks, "keep 20") == ""
        engine.replica_restarts[0] += 1
        with pytest.raises(Unavailable, match="already keeps 1024 MiB"):  # the other replica still does
            outcome(checks, "keep 250 more")
        engine.replica_restarts[1] += 1
        assert outcome(checks, "keep 250 more") == outcome(checks, "keep 250 0") == ""
        assert engine.told == [0, 1]
        assert outcome(checks, "keep 250 1") == ""
        assert engine.told == [0, 1, 0, 1], "what they had before they have no longer"
    finally:
        checks.close()


_HOST = """
import sys
from handler.core.values import StructuredOutput
from handler.engines.structured_output.validator import StructuredOutputValidator
from tests.unit.engines import fake_guides
checks = StructuredOutputValidator(fake_guides.make, seconds=1000.0)
assert checks.check(StructuredOutput("regex", "fine")).result() == ""
checks.check(StructuredOutput("regex", sys.argv[1]))
print(checks.pid, flush=True)
checks.check(StructuredOutput("regex", sys.argv[1])).result()
"""


@pytest.mark.parametrize("act", ["sleep 1000", "compute 1000"])
def test_nothing_outlives_a_host_that_is_killed(act: str) -> None:
    with subprocess.Popen([sys.executable, "-c", _HOST, act], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        pid = int(host.stdout.readline())
        wait_for(lambda: bool(children(pid)), 10, "no trial")
        trials = children(pid)
        host.kill()
    wait_for(lambda: not any(map(alive, [pid, *trials])), 10, "they live on")


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
