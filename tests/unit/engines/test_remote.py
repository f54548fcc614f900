"""How requests are retried among remote servers, on servers with a script."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from handler.config.config import Config
from handler.core.values import Finish, Sampling, StructuredOutput
from handler.engines.base import EngineConfig, EngineRequest, Output
from handler.engines.remote import engine as remote
from handler.engines.remote.engine import RemoteEngine, Running
from handler.engines.remote.servers import Failed, Part, RemoteServer, ResponseCheck, choose

BUSY = Failed("is overloaded", busy=True)
FAILED = Failed("broke down")


class Engine(RemoteEngine[ResponseCheck]):
    """An engine whose servers fail in the order of a script, and then send one token at a time."""

    def __init__(self, script: Sequence[Failed], num_tokens: int = 1) -> None:
        super().__init__("scripted", ["http://a"], 60.0)
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
    (server,) = engine._servers
    engine.begin("scripted", 100, EngineConfig(Config()), {server.url: FAILED})
    assert server.is_out(engine._loop.time())
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
