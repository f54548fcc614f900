"""Every rule of `lmi conform` fails on a server that breaks it, and passes on one that holds all."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from handler.cli import main
from handler.core.errors import ConfigError
from proof.conform import run as running
from proof.conform import sources
from proof.conform.dialects import GENERATING, PROFILES
from proof.conform.rule import RULES
from proof.conform.run import ConformPlan, Result, run
from proof.conform.server import Asking, Command, ContainerRun, Limits
from tests.app.server import serve
from tests.doubles.downloads import serving
from tests.moving.conform.decisions import Form
from tests.moving.conform.mutants import ELSEWHERE, IMPOSSIBLE, MUTANTS, Mutate
from tests.moving.conform.scripted import Scripted
from tests.moving.conform.websockets import PATHS
from tests.moving.conform.wire import Reply, Request
from tests.servers import free_port, options

LIMITS = Limits(response=20, long=1.5, payload=300_000, abandoned=3)
"""Of servers that hold all rules: SageMaker's, but for what would last long."""

SHORT = replace(LIMITS, whole=1.0, ping=0.3, abandoned=0.3, stop=3.0)
"""Of servers that break one."""

KEYED = ("key.every-route", "key.right", "key.ping")
LIFETIME = [rule for rule in RULES if rule.startswith(("start.", "stop."))]

BREAKABLE = [
    (rule.id, profile)
    for rule in RULES.values()
    for profile in rule.profiles[: 1 if rule.profiles == GENERATING else None]
    if rule.id not in LIFETIME
]
"""Rules with the profiles that may ask them in another way; those of all profiles ask alike."""


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
        return {
            result.rule.id: result for result in run(ConformPlan(asking, [profile], rules), None, lambda result: None)
        }


def test_every_rule_has_a_mutant() -> None:
    assert sorted([*MUTANTS, *ELSEWHERE]) == sorted(RULES)


def test_a_rule_is_a_sentence_with_a_source() -> None:
    for rule in RULES.values():
        assert rule.sentence.endswith("."), rule.id
        assert "|" not in rule.sentence, rule.id
        assert rule.source.url.startswith("https://") or rule.source is sources.OURS, rule.id
        assert {*rule.profiles} <= {*PROFILES}, rule.id


@pytest.mark.parametrize(("rule", "profile"), BREAKABLE)
def test_a_server_that_breaks_a_rule_fails_it(rule: str, profile: str) -> None:
    server = Scripted(rule, profile, key="a-key" if rule in KEYED else "")
    result = ask(server, profile, rule, limits=SHORT, slow=True)[rule]
    assert result.verdict == "failed", result
    assert result.expected, result
    assert result.got, result
    assert "a-key" not in result.request


class Impossible(Scripted):
    """Changes its answers as a mutant does."""

    def __init__(self, profile: str, mutate: Mutate) -> None:
        super().__init__("", profile)
        self.mutate = mutate

    async def send(self, reply: Reply, writer: asyncio.StreamWriter) -> None:
        self.mutate(self.asked, reply)
        await super().send(reply, writer)

    async def reply_to(self, request: Request) -> Reply:
        self.asked = request
        return await super().reply_to(request)


@pytest.mark.parametrize(("rule", "profile", "mutate"), IMPOSSIBLE)
def test_an_impossible_value_fails_a_rule(rule: str, profile: str, mutate: Mutate) -> None:
    server = Impossible(profile, mutate)
    result = ask(server, profile, rule, limits=SHORT)[rule]
    assert result.verdict == "failed", result


def test_pings_of_a_stream_are_no_fault() -> None:
    def mutate(request: Request, reply: Reply) -> None:
        if reply.events:
            ping: Any = {"type": "ping"}
            reply.events = [part for event in reply.events for part in (ping, event)] + [ping]

    rules = ("anthropic.order", "anthropic.event-names", "anthropic.start", "anthropic.end", "stream.same-text")
    results = ask(Impossible("anthropic", mutate), "anthropic", *rules, limits=SHORT)
    assert {rule: result.verdict for rule, result in results.items()} == dict.fromkeys(rules, "passed")


class Lacking(Scripted):
    """Leaves a field out of every answer."""

    def __init__(self, profile: str, *path: Any) -> None:
        super().__init__("", profile)
        self.path = path

    async def send(self, reply: Reply, writer: asyncio.StreamWriter) -> None:
        for document in reply.events or [reply.value]:
            with contextlib.suppress(LookupError, TypeError):  # it has no such place
                place = document
                for name in self.path[:-1]:
                    place = place[name]
                del place[self.path[-1]]
        await super().send(reply, writer)


CHAT, COMPLETION, MESSAGE = ("openai.chat",), ("openai.completion",), ("anthropic.message", "anthropic.usage")
CHUNKS, EVENTS = ("openai.chunks",), ("anthropic.order", "anthropic.start", "anthropic.end", "anthropic.event-names")
SYSTEM_ONE = ("systemone.result", "systemone.usage", "systemone.probabilities")
DECISIONS = ("decisions.result", "decisions.usage", "decisions.probabilities", "decisions.levels")
REQUIRED: dict[tuple[str, ...], str] = {
    SYSTEM_ONE: "model answers usage usage.input_tokens usage.output_tokens answers.refund answers.refund.type "
    "answers.refund.noul answers.area.choice answers.area.probabilities answers.area.confidence answers.anger.score "
    "answers.anger.legend answers.anger.probabilities answers.anger.confidence",
    DECISIONS: "model answers usage answers.0 answers.0.type answers.0.name answers.0.probability answers.1.choice "
    "answers.1.confidence answers.1.probabilities answers.1.probabilities.0.value "
    "answers.1.probabilities.0.probability answers.2.score answers.2.probabilities.0.label usage.input_tokens "
    "usage.input_tokens_details usage.input_tokens_details.cached_tokens usage.output_tokens "
    "usage.input_tokens_details.cache_write_tokens usage.output_tokens_details "
    "usage.output_tokens_details.reasoning_tokens usage.total_tokens",
    CHAT: "id object created model choices choices.0.index choices.0.message choices.0.finish_reason",
    CHUNKS: "id object created model choices choices.0.index choices.0.delta",
    COMPLETION: "id object created model choices choices.0.index choices.0.text choices.0.finish_reason "
    "usage.prompt_tokens usage.completion_tokens usage.total_tokens",
    MESSAGE: "id type role model content content.0.type content.0.text usage usage.input_tokens usage.output_tokens",
    EVENTS: "type index message.id message.type message.role message.model message.content message.usage.input_tokens "
    "message.usage.output_tokens content_block content_block.type content_block.text delta.type usage.output_tokens",
}
"""What the types of the packages openai 3.57, anthropic 2.14 and typesafe-sdk 0.7.5 require.

The key has the rules of which one must require it.
"""


@pytest.mark.parametrize(
    ("rules", "field"), [(rules, field) for rules, fields in REQUIRED.items() for field in fields.split()]
)
def test_a_field_that_sdks_require_has_a_rule(rules: tuple[str, ...], field: str) -> None:
    profile = RULES[rules[0]].profiles[0]
    path = [int(name) if name.isdecimal() else name for name in field.split(".")]
    results = ask(Lacking(profile, *path), profile, *rules, limits=SHORT)
    assert "failed" in {result.verdict for result in results.values()}


class Restless(Scripted):
    """Gives each answer another text, though it is greedy."""

    _answered = 0

    async def send(self, reply: Reply, writer: asyncio.StreamWriter) -> None:
        self._answered += 1
        text = str(self._answered).encode()
        if reply.events is not None:
            reply.events = [reply.encode(event).replace(b" three", b" t" + text) for event in reply.events]
        else:
            reply.value = reply.body.replace(b" three", b" t" + text)
        await super().send(reply, writer)


class Silent(Scripted):
    """Streams nothing."""

    async def send(self, reply: Reply, writer: asyncio.StreamWriter) -> None:
        if reply.events is not None:
            await asyncio.Event().wait()
        await super().send(reply, writer)


class Mute(Scripted):
    """Generates nothing."""

    async def send(self, reply: Reply, writer: asyncio.StreamWriter) -> None:
        if reply.made:
            await asyncio.Event().wait()
        await super().send(reply, writer)


@pytest.mark.parametrize("profile", ["lmi-0.28", "lmi-0.38", "tgi", "openai", "anthropic"])
def test_rules_that_need_one_greedy_text_are_not_asked_where_it_changes(profile: str) -> None:
    rules = ["stream.same-text", "bad.alone", f"{profile.partition('-')[0]}.stop"]
    results = ask(Restless("", profile), profile, *rules, limits=LIMITS)
    assert {rule: result.verdict for rule, result in results.items()} == dict.fromkeys(rules, "not asked")
    assert all("greedy responses differ" in result.expected for result in results.values())


def test_rules_that_need_the_speed_are_skipped_where_it_is_unmeasurable() -> None:
    result = ask(Silent(), "sagemaker", "disconnect.stream", limits=replace(LIMITS, response=1.0))["disconnect.stream"]
    assert (result.verdict, result.expected[:9]) == ("not asked", "64 tokens")


def test_a_rule_that_takes_too_long_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_RULE", 0.1)
    result = ask(Silent(), "sagemaker", "stream.chunked", limits=LIMITS)["stream.chunked"]
    assert (result.verdict, result.expected) == ("not asked", "the check did not end within 0.1 s")


def test_an_answer_beyond_timeout_is_not_asked() -> None:
    """One beyond a limit of the contract fails: `limits.whole-answer` has a mutant for it."""
    result = ask(Mute("", "lmi-0.28"), "lmi-0.28", "stream.chunked", limits=replace(LIMITS, response=0.5))[
        "stream.chunked"
    ]
    assert (result.verdict, result.expected) == ("not asked", "no response within 0.5 s (--timeout)")


def test_a_run_that_ends_early_keeps_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = RULES["stream.chunked"]

    def run(plan: ConformPlan, lifetime: object, tell: Callable[[Result], object]) -> list[Result]:
        tell(Result(rule, "sagemaker", "passed"))
        assert [one["rule"] for one in json.loads(file.read_text())["results"]] == [rule.id]
        raise KeyboardInterrupt

    file = tmp_path / "report.json"
    monkeypatch.setattr(running, "run", run)
    assert main(["conform", "http://127.0.0.1:1", "--output", str(file)]) != 0
    assert json.loads(file.read_text())["counts"] == {"passed": 1, "failed": 0, "not asked": 0}
    assert list(tmp_path.iterdir()) == [file]


def test_a_report_to_a_link_or_pipe_leaves_it_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the last result only."""
    link, pipe, target = tmp_path / "link.json", tmp_path / "pipe.json", tmp_path / "target"
    link.symlink_to(target)
    os.mkfifo(pipe)
    piped = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # so that neither end waits for the other

    def run(plan: ConformPlan, lifetime: object, tell: Callable[[Result], object]) -> list[Result]:
        for name in ("stream.chunked", "ping.ready"):
            assert not target.exists()
            tell(Result(RULES[name], "sagemaker", "passed"))
        return []

    monkeypatch.setattr(running, "run", run)
    assert main(["conform", "http://127.0.0.1:1", "--output", str(link), "--output", str(pipe)]) == 0
    for text in (target.read_text(), os.read(piped, 1 << 16)):
        assert json.loads(text)["counts"]["passed"] == 2
    os.close(piped)
    assert link.is_symlink()
    assert pipe.is_fifo()
    assert sorted(tmp_path.iterdir()) == [link, pipe, target]


@pytest.mark.parametrize(("number", "status"), [(errno.EBUSY, 0), (errno.ENOSPC, 1)])
def test_a_report_that_cannot_be_replaced_is_overwritten_if_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    """As a file that is a mount of its own, in a container."""

    def run(plan: ConformPlan, lifetime: object, tell: Callable[[Result], object]) -> list[Result]:
        tell(Result(RULES["ping.ready"], "sagemaker", "passed"))
        return []

    def replace(part: Path, path: Path) -> Path:
        raise OSError(number, os.strerror(number))

    file = tmp_path / "report.md"
    file.write_text("before")
    monkeypatch.setattr(running, "run", run)
    monkeypatch.setattr(Path, "replace", replace)
    assert main(["conform", "http://127.0.0.1:1", "--output", str(file)]) == status
    assert (file.read_text() == "before") == bool(status)
    assert list(tmp_path.iterdir()) == [file]


def test_an_answer_that_ends_with_its_connection_is_whole() -> None:
    """As of HTTP/1.0: only the rule about lengths is broken."""
    server = Scripted("invocations.whole-length", "lmi-0.28")
    results = ask(server, "lmi-0.28", "invocations", "lmi", limits=SHORT)
    assert [rule for rule, result in results.items() if result.verdict == "failed"] == ["invocations.whole-length"]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_server_that_holds_all_rules_passes(profile: str) -> None:
    results = ask(Scripted("", profile, key="a-key"), profile, limits=LIMITS)
    assert {rule: result for rule, result in results.items() if result.verdict == "failed"} == {}
    left_out = {rule for rule, result in results.items() if result.verdict == "not asked"}
    assert left_out == ({*LIFETIME, "limits.long-stream"} if profile == "sagemaker" else set())


class Vllm(Scripted):
    """Decides as vLLM 0.33 does."""

    def __init__(self) -> None:
        super().__init__()
        self.form = Form(is_vllm=True)


VLLM_DIFFERS = {
    "systemone.formula", "systemone.error", "systemone.model", "systemone.request-id", "systemone.models",
    "systemone.invocations", "systemone.compressed", "decisions.invocations", "decisions.compressed", "decisions.json",
}  # fmt: skip


def test_what_vllm_does_otherwise_is_documented(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    with scripted(Vllm()) as url:
        assert main(["conform", url, "--profile", "decisions", "--output", str(report)]) == 1
    failed, rules = report.read_text().split("## Rules")
    lines = [line for line in rules.splitlines() if line.endswith("| failed |")]
    assert {line.split(" | ")[0].removeprefix("| ") for line in lines} == VLLM_DIFFERS
    assert failed.count("* documented difference: vLLM 0.33") == len(VLLM_DIFFERS)


def test_rules_of_a_missing_route_are_not_asked() -> None:
    class Without(Scripted):
        """Has System One only, as SGLang's chat templates and llama.cpp's files have it."""

        async def send(self, reply: Reply, writer: asyncio.StreamWriter) -> None:
            await super().send(reply, writer)

        async def answer(self, request: Any, reader: Any, writer: Any) -> None:
            request.path = request.path.replace("/v1/decisions", "/nowhere")
            await super().answer(request, reader, writer)

    results = ask(Without(), "decisions", "systemone.order", "decisions", limits=LIMITS)
    assert results.pop("systemone.order").verdict == "passed"
    assert {result.verdict for result in results.values()} == {"not asked"}
    assert {result.expected for result in results.values()} == {"the server has no /v1/decisions"}


@pytest.mark.parametrize(
    ("broken", "patience", "verdict"),
    [("", 60, "passed"), ("disconnect.stream", 60, "failed"), ("disconnect.stream", 0, "not asked")],
)
def test_without_a_gauge_the_speed_shows_whether_the_engine_stops(broken: str, patience: float, verdict: str) -> None:
    """One that stays slow is busy with something else."""
    limits = replace(LIMITS, long=12, patience=patience)
    for _ in range(3):  # a busy machine may make it unclear
        result = ask(Scripted(broken, gauge=False), "lmi-0.28", "disconnect.stream", limits=limits)
        found = result["disconnect.stream"].verdict
        assert found in (verdict, "not asked"), result
        if found == verdict:
            return
    assert not broken, result


def test_a_stream_may_last_longer_than_a_whole_answer() -> None:
    limits = replace(LIMITS, response=1.0, whole=1.0, long=0.1)
    result = ask(Scripted(), "sagemaker", "limits.long-stream", limits=limits, slow=True)["limits.long-stream"]
    assert result.verdict != "failed", result  # on a busy machine it may be too short


def test_a_server_without_metrics_fails_one_rule_for_that() -> None:
    with scripted(Scripted()) as url:
        asking = Asking(url, metrics="/nowhere", limits=LIMITS)
        results = run(ConformPlan(asking, ["sagemaker"], ["metrics"]), None, lambda result: None)
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
    results = run(ConformPlan(asking, ["sagemaker"], LIFETIME), command, lambda result: None)
    failed = {result.rule.id for result in results if result.verdict == "failed"}
    assert failed == ({broken} if broken else set()), results


DOCKER = """#!/bin/sh
echo 'Cannot connect to the Docker daemon' >&2
exit 1
"""
PODMAN = """#!/bin/sh
case "$*" in
"container inspect "*" ours") kill -0 {pid} && echo true ;;
"kill --signal TERM ours") kill {pid} ;;
*) echo "no such container" >&2; exit 1 ;;
esac
"""
"""As podman does of a container that it removes at its end."""


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of container engines that stands before all others: docker without its daemon, and podman."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name, text in {"docker": DOCKER, "podman": PODMAN}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def test_a_container_of_podman_is_stopped_and_may_be_removed_at_its_end(engines: Path) -> None:
    port = free_port()
    words = [sys.executable, "-m", "tests.moving.conform.scripted", f"--port={port}"]
    with subprocess.Popen(words) as process:
        reaper = threading.Thread(target=process.wait)
        reaper.start()
        (engines / "podman").write_text(PODMAN.format(pid=process.pid))
        asking = Asking(f"http://127.0.0.1:{port}", limits=LIMITS)
        results = run(ConformPlan(asking, ["sagemaker"], ["stop"]), ContainerRun("ours"), lambda result: None)
        reaper.join()
    assert {result.rule.id: result.verdict for result in results} == dict.fromkeys(
        ("stop.finishes", "stop.new-work", "stop.exit"), "passed"
    )


def test_a_container_that_no_engine_has_is_named_with_what_each_said(engines: Path) -> None:
    plan = ConformPlan(Asking("http://127.0.0.1:1"), ["sagemaker"])
    with pytest.raises(ConfigError, match=r"theirs: docker: Cannot connect to the Docker daemon; podman: no such"):
        run(plan, ContainerRun("theirs"), lambda result: None)


def test_a_command_that_no_rule_stops_is_ended_by_sigterm(tmp_path: Path) -> None:
    """`docker run` ends its container then."""
    port = free_port()
    server = f"{sys.executable} -m tests.moving.conform.scripted --port={port}"
    script = f"{server} & trap 'kill $!; touch {tmp_path}/told; exit' TERM; wait"
    command = Command(shlex.join(["sh", "-c", script]))
    run(ConformPlan(Asking(f"http://127.0.0.1:{port}"), ["sagemaker"], ["ping.ready"]), command, lambda result: None)
    assert (tmp_path / "told").exists()


def test_a_command_that_ends_at_once_says_so() -> None:
    plan = ConformPlan(Asking(f"http://127.0.0.1:{free_port()}"), ["sagemaker"], ready=20)
    with pytest.raises(ConfigError, match="the server exited before it was ready"):
        run(plan, Command("false"), lambda result: None)


class Odd(BaseHTTPRequestHandler):
    """Answers everything with JSON of no API, which a terminal obeys and UTF-8 cannot write."""

    protocol_version = "HTTP/1.1"
    body = json.dumps({"token": [1], "data": [{"id": "\ud800\x1b[31m"}], "error": "\ud800\x1b[31m"}).encode()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("content-type", "application/jsonlines")
        self.send_header("content-length", str(2 * len(self.body) + 1))
        self.end_headers()
        self.wfile.write(self.body + b"\n" + self.body)

    do_GET = do_POST

    def log_message(self, *words: object) -> None: ...


def test_an_answer_of_no_form_breaks_its_rule_and_not_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Odd)) as url:
        assert main(["conform", url, "--profile", "lmi-0.38", "--rule", "lmi.last-line", "--rule", "lmi.stop"]) == 1
    out, told = capfd.readouterr()
    assert "failed     lmi-0.38   lmi.last-line  a response in the API's format (AttributeError" in told
    assert "lmi.stop" in told
    assert "* asked: `POST /invocations" in out
    assert "\x1b" not in out + told


def test_a_rule_of_another_profile_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "http://127.0.0.1:1", "--rule", "tgi.root"]) == 2
    assert "tgi.root: needs --profile tgi" in capsys.readouterr().err


def test_a_report_without_its_directory_is_refused_before_any_request(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["conform", "http://127.0.0.1:1", "--output", "/nowhere/report.md"])
    assert "there is no directory /nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["conform", "bench"])
@pytest.mark.parametrize(("key", "reason"), [("", "it requires a key"), ("wrong", "it refuses the key in LMI_API_KEY")])
def test_a_server_with_a_key_ends_the_command_at_its_first_401(
    command: str, key: str, reason: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with serve("--engine", "echo", env={"LMI_API_KEY": "a-key"}) as server:
        monkeypatch.setenv("LMI_API_KEY", key)
        arguments = ["--clients", "2", "--requests", "2"] if command == "bench" else []
        assert main([command, server.url, *arguments]) == 2
    out, told = capfd.readouterr()
    assert out == ""
    assert f"{server.url} responds with status 401: {reason}; set LMI_API_KEY=KEY in the environment" in told
    assert "failed" not in told


# -- our server holds every rule, in each of its modes -----------------------------------------------------------------


ANY = (
    "option.echo_tokens_per_second=1000",
    "option.enable_lora=true",
    "option.enable_stateful_sessions=true",
    "option.max_model_len=5000",
)
MODES = {
    "rolling batch": ((), ("sagemaker", "lmi-0.28", "openai", "anthropic", "triton", "decisions", "websockets")),
    "async": (("option.lmi_version=0.38",), ("sagemaker", "lmi-0.38", "openai", "websockets")),
    "tgi": (("option.tgi_version=3.3", "option.tgi_metrics=true"), ("sagemaker", "tgi", "websockets")),
    "tgi_compat": (("option.tgi_compat=true",), ("sagemaker", "websockets")),
}
"""Options, and the profiles that they are for."""


def test_a_server_with_websockets_off_fails_their_rules_and_says_why(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    slowly = options("option.websockets_max=0", "option.echo_tokens_per_second=1000")  # a response takes a while
    with serve("--engine", "echo", *slowly) as server:
        assert main(["conform", server.url, "--profile", "websockets", "--timeout", "60", "--output", str(file)]) == 1
    results = json.loads(file.read_text())["results"]
    assert [result["rule"] for result in results if result["result"] == "passed"] == ["upgrade.refused"]
    others = [result for result in results if result["rule"] != "upgrade.refused"]
    assert [result for result in others if result["result"] != "failed"] == []
    assert all("option.websockets_max=0" in result["got"] for result in others)


def test_rules_of_a_missing_websocket_are_not_asked() -> None:
    class Without(Scripted):
        """Has no realtime sessions, as an engine's server."""

        sockets = PATHS[:2]

    results = ask(Without(), "websockets", "realtime", "responses.create", limits=LIMITS)
    assert results.pop("responses.create").verdict == "passed"
    told = {(result.verdict, result.expected) for result in results.values()}
    assert told == {("not asked", "the server has no WebSocket at /v1/realtime")}


@pytest.mark.parametrize("mode", MODES)
def test_our_server_holds_every_rule(tmp_path: Path, mode: str) -> None:
    more, profiles = MODES[mode]
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    (tmp_path / "adapter_model.safetensors").touch()
    limits = replace(LIMITS, payload=25_000_000)
    given = options(*ANY, *more, f"option.adapters_root={tmp_path}")
    with serve("--engine", "echo", *given, env={"LMI_API_KEY": "a-key"}) as server:
        asking = Asking(server.url, key="a-key", adapter=f"sql={tmp_path}", limits=limits)
        results = run(ConformPlan(asking, profiles), None, lambda result: None)
    assert [result for result in results if result.verdict == "failed"] == []
    left_out = {result.rule.id for result in results if result.verdict == "not asked"}
    assert left_out == {*LIFETIME, "limits.long-stream"}


@pytest.mark.parametrize("profile", ["lmi-0.28", "lmi-0.38", "tgi"])
def test_a_report_names_the_profile_of_the_targets_origin(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether its rules were asked, too. The clients of a server that replaces TGI rely on TGI's format."""
    for asked in ("sagemaker", profile):
        file = tmp_path / f"{asked}.json"
        with scripted(Scripted("", profile)) as url:
            words = ["conform", url, "--profile", asked, "--rule", "stream.chunked", "--output", str(file)]
            assert main(words) == 0
        told = capsys.readouterr()
        (origin,) = json.loads(file.read_text())["origins"]
        number = sum(profile in rule.profiles for rule in RULES.values())
        assert (origin["profile"], origin["asked"], origin["rules"]) == (profile, asked == profile, number)
        assert f"Clients of this server may rely on {profile} (" in told.out
        assert (f"{number} rules, not asked: add `--profile {profile}`" in told.err) == (asked != profile)
