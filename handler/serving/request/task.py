"""A running request, from its headers until the last byte of its response is sent or the client disconnects."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import urllib.parse
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from handler.core.errors import (
    InvalidParameter,
    Overloaded,
    RefusedByEngine,
    ServingError,
    Unavailable,
    serving_error,
)
from handler.core.framing import JSON
from handler.core.loop import Begun
from handler.core.text import Prompt
from handler.core.values import Delta, Finish, Request
from handler.plugins.formatter_thread import ThreadedReply
from handler.protocols.kernel.dialect import ParsedRequest, WithoutEngine
from handler.protocols.kernel.errors import Headers, HttpResponse
from handler.scheduler.batcher import ClientChannel, FastPath
from handler.serving.admission import Admission
from handler.serving.engine_driver import EngineDriver
from handler.serving.head import Head
from handler.serving.metrics.request_stats import RequestStats
from handler.serving.quota import Share
from handler.serving.request.courses import COURSES
from handler.serving.request.life import (
    ACCEPT,
    ANSWERING,
    CLOSE,
    CLOSED,
    COMMIT,
    END,
    OUTPUT,
    PARSED,
    START,
    SUBMIT,
    Life,
)
from handler.serving.request.plan import Encoding, Intake, SharedMedia, Wait

log = logging.getLogger("handler.request")

_NOT_ENCODED = "a bug in the server: the error of a stream could not be encoded"


class RequestMemory(Share):
    """A request's share of the memory quota: first for its body, then for the decoded value and the unsent response."""

    _decoded = _repeated = 0
    body = 0  # bytes of the body, and of the stored responses that it refers to

    def settle(self, decoded: int, repeated: int) -> None:
        """Replace the share for the body with a share for its decoded value.

        Args:
            decoded: bytes of the decoded body.
            repeated: bytes of the body that are repeated in the response.

        Raises:
            Overloaded: all requests together need too much memory.
        """
        self._decoded, self._repeated = decoded, repeated
        self.set_unsent(0)

    def set_unsent(self, num_unsent: int) -> None:
        """Set the number of unsent bytes in the response, including the bytes that `settle` has counted.

        Raises:
            Overloaded: all requests together need too much memory.
        """
        self.set(self._decoded + max(self._repeated, num_unsent))


class _Refusal(NamedTuple):
    """An error that is the complete response to a request."""

    error: ServingError
    response: HttpResponse


def _failure(error: ServingError) -> Delta:
    return Delta(0, 0, (), Finish.ERROR, error)


class RequestTask(Life):
    """The task of a request, which receives its deltas and buffers the bytes of its response until the host sends them.

    A failure becomes the complete response if no bytes have been sent, and otherwise the last event of the stream. As a
    context manager, the task closes itself.

    Args:
        on_bytes: called with this task when there are bytes to send, when the engine returns its first output, and when
            the response is complete, at most once per engine step.

    Attributes:
        unsent: bytes of the response that the host has not taken yet.
        memory: share of the memory quota, which is held until the task is closed.
        parsed: parsed request, or None until the body has been parsed.
        pause: called with the task when the engine has finished and the reply has not, if there is a second request.
    """

    __slots__ = (
        "__weakref__", "_channel", "_fast_path", "_refusal", "admission", "driver", "head", "memory", "on_bytes",
        "parsed", "pause", "stats", "unsent",
    )  # fmt: skip

    def __init__(
        self,
        admission: Admission,
        driver: EngineDriver,
        stats: RequestStats,
        head: Head,
        on_bytes: Callable[[RequestTask], object] = bool,
    ) -> None:
        super().__init__()
        self.admission = admission
        self.driver = driver
        self.stats = stats
        self.head = head
        self._channel: ClientChannel | None = None
        self._fast_path: FastPath | None = None
        self._refusal: _Refusal | None = None
        self.on_bytes = on_bytes
        self.memory = RequestMemory(admission.memory.of(head.owner))
        self.parsed: ParsedRequest | None = None
        self.pause: Callable[[RequestTask], None] | None = None
        self.unsent: list[bytes] = []
        itself = weakref.ref(self)  # a task that nobody closes is freed too
        admission.tasks.add(self)
        self.hold(lambda: admission.tasks.discard(itself()), CLOSED)
        self.hold(self.memory.close, CLOSED)

    # -- the response that the host sends ------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether the first output for the response has arrived, or the request has ended."""
        return self.phase >= ANSWERING

    @property
    def status(self) -> int:
        """The status of the response, which is final when `begun` is true."""
        return 200 if self._refusal is None else self._refusal.response.status

    @property
    def error(self) -> ServingError | None:
        """The error if it is the complete response, otherwise None."""
        return None if self._refusal is None else self._refusal.error

    @property
    def content_type(self) -> str:
        """The content type of the response, or the JSON content type as long as it is unknown."""
        if self._refusal is not None:
            return self._refusal.response.content_type
        return (JSON if self.parsed is None else self.parsed.reply).content_type

    @property
    def streams(self) -> bool:
        """Whether the response is streamed. The response to a refused request is never streamed."""
        return self.parsed is not None and self.parsed.streams and self._refusal is None

    @property
    def owner(self) -> str:
        """The owner of the request's API key, or "" without a key."""
        return self.head.owner

    @property
    def ignored(self) -> Sequence[str]:
        return () if self.parsed is None else self.parsed.ignored

    @property
    def keep_alive(self) -> bytes:
        """The bytes to send when a stream has been idle for some time, or b"" if its dialect has no keep-alive."""
        return b"" if self.parsed is None else self.parsed.keep_alive

    def header(self, name: str) -> str:
        """Return the value of a request header, or "" if it is missing.

        Args:
            name: name of the header in lower case.
        """
        return self.head.headers.get(name, "")

    def dialect_headers(self) -> Headers:
        """Return the response headers that the dialect adds. Call this after the response has begun."""
        if self._refusal is not None:
            return self._refusal.response.headers
        if self.parsed is None or self.parsed.headers is None:
            return ()
        return self.parsed.headers(None if self.streams else self.stats.timing())

    @property
    def retry_after(self) -> float:
        """The number of seconds after which a refused client may retry, or 0 if this is unknown."""
        return self.error.retry_after if isinstance(self.error, Overloaded) else 0.0

    def take(self, limit: int | None = None) -> bytes:
        """Return the bytes to send now, possibly none.

        Args:
            limit: maximum number of bytes. The returned bytes end at a character boundary.
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
        if not self.committed:
            self.on(COMMIT)
        return data

    def take_whole(self) -> HttpResponse:
        """Return the complete response to a request that is non-streaming or was refused."""
        return HttpResponse(self.status, self.content_type, self.take(), self.retry_after, self.dialect_headers())

    # -- admission -----------------------------------------------------------------------------------------------

    async def parse(self, body: bytes) -> None:
        """Parse the body. If it is refused, the error is sent as the response."""
        if self.finished:
            return
        intake = Intake(self.head, body, self)
        del body  # the intake drops it as soon as it is decompressed
        try:
            plan, head = self.admission.plan, self.head
            for work in plan.body_of(head) if head.stages else plan.body:
                if (waiting := work(intake)) is not None:
                    await waiting
            parsed = intake.parsed
            assert parsed is not None, "a stage parses the body"
            self.memory.body = intake.num_bytes
            self.memory.settle(intake.size, parsed.num_repeated)
            if not self.finished:  # the server may have given up the request in the meantime
                self._accept(parsed)
        except Exception as error:  # one client's body must not stop the others
            self.refuse(serving_error(error), None if intake.decoded is None else intake.decoded.value)

    def note_decoded(self, intake: Intake) -> None:
        """Note that the body has been decoded, on a server that captures requests."""

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Run work for the request until it first waits, and continue it in the background until the request ends.

        What has not begun by then is withdrawn, for example a body that waits to be decoded.

        Returns:
            The task in the background, or None if the work did not have to wait.
        """
        try:
            waiting = work.send(None)
        except StopIteration:
            return None
        background = self.driver.loop.create_task(Begun(work, waiting))
        self.hold(background.cancel)
        return background

    async def run(self, body: bytes | None = None) -> None:
        """Parse the body (unless it is None), tokenize the prompts, join a batch, and submit the requests.

        Run this by `begin`.
        """
        if self.finished:
            return
        if body is not None:
            await self.parse(body)
            del body  # do not keep it in memory while the response is sent
        parsed, plan, loaded = self.parsed, self.admission.plan, list[Any]()
        if parsed is None or self.phase is not PARSED:
            return
        self.on(START)
        try:
            requests, course = parsed.requests, parsed.course
            if course is None and not requests:
                course = WithoutEngine()
            if course is not None and not await COURSES[type(course)](self, parsed, course, loaded):
                return
            encodings = await self.encode(requests, plan.encode, loaded)
            encoded = [encoding.request for encoding in encodings]
            if encoded != [*requests]:
                self.parsed = parsed = parsed._replace(requests=encoded)
            self.stats.note_encoded(parsed)
            for queue in plan.queue:
                if not self.finished and (waiting := queue(self, requests, self.head.owner)) is not None:
                    await waiting
            if self.finished:
                return
            self.on(SUBMIT)
            sink = parsed.reply.put if isinstance(parsed.reply, ThreadedReply) else self.feed
            for index, encoding in enumerate(encodings):
                prompt, put = self.start(index, encoding), functools.partial(sink, index)
                started, owner = self.stats.note_started, self.head.owner
                id = self.driver.submit(encoding.request, prompt, put, started, owner, follows=index > 0)
                self.hold(functools.partial(self.driver.cancel, id))
        except Exception as error:  # one client's request must not stop the others
            self.refuse(serving_error(error))

    async def encode(
        self, requests: Sequence[Request], hooks: Sequence[Callable[[Encoding], Wait]], loaded: SharedMedia, **more: Any
    ) -> list[Encoding]:
        """Pass requests through hooks of the plan.

        Args:
            loaded: media that were loaded for the body. More are added to it.
            more: further arguments of `Encoding`.
        """
        size, owner = self.memory.body, self.head.owner
        encodings = [Encoding(request, size, owner, self.hold, loaded, **more) for request in requests]
        for encoding in encodings:
            for work in hooks:
                if (waiting := work(encoding)) is not None:
                    await waiting
        return encodings

    def start(self, index: int, encoding: Encoding) -> Prompt:
        """Start the reply to a request that is submitted, and return the prompt of the request."""
        prompt = encoding.prompt
        assert prompt is not None, "a stage tokenizes the prompt"
        assert self.parsed is not None, "only a parsed request is encoded"
        self.stats.num_prompt_tokens += len(prompt.ids)
        self.parsed.reply.start(index, len(prompt.ids))
        return prompt

    def is_of(self, id: str, owner: str) -> bool:
        """Return whether the request is running and its client has set this id."""
        requests = () if self.parsed is None or self.finished else self.parsed.requests
        return any(request.id == id for request in requests) and self.head.owner == owner

    def stop(self) -> None:
        """End the response after the output so far, unless user code formats it or a thread is writing it."""
        if self.parsed is None or self.parsed.formats.title or self.parsed.reply.finished:
            return
        reply, num_sequences = self.parsed.reply, self.parsed.requests[0].sampling.num_sequences
        deltas = [Delta(0, sequence, (), Finish.STOP) for sequence in range(num_sequences)]
        self._put(b"".join(reply.feed(0, delta) for delta in deltas), deltas[-1])
        self.driver.flush()

    def _accept(self, parsed: ParsedRequest) -> None:
        self.parsed = parsed
        self.on(ACCEPT)
        timeout = math.inf
        for request in parsed.requests:
            if request.timeout < timeout:
                timeout = request.timeout
        if timeout < math.inf:
            expired = Overloaded("Request timeout expired")  # Triton's words
            self.hold(self.driver.loop.call_later(timeout, self.fail, expired).cancel)
        if self.head.dialect is not None and self.head.dialect.computes:
            self.stats.count_opened()
        self.stats.note_accepted(parsed)

    # -- rendering of the response -------------------------------------------------------------------------------

    def write_tokens_to(self, channel: ClientChannel) -> None:
        """Write the plain tokens of a stream to `channel`. Bytes that it does not accept are added to `unsent`."""
        self._channel = channel
        if self._fast_path is not None:
            self._fast_path.channel = channel

    def feed(self, index: int, delta: Delta) -> None:
        """Add a delta of a prompt to the response. The driver calls this in its step, except for most plain tokens."""
        stats = self.stats
        stats.num_tokens += len(delta.tokens)
        if not stats.first_at:
            stats.note_first()
        if delta.extras is not None:
            stats.num_prompt_tokens += delta.num_media_tokens
        if delta.error is not None or self.parsed is None:
            return self._fail(index, delta)
        if delta.finish is None or not self._writes_apart(self.parsed, index, delta):
            self._put(self.parsed.reply.feed(index, delta), delta)

    def _writes_apart(self, parsed: ParsedRequest, index: int, delta: Delta) -> bool:
        """Convert the last delta to bytes on a thread if this may take long. Return whether it may."""
        reply, keeps = parsed.reply, parsed.keeps
        if not (keeps or (delta.error is None and reply.takes_long(delta))):
            return False
        writing = self.admission.write(functools.partial(reply.feed, index, delta), self.head.owner, keeps=keeps)
        if writing is None:
            return False
        writing.add_done_callback(functools.partial(self._finish_writing, delta))
        return True

    def _put(self, data: bytes, delta: Delta) -> None:
        """Buffer bytes of the response, and notify the host at the end of the engine's step."""
        assert self.parsed is not None, "only a parsed request has a reply"
        reply = self.parsed.reply
        if reply.finished and not self.streams:
            try:
                self.memory.set_unsent(len(data))
            except Overloaded as error:
                return self._refuse(error)
        if data:
            self.unsent.append(data)
        begun = self.begun
        if not begun and not reply.finished:  # a request that is stopped may end in any phase
            self.on(OUTPUT)
        if reply.finished:
            self._end("ok", delta.finish)
        elif delta.finish is not None and self.pause is not None:
            pause, self.pause = self.pause, None
            pause(self)
        elif self._fast_path is None and (data if self.streams else not begun):
            self._open_fast_path(self.parsed, delta.id)
        elif not data and begun:
            return
        self.driver.notify(self)

    def _finish_writing(self, delta: Delta, writing: asyncio.Future[bytes]) -> None:
        """Process the end of a response after a thread has produced it, unless the client has disconnected."""
        error = None if writing.cancelled() else writing.exception()
        if self.finished or self.parsed is None or writing.cancelled():
            return
        if delta.error is not None:
            if error is not None:
                log.error(_NOT_ENCODED, exc_info=error)
            self._put_failure(b"" if error else writing.result(), delta.error)
        elif error is not None:
            return self.fail(serving_error(error))
        else:
            self._put(writing.result(), delta)
        self.driver.flush()

    def _open_fast_path(self, parsed: ParsedRequest, id: int) -> None:
        """Let the batcher encode the plain tokens of request `id` if the reply has an encoder."""
        encode = parsed.reply.token_encoder() if len(parsed.requests) == 1 else None
        if encode is not None:
            self._fast_path = FastPath(id, encode, self._channel, self._keep)
            self.driver.set_fast_path(self._fast_path)
            self.hold(self._close_fast_path)

    def _close_fast_path(self) -> None:
        """Close the fast path, which refers back to the task."""
        if self._fast_path is not None:
            self.stats.num_tokens += self._fast_path.num_tokens
            self._fast_path = None

    def _keep(self, line: bytes) -> None:
        self.unsent.append(line)
        self.driver.notify(self)

    def fail(self, error: ServingError) -> None:
        """End the request with `error`, which is sent as the complete response or as the last event of the stream."""
        self.feed_and_flush(0, _failure(error))

    def refuse(self, error: ServingError, body: Any = None) -> None:
        """Make `error` the complete response, or the last event of a stream that has been announced.

        Args:
            body: decoded body, or None if it was not decoded.
        """
        if self.finished:
            return
        if self.streams and self.committed:
            self._break_off(0, _failure(error))
        else:
            self._refuse(error, body)
        self.driver.flush()

    def close(self) -> None:
        """Close the request after its last byte has been sent, or cancel it if its client has disconnected."""
        if self.phase is CLOSED:
            return
        if not self.finished:
            self._end("cancelled")
        self.unsent = []
        self.on(CLOSE)

    def feed_and_flush(self, index: int, delta: Delta) -> None:
        """Add a delta to the response outside of the driver's steps."""
        if self.finished:
            return
        try:
            self.feed(index, delta)
        except Exception as error:  # the dialect has a bug
            self.feed(index, _failure(serving_error(error)))
        self.driver.flush()

    def _fail(self, index: int, delta: Delta) -> None:
        assert delta.error is not None, "only a parsed request gets deltas"
        if self.finished:
            return
        if self.streams and (self.committed or self.unsent):
            self._break_off(index, delta)
        else:
            self._refuse(delta.error)

    def _break_off(self, index: int, delta: Delta) -> None:
        """End a stream that has been announced with the error in `delta`."""
        assert self.parsed is not None, "the stream has been announced"
        assert delta.error is not None, "the stream fails"
        self.stats.error = delta.error.public
        if self._writes_apart(self.parsed, index, delta):
            return
        try:
            data = self.parsed.reply.feed(index, delta)
        except Exception:  # otherwise the client would wait forever
            log.exception(_NOT_ENCODED)
            data = b""
        self._put_failure(data, delta.error)

    def _put_failure(self, data: bytes, error: ServingError) -> None:
        """End a failed stream with the bytes that its reply has produced for the error."""
        self._end("failed" if self.begun else self._outcome(error))
        self._keep(data)

    def _outcome(self, error: ServingError) -> str:
        """Return the outcome for the metrics of a request that has no output."""
        if isinstance(error, Unavailable):
            return "overloaded" if isinstance(error, Overloaded) else "unavailable"
        return "failed" if self.stats.first_at and not isinstance(error, RefusedByEngine) else "refused"

    def _refuse(self, error: ServingError, body: Any = None) -> None:
        if self.parsed is not None:
            errors = self.parsed.errors
        else:
            dialect = self.admission.preprocessor.dialect_of(self.head)
            errors = dialect.errors_of(body, self.admission.preprocessor.context)
            # TGI counts requests that it refuses for a parameter, or because too many others are waiting
            if dialect.computes and isinstance(error, InvalidParameter | Unavailable):
                self.stats.count_opened()
        response = errors.whole(error)
        self._refusal = _Refusal(error.with_traceback(None), response)  # a traceback would form a reference cycle
        self.unsent[:] = [response.body]
        self.stats.error = error.public
        self._end(self._outcome(error))
        self.driver.notify(self)

    def _end(self, outcome: str, finish: Finish | None = None) -> None:
        """Release the resources that are held until the end of the request, and record its metrics."""
        self.on(END)
        self.stats.close(outcome, finish)


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the response header that lists ignored parameters.

    The client chooses the names, so they are quoted to be valid in a header. The list is cut to the length that
    SageMaker forwards.
    """
    if not names:
        return {}
    quoted = ", ".join(urllib.parse.quote(name[:64], safe="._-[]") for name in names[:32])
    return {"x-lmi-ignored-parameters": quoted[:1024]}
