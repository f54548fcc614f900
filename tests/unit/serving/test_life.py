"""A request's life in any order of events: what it holds is given back, each counter is right, and it ends once."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from handler.config.loader import read_config
from handler.core.errors import GenerationFailed, InvalidPayload, ServingError
from handler.core.framing import dumps
from handler.core.values import Finish
from handler.engines.base import Output, Step
from handler.engines.echo.engine import EchoTokenizer
from handler.plugins.api import TextGenerationOutput
from handler.plugins.functions import Formatters, OutputFormatter, Style
from handler.protocols.kernel.context import ServerContext
from handler.protocols.registry import ROUTES, choose
from handler.scheduler.lora import AdapterHome, AdapterRegistry
from handler.serving.metrics.tracing import RequestRecord
from handler.serving.model import ServedModel
from handler.serving.preprocessor import Preprocessor
from handler.serving.request import stages
from handler.serving.request.life import (
    ACCEPT,
    CLOSE,
    CLOSED,
    COMMIT,
    END,
    FINISHED,
    JOIN,
    OUTPUT,
    RECEIVING,
    START,
    SUBMIT,
    TRANSITIONS,
    Event,
    IllegalEvent,
    Life,
    Phase,
)
from handler.serving.request.task import RequestTask
from tests.stepped import INFO, Clock
from tests.unit.serving.hosts import (
    PIXELS,
    Engine,
    FormatterCalls,
    Host,
    Java,
    JavaHost,
    Loop,
    Store,
    Threads,
    WebHost,
)

LONG = "x" * 300
"""A word that makes a body so long that threads work on it."""
CHAT = "/v1/chat/completions"
INVOCATIONS = "/invocations"
INFER = "/v2/models/{model}/infer"
RESPONSES = "/v1/responses"
TALKS = [f"{RESPONSES} conv_{number}" for number in (1, 2)]
"""Responses in conversations."""
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
OPTIONS = (
    "option.llm_engine=echo", "option.rolling_batch=disable", "batch_size=2", "max_batch_delay=100", "job_queue_size=5",
    "option.predict_timeout=5", "option.request_time_limit=20", "option.responses_store=memory",
)  # fmt: skip
AnyHost = Host | WebHost | JavaHost
KINDS = st.sampled_from(["stepped", "http", "grpc", "java"])
DRAWN_ROUTES = st.sampled_from([CHAT, CHAT, INVOCATIONS, RESPONSES, *TALKS, INFER])


def body_of(route: str, text: str, *, streams: bool, media: bool) -> Any:
    """Return the body of a request."""
    content: Any = [{"type": "text", "text": text}, IMAGE] if media else text
    return {
        CHAT: {"messages": [{"role": "user", "content": content}], "stream": streams, "max_tokens": 9},
        INVOCATIONS: {"inputs": text, "parameters": {"max_new_tokens": 9}, "stream": streams},
        RESPONSES: {"input": text, "max_output_tokens": 9, "stream": streams},
        INFER: {
            "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [text]}],
            "parameters": {"timeout": 3_000_000},
        },
    }[route]


class Requests(RuleBasedStateMachine):
    """Requests to one model with dynamic batches. A rule is an event; the loop runs one iteration at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(1000.0)
        self.patches: list[Any] = [mock.patch.object(time, "monotonic", self.clock)]
        self.patches += [mock.patch.object(stages, "PARSE_INLINE", len(LONG))]
        self.patches += [mock.patch("handler.protocols.kernel.reply._LONG", 0)]
        for patch in self.patches:
            patch.start()
        self.loop, self.engine = Loop(), Engine()
        self.hosts: list[AnyHost] = []
        self.records: list[RequestRecord] = []
        self.num_tokens = 0  # tokens of requests that were not cancelled
        self.formats = False  # whether there was a request whose tokens are formatted on a thread
        self.num_formatted = 0  # tokens
        self.store = Store(lambda *call: self.threads.submit(*call))
        self.model: ServedModel = self.loop.call(self.make)
        self.java = self.loop.call(lambda: Java(self.model))
        self.threads = Threads(self.model.admission.media)
        self.model.admission.threads = self.model.admission.media = self.threads
        self.model.admission.formatters = FormatterCalls(self.threads, self.loop.call_soon_threadsafe)
        self.model.admission.tokenize_inline = len(LONG)
        self.model.metrics.recorders.append(self.records.append)

    def make(self) -> ServedModel:
        config = read_config(overrides=OPTIONS, environ={}).checked()
        context = replace(ServerContext(engine="scripted", config=config), no_media={"image": ""})
        formatters = Formatters(output=OutputFormatter("w", self.write, Style.OUTPUT))
        store: Any = self.store
        dialect = choose(replace(config, rolling_batch="auto"))  # the one with formatters, behind a gate all the same
        preprocessor = Preprocessor(dialect, context, EchoTokenizer(), lambda: INFO, formatters, store=store)
        model = ServedModel(config, self.engine, preprocessor, AdapterHome(AdapterRegistry()))  # type: ignore[arg-type]
        model.start()
        return model

    def write(self, output: TextGenerationOutput) -> str:
        """Format a token, as the output formatter of a model.py."""
        self.num_formatted += 1
        token, *_ = output.sequences[0].get_next_token()
        return "" if token is None else str(token.text)

    def host(self, index: int) -> AnyHost:
        return self.hosts[index % len(self.hosts)]

    # -- events --------------------------------------------------------------------------------------------------

    @initialize(hosts=st.lists(st.tuples(st.integers(0, 15), KINDS, DRAWN_ROUTES), min_size=2, max_size=4))
    def begin(self, hosts: list[tuple[int, str, str]]) -> None:
        for flags, kind, route in hosts:
            self.admit(flags, kind=kind, route=route)

    @precondition(lambda self: len(self.hosts) < 7)
    @rule(
        flags=st.integers(0, 15),
        valid=st.sampled_from([True] * 7 + [False]),
        kind=KINDS,
        route=DRAWN_ROUTES,
    )
    def admit(self, flags: int, *, valid: bool = True, kind: str = "stepped", route: str = CHAT) -> None:
        streams, is_long, media, patience = (bool(flags >> bit & 1) for bit in range(4))
        streams = streams and route != INFER
        self.formats = self.formats or route == INVOCATIONS
        route, _, conversation = route.partition(" ")
        body = body_of(route, f"a b {LONG if is_long else ''}", streams=streams, media=media)
        body |= {"conversation": conversation} if conversation else {}
        data, dialect = dumps(body) if valid else b"{", ROUTES.get(route)

        def opened() -> AnyHost:
            if kind == "stepped":
                return Host(self.model, data, streams=streams, patience=patience, dialect=dialect)
            if kind == "java":
                path = route.replace("{model}", "model")
                return JavaHost(self.model, self.java, data, patience=patience, route=path)
            return WebHost(self.model, data, patience=patience, cancels=kind == "grpc", dialect=dialect)

        self.hosts.append(self.loop.call(opened))

    @precondition(lambda self: self.hosts)
    @rule()
    def settle(self) -> None:
        """Let all requests go on as far as they can without the engine."""
        for _ in range(6):
            while self.threads.pending:
                self.threads.finish(0)
            for _ in range(4):
                self.loop.iterate()
        self.pass_time(0.2)
        self.iterate(4)

    @rule(times=st.integers(1, 4))
    def iterate(self, times: int) -> None:
        for _ in range(times):
            self.loop.iterate()

    @precondition(lambda self: self.threads.pending)
    @rule(index=st.integers(0, 9), fails=st.sampled_from([False, False, False, True]))
    def finish_on_thread(self, index: int, fails: bool) -> None:
        self.threads.finish(index, InvalidPayload("no") if fails else None)

    @precondition(lambda self: self.threads.pending)
    @rule(index=st.integers(0, 9))
    def hang_on_thread(self, index: int) -> None:
        self.threads.finish(index, hangs=True)

    @precondition(lambda self: self.threads.hung)
    @rule()
    def return_too_late(self) -> None:
        """Return from a call whose thread has been given up."""
        with contextlib.suppress(ServingError):
            self.threads.hung.pop(0)()

    @precondition(lambda self: self.hosts)
    @rule(mask=st.sampled_from([0, 0, 1, 6]), ends=st.sampled_from([0, 0, 0, 1, 2, 7]), once=st.booleans())
    def token(self, mask: int, ends: int, *, once: bool) -> None:
        """A step of the engine: it has not heard of what was cancelled since the last one."""
        if not self.engine.active and not self.engine.late:
            self.settle()
        chosen = {key for index, key in enumerate(sorted(self.engine.active)) if not mask >> index & 1}
        last = {key for index, key in enumerate(sorted(chosen)) if ends >> index & 1 and once}
        step = Step([], [], [], [])
        for key in [*self.engine.late, *sorted(chosen - last)]:
            step.keys.append(key)
            step.ids.append(1)
            step.logprobs.append(-0.1)
        for key in sorted(last):
            step.others.append(Output(key, [1], [-0.1], Finish.LENGTH))
            del self.engine.active[key]
        self.num_tokens += len(chosen)
        self.engine.late.clear()
        self.engine.outputs.append(step)
        self.loop.call(self.model.driver.step)

    @precondition(lambda self: self.hosts)
    @rule()
    def token_of_each(self) -> None:
        self.settle()
        self.token(0, 0, once=True)
        self.settle()

    @precondition(lambda self: self.engine.active)
    @rule(stops=st.booleans())
    def lose_all(self, *, stops: bool) -> None:
        """End all requests, because the engine has died or the server stops."""
        if stops:
            self.loop.call(self.model.give_up)
        else:
            self.engine.fail = GenerationFailed("the engine died")
            self.loop.call(self.model.driver.step)
            self.engine.late.clear()

    @precondition(lambda self: self.hosts)
    @rule(index=st.integers(0, 9))
    def close(self, index: int) -> None:
        self.leave(self.host(index))

    def leave(self, host: AnyHost) -> None:
        """End a request, as its client has gone or has all of the response, and look whether it holds anything."""
        task = host.task
        self.loop.call(host.close)
        if isinstance(host, JavaHost):  # its client's going ends nothing, and a thread may write the end
            self.settle()
        for _ in range(9):
            if not host.closed:
                self.loop.iterate()
        assert host.closed, "a client that has gone is not noticed"
        assert task is None or (task.phase is CLOSED and not task.memory.size)
        timers = [timer for owner, timer in self.loop.timers if owner is task]
        assert all(timer.cancelled() or timer.when() <= self.clock.now for timer in timers), "a timer is left"
        self.hosts.remove(host)

    @precondition(lambda self: self.hosts)
    @rule(index=st.integers(0, 9))
    def read(self, index: int) -> None:
        self.loop.call(self.host(index).read)

    @precondition(lambda self: self.hosts)
    @rule(index=st.integers(0, 9), refuses=st.booleans())
    def fail(self, index: int, refuses: bool) -> None:
        host, task, error = self.host(index), self.host(index).task, GenerationFailed("too late")
        if task is None or host.closed:
            return
        early = not (task.committed or (task.begun and isinstance(host, WebHost)))  # the head may be on its way
        self.loop.call(lambda: (task.refuse if refuses and early else task.fail)(error))

    @rule(seconds=st.sampled_from([*[0.2] * 8, 6.0, 21.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.loop.iterate()

    # -- what holds after each event -----------------------------------------------------------------------------

    def open_tasks(self) -> list[RequestTask]:
        return [host.task for host in self.hosts if host.task is not None and not host.closed]

    @invariant()
    def each_open_request_is_counted(self) -> None:
        assert self.model.num_requests == sum(not host.closed for host in self.hosts)

    @invariant()
    def requests_that_ended_hold_nothing(self) -> None:
        unfinished = [task for task in self.open_tasks() if not task.finished]
        gate = self.model.admission.gate
        assert gate is not None
        assert len(gate._waiting) + len(gate._running) <= len(unfinished)
        assert len(self.model.driver.sinks) == sum(task.phase >= Phase.SUBMITTED for task in unfinished)
        assert len(self.engine.active) <= len(self.model.driver.sinks)  # a thread may write the end of a response

    @invariant()
    def the_memory_of_media_is_held_until_the_request_ends(self) -> None:
        phases = [host.task.phase for host in self.hosts if host.has_media and host.task is not None]
        assert self.model.admission.media.memory.taken >= PIXELS * sum(Phase.WAITING <= phase < 6 for phase in phases)

    @invariant()
    def the_memory_of_a_request_is_held_until_it_is_closed(self) -> None:
        tasks = self.open_tasks()
        assert self.model.admission.memory.taken == sum(task.memory.size for task in tasks)
        assert all(task.memory.size for task in tasks if task.parsed is not None)

    @invariant()
    def tokens_of_cancelled_requests_are_not_counted(self) -> None:
        assert self.model.driver.batcher.num_tokens == self.num_tokens

    @invariant()
    def a_response_in_progress_is_of_a_request_that_has_not_ended(self) -> None:
        assert len(self.store.in_progress) <= sum(not task.finished for task in self.open_tasks())

    @invariant()
    def a_conversation_is_locked_by_a_request_that_has_not_ended(self) -> None:
        assert len(self.store.locked) <= sum(not task.finished for task in self.open_tasks())

    @precondition(lambda self: len(self.hosts) > 3)
    @rule()
    def finish_unread(self) -> None:
        """Let the engine and the threads end all requests, while no client reads."""
        for _ in range(9):
            self.settle()
            while self.engine.active:
                self.token(0, 7, once=True)
        assert all(task.finished for task in self.open_tasks()), "a request waits for a client"

    def teardown(self) -> None:
        try:
            while self.hosts:
                self.close(0)
            for _ in range(9):
                self.loop.iterate()
            self.end()
        finally:
            self.java.reading.cancel()
            self.loop.call(self.model.close)
            for _ in range(9):
                self.loop.iterate()
            self.loop.close()
            for patch in self.patches:
                patch.stop()

    def end(self) -> None:
        memories = self.model.admission.memory, self.model.admission.media.memory
        assert [memory.taken for memory in memories] == [0, 0]
        assert self.model.num_queued == self.model.num_requests == 0
        num_tokens = sum(record.num_tokens for record in self.records)
        assert num_tokens == self.num_tokens or (self.formats and num_tokens < self.num_tokens)
        assert not self.store.in_progress
        assert not self.store.locked
        num_formatted = self.num_formatted
        self.settle()
        while self.threads.hung:
            self.return_too_late()
        assert self.num_formatted == num_formatted, "tokens of a closed request are formatted"
        self.java.reading.cancel()
        self.iterate(2)
        assert not asyncio.all_tasks(self.loop)
        self.admit(0)
        self.pass_time(0.2)
        self.iterate(9)
        assert [task.phase for task in self.open_tasks()] == [Phase.SUBMITTED], "a slot of the batch was not left"
        self.close(0)


TestRequests = pytest.mark.filterwarnings("error")(Requests.TestCase)
TestRequests.settings = settings(max_examples=90, stateful_step_count=40, phases=[hypothesis.Phase.generate])


# -- clients that go early ---------------------------------------------------------------------------------------------


@pytest.fixture
def requests() -> Iterator[Requests]:
    machine = Requests()
    yield machine
    machine.teardown()


BODIES = {
    CHAT: dumps({"messages": [{"role": "user", "content": LONG}], "max_tokens": 9}),
    INFER: gzip.compress(
        dumps({"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [LONG]}]})
    ),
}


@pytest.mark.parametrize(
    ("route", "num_done", "stage"),
    [
        (CHAT, 0, "decoded"),
        (CHAT, 1, "parsed"),
        (CHAT, 2, "tokenized"),
        (INFER, 0, "decompressed"),
        (INFER, 1, "decoded"),
        (INFER, 2, "parsed"),
    ],
)
@pytest.mark.parametrize("cancels", [False, True])
def test_the_waiting_body_of_a_gone_client_is_never_processed(
    requests: Requests, route: str, num_done: int, stage: str, cancels: bool
) -> None:
    headers = {"content-encoding": "gzip"} if route == INFER else {}
    host = requests.loop.call(
        lambda: WebHost(
            requests.model, BODIES[route], patience=False, cancels=cancels, dialect=ROUTES[route], headers=headers
        )
    )
    requests.hosts.append(host)
    for _ in range(num_done):
        requests.threads.finish(0, None)
        requests.iterate(4)
    ((work, _),) = requests.threads.pending
    requests.leave(host)
    requests.iterate(3)
    assert work.cancelled(), f"it will be {stage}"
    assert requests.model.admission.memory.taken == 0


# -- the table ---------------------------------------------------------------------------------------------------------


def test_each_phase_can_be_left_and_none_is_entered_twice() -> None:
    moves = [(before, after) for (before, _), after in TRANSITIONS.items() if before is not after]
    assert {before for before, _ in moves} == {*Phase} - {CLOSED}
    assert all(before < after for before, after in moves)
    assert all(TRANSITIONS[phase, END] is FINISHED for phase in Phase if phase < FINISHED)


@pytest.mark.parametrize("path", [(), (END,), (ACCEPT, START, JOIN, SUBMIT, OUTPUT), (END, CLOSE)])
def test_an_event_that_is_impossible_in_a_phase_is_an_error_and_changes_nothing(path: tuple[Event, ...]) -> None:
    life = Life()
    for event in path:
        life.on(event)
    before = life.phase
    for event in Event:
        if (before, event) not in TRANSITIONS:
            with pytest.raises(IllegalEvent, match=f"{event.name} is impossible for a request that is {before.name}"):
                life.on(event)
    assert (life.phase, life.committed) == (before, False)


def test_the_status_of_a_response_is_committed_in_any_phase_but_the_last() -> None:
    for phase in Phase:
        assert ((phase, COMMIT) in TRANSITIONS) == (phase is not CLOSED)
    life = Life()
    life.on(COMMIT)
    life.on(COMMIT)
    assert (life.phase, life.committed) == (RECEIVING, True)


# -- the holdings ------------------------------------------------------------------------------------------------------


def test_a_holding_is_released_once_by_its_phase_and_the_latest_first() -> None:
    life, released = Life(), list[str]()
    for name in "ab":
        life.hold(lambda name=name: released.append(name))  # type: ignore[misc]
    life.hold(lambda: released.append("c"), CLOSED)
    life.hold(lambda: 1 / 0)
    life.on(END)
    assert released == ["b", "a"]
    life.hold(lambda: released.append("d"))
    life.on(CLOSE)
    assert released == ["b", "a", "d", "c"]


def test_what_is_held_too_late_is_released_at_once() -> None:
    life, released = Life(), list[str]()
    life.on(END)
    life.hold(lambda: released.append("finished"))
    life.hold(lambda: released.append("closed"), CLOSED)
    assert released == ["finished"]
    life.on(CLOSE)
    assert released == ["finished", "closed"]
    life.hold(lambda: released.append("late"), CLOSED)
    assert released == ["finished", "closed", "late"]
