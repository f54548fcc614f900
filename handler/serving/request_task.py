"""One request in flight on an event loop: from the parsed call to its last byte, or to the client's going away."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from handler.core.errors import InternalError, ServingError, Unavailable, serving_error
from handler.core.text import Prompt
from handler.core.values import Delta, Finish, Request
from handler.http.streaming import Writer
from handler.plugins.formatter_thread import FormatterThread, ThreadedReply
from handler.protocols.base import Headers, HttpResponse, ParsedRequest
from handler.serving.engine_driver import Pump
from handler.serving.stats import Record

log = logging.getLogger("handler.exchange")

Encode = Callable[[Request], Awaitable[tuple[Request, Prompt]]]


class Exchange:
    """Collects what comes back for a call and says where it goes.

    `begun` resolves when there is something to answer: then either `answer` holds a whole one, or the bytes of a
    stream have begun and `stream_to` says where they go from now on.

    Args:
        call: what was asked, with the reply that renders it.
        encode: checks a request and turns its text into ids; may raise ServingError.
        gate: entered before the requests are put to the engine, left when they have ended.
        formatters: where a model.py's functions run; None where there are none.
    """

    def __init__(
        self,
        call: ParsedRequest,
        *,
        encode: Encode,
        gate: AbstractAsyncContextManager[object],
        pump: Pump,
        record: Record,
        formatters: FormatterThread | None = None,
    ) -> None:
        self._call = call
        self._encode = encode
        self._gate = gate
        self._pump = pump
        self._record = record
        self._reply = call.reply
        self._threaded: ThreadedReply | None = None
        if call.formatter and formatters is not None:
            self._reply = self._threaded = ThreadedReply(call.reply, call.formatter, formatters, self._deliver)
        self._ids: set[int] = set()
        self._ended = asyncio.Event()
        self._pending: list[bytes] = []
        self._writer: Writer | None = None
        self.answer: HttpResponse | None = None
        self.failure: ServingError | None = None  # what `answer` is about, where it is not the answer asked for
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        try:
            encoded = [await self._encode(request) for request in self._call.requests]
            self._record.note_encoded()
            async with self._gate:
                if not self._record.outcome:  # the server may have given up meanwhile
                    self._submit(encoded)
                    await self._ended.wait()
        except Exception as error:
            self._refuse(serving_error(error))

    def _submit(self, encoded: Sequence[tuple[Request, Prompt]]) -> None:
        started = self._record.note_started
        sink = self._feed if self._threaded is None else self._threaded.put  # as a field it would be a cycle
        for index, (request, prompt) in enumerate(encoded):
            self._record.num_prompt_tokens += len(prompt.ids)
            self._reply.start(index, len(prompt.ids))
            self._ids.add(self._pump.submit(request, prompt, functools.partial(sink, index), started))

    def _feed(self, index: int, delta: Delta) -> None:
        """One delta of request number `index`: the hot path, once a token."""
        self._record.note(delta)
        if delta.error is not None:
            self._record.error = delta.error.public
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
                self.answer = HttpResponse(200, self._reply.content_type, data)
                self.begun.set_result(None)
        if self._reply.finished:
            self._end("failed" if delta.error is not None else "ok")

    def _deliver(self, index: int, delta: Delta) -> None:
        """A delta whose bytes were made elsewhere, outside of the pump's steps."""
        if self._record.outcome:
            return
        try:
            self._feed(index, delta)
        except Exception as error:
            log.exception("an answer could not be written: a bug")
            self._feed(index, Delta(0, 0, (), Finish.ERROR, InternalError.of(error)))
        self._pump.flush()

    def stream_to(self, writer: Writer) -> None:
        """From now on the bytes go to `writer`, first those that have gathered."""
        writer.write(b"".join(self._pending), last=self._reply.finished)
        self._pending.clear()
        self._writer = writer

    def headers(self) -> Headers:
        """The dialect's own, for the answer that has begun."""
        if self.failure is not None:
            return ()
        return self._call.headers(None if self.answer is None else self._record.timing())

    def cancel(self) -> None:
        """The client is gone: nothing more is computed for it."""
        if not self._record.outcome:
            self._end("cancelled")
            self._task.cancel()

    def fail(self, error: ServingError) -> None:
        """End every request of this exchange with `error`, in the way that what was sent so far allows."""
        for index in range(len(self._call.requests)):
            if not self._record.outcome:
                self._feed(index, Delta(0, 0, (), Finish.ERROR, error))

    def _refuse(self, error: ServingError) -> None:
        self._record.error = error.public
        # Without its traceback, which names this exchange: a cycle.
        self.answer, self.failure = self._reply.refused(error), error.with_traceback(None)
        outcome = "overloaded" if isinstance(error, Unavailable) else "failed" if self._record.begun else "refused"
        self._end(outcome)
        if not self.begun.done():
            self.begun.set_result(None)

    def _end(self, outcome: str) -> None:
        """Once, however it ends: the figures are written down, what is still in the engine leaves it."""
        if self._record.outcome:
            return
        self._record.close(outcome)
        for id in self._ids:
            self._pump.cancel(id)
        if self._threaded is not None:
            self._threaded.close()
        self._ended.set()
