"""One request in flight: from its headers to its last byte, or until its client disconnects."""

from __future__ import annotations

import asyncio
import functools
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

from handler.core.errors import Overloaded, RefusedByEngine, ServingError, Unavailable, serving_error
from handler.core.framing import JSON
from handler.core.loop import Begun
from handler.core.values import Delta, Finish
from handler.plugins.formatter_thread import ThreadedReply
from handler.protocols.kernel.dialect import ParsedRequest, Reply
from handler.protocols.kernel.errors import Headers, HttpResponse
from handler.scheduler.batcher import ClientChannel, FastPath
from handler.serving.admission import Admission
from handler.serving.engine_driver import DynamicBatcher, EngineDriver
from handler.serving.head import Head
from handler.serving.metrics.prometheus import RequestStats
from handler.serving.request_log import Answer, Captured, RequestLog
from handler.serving.turns import Quota, Share


class RequestMemory(Share):
    """One request's share of the memory: its body as it arrives, then the decoded value, and unread answers."""

    _decoded = _repeated = 0

    def settle(self, decoded: int, repeated: int) -> None:
        """Count a decoded body in place of the body, and the parts of it that the answer repeats.

        Raises:
            Overloaded: all requests together take too much; `hold` raises it too.
        """
        self._decoded, self._repeated = decoded, repeated
        self.hold(0)

    def hold(self, num_unread: int) -> None:
        """Count the bytes of the answer that its client has not read; those that it repeats are counted before."""
        self.set(self._decoded + max(self._repeated, num_unread))


class RequestTask:
    """Takes a request's deltas, and keeps the bytes of its answer until its host takes them.

    A failure becomes the whole answer while nothing has been taken, and the stream's last line afterwards. As a context
    manager it closes itself at the end.

    Args:
        on_bytes: called with this task when there is something to take, when the engine begins to answer, and at the
            end; at the end of the engine's step, once for all that it brought.
        on_close: called once with this task, when its host has closed it.
        memory: of all requests.
        batches: which the request must join before it goes to the engine; None if it need not.

    Attributes:
        status, content_type: of the answer; settled when `begun`.
        error: why the whole answer is a failure; None if it is not.
        unsent: bytes that the host has not taken yet.
        begun: the engine has answered, or the request was refused.
        committed: some bytes have been taken, or the host has sent the headers: the status cannot change any more.
        finished: nothing more comes.
        closed: the host is done with it.
        opened_at: by time.monotonic().
        memory: that the request takes, until it is closed.
        parsed: None until the body has been parsed.
        keeps_body: the body stays until the end.
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
        self._in_batch, self._size = False, 0  # of the body
        self._reply: Reply | None = None
        self._threaded: ThreadedReply | None = None
        self._ids: list[int] = []  # the batcher's
        self._fast_path: FastPath | None = None
        self._channel: ClientChannel | None = None
        self.notified = False  # the driver's
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

    # -- what the host sends -------------------------------------------------------------------------------------

    @property
    def content_type(self) -> str:
        """JSON's until it is known."""
        return self._content_type or (JSON if self._reply is None else self._reply).content_type

    @property
    def streams(self) -> bool:
        """Return whether the answer comes in parts. A refusal does not."""
        return self.parsed is not None and self.parsed.streams and self.error is None

    @property
    def ignored(self) -> Sequence[str]:
        """The ignored parameters."""
        return () if self.parsed is None else self.parsed.ignored

    @property
    def keep_alive(self) -> bytes:
        """Return the bytes that a stream sends after a while of silence; b"" for none."""
        return b"" if self.parsed is None else self.parsed.keep_alive

    def header(self, name: str) -> str:
        """Return a header of the request; "" if it has none.

        Args:
            name: in lower case.
        """
        return self._head.headers.get(name, "")

    def dialect_headers(self) -> Headers:
        """The dialect's own headers, for the answer that has begun."""
        if self.parsed is None or self.error is not None:
            return self._error_headers
        return self.parsed.headers(None if self.streams else self._stats.timing())

    @property
    def retry_after(self) -> float:
        """Seconds after which a refused client may come again; 0 if unknown."""
        return self.error.retry_after if isinstance(self.error, Overloaded) else 0.0

    def take(self, limit: int | None = None) -> bytes:
        """Return the bytes to send now, at most `limit` and whole characters; possibly none."""
        unsent = self.unsent
        if not unsent:
            return b""
        data = unsent[0] if len(unsent) == 1 else b"".join(unsent)
        unsent.clear()
        if limit is not None and len(data) > limit:
            end = limit
            while data[end] & 0xC0 == 0x80:  # amid a character
                end -= 1
            unsent.append(data[end:])
            data = data[:end]
        self.committed = True
        return data

    def take_whole(self) -> HttpResponse:
        """Return the whole answer of a request that does not stream, or was refused."""
        return HttpResponse(self.status, self.content_type, self.take(), self.retry_after, self.dialect_headers())

    def stream_end(self) -> bytes:
        """Return the end of a stream whose request was refused when the host had already sent keep-alives."""
        assert self._reply is not None, "its stream has begun"
        return self._reply.feed(0, Delta(0, 0, (), Finish.ERROR, self.error))

    # -- admission -----------------------------------------------------------------------------------------------

    async def parse(self, body: bytes) -> None:
        """Parse the body; a refusal becomes the answer."""
        if self.finished:
            return
        value, self._size, admission = None, len(body), self._admission
        try:
            decoded = await admission.decode(body, self._head, self.memory)
            decoded_size = self.memory.size - len(body)
            value = decoded.value
            recalled = None
            if admission.preprocessor.store is not None:
                recalled = await admission.recall(decoded, self._size, self._head)
            if recalled is not None:
                self._size += recalled.size
            parse = functools.partial(admission.preprocessor.parse, decoded, self._head, recalled)
            parsed = await admission.run(self._size, parse)
            self.memory.settle(decoded_size + self.keeps_body * len(body), parsed.num_repeated)
            if not self.finished:  # the server may have given up meanwhile
                self._accept(parsed)
        except Exception as error:  # one client's body must not stop the others
            self.refuse(serving_error(error), value)

    def start(self, body: bytes | None = None) -> None:
        """Parse the body, if that is not done yet, tokenize, join a batch, submit: in the background after a wait.

        The event loop need not be running.
        """
        if self.finished:
            return
        work = self._run(body)
        try:
            waiting = work.send(None)
        except StopIteration:
            return  # nothing had to be waited for
        self._background = self._driver.loop.create_task(Begun(work, waiting))

    async def _run(self, body: bytes | None) -> None:
        if body is not None:
            await self.parse(body)
            del body  # it is not kept while the answer is sent
        if self.parsed is None or self._reply is None or self.finished:
            return
        try:
            take_prompt = self.parsed.take_prompt
            if take_prompt is not None:
                await self._admission.tokenize(self.parsed.requests[0], self._size, self._head, take_prompt)
            if take_prompt is not None or not self.parsed.requests:  # the answer needs no engine
                return self._feed_and_flush(0, Delta(0, 0, ()))
            encoded = [
                await self._admission.encode(request, self._size, self._head) for request in self.parsed.requests
            ]
            self.parsed = self.parsed._replace(requests=[request for request, _ in encoded])
            self._stats.note_encoded(self.parsed)
            if self._batches is not None and not self.finished:
                await self._batches.join()
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
        self._stats.note_accepted(parsed)

    # -- the answer ----------------------------------------------------------------------------------------------

    def write_tokens_to(self, channel: ClientChannel) -> None:
        """Write a stream's plain tokens to `channel`; what it does not accept waits in `unsent`."""
        self._channel = channel
        if self._fast_path is not None:
            self._fast_path.channel = channel

    def feed(self, index: int, delta: Delta) -> None:
        """Write one delta of request number `index`. Belongs to the driver's step; most tokens bypass it."""
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
        """Write an answer's end on a thread if that may take long; None if it is to be done here."""
        keeps = self.parsed is not None and self.parsed.keeps
        if not (keeps or (delta.error is None and reply.takes_long(delta))):
            return None
        return self._admission.write(functools.partial(reply.feed, index, delta), keeps=keeps)

    def _put(self, reply: Reply, data: bytes, finish: Finish | None) -> None:
        """Keep what the reply has written, and tell the host when the engine's step ends."""
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
        """Take an answer's end that a thread has written, unless the client has gone meanwhile."""
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
        """Let the batcher encode plain tokens from now on, as soon as the reply has an encoder for them."""
        encode = reply.token_encoder() if len(self._ids) == 1 else None
        if encode is not None:
            self._fast_path = FastPath(self._ids[0], encode, self._channel, self._keep)
            self._driver.set_fast_path(self._fast_path)

    def _keep(self, line: bytes) -> None:
        self.unsent.append(line)
        self._driver.notify(self)

    def fail(self, error: ServingError) -> None:
        """End the request with `error`, in the way that the bytes sent so far allow."""
        self._feed_and_flush(0, Delta(0, 0, (), Finish.ERROR, error))

    def refuse(self, error: ServingError, body: Any = None) -> None:
        """Answer with only `error`.

        Args:
            body: the decoded body; None if it was not decoded.
        """
        if not self.finished:
            self._refuse(error, body)
            self._driver.flush()

    def close(self) -> None:
        """Close the request: its last byte is delivered, or its client has left and nothing more is computed."""
        if not self.finished:
            self._end("cancelled")
            background, self._background = self._background, None  # its traceback names this task: a cycle
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
        """Feed a delta outside of the driver's steps."""
        if self.finished:
            return
        try:
            self.feed(index, delta)
        except Exception as error:  # what rendered it has a bug
            self.feed(index, Delta(0, 0, (), Finish.ERROR, serving_error(error)))
        self._driver.flush()

    def _fail(self, index: int, delta: Delta) -> None:
        assert delta.error is not None, "a request is fed when it has been parsed"
        if self.finished:
            return
        if self._reply is None or not (self.streams and (self.committed or self.unsent)):
            return self._refuse(delta.error)
        self._stats.error = delta.error.public
        if (writing := self._write_apart(self._reply, index, delta)) is not None:
            return writing.add_done_callback(functools.partial(self._finish_writing, delta))
        self._put_failure(self._reply.feed(index, delta))

    def _put_failure(self, data: bytes) -> None:
        """End a stream that has failed with what its reply has written."""
        self._end("failed")
        self._driver.notify(self)
        self.unsent.append(data)

    def _refuse(self, error: ServingError, body: Any = None) -> None:
        if self.parsed is not None:
            errors = self.parsed.errors
        else:
            preprocessor = self._admission.preprocessor
            errors = preprocessor.dialect_of(self._head).errors_of(body, preprocessor.context)
        answer = errors.whole(error)
        self.status, self._content_type, self._error_headers = answer.status, answer.content_type, answer.headers
        self.error = error.with_traceback(None)  # a traceback names this task: a cycle
        self.unsent[:] = [answer.body]
        self._stats.error = error.public
        failed = "failed" if self._stats.engine_answered and not isinstance(error, RefusedByEngine) else "refused"
        unavailable = "overloaded" if isinstance(error, Overloaded) else "unavailable"
        self._end(unavailable if isinstance(error, Unavailable) else failed)
        self._driver.notify(self)

    def _end(self, outcome: str, finish: Finish | None = None) -> None:
        """Record the figures; remove its remaining sequences from the engine."""
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
    """Return the answer's header that lists ignored parameters.

    The names are the client's text: quoted, so that they fit a header, and cut to the length that SageMaker passes
    on.
    """
    if not names:
        return {}
    quoted = ", ".join(urllib.parse.quote(name[:64], safe="._-[]") for name in names[:32])
    return {"x-lmi-ignored-parameters": quoted[:1024]}


# -- a request in flight that is captured: its task keeps its body, and the bytes of its answer ------------------------


class CapturedTask(RequestTask):
    """Passes its request to the log when it is closed.

    Args:
        id: the request's, which a client may use again.
        path: with the query.
        more: those of `RequestTask`.
    """

    keeps_body = True

    __slots__ = ("_at", "_body", "_id", "_log", "_path", "_pieces")

    def __init__(self, log: RequestLog, id: str, path: str, *more: Any) -> None:
        super().__init__(*more)
        self._log, self._path = log, path
        self._at = time.time()
        self._id = f"{id}@{self._at:.6f}"
        self._body: bytes | None = None
        self._pieces: list[bytes] = []

    async def parse(self, body: bytes) -> None:
        self._body = body
        await super().parse(body)

    def write_tokens_to(self, channel: ClientChannel) -> None:
        """Do nothing: a capture needs all tokens, and the fast path would write past it."""

    def _put(self, reply: Reply, data: bytes, finish: Finish | None) -> None:
        if data:
            self._pieces.append(data)
        super()._put(reply, data, finish)

    def _keep(self, line: bytes) -> None:
        self._pieces.append(line)
        super()._keep(line)

    def _put_failure(self, data: bytes) -> None:
        self._pieces.append(data)
        super()._put_failure(data)

    def _refuse(self, error: ServingError, body: Any = None) -> None:
        super()._refuse(error, body)
        self._pieces[:] = self.unsent

    def close(self) -> None:
        if not self.closed and self._body is not None:
            answer = Answer(self.status, self.content_type, self._pieces) if self.finished else None
            self._log.put(Captured(self._id, self._at, self._path, self._head.headers, self._body, answer))
            self._body = None
        super().close()
