"""Calls the function `handle` of a user's model.py as LMI does, but on separate threads, because it may block."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from handler.config.config import Config
from handler.core.errors import ConfigError, Overloaded, ServingError, Unavailable, serving_error
from handler.core.fair_queue import OwnerCounts
from handler.core.loop import run_in_daemon_thread, wait_for
from handler.core.user_functions import Role
from handler.engines import s3
from handler.engines.huggingface.files import DESCRIPTIONS
from handler.plugins.formatter_thread import FormatterThread
from handler.plugins.handle import (
    TITLE,
    Answer,
    Broken,
    Call,
    Handle,
    Result,
    batch,
    broken,
    call,
    call_async,
    late,
    next_part,
    next_part_async,
)
from handler.serving.quota import Quota, Share
from handler.serving.request.gate import BatchGate, Turn
from handler.serving.request.life import Life

log = logging.getLogger("handler.formatters")

T = TypeVar("T")

_MAX_AHEAD = 1 << 24
"""Bytes that a plain function may produce ahead of its client while no other request waits for the function."""


class CustomHandle:
    """The user's `handle` function. A plain function runs one call at a time, as in an LMI worker. A coroutine function
    runs calls concurrently.

    A call that takes longer than option.predict_timeout is abandoned, and its request gets status 503. A request for a
    plain function also gets 503 if `job_queue_size` calls are waiting. A request for a coroutine function also gets 503
    if there are already `job_queue_size` running calls and open streams.

    Args:
        memory: memory quota of all requests. It limits the parts that wait for their clients.
    """

    def __init__(self, handle: Handle, config: Config, memory: Quota) -> None:
        self._handle = handle
        self.role = handle.role
        self._start_limit = config.model_loading_timeout
        by_echo = handle.role is not Role.ALONE and config.engine == "echo"
        self._files = DESCRIPTIONS if by_echo else ()  # files to download from S3: the engine echo needs no weights
        self._runs: _OneByOne | _SideBySide
        if handle.is_async:
            self._runs = _SideBySide(handle, config.predict_timeout, config.job_queue_size)
        else:
            limit = config.predict_timeout
            size = config.batch_size if config.rolling_batch == "disable" else 1
            # A call that hangs is noticed a little late. The calls behind it must not fail with it.
            gate = BatchGate(replace(config, batch_size=size, predict_timeout=1.1 * limit))
            self._runs = _OneByOne(handle, limit, gate, memory)

    async def begin(self) -> None:
        """Call the function for the first time, with an empty input, so that it loads what it needs.

        As in LMI, a model on S3 is downloaded first, and the function gets its local directory. With the engine echo,
        the weights are not downloaded.

        Raises:
            ConfigError: the call takes too long, the model cannot be downloaded, or the call fails and nothing else can
                process requests.
        """
        properties = self._handle.properties
        if s3.is_url(url := properties.get("model_id")):
            directory = await run_in_daemon_thread(s3.download, url, self._files)
            properties = {**properties, "model_id": str(directory)}
        first = Call({}, properties)
        try:
            (result,) = await self._runs.call([first], self._start_limit)
        except ServingError as error:
            raise ConfigError(f"{error.message} (option.model_loading_timeout)") from None
        with Life() as life:  # the response is not needed
            _hold_parts(result, life)
        if isinstance(result, Answer) and result.status >= 300 and self.role is not Role.FIRST:
            words = "out of memory" if result.status == 507 else result.body.decode(errors="replace")[:1000]
            raise ConfigError(f"{TITLE} failed when it was called to initialize: {words}")

    async def answer(
        self, contents: dict[str, bytes], properties: dict[str, str], life: Life, owner: str = ""
    ) -> Result:
        """Return the function's response.

        Args:
            contents: contents of the function's input.
            properties: properties of the function's input.
            life: life of the request, which holds the `parts` of the response until it is finished.
            owner: owner of the request, or "" without an owner. The owners take turns to call a plain function.
        """
        try:
            return await self._runs.answer(Call(contents, {**properties, **self._handle.always}), life, owner)
        except ServingError as error:
            log.error("%s", error.message)
            return late(error)

    def close(self) -> None:
        self._runs.close()


def _hold_parts(result: Result, life: Life) -> None:
    """Close the parts of a streamed response when its request is finished, which may have happened already."""
    if isinstance(result, Answer) and result.parts is not None:
        life.hold(result.parts.close)


class _Parts:
    """The remaining parts of a streamed response. Each part is produced when the client has taken the previous one.

    Attributes:
        ended: set when all parts have been produced, or the parts were closed.
        held: what the call holds until then.
    """

    def __init__(self, parts: Any, runs: _OneByOne | _SideBySide) -> None:
        self._parts, self._runs = parts, runs
        self.ended = asyncio.Event()
        self.held = contextlib.ExitStack()

    async def next(self) -> bytes | Broken | None:
        """Return the next part, or None after the last part."""
        if self.ended.is_set():
            return None
        try:
            part = await self._runs.next_part(self._parts)
        except ServingError as error:
            log.error("%s", error.message)
            part = broken(error.status, error.message)
        if part is None or isinstance(part, Broken):
            self.close()
        return part

    def close(self) -> None:
        """Close the parts. If the function is computing a part, it finishes that part."""
        if not self.ended.is_set():
            self.ended.set()
            self.held.close()
            self._runs.end(self._parts)


class _PartsAhead:
    """The remaining parts of a plain function's response, which are produced ahead of a slow client.

    As in DJL Serving, a client does not hold up the function for other requests. If nobody else waits for the function,
    it is at most `_MAX_AHEAD` bytes ahead.

    Args:
        has_waiting: returns whether other requests wait for the function.
    """

    def __init__(self, parts: _Parts, memory: Quota, has_waiting: Callable[[], bool]) -> None:
        self._parts = parts
        self._has_waiting = has_waiting
        self._memory = Share(memory)
        self._quota_size = memory.most
        self._unsent = deque[bytes | Broken]()
        self._sending = 0  # bytes of the part that the client is taking
        self._changed = asyncio.Event()
        self._error: Overloaded | None = None
        self.ended = parts.ended

    async def produce(self) -> None:
        """Produce all parts, until the end or until they are closed."""
        while (part := await self._parts.next()) is not None:
            self._add(part)
            while self._memory.size > _MAX_AHEAD and not (self._has_waiting() or self.ended.is_set()):
                await self._next_change()
        self.note_change()

    def _add(self, part: bytes | Broken) -> None:
        """Store a part for the client. If there is no memory for it, the response ends."""
        try:
            if self._memory.size + _size(part) > self._quota_size:
                raise Overloaded(
                    f"a client has not read {self._quota_size} bytes of its stream (option.requests_total_bytes)"
                )
            self._memory.take(_size(part))
            self._unsent.append(part)
        except Overloaded as error:
            self._error = error
            self.close()
        self.note_change()

    async def next(self) -> bytes | Broken | None:
        """Return the next part, or None after the last part. The previous part has been sent.

        Raises:
            Overloaded: too many bytes wait for clients.
        """
        self._memory.give_back(self._sending)
        self._sending = 0
        self.note_change()
        while not (self._unsent or self.ended.is_set()):
            await self._next_change()
        if self._error is not None:
            raise self._error
        if not self._unsent:
            return None
        part = self._unsent.popleft()
        self._sending = _size(part)
        return part

    def close(self) -> None:
        """Close the parts, and drop those that have not been sent."""
        self._parts.close()
        self._unsent = deque(maxlen=0)  # a part that is being produced is dropped too
        self._memory.close()
        self.note_change()

    def note_change(self) -> None:
        """Wake the function or the client, which may be waiting for the other one."""
        self._changed.set()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def _size(part: bytes | Broken) -> int:
    return len(part.body if isinstance(part, Broken) else part)


class _Waiting(NamedTuple):
    item: Call
    life: Life
    future: asyncio.Future[Result]


class _OneByOne:
    """Runs a plain function on one thread. A call starts once the previous call has returned its last part.

    Args:
        limit: maximum duration of a call, in seconds.
        gate: gate that groups requests into batches. Each batch is passed to the function in one call.
        memory: memory quota of all requests.
    """

    def __init__(self, handle: Handle, limit: float, gate: BatchGate, memory: Quota) -> None:
        self._handle = handle
        self._gate = gate
        self._memory = memory
        self._streaming: _PartsAhead | None = None
        self._thread = FormatterThread(asyncio.get_running_loop().call_soon_threadsafe, limit, late=Unavailable)
        self._calls: dict[Turn, _Waiting] = {}
        self._serving: asyncio.Task[None] | None = None

    async def answer(self, item: Call, life: Life, owner: str = "") -> Result:
        turn = self._gate.join(owner)
        self._calls[turn] = waiting = _Waiting(item, life, asyncio.get_running_loop().create_future())
        turn.add_done_callback(self._begin)
        if self._streaming is not None:
            self._streaming.note_change()  # it must not wait for its client any longer
        try:
            await self._gate.wait(turn)
            return await waiting.future
        finally:
            if not waiting.future.cancel() and not waiting.future.cancelled():
                waiting.future.exception()  # it has been seen, even if the client went at the same moment
            if not turn.done():
                self._leave(turn)

    def _leave(self, turn: Turn) -> None:
        del self._calls[turn]
        self._gate.leave(turn)

    async def call(self, items: list[Call], limit: float | None = None) -> list[Result]:
        """Call the function.

        Raises:
            Unavailable: the call takes too long.
        """
        joined = batch(items, self._handle.always)
        future = self._thread.submit(TITLE, call, self._handle, joined, limit=limit)
        return [self._with_parts(result) for result in await asyncio.wrap_future(future)]

    async def next_part(self, parts: Any) -> bytes | Broken | None:
        part: bytes | Broken | None = await asyncio.wrap_future(self._thread.submit(TITLE, next_part, parts))
        return part

    def end(self, parts: Any) -> None:
        self._thread.submit(TITLE, _close, parts)

    def close(self) -> None:
        for waiting in self._calls.values():
            waiting.future.cancel()
        if self._serving is not None:
            self._serving.cancel()
        self._thread.close()

    def _with_parts(self, result: Result) -> Result:
        if isinstance(result, Answer) and result.parts is not None:
            parts = _PartsAhead(_Parts(result.parts, self), self._memory, lambda: self._gate.num_waiting > 0)
            return result._replace(parts=parts)
        return result

    def _begin(self, turn: Turn) -> None:
        """Call the function once for all requests in the batch of a turn."""
        if (batch := turn.result())[0] is turn:
            self._serving = asyncio.ensure_future(self._answer_all(batch))

    async def _answer_all(self, batch: list[Turn]) -> None:
        calls = [waiting for turn in batch if not (waiting := self._calls[turn]).future.done()]  # others have left
        try:
            results = await self.call([waiting.item for waiting in calls]) if calls else []
            for waiting, result in zip(calls, results, strict=True):
                _hold_parts(result, waiting.life)
                if not waiting.future.done():
                    waiting.future.set_result(result)
                if isinstance(result, Answer) and result.parts is not None:
                    await self._stream(result.parts)
        except Exception as error:  # no request must wait forever
            for waiting in calls:
                if not waiting.future.done():
                    waiting.future.set_exception(serving_error(error))
        finally:
            for turn in batch:
                self._leave(turn)

    async def _stream(self, parts: _PartsAhead) -> None:
        self._streaming = parts
        try:
            await parts.produce()
        finally:
            self._streaming = None


def _close(parts: Any) -> None:
    try:
        parts.close()
    except BaseException:  # the user's code
        log.exception("%s failed when its stream was closed", TITLE)


class _SideBySide:
    """Runs a coroutine function on an event loop in a separate thread. A loop that hangs is replaced."""

    def __init__(self, handle: Handle, limit: float, room: int) -> None:
        self._handle, self._limit = handle, limit
        self._loop = _loop_on_thread()
        self._loops: dict[int, asyncio.AbstractEventLoop] = {}  # loops of streamed parts, by the parts' identity
        self._calls = OwnerCounts(room, f"the queue is full (job_queue_size={room})")  # a stream counts until its end
        self._watching: asyncio.Task[None] | None = None

    async def answer(self, item: Call, life: Life, owner: str = "") -> Result:
        with self._calls.hold(owner) as held:
            (result,) = await self.call([item])
            if isinstance(result, Answer) and isinstance(result.parts, _Parts):
                result.parts.held = held.pop_all()
            _hold_parts(result, life)
            return result

    async def call(self, items: list[Call], limit: float | None = None) -> list[Result]:
        """Call the function with a single request.

        Raises:
            Unavailable: the call takes too long.
        """
        loop = self._loop
        result = await self._run(loop, call_async(self._handle, items[0]), limit)
        if isinstance(result, Answer) and result.parts is not None:
            parts = result.parts
            if not hasattr(parts, "__anext__"):
                parts = _asynchronous(parts)
            self._loops[id(parts)] = loop
            result = result._replace(parts=_Parts(parts, self))
        return [result]

    async def next_part(self, parts: Any) -> bytes | Broken | None:
        return await self._run(self._loops[id(parts)], next_part_async(parts))

    def end(self, parts: Any) -> None:
        loop = self._loops.pop(id(parts))
        asyncio.run_coroutine_threadsafe(_aclose(parts), loop)

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _run(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], limit: float | None = None
    ) -> T:
        seconds = self._limit if limit is None else limit
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return await wait_for(asyncio.wrap_future(future), seconds)
        except asyncio.TimeoutError:
            if self._watching is None and loop is self._loop:
                self._watching = asyncio.ensure_future(self._replace_hung(loop))
            raise Unavailable(f"{TITLE} did not end within {seconds:g} s") from None

    async def _replace_hung(self, loop: asyncio.AbstractEventLoop) -> None:
        """Replace the loop if it makes no progress for as long as a call may take. Its thread cannot be stopped."""
        try:
            alive = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
            await wait_for(asyncio.wrap_future(alive), self._limit)
        except asyncio.TimeoutError:
            log.error("%s blocks its event loop; its thread is replaced", TITLE)
            self._loop = _loop_on_thread()
        finally:
            self._watching = None


def _loop_on_thread() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=functools.partial(_run_loop, loop), daemon=True, name="handle").start()
    return loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def _asynchronous(parts: Any) -> AsyncIterator[bytes]:
    """Convert a plain generator, which a coroutine function may return, to an asynchronous generator."""
    for part in parts:
        yield part
        await asyncio.sleep(0)


async def _aclose(parts: Any) -> None:
    try:
        await parts.aclose()
    except Exception:  # the user's code
        log.exception("%s failed when its stream was closed", TITLE)
