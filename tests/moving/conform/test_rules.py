"""Every rule of `lmi conform` fails on a server that breaks it, and passes on one that holds all."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from handler.conform.process import Command
from handler.conform.rule import PROFILES, RULES
from handler.conform.run import Plan, Result, run
from handler.conform.server import Asking, Limits
from tests.moving.conform.mutants import ELSEWHERE, MUTANTS
from tests.moving.conform.scripted import Scripted
from tests.ports import free_port

LIMITS = Limits(answer=20, long=1.5, payload=300_000, abandoned=3)
"""Of servers that hold all rules: SageMaker's, but for what would last long."""

SHORT = replace(LIMITS, whole=1.0, ping=0.3, abandoned=0.3, stop=3.0)
"""Of servers that break one."""

KEYED = ("key.every-route", "key.right", "key.ping")
LIFETIME = [rule for rule in RULES if rule.startswith(("start.", "stop."))]


@contextlib.contextmanager
def scripted(server: Scripted) -> Iterator[str]:
    """Run it on a thread, and yield its URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.listen(), loop).result(10)
        yield f"http://127.0.0.1:{server.port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def ask(server: Scripted, profile: str, *rules: str, limits: Limits, slow: bool = False) -> dict[str, Result]:
    with scripted(server) as url:
        asking = Asking(url, key=server.key, adapter="sql=/adapters/sql", slow=slow, limits=limits)
        return {result.rule.id: result for result in run(Plan(asking, [profile], rules), None, lambda result: None)}


def test_every_rule_has_a_mutant() -> None:
    assert sorted([*MUTANTS, *ELSEWHERE]) == sorted(RULES)


def test_a_rule_is_a_sentence_with_a_source() -> None:
    for rule in RULES.values():
        assert rule.sentence.endswith("."), rule.id
        assert "|" not in rule.sentence, rule.id
        assert rule.source.url.startswith("https://"), rule.id
        assert {*rule.profiles} <= {*PROFILES}, rule.id


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in LIFETIME])
def test_a_server_that_breaks_a_rule_fails_it(rule: str) -> None:
    profile = RULES[rule].profiles[0]
    server = Scripted(rule, profile, key="a-key" if rule in KEYED else "")
    result = ask(server, profile, rule, limits=SHORT, slow=True)[rule]
    assert result.verdict == "failed", result
    assert result.wanted, result
    assert result.got or rule.startswith("disconnect."), result
    assert "a-key" not in result.asked


@pytest.mark.parametrize("profile", PROFILES)
def test_a_server_that_holds_all_rules_passes(profile: str) -> None:
    results = ask(Scripted("", profile, key="a-key"), profile, limits=LIMITS)
    assert {rule: result for rule, result in results.items() if result.verdict == "failed"} == {}
    left_out = {rule for rule, result in results.items() if result.verdict == "not asked"}
    assert left_out == ({*LIFETIME, "limits.long-stream"} if profile == "sagemaker" else set())


@pytest.mark.parametrize(
    ("broken", "patience", "verdict"),
    [("", 60, "passed"), ("disconnect.stream", 60, "failed"), ("disconnect.stream", 0, "not asked")],
)
def test_a_server_without_a_gauge_shows_by_its_speed_whether_its_engine_stops(
    broken: str, patience: float, verdict: str
) -> None:
    """One that stays slow is busy with something else."""
    limits = replace(LIMITS, long=12, patience=patience)
    result = ask(Scripted(broken, gauge=False), "lmi-0.28", "disconnect.stream", limits=limits)
    assert result["disconnect.stream"].verdict == verdict, result


def test_a_server_without_metrics_fails_one_rule_for_that() -> None:
    with scripted(Scripted()) as url:
        asking = Asking(url, metrics="/nowhere", limits=LIMITS)
        results = run(Plan(asking, ["sagemaker"], ["metrics"]), None, lambda result: None)
    assert [(result.rule.id, result.verdict) for result in results] == [
        ("metrics.format", "failed"),
        ("metrics.few", "not asked"),
        ("metrics.count", "not asked"),
    ]


@pytest.mark.parametrize("broken", ["", *LIFETIME])
def test_the_beginning_and_the_end_of_a_command(broken: str) -> None:
    port = free_port()
    slow = 0.3 if broken.startswith("start.") else 0.0
    words = [sys.executable, "-m", "tests.moving.conform.scripted", f"--port={port}", f"--slow-start={slow}"]
    command = Command(" ".join([*words, f"--broken={broken}"]))
    asking = Asking(f"http://127.0.0.1:{port}", limits=replace(LIMITS, stop=3.0 if broken else 30.0))
    results = run(Plan(asking, ["sagemaker"], LIFETIME), command, lambda result: None)
    failed = {result.rule.id for result in results if result.verdict == "failed"}
    assert failed == ({broken} if broken else set()), results
