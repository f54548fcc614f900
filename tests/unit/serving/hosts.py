"""Hosts of requests, and the engine, threads and store behind them, each of which goes on when a test says so."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

from starlette.types import ASGIApp, Message

from handler.core.errors import ConversationLocked, FormatterFailed, GenerationFailed
from handler.core.loop import settle, start_now
from handler.core.media import MediaSource, Medium
from handler.engines.base import Step
from handler.engines.process.supervisor import LoopHooks
from handler.http.exchange import EXCHANGE, AsgiExchange
from handler.http.inference import Inference
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.kernel.stored import KeptResponse, Recalled, Wanted
from handler.serving.conversations import ResponseTurn
from handler.serving.media.loader import LoadedMedia, MediaLoader, Reservation
from handler.serving.model import ServedModel
from handler.serving.request.life import CLOSED
from handler.serving.request.task import RequestTask
from handler.serving.turns import Flow
from tests.doubles import djl_python
from tests.doubles.djl_modules import modes, wire
from tests.stepped import INFO, Readable

EMPTY = MappingProxyType[str, str]({})
PIXELS = 300
"""Bytes of a decoded image."""


class Loop(asyncio.SelectorEventLoop):
    """An event loop that runs only in single iterations.

    Attributes:
        timers: the timers of requests, with their tasks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.timers: list[tuple[RequestTask, asyncio.TimerHandle]] = []

    def call_at(self, when: float, callback: Callable[..., Any], *arguments: Any, context: Any = None) -> Any:  # type: ignore[override]
        timer = super().call_at(when, callback, *arguments, context=context)
        if isinstance(task := getattr(callback, "__self__", None), RequestTask):
            self.timers.append((task, timer))
        return timer

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
        self.hung: list[Callable[[], Any]] = []
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

    def finish(self, index: int, error: Exception | None = None, *, hangs: bool = False) -> None:
        """End a call.

        Args:
            hangs: whether the thread is given up before the call returns.
        """
        future, call = self.pending.pop(index % len(self.pending))
        if future.set_running_or_notify_cancel():
            if error is not None:
                future.set_exception(error)
            elif hangs:
                self.hung.append(call)
                future.set_exception(FormatterFailed("it did not end"))
            else:
                settle(future, call)


class FormatterCalls:
    """The thread of the formatters, whose calls end as those of `Threads` do."""

    def __init__(self, threads: Threads, post: Callable[[Callable[[], None]], object]) -> None:
        self._threads, self._post = threads, post

    def submit(self, title: str, function: Callable[..., Any], *arguments: Any, limit: float | None = None) -> Any:
        return self._threads.submit(functools.partial(function, *arguments), 1.0)

    def run(self, then: Callable[[Future[Any]], None], title: str, function: Callable[..., Any], *args: Any) -> None:
        future = self.submit(title, function, *args)
        future.add_done_callback(lambda done: self._post(functools.partial(then, done)))

    def close(self) -> None: ...


class Store:
    """A store of responses, whose calls end as those of `Threads` do.

    Attributes:
        in_progress: ids of the responses in progress.
        locked: numbers of the conversations in which a request has its turn.
    """

    most_bytes = 1 << 20
    may_be_full = True

    def __init__(self, submit: Callable[..., Future[Any]]) -> None:
        self._submit = submit
        self.in_progress = set[str]()
        self.locked = set[int]()

    # The locks of conversations.

    def take(self, number: int) -> None:
        if number in self.locked:
            raise ConversationLocked
        self.locked.add(number)

    def release(self, number: int) -> None:
        self.locked.remove(number)

    def new_turn(self) -> ResponseTurn:
        locks: Any = self
        return ResponseTurn(locks)

    def end_turn(self, owner: str, turn: ResponseTurn) -> None:
        turn.end()

    def recall(
        self, owner: str, wanted: Wanted, reserve: Callable[[int], object], turn: ResponseTurn
    ) -> Future[Recalled]:
        def recall() -> Recalled:
            turn.take(int(wanted.conversation.removeprefix("conv_")))
            return Recalled()

        return self._submit(recall, 1.0)

    def check_calls(self, owner: str) -> None: ...

    def check_room(self, owner: str, size: int) -> Future[Any]:
        return self._submit(lambda: None, 1.0)

    def write(self, owner: str, call: Callable[[], Any]) -> Future[Any]:
        return self._submit(call, 1.0)

    def begin(self, owner: str, id: str, response: Mapping[str, Any]) -> object:
        self.in_progress.add(id)
        return object()

    def keep(self, owner: str, response: KeptResponse, turn: ResponseTurn | None) -> bool:
        self.end(response.id)
        if turn is not None:
            turn.end()
        return True

    def end(self, id: str) -> None:
        self.in_progress.discard(id)

    def close(self) -> None: ...


class Host:
    """The host of a request. `wire` has what its client gets.

    Args:
        patience: whether the host takes bytes only when the machine says so.
    """

    def __init__(
        self, model: ServedModel, body: bytes, *, streams: bool, patience: bool, dialect: Dialect | None
    ) -> None:
        self.wire, self.streams, self.patience, self.has_media = b"", streams, patience, b"image_url" in body
        self.gone, self.is_chat = False, dialect is not None and dialect.name == "openai_chat"
        self.task: RequestTask | None = model.open({}, dialect, on_bytes=self.on_bytes)
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
        assert not self.is_chat or self.num_ends() == ended
        self.task = None  # it refers to this host

    def num_ends(self) -> int:
        """Return the number of ends in what the client has got."""
        if not self.wire.startswith(b"data:"):
            return len(self.wire.splitlines())
        events = self.wire.decode().split("\n\n")[:-1]
        assert sum('"error"' in event for event in events) <= 1
        assert "data: [DONE]" not in events[:-1]
        return events.count("data: [DONE]")


class Client:
    """A client of an ASGI application, whose server the machine plays.

    Args:
        patience: whether the client reads only when the machine says so. Until then its connection takes only the head.
        cancels: whether the server cancels the call of a client that has gone, as gRPC does, instead of telling it.
    """

    def __init__(
        self, app: ASGIApp, body: bytes, *, patience: bool, cancels: bool, headers: Mapping[str, str] = EMPTY
    ) -> None:
        self.wire, self._cancels, self._patience = b"", cancels, patience
        self.has_head = False
        self.gone, self.room = asyncio.Event(), asyncio.Event()
        if not patience:
            self.room.set()
        self._received: list[Message] = [{"type": "http.request", "body": body}]
        self._call = start_now(self._respond(app, dict(headers)))

    async def _respond(self, app: ASGIApp, headers: Mapping[str, str]) -> None:
        exchange = AsgiExchange(self._receive, self._send, "1.1")
        scope = {
            "type": "http", "method": "POST", "path": "/invocations", "query_string": b"", "path_params": {},
            "headers": [], "headers_by_name": headers, "request_id": "1", "extensions": {EXCHANGE: exchange},
        }  # fmt: skip
        with contextlib.closing(exchange), contextlib.suppress(OSError):
            await app(scope, self._receive, exchange.send)

    async def _receive(self) -> Message:
        if not self._received:
            await self.gone.wait()
        return self._received.pop() if self._received else {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            await self.room.wait()
        if self.gone.is_set():
            raise OSError("the client has gone")
        self.has_head = True
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


class WebHost(Client):
    """The HTTP or gRPC host of a request."""

    def __init__(
        self,
        model: ServedModel,
        body: bytes,
        *,
        patience: bool,
        cancels: bool,
        dialect: Dialect | None,
        headers: Mapping[str, str] = EMPTY,
    ) -> None:
        self.has_media = b"image_url" in body
        before = {*model.admission.tasks}
        super().__init__(Inference(model, dialect), body, patience=patience, cancels=cancels, headers=headers)
        opened = {*model.admission.tasks} - before
        self.task: RequestTask | None = next(iter(opened), None)


class Java:
    """The Java side of DJL's async mode, which gets the output of all requests as one response."""

    def __init__(self, model: ServedModel) -> None:
        self.mode = modes.Async(model, wire.installed_version())
        self.room = asyncio.Event()
        self.room.set()
        self.reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        connection = djl_python.Connection()
        async for output in self.mode.outputs(djl_python.Output()):
            await self.room.wait()
            output.send(connection)


class JavaHost:
    """DJL's async mode as the host of a request. It does not hear of a client that has gone.

    Args:
        patience: whether Java reads nothing more until the machine says so.
    """

    def __init__(self, model: ServedModel, java: Java, body: bytes, *, patience: bool, route: str) -> None:
        self.has_media, self._java = b"image_url" in body, java
        if patience:
            java.room.clear()
        before = {*model.admission.tasks}
        self._call = start_now(java.mode.answer(djl_python.Input({"route": route}, {"data": body})))
        opened = {*model.admission.tasks} - before
        self.task: RequestTask | None = next(iter(opened))

    @property
    def closed(self) -> bool:
        return self.task is None or self.task.phase is CLOSED

    def read(self) -> None:
        self._java.room.set()

    def close(self) -> None:
        """End the request, and let Java read it."""
        assert self.task is not None
        self.task.fail(GenerationFailed("the machine ends it"))
        self.read()
