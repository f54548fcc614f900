"""What every HTTP route stands on: one schema, one tokenizer, one batcher behind a pump, and the state of it all."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from handler.batcher import Batcher
from handler.config import Config
from handler.core import Request
from handler.engines.base import EngineInfo, Tokenizer
from handler.engines.remote import RemoteEngine, State
from handler.errors import InvalidParameter, InvalidPayload, Unavailable
from handler.hosts.dynamic import BatchGate
from handler.hosts.exchange import Exchange
from handler.hosts.metrics import Metrics
from handler.hosts.pump import Pump
from handler.schemas.base import Call, Context, Schema
from handler.schemas.reading import decode
from handler.text import Prompt

_LARGE = 1 << 16  # bytes of a body that is better parsed off the event loop


class Service:
    """One served model; made and used on the event loop that serves.

    Args:
        config: all options.
        engine: started, perhaps still loading.
        tokenizer: the engine's; used on threads.
        schema: what /invocations speaks.
        context: what the schema needs to know of the rest.
    """

    def __init__(
        self,
        config: Config,
        engine: RemoteEngine,
        tokenizer: Tokenizer,
        schema: Schema,
        context: Context,
    ) -> None:
        self.config = config
        self.schema = schema
        self.draining = False
        self.num_requests = 0  # being read or answered, the last byte's delivery included
        self._exchanges: weakref.WeakSet[Exchange] = weakref.WeakSet()
        self.started_at = time.time()
        self._context = context
        self._engine = engine
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self._gate: BatchGate | None = None
        if config.rolling_batch == "disable":
            self._gate = BatchGate(
                config.batch_size, config.max_batch_delay / 1000, config.job_queue_size, config.predict_timeout
            )
        self._batcher = Batcher(
            engine,
            max_active=config.max_rolling_batch_size,
            max_queued=config.job_queue_size,
            queue_timeout=config.predict_timeout,
        )
        self.metrics = Metrics(queued=lambda: self.num_queued, active=lambda: self._batcher.num_active)
        self._pump = Pump(self._batcher, on_tokens=self.metrics.tokens.inc)

    def start(self, on_state: Callable[[State], None] = lambda state: None) -> None:
        """Listen to the engine; `on_state` is told of its state, now and at every change."""

        def changed(state: State) -> None:
            self.metrics.ready.set(state is State.READY)
            if state is State.RESTARTING:
                self.metrics.restarts.inc()
            on_state(state)

        self._engine.attach(watch=self._pump.watch, on_change=changed)

    def drain(self) -> None:
        """Refuse new work from now on; what is under way goes on."""
        self.draining = True

    def close(self) -> None:
        self._pump.close()
        self._engine.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def give_up(self) -> None:
        """End what is under way with an error that the clients can read."""
        for exchange in list(self._exchanges):
            exchange.fail(Unavailable("the server stopped before the answer was complete"))

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        return "stopping" if self.draining else self._engine.state.value

    @property
    def reason(self) -> str:
        """Why the engine cannot serve, where that is known."""
        return self._engine.reason

    @property
    def healthy(self) -> bool:
        return self._engine.ready and not self.draining

    @property
    def info(self) -> EngineInfo | None:
        return self._engine.info

    @property
    def num_queued(self) -> int:
        return self._batcher.num_queued + (self._gate.num_waiting if self._gate else 0)

    # -- one request ---------------------------------------------------------------------------------------------

    def check_room(self) -> None:
        """Raises `Unavailable` when a new request would be turned away."""
        if self.draining:
            raise Unavailable("the server is stopping")
        if self._engine.state is State.LOADING:
            raise Unavailable(f"Model is not ready: {self.config.model_name}")
        if self._engine.state is State.CLOSED:
            raise Unavailable(f"the engine is down: {self.reason}")
        (self._gate or self._batcher).check_room()

    async def parse(self, body: bytes, *, plain: bool) -> Call:
        """The body as the schema reads it, `plain` text being a prompt; a large one is read off the event loop."""

        def read() -> Call:
            value = {"inputs": _utf8(body)} if plain else decode(body)
            return self.schema.parse(value, self._context)

        if len(body) < _LARGE:
            return read()
        return await asyncio.get_running_loop().run_in_executor(self._threads, read)

    def exchange(self, call: Call, request_id: str) -> Exchange:
        """Put a call's requests to the engine."""
        exchange = Exchange(
            call,
            encode=self._encode,
            gate=self._gate if self._gate is not None else contextlib.nullcontext(),
            pump=self._pump,
            metrics=self.metrics,
            request_id=request_id,
            log_text=self.config.log_prompts,
        )
        self._exchanges.add(exchange)
        return exchange

    async def _encode(self, request: Request) -> Prompt:
        loop = asyncio.get_running_loop()
        prompt = await loop.run_in_executor(self._threads, self._tokenizer.encode, request.prompt)
        if request.truncate is not None:
            prompt = prompt._replace(ids=prompt.ids[-request.truncate :])
        self._check_length(request, prompt)
        return prompt

    def _check_length(self, request: Request, prompt: Prompt) -> None:
        """Engines clamp or fail late where we refuse at once."""
        num_prompt, wanted = len(prompt.ids), request.sampling.max_new_tokens
        if not num_prompt:
            raise InvalidPayload("'inputs' has no tokens")
        size = len(prompt.vocabulary)
        for id in request.sampling.stop_token_ids:
            if id >= size:
                raise InvalidParameter(f"parameters.stop_token_ids: {id} is not in the vocabulary of {size} tokens")
        info = self._engine.info
        if info is None:  # nothing was ever loaded: check_room turns requests away
            return
        limit = info.max_total_tokens
        if num_prompt >= limit:
            raise InvalidPayload(f"'inputs' has {num_prompt} tokens; the model takes at most {limit - 1}")
        if num_prompt + wanted > limit:
            raise InvalidParameter(
                f"parameters.max_new_tokens={wanted}: with {num_prompt} prompt tokens it must be at most "
                f"{limit - num_prompt}, as the model takes {limit} in all"
            )


def _utf8(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise InvalidPayload(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
