"""Engines in front of servers, in the loop of the engine process, to which they pass steps from their own loop."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from handler.config.config import Config
from handler.core.values import Finish, Sampling
from handler.engines.base import EngineConfig, EngineRequest, EngineStatistics, Interrupted, OwnServerLost, Step
from handler.engines.grpc.engine import GrpcEngine
from handler.engines.openai import engine as openai_engine
from handler.engines.openai.kinds import KINDS
from handler.engines.openai.sglang.engine import SglangEngine
from handler.engines.process.engine_process import Cancel, EngineFailed
from handler.engines.process.own_server import OwnServer
from handler.engines.remote.engine import RemoteEngine, Running
from handler.engines.remote.servers import Ill, Part, RemoteServer, ResponseCheck, Software
from tests.doubles import grpc_servers, sglang_server, tiny
from tests.process.engines.engine_threads import EngineThread, engine_thread
from tests.servers import wait_for

SAMPLING = Sampling(max_new_tokens=4, logprobs=False)
LONG = Sampling(max_new_tokens=4000, logprobs=False, ignore_eos=True)


def config(server: Any, kind: str, **options: Any) -> EngineConfig:
    given = {"base_url": (server.url,), "base_url_kind": kind, "base_url_connect_timeout": 5.0}
    return EngineConfig(Config(engine_options={**given, "base_url_timeout": 30.0, **options}))


def num_tokens(messages: list[Any]) -> int:
    steps = [message for message in messages if isinstance(message, Step)]
    return sum(len(step.ids) + sum(len(output.ids) for output in step.others) for step in steps)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_statistics_are_reported_when_all_requests_have_ended(tmp_path: Path, kind: str) -> None:
    model = tiny.make(tmp_path)
    with grpc_servers.listening(kind) as server:
        settings = config(server, kind)
        made = EngineConfig(settings.options, model=model)
        with engine_thread(lambda: GrpcEngine(made)) as host:
            for key in (1, 2):
                host.send(EngineRequest(key, [301, 302, 303], SAMPLING))
                messages = host.until_end(key)
                assert num_tokens(messages) == 4
                assert not any(isinstance(message, EngineFailed) for message in messages)
            wait_for(lambda: server.num_loads_asked >= 2, 10, "the statistics of the end are not asked for")


def test_statistics_are_reported_while_a_request_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handler.engines.process.engine_process._REPORT_INTERVAL", 0.01)
    with sglang_server.listening(context=8000, pace=0.01) as server:

        class Counting(SglangEngine):
            count = 0

            def statistics(self) -> EngineStatistics:
                self.count += 1
                return EngineStatistics(num_waiting=self.count)

        with engine_thread(lambda: Counting(config(server, "sglang"), KINDS["sglang"])) as host:
            host.send(EngineRequest(1, [5, 6, 7], LONG))
            reports = 0
            while reports < 5:
                message = host.receive()
                assert message is not None
                reports += isinstance(message, EngineStatistics)


def test_sglang_is_told_that_a_request_has_ended_early() -> None:
    with (
        sglang_server.listening(context=100_000, pace=0.01, disconnect_seconds=sglang_server.NEVER) as server,
        engine_thread(lambda: openai_engine.load(config(server, "sglang"))) as host,
    ):
        host.send(EngineRequest(1, [5, 2, 7], LONG._replace(stop_token_ids=(7,))))
        host.until_end(1)
        wait_for(lambda: not server.running, 10, "the server computes tokens for nobody")
        assert len(server.aborted) == 1


# -- a server that the engine has started ------------------------------------------------------------------------------


class Own(OwnServer):
    """Stands for a server that an engine has started; `words` say how it has ended."""

    words = ""

    def __init__(self) -> None:
        pass

    end = None

    def failure(self) -> str:
        return self.words

    def stop(self, *args: Any) -> None:
        pass


class Scripted(RemoteEngine[ResponseCheck]):
    """Request 1 gets a token, and its server fails when request 2 is cancelled. Other requests get many tokens."""

    def __init__(self, own: Own | None = None) -> None:
        super().__init__(Software("scripted"), ["http://a"], 60.0, 0.0, own)
        self.begin("scripted", 1000, EngineConfig(Config()), {})
        self.fails = asyncio.Event()

    def new_call(self, request: EngineRequest) -> ResponseCheck:
        return ResponseCheck(request.sampling)

    def give(
        self, server: RemoteServer, running: Running[ResponseCheck], id: int, finish: Finish | None = None
    ) -> None:
        part = Part(finish=finish)
        running.call.take(part, [id], [None], [])
        self.take(server, running, part)

    async def stream(self, server: RemoteServer, running: Running[ResponseCheck]) -> None:
        self.give(server, running, 7)
        if running.key == 1:
            await self.fails.wait()
            raise Ill("is broken")
        try:
            await asyncio.sleep(1000)
        finally:
            self.fails.set()

    async def check(self, server: RemoteServer) -> None:
        pass

    async def disconnect(self) -> None:
        pass


def test_a_broken_server_is_reported_even_if_no_request_is_left() -> None:
    with engine_thread(lambda: Scripted(Own())) as host:
        host.send(EngineRequest(1, [1], LONG), EngineRequest(2, [1], LONG))
        seen: set[int] = set()
        while seen != {1, 2}:
            seen.update(host.receive().keys)
        host.send(Cancel(2))
        lost = failure(host)
        assert (lost.reason, lost.lost_server) == ("the server is broken", True)


def failure(host: EngineThread) -> EngineFailed:
    while not isinstance(message := host.receive(), EngineFailed):
        assert message is not None
    return message


class Streaming(Scripted):
    """Its own server ends after a token. What the server has sent before arrives later, with a command."""

    def __init__(self, own: Own, command: int) -> None:
        super().__init__(own)
        self.own, self.command = own, command

    async def stream(self, server: RemoteServer, running: Running[ResponseCheck]) -> None:
        self.give(server, running, 0)
        self.own.words = "has ended"
        os.write(self.command, b"!")
        self._lose_own()
        for id in range(1, 10):
            await asyncio.sleep(0.002)
            self.give(server, running, id, Finish.LENGTH if id == 9 else None)


def test_what_an_own_server_has_sent_comes_before_its_end_even_if_a_command_waits() -> None:
    commands, sender = os.pipe()
    engine = Streaming(Own(), sender)
    engine.interrupt_on(commands)
    steps: list[Step] = []

    def keep(step: Step) -> bool:
        steps.append(step)
        return True

    try:
        engine.add(EngineRequest(1, [1], LONG))
        with pytest.raises(OwnServerLost, match="the server has ended"):
            engine.run_steps(keep)
        assert num_tokens(list(steps)) == 10
    finally:
        engine.close()
        os.close(commands)
        os.close(sender)


def test_an_end_just_after_a_step_does_not_lose_it() -> None:
    class Ending(Scripted):
        async def stream(self, server: RemoteServer, running: Running[ResponseCheck]) -> None:
            self.give(server, running, 7)
            own.words = "has ended"
            self._loop.call_soon(self._lose_own)  # once the step has been taken
            await asyncio.sleep(1000)

    own = Own()
    engine = Ending(own)
    try:
        engine.add(EngineRequest(1, [1], LONG))
        assert engine.step().ids == [7]
        with pytest.raises(OwnServerLost):
            engine.step()
    finally:
        engine.close()


def test_a_command_just_after_a_step_does_not_lose_it() -> None:
    commands, sender = os.pipe()

    class Interrupted50(Scripted):
        async def stream(self, server: RemoteServer, running: Running[ResponseCheck]) -> None:
            for id in range(50):
                self.give(server, running, id, Finish.LENGTH if id == 49 else None)
                self._loop.call_soon(os.write, sender, b"!")  # once the step has been taken
                await asyncio.sleep(0.001)

    engine, ids, deadline = Interrupted50(), list[int](), time.monotonic() + 30
    engine.interrupt_on(commands)
    try:
        engine.add(EngineRequest(1, [1], LONG))
        while len(ids) < 50:
            assert time.monotonic() < deadline
            try:
                step = engine.step()
            except Interrupted:
                os.read(commands, 100)
                continue
            ids += step.ids + [id for output in step.others for id in output.ids]
        assert ids == [*range(50)]
    finally:
        engine.close()
        os.close(commands)
        os.close(sender)
