"""The task of a running request, from its headers to the last byte of its response, or until its client disconnects."""

from __future__ import annotations

import asyncio
import functools
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

from handler.core.errors import InvalidParameter, Overloaded, RefusedByEngine, ServingError, Unavailable, serving_error
from handler.core.framing import JSON
from handler.core.loop import Begun
from handler.core.values import Delta, Finish
from handler.plugins.formatter_thread import ThreadedReply
from handler.protocols.kernel.dialect import Dialect, ParsedRequest, Reply
from handler.protocols.kernel.errors import Headers, HttpResponse
from handler.scheduler.batcher import ClientChannel, FastPath
from handler.serving.admission import Admission
from handler.serving.engine_driver import DynamicBatcher, EngineDriver
from handler.serving.head import Head
from handler.serving.metrics.prometheus import RequestStats
from handler.serving.quota import Quota, Share
from handler.serving.request_log import Answer, Captured, RequestLog


class RequestMemory(Share):
    """A request's share of the memory quota: first for its body, then for the decoded value and the unsent response."""

    _decoded = _repeated = 0

    def settle(self, decoded: int, repeated: int) -> None:
        """Replace the body's share by that of the decoded body.

        Args:
            decoded: bytes of the decoded body.
            repeated: bytes of the body that the response repeats.

        Raises:
            Overloaded: all requests together need too much memory.
        """
        self._decoded, self._repeated = decoded, repeated
        self.hold(0)

    def hold(self, num_unsent: int) -> None:
        """Set the number of unsent bytes of the response, which include those that `settle` has counted.

        Raises:
            Overloaded: all requests together need too much memory.
        """
        self.set(self._decoded + max(self._repeated, num_unsent))


class RequestTask:
    """The task of a request, which receives its deltas and buffers the bytes of its response until the host sends them.

    A failure becomes the complete response if no bytes have been sent, and otherwise the last event of the stream. As a
    context manager, the task closes itself.

    Args:
        on_bytes: called with this task when there are bytes to send, when the engine starts to answer, and when the
            response is complete, at most once per engine step.
        on_close: called with this task when the host closes it.
        memory: memory quota of all requests.
        batches: gate for dynamic batches that the request must join, or None without dynamic batching.

    Attributes:
        status: status of the response, which is final when `begun`.
        error: error if it is the complete response, otherwise None.
        unsent: bytes of the response that the host has not taken yet.
        begun: whether the engine has answered, or the request was refused.
        committed: whether the status cannot change any more, because the host has sent the headers or taken bytes.
        finished: whether the response is complete.
        closed: whether the host has closed the task.
        opened_at: start time, by time.monotonic().
        memory: the request's share of the memory quota, until the task is closed.
        parsed: parsed request, or None until the body has been parsed.
        keeps_body: whether the body is kept until the task is closed.
    """

    keeps_body = False

    __slots__ = (
        "__weakref__", "_admission", "_background", "_batches", "_channel", "_content_type", "_driver",
        "_error_headers", "_fast_path", "_head", "_ids", "_in_batch", "_on_close", "_reply", "_size", "_stats",
        "_threaded", "begun", "closed", "committed", "error", "finished", "memory", "notified", "on_bytes", "opened_at",
        "parsed", "status", "unsent",
    )  # fmt: skip

    def __init__(
        self,
        admission: Admission,
        driver: EngineDriver,
        stats: RequestStats,
        head: Head,
        on_bytes: Callable[[RequestTask], object],
        on_close: Callable[[RequestTask], object],
        memory: Quota,
        batches: DynamicBatcher | None = None,
    ) -> None:
        self._admission = admission
        self._driver = driver
        self._stats = stats
        self._head = head
        self._batches = batches
        self._background: asyncio.Future[None] | None = None
        self._in_batch = False
        self._size = 0  # bytes of the body
        self._reply: Reply | None = None
        self._threaded: ThreadedReply | None = None
        self._ids: list[int] = []  # ids in the batcher
        self._fast_path: FastPath | None = None
        self._channel: ClientChannel | None = None
        self.notified = False  # set by the driver
        self._content_type = ""
        self._error_headers: Headers = ()
        self.on_bytes = on_bytes
        self._on_close = on_close
        self.memory = RequestMemory(memory)
        self.parsed: ParsedRequest | None = None
        self.status = 200
        self.error: ServingError | None = None
        self.unsent: list[bytes] = []
        self.begun = self.committed = self.finished = self.closed = False
        self.opened_at = time.monotonic()

    # -- the response that the host sends ------------------------------------------------------------------------

    @property
    def content_type(self) -> str:
        """Return the content type of the response, or that of JSON while it is not known."""
        return self._content_type or (JSON if self._reply is None else self._reply).content_type

    @property
    def streams(self) -> bool:
        """Return whether the response is streamed. A refused request has a single response."""
        return self.parsed is not None and self.parsed.streams and self.error is None

    @property
    def ignored(self) -> Sequence[str]:
        return () if self.parsed is None else self.parsed.ignored

    @property
    def keep_alive(self) -> bytes:
        """Return the bytes to send when a stream has been silent for some time, or b"" if its dialect has none."""
        return b"" if self.parsed is None else self.parsed.keep_alive

    def header(self, name: str) -> str:
        """Return the value of a request header, or "" if it is missing.

        Args:
            name: name of the header in lower case.
        """
        return self._head.headers.get(name, "")

    def dialect_headers(self) -> Headers:
        """Return the dialect's headers for the response, after it has begun."""
        if self.parsed is None or self.error is not None:
            return self._error_headers
        return self.parsed.headers(None if self.streams else self._stats.timing())

    @property
    def retry_after(self) -> float:
        """Return the number of seconds after which a refused client may try again, or 0 if it is unknown."""
        return self.error.retry_after if isinstance(self.error, Overloaded) else 0.0

    def take(self, limit: int | None = None) -> bytes:
        """Return the bytes to send now, possibly none.

        Args:
            limit: maximum number of bytes. The bytes end at a character boundary.
        """
        unsent = self.unsent
        if not unsent:
            return b""
        data = unsent[0] if len(unsent) == 1 else b"".join(unsent)
        unsent.clear()
        if limit is not None and len(data) > limit:
            end = limit
            while data[end] & 0xC0 == 0x80:  # within a UTF-8 character
                end -= 1
            unsent.append(data[end:])
            data = data[:end]
        self.committed = True
        return data

    def take_whole(self) -> HttpResponse:
        """Return the complete response to a request that does not stream, or was refused."""
        return HttpResponse(self.status, self.content_type, self.take(), self.retry_after, self.dialect_headers())

    def stream_end(self) -> bytes:
        """Return the end of a stream for a request that was refused after keep-alives had been sent."""
        assert self._reply is not None, "the stream has begun"
        return self._reply.feed(0, Delta(0, 0, (), Finish.ERROR, self.error))

    # -- admission -----------------------------------------------------------------------------------------------

    async def parse(self, body: bytes) -> None:
        """Parse the body. If it is refused, the error becomes the response."""
        if self.finished:
            return
        value, self._size, admission = None, len(body), self._admission
        try:
            decoded = await admission.decode(body, self._head, self.memory)
            value, decoded_size = decoded.value, decoded.size
            recalled = None
            if admission.preprocessor.store is not None:
                recalled = await admission.recall(decoded, self._size, self._head, self.memory)
            if recalled is not None:
                self._size += recalled.size
                decoded_size += recalled.size
            parse = functools.partial(admission.preprocessor.parse, decoded, self._head, recalled)
            parsed = await admission.run(self._size, parse)
            self.memory.settle(decoded_size + self.keeps_body * len(body), parsed.num_repeated)
            if not self.finished:  # the server may have given up the request in the meantime
                self._accept(parsed)
        except Exception as error:  # one client's body must not stop the others
            self.refuse(serving_error(error), value)

    def start(self, body: bytes | None = None) -> None:
        """Parse the body if it is given, tokenize the prompts, join a batch, and submit the request.

        This continues in the background as soon as it has to wait. The event loop need not be running.
        """
        if self.finished:
            return
        work = self._run(body)
        try:
            waiting = work.send(None)
        except StopIteration:
            return  # it did not have to wait
        self._background = self._driver.loop.create_task(Begun(work, waiting))

    async def _run(self, body: bytes | None) -> None:
        if body is not None:
            await self.parse(body)
            del body  # do not keep it in memory while the response is sent
        if self.parsed is None or self._reply is None or self.finished:
            return
        try:
            take_prompt = self.parsed.take_prompt
            if take_prompt is not None:
                await self._admission.tokenize(self.parsed.requests[0], self._size, self._head, take_prompt)
            if take_prompt is not None or not self.parsed.requests:  # the response needs no engine
                return self._feed_and_flush(0, Delta(0, 0, ()))
            encoded = [
                await self._admission.encode(request, self._size, self._head) for request in self.parsed.requests
            ]
            self.parsed = self.parsed._replace(requests=[request for request, _ in encoded])
            self._stats.note_encoded(self.parsed)
            if self._batches is not None and not self.finished:
                await self._batches.join(line=encoded[0][0].background is not None)
                self._in_batch = True
                if self.finished:
                    self._batches.leave()
            if self.finished:
                return
            sink = self.feed if self._threaded is None else self._threaded.put
            for index, (request, prompt) in enumerate(encoded):
                self._stats.num_prompt_tokens += len(prompt.ids)
                self._reply.start(index, len(prompt.ids))
                own, started = functools.partial(sink, index), self._stats.note_started
                self._ids.append(self._driver.submit(request, prompt, own, started, follows=index > 0))
        except Exception as error:  # one client's request must not stop the others
            self.refuse(serving_error(error))

    def _accept(self, parsed: ParsedRequest) -> None:
        self.parsed, self._reply = parsed, parsed.reply
        if parsed.formatter:
            thread = self._admission.formatters
            self._threaded = ThreadedReply(parsed.reply, parsed.formatter, thread, self._feed_and_flush)
            self._reply = self._threaded
        if self._dialect.computes:
            self._stats.count_opened()
        self._stats.note_accepted(parsed)

    @property
    def _dialect(self) -> Dialect:
        return self._admission.preprocessor.dialect_of(self._head)

    # -- rendering of the response -------------------------------------------------------------------------------

    def write_tokens_to(self, channel: ClientChannel) -> None:
        """Write the plain tokens of a stream to `channel`. Bytes that it does not accept are added to `unsent`."""
        self._channel = channel
        if self._fast_path is not None:
            self._fast_path.channel = channel

    def feed(self, index: int, delta: Delta) -> None:
        """Render a delta of request number `index`. The driver calls this in its step, except for most plain tokens."""
        stats = self._stats
        stats.num_tokens += len(delta.tokens)
        if not stats.engine_answered:
            stats.note_first()
        reply = self._reply
        if delta.error is not None or reply is None:
            return self._fail(index, delta)
        if delta.finish is not None and (writing := self._write_apart(reply, index, delta)) is not None:
            return writing.add_done_callback(functools.partial(self._finish_writing, delta))
        self._put(reply, reply.feed(index, delta), delta.finish)

    def _write_apart(self, reply: Reply, index: int, delta: Delta) -> asyncio.Future[bytes] | None:
        """Render the last delta on a thread if that may take long. Return None if it must be rendered inline."""
        keeps = self.parsed is not None and self.parsed.keeps
        if not (keeps or (delta.error is None and reply.takes_long(delta))):
            return None
        return self._admission.write(functools.partial(reply.feed, index, delta), keeps=keeps)

    def _put(self, reply: Reply, data: bytes, finish: Finish | None) -> None:
        """Buffer the rendered bytes, and notify the host at the end of the engine's step."""
        if reply.finished and not self.streams:
            try:
                self.memory.hold(len(data))
            except Overloaded as error:
                return self._refuse(error)
        if data:
            self.unsent.append(data)
        if reply.finished:
            self._end("ok", finish)
        elif data and self._fast_path is None:
            self._open_fast_path(reply)
        elif not data and self.begun:
            return
        self.begun = True
        self._driver.notify(self)

    def _finish_writing(self, delta: Delta, writing: asyncio.Future[bytes]) -> None:
        """Process the end of a response that a thread has rendered, unless the client has disconnected."""
        error = None if writing.cancelled() else writing.exception()
        if self.finished or self._reply is None or writing.cancelled():
            return
        if delta.error is not None:
            self._put_failure(b"" if error else writing.result())
        elif error is not None:
            return self.fail(serving_error(error))
        else:
            self._put(self._reply, writing.result(), delta.finish)
        self._driver.flush()

    def _open_fast_path(self, reply: Reply) -> None:
        """Let the batcher encode plain tokens from now on, if the reply has an encoder for them."""
        encode = reply.token_encoder() if len(self._ids) == 1 else None
        if encode is not None:
            self._fast_path = FastPath(self._ids[0], encode, self._channel, self._keep)
            self._driver.set_fast_path(self._fast_path)

    def _keep(self, line: bytes) -> None:
        self.unsent.append(line)
        self._driver.notify(self)

    def fail(self, error: ServingError) -> None:
        """End the request with `error`, which becomes the complete response, or the last event of a begun stream."""
        self._feed_and_flush(0, Delta(0, 0, (), Finish.ERROR, error))

    def refuse(self, error: ServingError, body: Any = None) -> None:
        """Make `error` the complete response.

        Args:
            body: decoded body, or None if it was not decoded.
        """
        if not self.finished:
            self._refuse(error, body)
            self._driver.flush()

    def close(self) -> None:
        """Close the request after its last byte was sent, or cancel it if its client has disconnected."""
        if not self.finished:
            self._end("cancelled")
            background, self._background = self._background, None  # its traceback refers to this task: a cycle
            if background is not None:
                background.cancel()
        if not self.closed:
            self.closed = True
            self.memory.give_back()
            self._on_close(self)

    def __enter__(self) -> RequestTask:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _feed_and_flush(self, index: int, delta: Delta) -> None:
        """Render a delta outside of the driver's steps."""
        if self.finished:
            return
        try:
            self.feed(index, delta)
        except Exception as error:  # the dialect has a bug
            self.feed(index, Delta(0, 0, (), Finish.ERROR, serving_error(error)))
        self._driver.flush()

    def _fail(self, index: int, delta: Delta) -> None:
        assert delta.error is not None, "only a parsed request gets deltas"
        if self.finished:
            return
        if self._reply is None or not (self.streams and (self.committed or self.unsent)):
            return self._refuse(delta.error)
        self._stats.error = delta.error.public
        if (writing := self._write_apart(self._reply, index, delta)) is not None:
            return writing.add_done_callback(functools.partial(self._finish_writing, delta))
        self._put_failure(self._reply.feed(index, delta))

    def _put_failure(self, data: bytes) -> None:
        """End a failed stream with the bytes that its reply has rendered."""
        self._end("failed")
        self._driver.notify(self)
        self.unsent.append(data)

    def _refuse(self, error: ServingError, body: Any = None) -> None:
        if self.parsed is not None:
            errors = self.parsed.errors
        else:
            errors = self._dialect.errors_of(body, self._admission.preprocessor.context)
            # TGI counts requests that it refuses for a parameter, or because too many others are waiting
            if self._dialect.computes and isinstance(error, InvalidParameter | Unavailable):
                self._stats.count_opened()
        answer = errors.whole(error)
        self.status, self._content_type, self._error_headers = answer.status, answer.content_type, answer.headers
        self.error = error.with_traceback(None)  # a traceback refers to this task: a cycle
        self.unsent[:] = [answer.body]
        self._stats.error = error.public
        failed = "failed" if self._stats.engine_answered and not isinstance(error, RefusedByEngine) else "refused"
        unavailable = "overloaded" if isinstance(error, Overloaded) else "unavailable"
        self._end(unavailable if isinstance(error, Unavailable) else failed)
        self._driver.notify(self)

    def _end(self, outcome: str, finish: Finish | None = None) -> None:
        """Record the request's metrics, and remove its remaining sequences from the engine."""
        self.finished = self.begun = True
        fast_path, self._fast_path = self._fast_path, None  # it refers to this task: a cycle
        if fast_path is not None:
            self._stats.num_tokens += fast_path.num_tokens
        self._stats.close(outcome, finish)
        for id in self._ids:
            self._driver.cancel(id)
        if self._threaded is not None:
            self._threaded.close()
        if self._in_batch and self._batches is not None:
            self._batches.leave()


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the response header that lists ignored parameters.

    The names are chosen by the client. They are quoted so that they are valid in a header, and the list is cut to the
    length that SageMaker forwards.
    """
    if not names:
        return {}
    quoted = ", ".join(urllib.parse.quote(name[:64], safe="._-[]") for name in names[:32])
    return {"x-lmi-ignored-parameters": quoted[:1024]}


# -- captured requests, whose tasks keep the body and all bytes of the response ----------------------------------------


class CapturedTask(RequestTask):
    """The task of a request that is passed to the request log when it is closed.

    Args:
        log: log that the request is written to.
        id: id of the request, which clients may use more than once.
        path: path with its query.
        more: arguments of `RequestTask`.
    """

    keeps_body = True

    __slots__ = ("_at", "_body", "_id", "_log", "_path", "_pieces", "_taken")

    def __init__(self, log: RequestLog, id: str, path: str, *more: Any) -> None:
        super().__init__(*more)
        self._log, self._path = log, path
        self._at = time.time()
        self._id = f"{id}@{self._at:.6f}"
        self._body: bytes | None = None
        self._pieces: list[bytes] = []
        self._taken = 0  # bytes of the pieces

    async def parse(self, body: bytes) -> None:
        self._body = body
        await super().parse(body)

    def write_tokens_to(self, channel: ClientChannel) -> None:
        """Do nothing. The fast path would bypass the capture, which needs all tokens."""

    def _put(self, reply: Reply, data: bytes, finish: Finish | None) -> None:
        self._capture(data)
        super()._put(reply, data, finish)

    def _keep(self, line: bytes) -> None:
        self._capture(line)
        super()._keep(line)

    def _put_failure(self, data: bytes) -> None:
        self._capture(data)
        super()._put_failure(data)

    def _refuse(self, error: ServingError, body: Any = None) -> None:
        super()._refuse(error, body)
        self._pieces.clear()
        self._capture(b"".join(self.unsent))

    def _capture(self, data: bytes) -> None:
        """Keep a piece of the response. If there is no room for it, the request is not captured."""
        if self._body is None or not data:
            return
        if self._log.take(len(data)):
            self._pieces.append(data)
            self._taken += len(data)
        else:
            self._log.drop("the responses in progress need too much memory", self._taken)
            self._pieces.clear()
            self._body = None

    def close(self) -> None:
        if not self.closed and self._body is not None:
            answer = Answer(self.status, self.content_type, self._pieces) if self.finished else None
            captured = Captured(self._id, self._at, self._path, self._head.headers, self._body, answer)
            self._log.put(captured, self._taken)
            self._body = None
        super().close()
