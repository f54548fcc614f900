"""Calls of a user's `handle` in any order of events: what they hold is given back, and no client waits for another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from handler.config.config import Config
from handler.core.errors import Unavailable
from handler.core.loop import settle
from handler.core.user_functions import Role
from handler.http.custom import HandleRoutes
from handler.plugins.handle import Answer, Call, Handle, PassOn, Result
from handler.serving import custom_handle
from handler.serving.custom_handle import CustomHandle
from handler.serving.quota import Quota
from tests.stepped import Clock
from tests.unit.serving.hosts import Client, Loop

MIB = 1 << 20
ROOM = 24 * MIB
"""Bytes that may wait for clients. The function may be 16 MiB ahead of a client while nobody waits for it."""


class Thread:
    """The thread of a plain function, whose calls end in their order when the machine says so."""

    def __init__(self, post: object, limit: float, *, late: type[Unavailable]) -> None:
        self.pending: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.hung: list[Callable[[], Any]] = []

    def submit(self, title: str, function: Callable[..., Any], *arguments: Any, limit: float | None = None) -> Any:
        future = Future[Any]()
        self.pending.append((future, partial(function, *arguments)))
        return future

    def finish(self, *, hangs: bool = False) -> None:
        future, call = self.pending.pop(0)
        if not future.set_running_or_notify_cancel():
            return
        if hangs:
            self.hung.append(call)
            future.set_exception(Unavailable("it did not end"))
        else:
            settle(future, call)

    def close(self) -> None: ...


def plain(item: Any) -> None: ...


def respond(handle: Handle, item: Call) -> list[Result]:
    """Respond to a call with as many parts as its body says."""
    body = item.content["data"]
    if body == b"pass":
        return [PassOn()]
    if body == b"whole":
        return [Answer(200, body=b"whole")]
    return [Answer(200, parts=parts(int(body)))]


def parts(number: int) -> Iterator[bytes]:
    for _ in range(number):
        yield bytes(MIB)


class Calls(RuleBasedStateMachine):
    """Calls of a plain function. A rule is an event; the loop runs one iteration at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.loop = Clock(1000.0), Loop()
        self.patches: list[Any] = [
            mock.patch.object(time, "monotonic", self.clock),
            mock.patch.object(custom_handle, "call", respond),
            mock.patch.object(custom_handle, "FormatterThread", self.make_thread),
        ]
        for patch in self.patches:
            patch.start()
        self.memory = Quota(ROOM, 0, 0, "too much")
        self.handle: CustomHandle = self.loop.call(self.make)
        self.clients: list[Client] = []
        self.passed_on = 0

    def make_thread(self, *arguments: Any, **options: Any) -> Thread:
        self.thread = Thread(*arguments, **options)
        return self.thread

    def make(self) -> CustomHandle:
        config = Config(predict_timeout=5, job_queue_size=9)
        return CustomHandle(Handle(plain, Role.FIRST, {}, {}), config, self.memory)

    async def pass_on(self, scope: Any, receive: Any, send: Any) -> None:
        self.passed_on += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"passed on"})

    def client(self, index: int) -> Client:
        return self.clients[index % len(self.clients)]

    # -- events --------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.clients) < 7)
    @rule(
        body=st.sampled_from([b"0", b"1", b"3", b"20", b"40", b"whole", b"pass"]),
        patience=st.booleans(),
        cancels=st.booleans(),
    )
    def call(self, body: bytes, *, patience: bool = False, cancels: bool = False) -> None:
        model: Any = SimpleNamespace(
            config=SimpleNamespace(name="m", model_name=["m"]),
            availability=SimpleNamespace(state="ready"),
            check_room=bool,
        )
        routes = HandleRoutes(self.handle.answer, model, self.pass_on)
        self.clients.append(self.loop.call(lambda: Client(routes, body, patience=patience, cancels=cancels)))

    @rule(times=st.integers(1, 4))
    def iterate(self, times: int) -> None:
        for _ in range(times):
            self.loop.iterate()

    @precondition(lambda self: self.thread.pending)
    @rule(hangs=st.sampled_from([False] * 9 + [True]))
    def finish_on_thread(self, hangs: bool) -> None:
        self.thread.finish(hangs=hangs)
        self.iterate(2)

    @precondition(lambda self: self.thread.hung)
    @rule()
    def return_too_late(self) -> None:
        self.thread.hung.pop(0)()

    @precondition(lambda self: self.clients)
    @rule(index=st.integers(0, 9))
    def read(self, index: int) -> None:
        self.loop.call(self.client(index).read)
        self.iterate(2)

    @precondition(lambda self: self.clients)
    @rule(index=st.integers(0, 9))
    def close(self, index: int) -> None:
        client = self.client(index)
        self.loop.call(client.close)
        for _ in range(9):
            if not client.closed:
                self.loop.iterate()
        assert client.closed, "a client that has gone is not noticed"
        self.clients.remove(client)

    @rule(seconds=st.sampled_from([0.2, 0.2, 6.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.loop.iterate()

    @rule()
    def settle(self) -> None:
        """Let the function go on as far as it can while no client reads."""
        self.iterate(9)
        while self.thread.pending:
            self.thread.finish()
            self.iterate(9)
        assert all(client.has_head or client.closed for client in self.clients), "a client waits for another"

    # -- what holds after each event -----------------------------------------------------------------------------

    @invariant()
    def what_waits_for_clients_is_bounded(self) -> None:
        assert 0 <= self.memory.taken <= ROOM

    @invariant()
    def without_clients_nothing_is_held(self) -> None:
        if all(client.closed for client in self.clients):
            assert self.memory.taken == 0

    def teardown(self) -> None:
        try:
            while self.clients:
                self.close(0)
            self.end()
        finally:
            self.loop.call(self.handle.close)
            self.iterate(9)
            self.loop.close()
            for patch in self.patches:
                patch.stop()

    def end(self) -> None:
        self.settle()
        assert not asyncio.all_tasks(self.loop)
        self.call(b"whole")
        self.iterate(3)
        assert len(self.thread.pending) == 1, "the function does not wait for a client that has gone"
        self.settle()
        (client,) = self.clients
        assert (client.wire, client.closed, self.memory.taken) == (b"whole", True, 0)


TestCalls = pytest.mark.filterwarnings("error")(Calls.TestCase)
TestCalls.settings = settings(max_examples=60, stateful_step_count=40, phases=[hypothesis.Phase.generate])
