"""A request's life in any order of events: what it holds is given back, each counter is right, and it ends once."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from starlette.types import Message

from handler.config.loader import read_config
from handler.core.errors import GenerationFailed, InvalidPayload
from handler.core.framing import dumps
from handler.core.loop import start_now
from handler.core.media import MediaSource, Medium
from handler.core.values import Finish
from handler.engines.base import Output, Step
from handler.engines.echo.engine import EchoTokenizer
from handler.engines.process.supervisor import LoopHooks
from handler.http.inference import Inference
from handler.http.protocol import EXCHANGE, AsgiExchange
from handler.plugins.functions import Formatters
from handler.protocols.kernel.context import ServerContext
from handler.protocols.registry import ROUTES, choose
from handler.scheduler.lora import AdapterHome, AdapterRegistry
from handler.serving.media.loader import LoadedMedia, MediaLoader, Reservation
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
from handler.serving.turns import Flow
from tests.docs.pages import fill, table
from tests.stepped import INFO, Clock, Readable

DOCUMENT = Path(__file__).parents[3] / "docs" / "structure.md"
LONG = "x" * 300
"""A word that makes a body so long that threads work on it."""
CHAT = "/v1/chat/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
PIXELS = 300  # bytes of a decoded image
OPTIONS = (
    "option.llm_engine=echo", "option.rolling_batch=disable", "batch_size=2", "max_batch_delay=100", "job_queue_size=5",
    "option.predict_timeout=5", "option.request_time_limit=20",
)  # fmt: skip


class Loop(asyncio.SelectorEventLoop):
    """An event loop that runs only in single iterations."""

    def iterate(self) -> None:
        self.call_soon(self.stop)
        self.run_forever()

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function as a callback of the loop would, without an iteration."""
        asyncio.events._set_running_loop(self)
        try:
            return function()
        finally:
            asyncio.events._set_running_loop(None)


class Engine(Readable):
    """An engine whose steps have the tokens that the machine chooses, also of sequences cancelled during the step."""

    def __init__(self) -> None:
        super().__init__(INFO)
        self.late: list[int] = []
        self.outputs: list[Step] = []

    def attach(self, host: LoopHooks) -> None:
        host.on_change(self.state)

    def cancel(self, key: int) -> None:
        if key in self.active:
            self.late.append(key)
        super().cancel(key)

    def step(self, timeout: float = 0.0) -> list[Step]:
        if self.fail is not None:
            return super().step()
        outputs, self.outputs = self.outputs, []
        return outputs


class Threads:
    """Calls that threads would make, and media that they would load: each ends when the machine says so."""

    def __init__(self, media: MediaLoader) -> None:
        self.pending: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.memory = media.memory
        self.shutdown = self.close = media.close

    def submit(
        self, call: Callable[[], Any], cost: float, *, slow: bool = False, flow: Flow | None = None
    ) -> Future[Any]:
        self.pending.append((Future(), call))
        return self.pending[-1][0]

    def load(self, sources: Sequence[MediaSource], owner: str = "") -> Future[Any]:
        def load() -> LoadedMedia:
            reservation = Reservation(self.memory, "images")
            reservation.take(PIXELS)
            return LoadedMedia((Medium("image", (10, 10), bytes(PIXELS), "a"),), reservation)

        return self.submit(load, 1.0)

    def finish(self, index: int, error: Exception | None) -> None:
        future, call = self.pending.pop(index % len(self.pending))
        if future.set_running_or_notify_cancel():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(call())


class Host:
    """The host of a request. `wire` has what its client gets.

    Args:
        patience: whether the host takes bytes only when the machine says so.
    """

    def __init__(self, model: ServedModel, body: bytes, *, streams: bool, patience: bool) -> None:
        self.wire, self.streams, self.patience, self.has_media = b"", streams, patience, b"image_url" in body
        self.gone = False
        self.task: RequestTask | None = model.open({}, ROUTES[CHAT], on_bytes=self.on_bytes)
        self.task.begin(self.task.run(body))

    def on_bytes(self, task: RequestTask) -> None:
        assert not self.gone, "a closed request calls its host"
        self.task = task  # not known yet if it is refused before its body is read
        if not self.patience:
            self.read()

    @property
    def closed(self) -> bool:
        return self.task is None

    def read(self) -> None:
        if self.task is not None and (self.streams or self.task.finished):
            self.wire += self.task.take()

    def close(self) -> None:
        """Close the request, as its client has disconnected or has all of the response."""
        task = self.task
        assert task is not None, "it is closed once"
        ended, self.gone = task.finished, True
        if ended:
            self.read()
        task.close()
        task.close()
        assert (task.phase, task.take(), task.memory.size) == (CLOSED, b"", 0)
        assert self.num_ends() == ended
        self.task = None  # it refers to this host

    def num_ends(self) -> int:
        """Return the number of ends in what the client has got."""
        if not self.wire.startswith(b"data:"):
            return len(self.wire.splitlines())
        events = self.wire.decode().split("\n\n")[:-1]
        assert sum('"error"' in event for event in events) <= 1
        assert "data: [DONE]" not in events[:-1]
        return events.count("data: [DONE]")


class WebHost:
    """The HTTP or gRPC host of a request: an ASGI call, whose server the machine plays.

    Args:
        patience: whether the client reads only when the machine says so. Until then its connection is full.
        cancels: whether the server cancels the call of a client that has gone, as gRPC does, instead of telling it.
    """

    def __init__(
        self,
        model: ServedModel,
        body: bytes,
        *,
        patience: bool,
        cancels: bool,
        route: str = CHAT,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.wire, self.has_media, self._cancels, self._patience = b"", b"image_url" in body, cancels, patience
        self.gone, self.room = asyncio.Event(), asyncio.Event()
        if not patience:
            self.room.set()
        self._received: list[Message] = [{"type": "http.request", "body": body}]
        before = {*model.admission.tasks}
        self._call = start_now(self._respond(Inference(model, ROUTES.get(route)), dict(headers)))
        opened = {*model.admission.tasks} - before
        self.task: RequestTask | None = next(iter(opened), None)

    async def _respond(self, app: Inference, headers: Mapping[str, str]) -> None:
        exchange = AsgiExchange(self._receive, self._send, "1.1")
        scope = {"path_params": {}, "request_id": "1", "headers_by_name": headers, "query_string": b"", "path": "/"}
        with contextlib.closing(exchange), contextlib.suppress(OSError):
            await app({**scope, "extensions": {EXCHANGE: exchange}}, self._receive, exchange.send)

    async def _receive(self) -> Message:
        if not self._received:
            await self.gone.wait()
        return self._received.pop() if self._received else {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.room.wait()
        if self.gone.is_set():
            raise OSError("the client has gone")
        self.wire += message.get("body", b"")

    @property
    def closed(self) -> bool:
        return self._call.done()

    def read(self) -> None:
        """Let the server send what waits for the client, and what follows in this iteration of the loop."""
        self.room.set()
        if self._patience:
            asyncio.get_running_loop().call_soon(self.room.clear)

    def close(self) -> None:
        """End the request, as its client has gone. The loop must run until the call has ended."""
        if self._cancels:
            self._call.cancel()
            return
        self.gone.set()
        self.room.set()  # a server raises an error in its `send`


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
        self.hosts: list[Host | WebHost] = []
        self.records: list[RequestRecord] = []
        self.num_tokens = 0  # tokens of requests that were not cancelled
        self.model: ServedModel = self.loop.call(self.make)
        self.threads = Threads(self.model.admission.media)
        self.model.admission.threads = self.model.admission.media = self.threads
        self.model.admission.tokenize_inline = len(LONG)
        self.model.metrics.recorders.append(self.records.append)

    def make(self) -> ServedModel:
        config = read_config(overrides=OPTIONS, environ={}).checked()
        context = replace(ServerContext(engine="scripted"), no_media={"image": ""})
        preprocessor = Preprocessor(choose(config), context, EchoTokenizer(), lambda: INFO, Formatters())
        model = ServedModel(config, self.engine, preprocessor, AdapterHome(AdapterRegistry()))  # type: ignore[arg-type]
        model.start()
        return model

    def host(self, index: int) -> Host | WebHost:
        return self.hosts[index % len(self.hosts)]

    # -- events --------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.hosts) < 7)
    @rule(
        flags=st.integers(0, 15),
        valid=st.sampled_from([True] * 7 + [False]),
        kind=st.sampled_from(["stepped", "http", "grpc"]),
    )
    def admit(self, flags: int, *, valid: bool = True, kind: str = "stepped") -> None:
        streams, is_long, media, patience = (bool(flags >> bit & 1) for bit in range(4))
        text = f"a b {LONG if is_long else ''}"
        content: Any = [{"type": "text", "text": text}, IMAGE] if media else text
        body = {"messages": [{"role": "user", "content": content}], "stream": streams, "max_tokens": 9}
        data = dumps(body) if valid else b"{"

        def opened() -> Host | WebHost:
            if kind == "stepped":
                return Host(self.model, data, streams=streams, patience=patience)
            return WebHost(self.model, data, patience=patience, cancels=kind == "grpc")

        self.hosts.append(self.loop.call(opened))

    @rule(times=st.integers(1, 4))
    def iterate(self, times: int) -> None:
        for _ in range(times):
            self.loop.iterate()

    @precondition(lambda self: self.threads.pending)
    @rule(index=st.integers(0, 9), fails=st.sampled_from([False, False, False, True]))
    def finish_on_thread(self, index: int, fails: bool) -> None:
        self.threads.finish(index, InvalidPayload("no") if fails else None)

    @precondition(lambda self: self.hosts)
    @rule(mask=st.integers(0, 7), ends=st.integers(0, 7), once=st.booleans())
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

    def leave(self, host: Host | WebHost) -> None:
        """End a request, as its client has gone or has all of the response, and look whether it holds anything."""
        task = host.task
        self.loop.call(host.close)
        for _ in range(9):
            if not host.closed:
                self.loop.iterate()
        assert host.closed, "a client that has gone is not noticed"
        assert task is None or (task.phase is CLOSED and not task.memory.size)
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

    @rule(seconds=st.sampled_from([0.2, 0.2, 0.2, 0.2, 6.0, 21.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.loop.iterate()

    def settle(self) -> None:
        """Let all requests go on as far as they can without the engine."""
        for _ in range(6):
            while self.threads.pending:
                self.threads.finish(0, None)
            for _ in range(4):
                self.loop.iterate()
        self.pass_time(0.2)
        self.iterate(4)

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

    def teardown(self) -> None:
        try:
            while self.hosts:
                self.close(0)
            for _ in range(9):
                self.loop.iterate()
            self.end()
        finally:
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
        assert sum(record.num_tokens for record in self.records) == self.num_tokens
        assert not asyncio.all_tasks(self.loop)
        self.admit(0)
        self.pass_time(0.2)
        self.iterate(9)
        assert [task.phase for task in self.open_tasks()] == [Phase.SUBMITTED], "a slot of the batch was not left"
        self.close(0)


TestRequests = pytest.mark.filterwarnings("error")(Requests.TestCase)
TestRequests.settings = settings(max_examples=60, stateful_step_count=40, phases=[hypothesis.Phase.generate])


# -- clients that go early ---------------------------------------------------------------------------------------------


@pytest.fixture
def requests() -> Iterator[Requests]:
    machine = Requests()
    yield machine
    machine.teardown()


INFER = "/v2/models/{model}/infer"
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
        lambda: WebHost(requests.model, BODIES[route], patience=False, cancels=cancels, route=route, headers=headers)
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


def render() -> str:
    """Return docs/structure.md with the table of transitions."""
    rows = []
    for phase in Phase:
        following = [(event, after) for (before, event), after in TRANSITIONS.items() if before is phase]
        moves = [f"{event.name} → {after.name}" for event, after in following if after is not phase]
        stays = [event.name for event, after in following if after is phase]
        rows.append((phase.name, ", ".join(moves), ", ".join(stays)))
    return fill(DOCUMENT.read_text(), "lifecycle", table(("phase", "event → next phase", "other events"), rows))


def test_the_document_shows_the_table() -> None:
    assert DOCUMENT.read_text() == render(), "`python -m tests.unit.serving.test_life` writes it"


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


if __name__ == "__main__":
    DOCUMENT.write_text(render())
