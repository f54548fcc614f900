"""Creates background responses, sends their events and cancels them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable

from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from handler.core.errors import NotJson, ServingError, TooLarge, Unavailable
from handler.core.framing import JSON, SSE, dumps
from handler.core.framing import KEEP_ALIVE as COMMENT
from handler.core.log import of_request
from handler.core.loop import wait_for
from handler.http.exchange import EXCHANGE, AnyExchange
from handler.http.inference import (
    AS_IT_COMES,
    KEEP_ALIVE,
    Handle,
    Headers,
    Respond,
    Responded,
    declared_length,
    encoded,
    read_short_body,
    send_answer,
    send_start,
)
from handler.http.stored_calls import StoredCall, store_of
from handler.http.urls import query_of
from handler.protocols.kernel.body import decode
from handler.protocols.kernel.errors import HttpResponse
from handler.protocols.openai.api import ERRORS
from handler.protocols.responses.api import not_kept, read_starting_after
from handler.protocols.responses.background import no_events, not_cancellable
from handler.serving.background.runs import BackgroundRuns
from handler.serving.head import owner_of
from handler.serving.model import ServedModel
from handler.serving.quota import Share
from handler.serving.request.captured import CapturedTask
from handler.serving.request.task import RequestTask, ignored_header
from handler.serving.request_log import Capture
from handler.serving.stored_responses import BUSY_SECONDS

log = logging.getLogger("handler.server")

_BODY = 1 << 12  # maximum size in bytes of a body with the parameters of a GET request
_PART = 1 << 16  # bytes of events to collect before they are sent
_WRITE_SECONDS = 2 * BUSY_SECONDS  # maximum seconds to wait for a final state to be written
_LOOK_SECONDS = 1.0  # seconds between two searches for events of a response that another server is running


async def create(model: ServedModel, task: RequestTask) -> Respond | None:
    """Start a background response, which closes the task. It continues if the client disconnects.

    Returns:
        A function that responds to the request, or None if the task has been refused.
    """
    runs = model.background
    assert runs is not None, "it exists if responses are stored"
    capture = task.capture.pass_on() if isinstance(task, CapturedTask) else None  # the client gets other bytes
    starting = asyncio.ensure_future(runs.start(task))
    ignored = encoded(ignored_header(task.ignored).items())
    try:
        run = await asyncio.shield(starting)
    except ServingError as error:
        if isinstance(task, CapturedTask) and capture is not None:
            task.capture = capture
        task.refuse(error)
        return None
    except asyncio.CancelledError:
        starting.add_done_callback(lambda _: None if starting.exception() is None else task.close())
        return functools.partial(_send_nothing, capture=capture)
    if run.detached.streams:
        reader = _EventReader(runs, run.owner, run.id, 0)
        return functools.partial(_send_events, model, reader, extra=ignored, capture=capture)
    queued = HttpResponse(200, JSON.content_type, dumps({**run.detached.queued.head, "output": []}))
    return functools.partial(_send_queued, queued=queued, extra=ignored, capture=capture)


async def _send_nothing(scope: Scope, send: Send, capture: Capture | None) -> None:
    """The server has stopped."""
    if capture is not None:
        capture.end(scope["headers_by_name"], None)


async def _send_queued(scope: Scope, send: Send, queued: HttpResponse, extra: Headers, capture: Capture | None) -> None:
    await send_answer(scope, send, queued, extra)
    if capture is not None:
        capture.add(queued.body)
        capture.end(scope["headers_by_name"], (queued.status, queued.content_type))


class _EventReader:
    """Reads the events of a response: those in memory, or else those in the store.

    Args:
        first: number of the first event to read.

    Attributes:
        run: the run of the response, or None if it has ended or is not running on this server.
    """

    def __init__(self, runs: BackgroundRuns, owner: str, id: str, first: int) -> None:
        self._runs, self._owner, self._id, self._first = runs, owner, id, first
        self.run = runs.find(owner, id)

    async def read(self) -> tuple[bytes, bool]:
        """Return the next events, if there are any, and whether they are the last ones."""
        page = None if self.run is None else self.run.read(self._first)
        if page is None:
            store = self._runs.store
            read = store.background.read
            page = await asyncio.wrap_future(store.call(self._owner, read, self._owner, self._id, self._first, _PART))
        self._first += len(page.events or ())
        return b"".join(page.events or ()), page.ended or page.events is None

    async def send(self, send: Send, message: Message) -> None:
        """Send a message. If the client is slow, the run is not kept in memory for it."""
        self.run = None
        await send(message)
        self.run = self._runs.find(self._owner, self._id)


async def _send_events(
    model: ServedModel,
    reader: _EventReader,
    scope: Scope,
    send: Send,
    *,
    extra: Headers | None = None,
    capture: Capture | None = None,
) -> None:
    """Send the events of a response until it has ended or is deleted, or the client has disconnected.

    A slow client holds one part of the events, and does not hold the run.
    """
    exchange: AnyExchange = scope["extensions"][EXCHANGE]
    headers = [(b"cache-control", b"no-cache"), AS_IT_COMES, *(extra or [])]
    readers = set[Callable[[], object]]() if reader.run is None else reader.run.readers
    readers.add(exchange.wake)
    send = functools.partial(reader.send, send)
    is_whole = False
    try:
        quota = model.admission.memory.of(owner_of(scope["headers_by_name"]))
        with model.adapters.calls, Share(quota) as memory:
            await send_start(scope, send, 200, SSE.content_type, headers)
            is_whole = await _send_parts(model, send, reader, exchange, memory, capture)
            await exchange.read()
    except ServingError as error:  # the store or the memory is overloaded; the client can resume and miss no events
        id = scope["request_id"]
        log.info("request %s: the events of a response cannot be sent: %s", id, error.message, extra=of_request(id))
        exchange.drop()
    except (OSError, RuntimeError):  # the connection is closed, but this has not been reported yet
        exchange.drop()
    finally:
        readers.discard(exchange.wake)
        if capture is not None:
            capture.end(scope["headers_by_name"], (200, SSE.content_type) if is_whole else None)


async def _send_parts(
    model: ServedModel,
    send: Send,
    reader: _EventReader,
    exchange: AnyExchange,
    memory: Share,
    capture: Capture | None,
) -> bool:
    """Send the events, and return whether the last one was sent."""
    sent_at = time.monotonic()
    while not exchange.is_over:
        data, is_last = await reader.read()
        silent = time.monotonic() - sent_at
        if not (data or is_last) and silent >= KEEP_ALIVE:
            data = COMMENT
        if data or is_last:
            memory.set(len(data) + exchange.num_unsent)
            await send({"type": "http.response.body", "body": data, "more_body": not is_last})
            memory.set(exchange.num_unsent)
            sent_at, silent = time.monotonic(), 0.0
        if capture is not None and data != COMMENT:
            capture.add(data)
        if is_last:
            return True
        if not data or data == COMMENT:
            if reader.run is None:
                if model.availability.draining:
                    await send({"type": "http.response.body", "body": b""})
                    return False
                await exchange.wait(_LOOK_SECONDS)
            else:
                await exchange.wait(KEEP_ALIVE - silent)
    return False


class BackgroundHandlers:
    """Handlers of the routes of stored responses that concern background responses."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def retrieve(self, otherwise: Handle) -> Handle:
        """Return a handler that sends the events of a response if the query or the body requests a stream."""

        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                parameters = await self._in_body(scope, receive)
                if b"stream" in scope["query_string"] or b"starting_after" in scope["query_string"]:
                    parameters |= QueryParams(query_of(scope))
                if not parameters:
                    return await otherwise(scope, receive, send)
                after = read_starting_after(parameters)
                if after is None:
                    return await otherwise(scope, receive, send)
                reader = await self._reader(scope, after + 1)
            except ServingError as error:
                return await send_answer(scope, send, ERRORS.whole(error))
            except ClientDisconnect:
                return
            await _send_events(self._model, reader, scope, send)

        return handle

    async def _in_body(self, scope: Scope, receive: Receive) -> dict[str, str]:
        """Return the parameters in the body. OpenAI's client for Go sends `stream` there.

        A body that is large or not JSON is ignored, as on all routes without a body.
        """
        length = declared_length(scope)
        if length > _BODY or not (length or "transfer-encoding" in scope["headers_by_name"]):
            return {}
        with contextlib.suppress(NotJson, TooLarge):
            body = decode(await read_short_body(scope, receive, _BODY, self._model))
            if isinstance(body, dict):
                pairs = [(name, body.get(name)) for name in ("stream", "starting_after")]
                return {name: dumps(value).decode().strip('"') for name, value in pairs if value is not None}
        return {}

    async def _reader(self, scope: Scope, first: int) -> _EventReader:
        store, runs = store_of(self._model), self._model.background
        assert runs is not None, "it exists if responses are stored"
        owner, id = owner_of(scope["headers_by_name"]), scope["path_params"]["response"]
        streams = await asyncio.wrap_future(store.call(owner, store.background.streams, owner, id))
        if streams is None and not await asyncio.wrap_future(store.exists(owner, id)):
            raise not_kept(id)
        if not streams:
            raise no_events()
        return _EventReader(runs, owner, id, first)

    async def cancel(self, call: StoredCall) -> Responded:
        """Cancel a response, and return it. A response that has ended does not change."""
        store, owner, id = call.store, call.owner, call.id
        await self.stop(owner, id)
        if await asyncio.wrap_future(store.call(owner, store.background.streams, owner, id)) is None:
            raise not_cancellable(id) if await asyncio.wrap_future(store.exists(owner, id)) else not_kept(id)
        response = await asyncio.wrap_future(store.response(owner, id, call.take))
        if response is not None and response["status"] in ("queued", "in_progress"):  # on another server
            await asyncio.wrap_future(store.call(owner, store.background.cancel, owner, id))
            response = await asyncio.wrap_future(store.response(owner, id, call.take))
        if response is None:
            raise not_kept(id)
        return response, ()

    async def stop(self, owner: str, id: str) -> None:
        """Cancel a response that is running on this server, and wait until its final state has been written.

        Raises:
            Unavailable: it cannot be written, for example because the disk is full. The response is no longer running.
        """
        runs = self._model.background
        run = None if runs is None else runs.find(owner, id)
        if run is not None:
            run.cancel()
            try:
                await wait_for(asyncio.shield(run.ended), _WRITE_SECONDS)
            except asyncio.TimeoutError:
                raise Unavailable("the response has stopped, but its final state has not been stored yet") from None
