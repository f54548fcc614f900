"""How requests are retried among remote servers, on servers with a script."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from handler.config.config import Config
from handler.core.errors import ConfigError
from handler.core.values import Extras, Finish, Pooling, Sampling, StructuredOutput, Thoughts
from handler.engines.base import Alternatives, EngineConfig, EngineInfo, EngineRequest, Interrupted, Output
from handler.engines.remote import engine as remote
from handler.engines.remote.engine import RemoteEngine, Running
from handler.engines.remote.servers import (
    VLLM,
    BrokeOff,
    Busy,
    Failed,
    Part,
    Refused,
    RemoteServer,
    ResponseCheck,
    Software,
    choose,
)

BUSY = Busy("is overloaded")
FAILED = Failed("broke down")


class Engine(RemoteEngine[ResponseCheck]):
    """An engine whose servers fail in the order of a script, and then send one token at a time."""

    def __init__(self, script: Sequence[Failed], num_tokens: int = 1) -> None:
        super().__init__(Software("scripted"), ["http://a"], 60.0)
        self.servers = self._servers
        self.script, self.num_tokens = iter(script), num_tokens
        self.on_trial: list[bool] = []
        self.num_checks = 0
        self.disconnected = False
        self.begin("scripted", 100, EngineConfig(Config()), {})

    def new_call(self, request: EngineRequest) -> ResponseCheck:
        return ResponseCheck(request.sampling)

    async def stream(self, server: RemoteServer, running: Running[ResponseCheck]) -> None:
        if (error := next(self.script, None)) is not None:
            raise error
        for left in reversed(range(self.num_tokens)):
            part = Part(finish=None if left else Finish.LENGTH)
            running.call.take(part, [65], [None], [])
            self.take(server, running, part)
            self.on_trial.append(not server.serves(self._loop.time()))

    async def check(self, server: RemoteServer) -> None:
        self.num_checks += 1

    async def disconnect(self) -> None:
        self.disconnected = True


async def _now() -> float:
    return asyncio.get_running_loop().time()


def now(engine: RemoteEngine[Any]) -> float:
    """Return the time by which an engine leaves servers out."""
    return engine.complete(_now())


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_PAUSE", 0.0)
    monkeypatch.setattr("handler.engines.remote.servers._PAUSE", 0)


def last(script: Sequence[Failed], num_tokens: int = 1) -> tuple[Output, Engine]:
    """Run a request to its end, and return its last output and the engine."""
    engine = Engine(script, num_tokens)
    try:
        engine.add(EngineRequest(1, [65], Sampling(max_new_tokens=num_tokens, logprobs=False)))
        for _ in range(100):
            for output in engine.step().others:
                if output.finish is not None:
                    return output, engine
    finally:
        engine.close()
    raise AssertionError("the request has no end")


@pytest.mark.parametrize(
    ("script", "error", "retry_after"),
    [
        ([BUSY, BUSY, BUSY], "the scripted server is busy: it is overloaded", 0.0),
        ([FAILED, FAILED, BUSY], "the scripted server is busy: it is overloaded", 0.0),
        ([BUSY, FAILED, FAILED], "the scripted server broke down", None),
        ([BUSY, BUSY, FAILED], "the scripted server broke down", None),
    ],
)
def test_a_server_that_was_busy_and_then_fails_has_failed(
    script: Sequence[Failed], error: str, retry_after: float | None
) -> None:
    output, _ = last(script)
    assert (output.finish, output.error, output.retry_after) == (Finish.ERROR, error, retry_after)


def test_the_first_token_ends_a_servers_trial() -> None:
    output, engine = last([FAILED], num_tokens=3)
    assert output.finish is Finish.LENGTH
    assert engine.on_trial == [False] * 3, "other requests may use the server while this one is still running"


def test_a_known_server_is_not_checked_before_each_request() -> None:
    _, engine = last([], num_tokens=3)
    assert engine.num_checks == 0


def test_the_engines_end_closes_its_connections() -> None:
    _, engine = last([])
    assert engine.disconnected


def test_a_server_that_failed_at_startup_gets_no_requests_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handler.engines.remote.servers._PAUSE", 60)
    engine = Engine([])
    (server,) = engine.servers
    engine.begin("scripted", 100, EngineConfig(Config()), {server.url: FAILED})
    assert server.is_out(now(engine))
    engine.close()


def test_a_server_on_trial_gets_one_request() -> None:
    server, other = RemoteServer("http://a"), RemoteServer("http://b")
    other.known, other.outstanding = True, 1000
    server.failed(0.0)
    server.known, now = True, 100.0  # the pause is over, and the server has confirmed its model
    assert choose([server, other], Counter(), now) is server
    server.outstanding = 1
    assert choose([server, other], Counter(), now) is other
    server.begun()
    assert choose([server, other], Counter(), now) is server


class Silent(Engine):
    """An engine whose server never answers."""

    async def stream(self, server: RemoteServer, running: Running[ResponseCheck]) -> None:
        await asyncio.get_running_loop().create_future()


def test_a_request_is_its_servers_burden_until_it_is_cancelled() -> None:
    engine = Silent([])
    (server,) = engine._servers
    engine.add(EngineRequest(1, [65, 66], Sampling(max_new_tokens=3, logprobs=False)))
    engine.step()
    assert server.outstanding == 5
    engine.cancel(1)
    assert server.outstanding == 0
    engine.cancel(1)
    engine.close()


class Asked(Engine):
    """An engine that counts what it asks its server."""

    num_asked = 0

    async def stream(self, server: RemoteServer, running: Running[ResponseCheck]) -> None:
        self.num_asked += 1
        await super().stream(server, running)


def test_what_a_server_did_not_enforce_on_a_prompt_is_asked_again() -> None:
    engine = Asked([])
    rule = StructuredOutput("regex", "[0-9]")
    for key, num_asked in ((1, 6), (2, 9)):  # three probes of any prompt, and three of this one for each request
        engine.add(EngineRequest(key, [66], Sampling(max_new_tokens=1, logprobs=False, structured_output=rule)))
        while not (ends := engine.step().others):
            pass
        assert "does not enforce structured output on this prompt" in str(ends[0].error)
        assert engine.num_asked == num_asked
    engine.close()


# -- several servers, on a script for each -----------------------------------------------------------------------------


TOKEN = "a token"
HELD = "the end, which is held back"
END = "the end, though the stream goes on"
WAIT = "silence until `go_on`"
NOTHING = "silence"
Line = Failed | Refused | Exception | Part | str


class Several(RemoteEngine[ResponseCheck]):
    """An engine whose servers do what their scripts say for each request, and then send one token."""

    def __init__(
        self,
        *scripts: Sequence[Line],
        max_silence: float = 60.0,
        checks: Sequence[Failed] = (),
        urls: Sequence[str] = (),
        kind: Software = VLLM,
    ) -> None:
        urls = urls or [f"http://server-{n}.example:80" for n in range(len(scripts))]
        super().__init__(kind, urls, max_silence)
        self.scripts = {server: list(script) for server, script in zip(self._servers, scripts, strict=True)}
        self.asked: list[int] = []
        self.checks, self.num_checks = list(checks), 0
        self.go_on = asyncio.Event()
        self.calls: list[ResponseCheck] = []
        self.begin("vllm", 100, EngineConfig(Config()), {})

    @property
    def servers(self) -> list[RemoteServer]:
        return self._servers

    def new_call(self, request: EngineRequest) -> ResponseCheck:
        call = ResponseCheck(request.parameters if isinstance(request.parameters, Sampling) else Sampling())
        self.calls.append(call)
        return call

    async def stream(self, server: RemoteServer, running: Running[ResponseCheck]) -> None:
        self.asked.append(self._servers.index(server))
        script = self.scripts[server]
        while script:
            line = script.pop(0)
            if isinstance(line, Exception):
                raise line
            if line == NOTHING:
                await asyncio.get_running_loop().create_future()
            if line == WAIT:
                await self.go_on.wait()
                self.go_on.clear()
                continue
            if isinstance(line, Part):
                self.take(server, running, line)
                continue
            part = Part(finish=Finish.LENGTH if line in (HELD, END) else None)
            running.call.take(part, [65], [None], [])
            if line == HELD:
                self.hold(running, part)
            else:
                self.take(server, running, part)
                await asyncio.sleep(0)
        if running.held is not None:
            return self.release(server, running)
        part = Part(finish=Finish.LENGTH)
        running.call.take(part, [66], [None], [])
        self.take(server, running, part)

    async def check(self, server: RemoteServer) -> None:
        self.num_checks += 1
        if self.checks:
            raise self.checks.pop(0)

    async def disconnect(self) -> None:
        pass


@pytest.fixture
def several() -> Iterator[Callable[..., Several]]:
    made: list[Several] = []

    def make(*scripts: Sequence[Line], **more: Any) -> Several:
        made.append(Several(*scripts, **more))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def request(key: int = 1, tokens: int = 5, **more: Any) -> EngineRequest:
    return EngineRequest(key, [65, 66], Sampling(max_new_tokens=tokens, logprobs=False, **more))


def outputs(engine: RemoteEngine[Any], ends: int = 1) -> list[Output]:
    """Return all outputs until so many requests have ended. Plain tokens are outputs too."""
    found: list[Output] = []
    for _ in range(100):
        step = engine.step()
        tokens = zip(step.keys, step.ids, step.logprobs, strict=True)
        found += [Output(key, [id], [logprob]) for key, id, logprob in tokens]
        found += step.others
        if sum(output.finish is not None for output in found) >= ends:
            return found
    raise AssertionError("the requests have no end")


def end_of(engine: RemoteEngine[Any], what: EngineRequest | None = None) -> Output:
    engine.add(what or request())
    return outputs(engine)[-1]


Make = Callable[..., Several]


def test_a_request_has_two_attempts_more_than_there_are_servers(several: Make) -> None:
    engine = several([FAILED] * 9, [FAILED] * 9)
    assert end_of(engine).error == "the vllm server broke down"
    assert sorted(engine.asked) == [0, 0, 1, 1], "in turn"
    engine = several([FAILED, FAILED])
    assert end_of(engine).finish is Finish.LENGTH
    assert engine.asked == [0, 0, 0]


def test_attempts_at_the_same_server_are_made_after_growing_pauses(several: Make, monkeypatch: Any) -> None:
    monkeypatch.setattr(remote, "_PAUSE", 0.125)
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    end_of(several([FAILED] * 3))
    assert pauses == [0.125, 0.25]


def test_what_a_client_has_seen_is_not_computed_again_elsewhere(several: Make) -> None:
    engine = several([TOKEN, Failed("broke down", "why it did")], [])
    engine.servers[1].outstanding = 100
    engine.add(request())
    token, end = outputs(engine)
    assert (list(token.ids), token.finish) == ([65], None)
    assert (end.error, end.finish, end.refused, end.retry_after) == (
        "the vllm server broke down", Finish.ERROR, False, None,
    )  # fmt: skip
    assert end.detail == "http://server-0.example:80 broke down: why it did"
    assert engine.asked == [0]


def test_a_request_that_breaks_two_servers_is_not_sent_to_a_third(several: Make) -> None:
    broke = BrokeOff("closed the connection")
    engine = several([broke] * 9, [broke] * 9, [])
    for server, load in zip(engine.servers, (0, 10, 100), strict=True):
        server.outstanding = load
    assert end_of(engine).error == "the vllm server closed the connection"
    assert engine.asked == [0, 1]
    engine = several([broke, broke])
    assert end_of(engine).finish is Finish.LENGTH, "the same server twice may have been restarted"


def test_a_refusal_is_the_clients_and_is_not_tried_elsewhere(several: Make) -> None:
    engine = several([Refused(400, "the prompt is too long for server-0.example")], [])
    engine.servers[1].outstanding = 100
    end = end_of(engine)
    assert (end.refused, end.finish) == (True, Finish.ERROR)
    assert str(end.error).startswith("the prompt is too long for ")
    assert "server-0" not in str(end.error)
    assert end.detail == "http://server-0.example:80 refused the request with 400"
    assert engine.asked == [0]
    assert engine.servers[0].known, "the request was at fault"


def test_host_names_are_hidden_unless_they_are_plain_words(several: Make) -> None:
    urls = ["http://localhost:80", "http://gpu-1.example:81/v1", "http://[2001:db8::7]:82"]
    refusal = "localhost and localhost:80 and gpu-1.example:81 and gpu-1.example and [2001:db8::7]:82 and 2001:db8::7"
    engine = several([Refused(400, refusal)], [], [], urls=urls)
    for server in engine.servers[1:]:
        server.outstanding = 100
    assert end_of(engine).error == "localhost and [key] and [key] and [key] and [key] and [key]"


def test_a_refusal_without_words_has_the_servers_status(several: Make) -> None:
    assert end_of(several([Refused(422, "")])).error == "the vllm server answered 422"


def test_a_refusal_in_the_middle_of_an_answer_is_a_failure(several: Make) -> None:
    end = end_of(several([TOKEN, Refused(400, "too long")]))
    assert (end.error, end.refused) == ("the vllm server refused the request with 400", False)
    assert end.detail.endswith("too long")


def test_an_answer_that_cannot_be_read_ends_its_request_alone(several: Make) -> None:
    engine = several([KeyError("choices")])
    end = end_of(engine)
    assert end.error == "the vllm server sent a response that cannot be processed"
    assert "KeyError('choices')" in end.detail
    assert end_of(engine, request(2)).finish is Finish.LENGTH


def test_clients_of_busy_servers_may_come_back_when_the_first_allows_it(several: Make) -> None:
    slow, soon = (Busy("is overloaded", retry_after=wait) for wait in (9.0, 4.0))
    engine = several([slow] * 9, [soon] * 9)
    end = end_of(engine)
    assert (end.error, end.retry_after) == ("the vllm server is busy: it is overloaded", 4.0)
    assert sorted(engine.asked) == [0, 1], "neither is asked again before that"


def test_a_busy_server_that_names_no_time_is_asked_again(several: Make) -> None:
    engine = several([BUSY], [Busy("is overloaded", retry_after=9.0)] * 9)
    engine.servers[0].outstanding = 100
    assert end_of(engine).finish is Finish.LENGTH
    assert engine.asked == [1, 0, 0]


def test_a_server_that_fails_is_left_out_and_the_log_says_so(
    several: Make, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("handler.engines.remote.servers._PAUSE", 7.0)
    engine = several([Failed("broke down", "why")], [])
    engine.servers[1].outstanding = 100
    assert end_of(engine).finish is Finish.LENGTH
    assert engine.asked == [0, 1]
    assert (
        capsys.readouterr().err == "http://server-0.example:80 broke down: why; other servers are preferred for 7 s\n"
    )
    assert not engine.servers[0].known
    assert end_of(engine, request(2)).finish is Finish.LENGTH
    assert engine.asked == [0, 1, 1]
    assert engine.num_checks == 0, "nor is it asked for its model"


def test_a_server_that_was_out_is_asked_for_its_model_first(several: Make) -> None:
    engine = several([FAILED], checks=[Failed("has no model")])
    assert end_of(engine).finish is Finish.LENGTH
    assert engine.num_checks == 2
    assert engine.asked == [0, 0]
    (server,) = engine.servers
    assert server.known
    assert server.num_failures == 0, "it has answered"


def test_a_server_that_lost_its_model_gets_no_request(several: Make) -> None:
    engine = several([FAILED], checks=[Failed("has no model")] * 9)
    assert end_of(engine).error == "the vllm server has no model"
    assert engine.asked == [0]


def test_servers_whose_pause_is_over_are_asked_beside_the_requests(several: Make) -> None:
    engine = several([], [])
    engine.servers[1].known = False
    assert end_of(engine).finish is Finish.LENGTH
    engine.step()
    assert engine.asked == [0]
    assert engine.servers[1].known


def test_a_known_server_is_asked_again_only_on_demand_and_not_at_once(several: Make) -> None:
    engine = several([])
    (server,) = engine.servers
    for again, asked_at, num_checks in ((False, 0.0, 0), (True, 0.0, 1), (True, None, 1)):
        if asked_at is not None:
            server.asked_at = asked_at
        engine.complete(engine.ask(server, again=again))
        assert engine.num_checks == num_checks
    assert server.asked_at > 0


def test_a_silent_server_is_given_up(several: Make) -> None:
    engine = several([NOTHING], [], max_silence=0.05)
    engine.servers[1].outstanding = 100
    end = end_of(engine)
    assert end.error == "the vllm server sent no token for 0.05 s (option.base_url_timeout)"
    assert not engine.servers[0].known
    assert engine.asked == [0], "the request may be the cause"
    assert engine.servers[0].outstanding == 0


def test_the_pause_before_another_attempt_is_no_silence(several: Make, monkeypatch: Any) -> None:
    monkeypatch.setattr("handler.engines.remote.engine._PAUSE", 0.6)
    engine = several([FAILED], max_silence=0.3)
    assert end_of(engine).finish is Finish.LENGTH
    assert engine.asked == [0, 0]


def test_an_end_that_is_held_back_is_not_lost_with_its_server(several: Make) -> None:
    for after in (NOTHING, Failed("broke down")):
        engine = several([HELD, after], max_silence=0.05)
        engine.add(request())
        (end,) = outputs(engine)
        assert (list(end.ids), end.finish, end.error) == ([65], Finish.LENGTH, None)
        assert engine.asked == [0]


def test_an_end_that_is_held_back_takes_the_place_of_what_was_not_read_yet(several: Make) -> None:
    engine = several([HELD])
    engine.add(request())
    assert [list(output.ids) for output in outputs(engine)] == [[65]]


def test_a_server_with_the_fewest_tokens_to_compute_is_asked(several: Make) -> None:
    engine = several([NOTHING], [NOTHING], [NOTHING])
    for key in (1, 2):
        engine.add(request(key, tokens=5))
    engine.add(EngineRequest(3, [65], Pooling("embed")))
    engine.step()
    assert sorted(server.outstanding for server in engine.servers) == [1, 7, 7]
    for key in (1, 2, 3):
        engine.cancel(key)
    assert [server.outstanding for server in engine.servers] == [0, 0, 0]


def test_closed_connections_are_seen_before_a_request_is_sent(several: Make) -> None:
    """While no request runs, nothing else runs the loop."""
    engine, closed = several([TOKEN]), list[str]()

    async def close_soon() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, loop.call_soon, closed.append, "closed")

    engine.complete(close_soon())
    assert closed == []
    engine.add(request())
    assert closed == ["closed"]


def test_a_cancelled_request_has_no_more_output(several: Make) -> None:
    engine = several([TOKEN, NOTHING])
    engine.add(request())
    engine.complete(asyncio.sleep(0))
    assert engine.asked == [0]
    engine.cancel(1)
    step = engine.step()
    assert (step.keys, step.others) == ([], [])


def test_a_step_without_output_ends_soon_and_is_empty(several: Make) -> None:
    step = several([]).step()
    assert (step.keys, step.ids, step.logprobs, step.others) == ([], [], [], [])


def test_a_command_interrupts_one_step(several: Make) -> None:
    engine = several([NOTHING])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        assert engine.interrupt_on(ours.fileno())
        assert os.get_blocking(ours.fileno())
        theirs.send(b"!")
        with pytest.raises(Interrupted):
            engine.step()
        ours.recv(1)
        step = engine.step()
        assert (step.keys, step.others) == ([], [])


def test_all_that_a_server_sends_with_a_token_is_passed_on(several: Make) -> None:
    tops: list[Alternatives] = [((65, -0.5),)]
    for part in (
        Part(ids=[65], logprobs=[-0.5], tops=tops),
        Part(ids=[65], logprobs=[-0.5], extras=Extras()),
        Part(ids=[65], logprobs=[-0.5], prompt_logprobs=[None, -1.0], prompt_tops=tops),
        Part(ids=[65, 66], logprobs=[-0.5, -0.25]),
        Part(finish=Finish.EOS),
    ):
        engine = several([part, NOTHING])
        engine.add(request())
        (output,) = engine.step().others
        assert (output.key, output.ids, output.logprobs, output.finish) == (1, part.ids, part.logprobs, part.finish)
        assert (output.tops, output.extras) == (part.tops or None, part.extras)
        assert (output.prompt_logprobs, output.prompt_tops) == (part.prompt_logprobs, part.prompt_tops)


def test_a_plain_token_comes_in_a_steps_lists(several: Make) -> None:
    engine = several([TOKEN, NOTHING])
    engine.add(request())
    step = engine.step()
    assert (step.keys, step.ids, step.logprobs, step.others) == ([1], [65], [None], [])


def test_output_ends_a_step_at_once(several: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_IDLE", 1000.0)
    engine = several([TOKEN], [KeyError()])
    engine.servers[1].outstanding = 100
    assert end_of(engine).finish is Finish.LENGTH
    engine.servers[0].outstanding = 200
    assert end_of(engine, request(2)).error


class Clock:
    """Steps an engine once for each second that passes on the clock by which servers are silent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(remote, "_IDLE", 0.0)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def run(self, engine: Several, seconds: int) -> list[Output]:
        found: list[Output] = []
        for _ in range(seconds):
            self.now += 1.0
            for _ in range(3):
                found += engine.step().others
        return found


def test_a_server_is_silent_after_its_timeout_since_the_last_token(several: Make, monkeypatch: Any) -> None:
    clock = Clock(monkeypatch)
    engine = several([WAIT, TOKEN, WAIT, TOKEN, NOTHING], max_silence=10.0)
    engine.add(request())
    for _ in range(2):
        assert clock.run(engine, 10) == []
        engine.go_on.set()
        engine.step()
        engine.step()
    assert clock.run(engine, 10) == []
    (end,) = clock.run(engine, 1)
    assert "sent no token for 10 s" in str(end.error)


def test_a_stream_that_goes_on_after_its_end_is_given_up_soon(several: Make, monkeypatch: Any) -> None:
    clock = Clock(monkeypatch)
    for script in ([HELD, NOTHING], [END, NOTHING]):
        engine = several(script)
        engine.add(request())
        ends = clock.run(engine, 2)
        assert engine.servers[0].outstanding > 0
        ends += clock.run(engine, 1)
        assert [(list(end.ids), end.finish, end.error) for end in ends] == [([65], Finish.LENGTH, None)]
        assert engine.servers[0].outstanding == 0


def test_a_cancelled_requests_connection_is_closed_at_once(several: Make) -> None:
    engine, closed = several([NOTHING]), list[str]()
    stream = engine.stream

    async def closing(server: RemoteServer, running: Running[ResponseCheck]) -> None:
        try:
            await stream(server, running)
        finally:
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(closed.append, "one round later")

    engine.stream = closing  # type: ignore[method-assign]
    engine.add(request())
    engine.step()
    engine.cancel(1)
    assert closed == ["one round later"]


def test_a_request_may_have_the_key_of_one_that_was_cancelled(several: Make) -> None:
    engine = several([NOTHING])
    engine.add(request())
    engine.step()
    engine.cancel(1)
    assert end_of(engine).finish is Finish.LENGTH
    engine.step()
    call = weakref.ref(engine.calls.pop())
    engine.calls.clear()
    gc.collect()
    assert call() is None, "nothing is left of them"


async def forever(server: RemoteServer) -> None:
    await asyncio.get_running_loop().create_future()


async def _tasks() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}


def test_at_its_end_the_engine_waits_for_no_server(several: Make) -> None:
    engine = Several([NOTHING])
    engine.add(request())
    engine.step()

    engine.check = forever  # type: ignore[method-assign]
    engine.servers[0].known = False
    engine.add(request(2))
    engine.step()
    running = engine.complete(_tasks())
    assert len(running) == 3, "two requests and a check"
    engine.close()
    assert all(task.cancelled() for task in running)
    with pytest.raises(RuntimeError, match="closed"):
        engine.step()


def test_a_server_without_the_model_is_left_out(several: Make, monkeypatch: Any) -> None:
    monkeypatch.setattr("handler.engines.remote.servers._PAUSE", 7.0)
    engine = several([], checks=[FAILED])
    (server,) = engine.servers
    server.known = False
    with pytest.raises(Failed) as raised:
        engine.complete(engine.ask(server))
    assert raised.value is FAILED
    assert server.is_out(now(engine))


# -- what the servers report at startup --------------------------------------------------------------------------------


def begun(most: int | None, configured: int | None = None) -> Several:
    engine = Several([], [])
    engine.begin("openai", most, EngineConfig(replace(Config(), max_model_len=configured)), {})
    return engine


@pytest.mark.parametrize(
    ("reported", "configured", "most"), [(100, None, 100), (None, 50, 50), (100, 50, 50), (50, 100, 50)]
)
def test_the_smaller_limit_is_the_remote_engines(reported: int | None, configured: int | None, most: int) -> None:
    engine = begun(reported, configured)
    urls = "http://server-0.example:80, http://server-1.example:80"
    info = EngineInfo(name="openai", version="vllm", device=urls, dtype="remote", max_total_tokens=most)
    assert engine.info == info
    engine.check_max_tokens(None)
    engine.check_max_tokens(most)
    with pytest.raises(Failed, match="accepts fewer tokens per request than this handler") as raised:
        engine.check_max_tokens(most - 1)
    told = f"{most - 1} instead of {most}; to use it, restart this handler"
    assert raised.value.detail == told
    engine.close()


def test_a_limit_that_no_server_reports_must_be_set() -> None:
    with pytest.raises(ConfigError, match=r"server-0.example:80 does not report .*: set option.max_model_len"):
        begun(None)


# -- structured output -------------------------------------------------------------------------------------------------


RULE = StructuredOutput("regex", "[0-9]")


class Obedient(Several):
    """Servers that enforce rules on prompts that begin with one of some ids: the choice of a probe is its token."""

    def __init__(self, *ids: int, count: int = 1, kind: Software = VLLM) -> None:
        super().__init__(*[[]] * count, kind=kind)
        self.ids, self.probes = ids, list[tuple[Sequence[int], str]]()
        self.choices: dict[ResponseCheck, str] = {}

    def new_call(self, request: EngineRequest) -> ResponseCheck:
        call = super().new_call(request)
        rule = request.sampling.structured_output
        self.choices[call] = ""
        if rule is not None and rule.kind == "choice":
            self.probes.append((request.ids, request.sampling.cache_salt))
            if request.ids[0] in self.ids:
                (self.choices[call],) = json.loads(rule.value)
            assert request.sampling.max_new_tokens == 1
            assert not request.sampling.logprobs
        return call

    async def stream(self, server: RemoteServer, running: Running[ResponseCheck]) -> None:
        part = Part(finish=Finish.LENGTH)
        running.call.take(part, [int(self.choices[running.call] or "65")], [None], [])
        self.take(server, running, part)


@pytest.fixture
def obedient() -> Iterator[Callable[..., Obedient]]:
    made: list[Obedient] = []

    def make(*ids: int, **more: Any) -> Obedient:
        made.append(Obedient(*ids, **more))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def test_a_server_that_enforces_every_rule_is_asked_once_in_a_while(obedient: Any, monkeypatch: Any) -> None:
    engine = obedient(0)
    for key in (1, 2):
        end = end_of(engine, request(key, structured_output=RULE))
        assert (end.finish, list(end.ids)) == (Finish.LENGTH, [65])
    assert engine.probes == [([0], "")] * 3
    (server,) = engine.servers
    server.enforces_until = now(engine) + 1
    end_of(engine, request(3, structured_output=RULE))
    assert len(engine.probes) == 3
    server.enforces_until = now(engine)
    end_of(engine, request(4, structured_output=RULE))
    assert len(engine.probes) == 6
    assert server.enforces_until - now(engine) == pytest.approx(60, abs=1)


def test_a_server_is_asked_for_the_prompt_itself_under_its_salt(obedient: Any) -> None:
    engine = obedient(65)
    assert end_of(engine, request(1, structured_output=RULE, cache_salt="s")).finish is Finish.LENGTH
    assert engine.probes == [([0], "")] * 3 + [([65, 66], "s")] * 3


def test_a_rule_that_is_not_enforced_is_refused_with_the_reason(obedient: Any) -> None:
    engine = obedient()
    end = end_of(engine, request(1, structured_output=RULE))
    assert (end.refused, end.finish) == (True, Finish.ERROR)
    assert end.error == (
        "the vllm server does not enforce structured output on this prompt; "
        "with --reasoning-parser, it does so only after the reasoning has ended"
    )
    assert end.detail == "http://server-0.example:80 does not enforce it"


def test_a_rule_after_reasoning_is_left_to_vllm_alone(obedient: Any) -> None:
    rule = RULE._replace(allows_text=True)
    thoughts = Thoughts(("<think>",), ("</think>",), is_open=True)
    for kind, given, finish in (
        (VLLM, {"structured_output": rule, "thoughts": thoughts}, Finish.LENGTH),
        (VLLM, {"structured_output": rule}, Finish.ERROR),
        (VLLM, {"structured_output": RULE, "thoughts": thoughts}, Finish.ERROR),
        (Software("tgi"), {"structured_output": rule, "thoughts": thoughts}, Finish.ERROR),
    ):
        engine = obedient(kind=kind)
        end = end_of(engine, request(1, **given))
        assert end.finish is finish
        assert (end.error is None) == (finish is Finish.LENGTH)


def test_requests_share_the_probes_of_their_server(obedient: Any) -> None:
    engine = obedient(0)
    for key in (1, 2, 3):
        engine.add(request(key, structured_output=RULE))
    assert {end.key for end in outputs(engine, 3)} == {1, 2, 3}
    assert len(engine.probes) == 3
    engine.servers[0].enforces_until = 0.0
    end_of(engine, request(4, structured_output=RULE))
    assert len(engine.probes) == 6, "later ones are probed anew"


def test_a_failure_has_a_servers_rules_asked_again_but_being_busy_has_not(several: Make) -> None:
    for error, until in ((BUSY, 7.0), (FAILED, 0.0)):
        engine = several([])
        (server,) = engine.servers
        server.enforces_until = 7.0
        engine.leave_out(server, error)
        assert server.enforces_until == until
