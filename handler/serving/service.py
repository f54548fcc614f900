"""What a host with an event loop stands on: a schema, a tokenizer, a batcher behind a pump, and the state of it all."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from handler.core.errors import ConfigError, ServingError, Unavailable, serving_error
from handler.core.text import Prompt
from handler.core.values import Request
from handler.engines.base import EngineInfo, Tokenizer
from handler.engines.process.supervisor import State
from handler.plugins.formatter_thread import FormatterThread
from handler.protocols.base import HttpResponse, ParsedRequest, Schema
from handler.scheduler.lora.registry import Change, Outcome, Registered
from handler.serving.daemon_thread import aside
from handler.serving.dynamic_batcher import BatchGate
from handler.serving.engine_driver import Pump
from handler.serving.large_bodies import LARGE, is_long
from handler.serving.launch import make_batcher
from handler.serving.metrics import Metrics
from handler.serving.model import LoadedModel
from handler.serving.preprocess import Decoded, Headers, Intake, check_guide
from handler.serving.request_task import Exchange
from handler.serving.stats import Record

T = TypeVar("T")

TOKENIZER_THREADS = 2
_PARSE_ASIDE = 1 << 16  # bytes of a body that is better parsed off the event loop


class Service:
    """One served model; made and used on the event loop that serves.

    Args:
        loaded: its engine is started, perhaps still loading; the tokenizer is used on threads.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        config, engine = loaded.config, loaded.engine
        self.config = config
        self.context = loaded.context
        self.intake = Intake.of(loaded)
        self.schema = self.intake.schema
        self.draining = False
        self.num_requests = 0  # being read or answered, the last byte's delivery included
        self._exchanges: weakref.WeakSet[Exchange] = weakref.WeakSet()
        self.started_at = time.time()
        self._engine = engine
        self._guides = loaded.guides
        self._tokenizer = loaded.tokenizer
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenize")
        self._formatters: FormatterThread | None = None
        if self.intake.runs_model_py:
            self._formatters = FormatterThread(asyncio.get_running_loop().call_soon_threadsafe)
        self._gate: BatchGate | None = None
        if config.rolling_batch == "disable":
            self._gate = BatchGate(
                config.batch_size, config.max_batch_delay / 1000, config.job_queue_size, config.predict_timeout
            )
        self._batcher = make_batcher(config, engine, loaded.adapters.registry)
        self._pump = Pump(self._batcher)
        self.metrics = Metrics(
            queued=lambda: self.num_queued,
            active=lambda: self._batcher.num_active,
            tokens=lambda: self._pump.num_tokens,
        )
        self._at_start = loaded.adapters.at_start
        self.adapters = loaded.adapters.registry
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the engine is ready and has the adapters that lie beside the model; a ConfigError names a broken
        one."""

    def start(self, on_state: Callable[[State], None] = lambda state: None) -> None:
        """Listen to the engine; `on_state` is told of its state, now and at every change.

        It is ready for others when it has the adapters that lie beside the model; one that is broken closes it.
        """

        def changed(state: State) -> None:
            if state is State.READY and not self.opened.done():
                if self._at_start:
                    opening = asyncio.ensure_future(self._load_adapters())
                    opening.add_done_callback(lambda task: changed(State.READY if self._is_open else State.CLOSED))
                    self._opening = opening
                    return
                self.opened.set_result(None)
            self.metrics.ready.set(state is State.READY)
            if state is State.READY and self._guides is not None:
                self._guides.start()
            if state is State.RESTARTING:
                self.metrics.restarts.inc()
            on_state(state)

        self._engine.attach(watch=self._pump.watch, on_change=changed)

    async def _load_adapters(self) -> None:
        for name, path in self._at_start.items():
            try:
                await self.change_adapter(functools.partial(self.adapters.register, name, path))
            except Exception as error:
                message = f"the adapter {name} cannot be used: {serving_error(error).message}"
                return self.opened.set_exception(ConfigError(message))
        self.opened.set_result(None)

    @property
    def _is_open(self) -> bool:
        return self.opened.done() and self.opened.exception() is None

    def drain(self) -> None:
        """Refuse new work from now on; what is under way goes on."""
        self.draining = True

    def close(self) -> None:
        self._pump.close()
        self._engine.close()
        if self._guides is not None:
            self._guides.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.intake.close()
        if self._formatters is not None:
            self._formatters.close()

    def give_up(self) -> None:
        """End what is under way with an error that the clients can read."""
        for exchange in list(self._exchanges):
            exchange.fail(Unavailable("the server stopped before the answer was complete"))

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        if self.draining:
            return "stopping"
        state = self._engine.state
        return State.LOADING.value if state is State.READY and not self._is_open else state.value

    @property
    def reason(self) -> str:
        """Why the engine cannot serve, where that is known."""
        return self._engine.reason

    @property
    def healthy(self) -> bool:
        return self._engine.ready and self._is_open and not self.draining

    @property
    def info(self) -> EngineInfo | None:
        return self._engine.info

    @property
    def num_queued(self) -> int:
        return self._batcher.num_queued + (self._gate.num_waiting if self._gate else 0)

    # -- adapters ------------------------------------------------------------------------------------------------

    async def register_adapter(self, name: str, src: str, *, preload: bool) -> Registered:
        """Returns when requests may name it.

        Raises:
            ServingError: nothing has changed.
        """
        self._check_open()
        path = await aside(functools.partial(self.adapters.path, src))
        begin = functools.partial(self.adapters.register, name, path, preload=preload)
        settled = await self.change_adapter(begin)
        assert settled is not None, "what was registered is there"
        return settled

    async def update_adapter(self, name: str, src: str | None, *, preload: bool | None) -> None:
        """Returns when requests that name it get the new one; without `src`, from where it came.

        Raises:
            ServingError: nothing has changed.
        """
        src = self.adapters.get(name).adapter.path if src is None else src
        path = await aside(functools.partial(self.adapters.path, src))
        await self.change_adapter(functools.partial(self.adapters.update, name, path=path, preload=preload))

    async def change_adapter(self, begin: Change) -> Registered | None:
        """What stands under the name then; goes on to its end when whoever waits for it is cancelled.

        Raises:
            ServingError: nothing has changed.
        """
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        begin(lambda outcome: None if done.done() else done.set_result(outcome))
        outcome = await done
        if isinstance(outcome, ServingError):
            raise outcome
        return outcome

    def _check_open(self) -> None:
        """Raises `Unavailable` when it stops, or has not yet those beside the model, whose numbers are the first."""
        if self.draining:
            raise Unavailable("the server is stopping")
        if not self._is_open:
            raise Unavailable(f"Model is not ready: {self.config.model_name}")

    # -- one request ---------------------------------------------------------------------------------------------

    def check_room(self) -> None:
        """Raises `Unavailable` when a new request would be turned away."""
        if self.draining:
            raise Unavailable("the server is stopping")
        if self._engine.state is State.CLOSED:
            raise Unavailable(f"the engine is down: {self.reason}")
        self._check_open()
        (self._gate or self._batcher).check_room()

    async def decode(self, body: bytes, headers: Headers, schema: Schema | None = None) -> Decoded:
        """The body as a value; off the event loop when it is large, or when a model.py reads it.

        Args:
            schema: the route's own dialect.
        """
        decode = functools.partial(self.intake.decode, body, headers, schema)
        if schema is None and self._formatters is not None and (title := self.intake.input_formatter):
            decoded: Decoded = await asyncio.wrap_future(self._formatters.submit(title, decode))
            return decoded
        return await self.aside(len(body), decode)

    async def parse(self, body: Decoded, size: int, headers: Headers, schema: Schema | None = None) -> ParsedRequest:
        """What a decoded body of `size` bytes asks for; a large one is read off the event loop."""
        return await self.aside(size, functools.partial(self.intake.parse, body, headers, schema))

    async def aside(self, size: int, use: Callable[[], T]) -> T:
        """What `use` makes of a body of `size` bytes: on a thread where that takes its time, on another where long."""
        if size < _PARSE_ASIDE:
            return use()
        if size < LARGE:
            return await asyncio.get_running_loop().run_in_executor(self._threads, use)
        return await asyncio.wrap_future(self.intake.large_bodies.submit(use))

    async def with_tokenizer(self, use: Callable[[Tokenizer], T]) -> T:
        """What `use` makes of the tokenizer, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, use, self._tokenizer)

    async def read(self, body: bytes, headers: Headers) -> ParsedRequest:
        """What a body asks for, as the configured schema reads it."""
        return await self.parse(await self.decode(body, headers), len(body), headers)

    def refuse(
        self, error: ServingError, request_id: str, body: Any = None, schema: Schema | None = None
    ) -> HttpResponse:
        """The answer to a request that was never put to the engine.

        Args:
            body: decoded, if it came to that.
        """
        record = Record(request_id, metrics=self.metrics)
        record.error = error.public
        record.close("overloaded" if isinstance(error, Unavailable) else "refused")
        return (schema or self.schema).refused(error, body, self.intake.context)

    def exchange(self, call: ParsedRequest, request_id: str) -> Exchange:
        """Put a call's requests to the engine."""
        record = Record(request_id, call, log_prompts=self.config.log_prompts, metrics=self.metrics)
        exchange = Exchange(
            call,
            encode=self._encode,
            gate=self._gate if self._gate is not None else contextlib.nullcontext(),
            pump=self._pump,
            record=record,
            formatters=self._formatters,
        )
        self._exchanges.add(exchange)
        return exchange

    async def _encode(self, request: Request) -> tuple[Request, Prompt]:
        encode, large_bodies = self.intake.encode, self.intake.large_bodies
        submit = large_bodies.submit if is_long(request) else self._threads.submit
        encoded = await asyncio.wrap_future(submit(encode, request))
        if (trial := self.intake.try_guide(request)) is not None:
            check_guide(request, await asyncio.wrap_future(trial))
        return encoded
