"""One HTTP request in flight: from the parsed call to its last byte, or to the client's going away."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from handler.core import Delta, Finish, Request
from handler.errors import InternalError, ServingError, Unavailable
from handler.hosts.body import Writer
from handler.hosts.metrics import Metrics
from handler.hosts.pump import Pump
from handler.schemas.base import Answer, Call
from handler.text import Prompt

log = logging.getLogger("handler.request")

Encode = Callable[[Request], Awaitable[Prompt]]


class Exchange:
    """Collects what comes back for a call and says where it goes.

    `begun` resolves when there is something to answer: then either `answer` holds a whole one, or the bytes of a
    stream have begun and `stream_to` says where they go from now on.

    Args:
        call: what was asked, with the reply that renders it.
        encode: checks a request and turns its text into ids; may raise ServingError.
        gate: entered before the requests are put to the engine, left when they have ended.
    """

    def __init__(
        self,
        call: Call,
        *,
        encode: Encode,
        gate: AbstractAsyncContextManager[object],
        pump: Pump,
        metrics: Metrics,
        request_id: str,
        log_text: bool = False,
    ) -> None:
        self._call = call
        self._encode = encode
        self._gate = gate
        self._pump = pump
        self._metrics = metrics
        self._request_id = request_id
        self._log_text = log_text
        self._reply = call.reply
        self._ids: set[int] = set()
        self._ended = asyncio.Event()
        self._pending: list[bytes] = []
        self._writer: Writer | None = None
        self._received_at = time.perf_counter()
        self._first_at = 0.0
        self._num_prompt_tokens = 0
        self._num_tokens = 0
        self._outcome = ""
        self._error = ""
        self.answer: Answer | None = None
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        try:
            prompts = [await self._encode(request) for request in self._call.requests]
            async with self._gate:
                self._submit(prompts)
                await self._ended.wait()
        except ServingError as error:
            self._refuse(error)
        except Exception as error:
            log.exception("id=%s: a bug", self._request_id)
            self._refuse(InternalError(f"internal error: {type(error).__name__}"))

    def _submit(self, prompts: Sequence[Prompt]) -> None:
        for index, (request, prompt) in enumerate(zip(self._call.requests, prompts, strict=True)):
            self._num_prompt_tokens += len(prompt.ids)
            self._reply.start(index, len(prompt.ids))
            self._ids.add(self._pump.submit(request, prompt, functools.partial(self._feed, index)))
        self._metrics.prompt_tokens.inc(self._num_prompt_tokens)

    def _feed(self, index: int, delta: Delta) -> None:
        """One delta of request number `index`: the hot path, once a token."""
        if not self._first_at:
            self._first_at = time.perf_counter()
        self._num_tokens += len(delta.tokens)
        if delta.error is not None:
            self._error = delta.error.public
            if not (self._writer or self._pending):
                self._refuse(delta.error)
                return
        data = self._reply.feed(index, delta)
        if data or self._reply.finished:
            if self._writer is not None:
                self._pump.write(self._writer, data, last=self._reply.finished)
            elif self._call.streams:
                self._pending.append(data)
                if not self.begun.done():
                    self.begun.set_result(None)
            else:
                self.answer = Answer(200, self._reply.content_type, data)
                self.begun.set_result(None)
        if self._reply.finished:
            self._end("failed" if delta.error is not None else "ok")

    def stream_to(self, writer: Writer) -> None:
        """From now on the bytes go to `writer`, first those that have gathered."""
        writer.write(b"".join(self._pending), last=self._reply.finished)
        self._pending.clear()
        self._writer = writer

    def cancel(self) -> None:
        """The client is gone: nothing more is computed for it."""
        if not self._outcome:
            self._end("cancelled")
            self._task.cancel()

    def fail(self, error: ServingError) -> None:
        """End every request of this exchange with `error`, in the way that what was sent so far allows."""
        for index in range(len(self._call.requests)):
            if not self._outcome:
                self._feed(index, Delta(0, 0, (), Finish.ERROR, error))

    def _refuse(self, error: ServingError) -> None:
        self._error = error.public
        self.answer = self._reply.refused(error)
        outcome = "overloaded" if isinstance(error, Unavailable) else "failed" if self._first_at else "refused"
        self._end(outcome)
        if not self.begun.done():
            self.begun.set_result(None)

    def _end(self, outcome: str) -> None:
        """Once, however it ends: what is still in the engine leaves it, the figures are written down."""
        if self._outcome:
            return
        self._outcome = outcome
        for id in self._ids:
            self._pump.cancel(id)
        self._ended.set()
        now = time.perf_counter()
        seconds = now - self._received_at
        metrics = self._metrics
        metrics.requests.labels(outcome).inc()
        metrics.duration.observe(seconds)
        first = self._first_at - self._received_at if self._num_tokens else 0.0
        if self._num_tokens:
            metrics.first_token.observe(first)
        if self._num_tokens > 1:
            metrics.per_token.observe((now - self._first_at) / (self._num_tokens - 1))
        log.info(
            "id=%s outcome=%s prompt_tokens=%d tokens=%d first_token_s=%.3f seconds=%.3f%s%s",
            self._request_id, outcome, self._num_prompt_tokens, self._num_tokens, first, seconds,
            f" ignored={','.join(name[:64] for name in self._call.ignored[:32])!r}" if self._call.ignored else "",
            f" error={self._error!r}" if self._error else "",
        )  # fmt: skip
        if self._log_text:
            prompts = [request.messages or request.prompt for request in self._call.requests]
            log.info("id=%s prompts=%r", self._request_id, prompts)
