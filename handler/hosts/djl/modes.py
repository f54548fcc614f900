"""The ways in which DJL calls its worker: a step of a rolling batch, a whole batch, or a request of its own (async)."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from djl_python import Input, Output

from handler.config import Config
from handler.errors import InternalError, InvalidPayload, ServingError
from handler.hosts.djl.wire import Dialect, PieceWriter, Sent, batched, headers_of, is_batch, reason, refusal, single
from handler.hosts.intake import ignored_header
from handler.hosts.rolling import RollingHost
from handler.hosts.service import Service
from handler.hosts.steps import Item, Place, Steps, request_id, serving_error
from handler.schemas.base import Answer

log = logging.getLogger("handler.djl")


class Passive:
    """A rank of an MPI world that is not the first: the engine runs beside rank 0, which answers."""

    def answer(self, inputs: Input) -> Output:
        return Output()


class Rolling:
    """A call is one step of every live request."""

    def __init__(self, steps: Steps, lock: threading.Lock, dialect: Dialect) -> None:
        self._lock = lock
        self._rolling = RollingHost(steps, commits_early=dialect.json_errors, max_piece=dialect.max_piece)
        self._writer = PieceWriter(dialect)

    def answer(self, inputs: Input) -> Output:
        properties = inputs.get_properties()
        if "batch_size" not in properties:  # only a `handler` of the client's own comes past the rolling batch
            return refusal(InvalidPayload("property handler: a request cannot choose the function that answers it"))
        size = int(properties["batch_size"])
        with self._lock:
            if properties.get("reset_rollingbatch") == "true":
                self._rolling.reset()
            try:
                pieces = self._rolling.step(size, batched(inputs))
            except Exception as error:  # left to Java, it would fail every client with a text of its own
                log.exception("a step failed: a bug")
                pieces = self._rolling.fail(size, InternalError(f"internal error: {type(error).__name__}"))
            return Sent(self._writer.step(pieces))


class Dynamic:
    """A call is a whole batch, answered when all of it is done."""

    def __init__(self, steps: Steps, lock: threading.Lock, config: Config) -> None:
        self._steps = steps
        self._lock = lock
        self._streaming = config.enable_streaming
        self._seconds = max(0.1, config.predict_timeout - 1.0)  # then Java kills the worker

    def answer(self, inputs: Input) -> Output:
        try:
            if is_batch(inputs):
                return self._batch(inputs)
            return self._stream(single(inputs)) if self._streaming else _whole(self._run([single(inputs)])[0])
        except Exception as error:
            return refusal(serving_error(error))

    def _run(self, items: Sequence[Item]) -> list[Place]:
        with self._lock:
            return self._steps.run(items, self._seconds)

    def _batch(self, inputs: Input) -> Output:
        """One status for all: a failure is told in its own body."""
        found = batched(inputs)
        size = int(inputs.get_properties()["batch_size"])
        output = Output()
        for index, place in enumerate(self._run([found.get(index, Item(b"", {})) for index in range(size)])):
            output.add(place.take(), key="data", batch_index=index)
        return output.add_property("Content-Type", "application/json")

    def _stream(self, item: Item) -> Output:
        with self._lock:
            place = self._steps.begin(item, self._seconds)
        if place.error is not None:
            return _whole(place)
        output = Output()
        for name, value in headers_of(place).items():
            output.add_property(name, value)
        return output.add_stream_content(self._chunks(place), None)

    def _chunks(self, place: Place) -> Iterator[bytes]:
        """Ends when the answer does; djl_python asks for the next one when the last is written."""
        last = False
        while not last:
            with self._lock:
                if not place.unsent:
                    self._steps.step(0.1)
                data = place.take()
                last = place.finished and not place.unsent
            if data:
                yield data


def _whole(place: Place) -> Output:
    output = Output(code=place.status, message=reason(place.error) if place.error else "OK")
    for name, value in headers_of(place).items():
        output.add_property(name, value)
    return output.add(place.take(), key="data")


class Async:
    """Every request is a task of its own on djl_python's event loop; each piece is an Output with a request's map."""

    def __init__(self, service: Service, dialect: Dialect) -> None:
        self._service = service
        self._writer = PieceWriter(dialect)

    async def answer(self, inputs: Input) -> AsyncIterator[Output]:
        return self._outputs(single(inputs))

    async def _outputs(self, item: Item) -> AsyncIterator[Output]:
        """Ends with a last piece, whatever happens: without one, Java lets the client wait."""
        try:
            async for output in self._answer(item):
                yield output
        except Exception as error:
            failure = serving_error(error)
            yield self._failed(failure, self._service.schema.refused(failure))

    async def _answer(self, item: Item) -> AsyncIterator[Output]:
        service = self._service
        service.intake.check_headers(item.headers)
        service.check_room()
        call = await service.read(item.body, item.headers)
        exchange = service.exchange(call, request_id(item.headers))
        headers = {"Content-Type": call.reply.content_type, **ignored_header(call.ignored)}
        try:
            await exchange.begun
            if exchange.failure is not None and exchange.answer is not None:
                yield self._failed(exchange.failure, exchange.answer)
            elif exchange.answer is not None:
                yield _output(self._writer.piece(exchange.answer.body, last=True), headers)
            else:
                chunks = Chunks()
                exchange.stream_to(chunks)
                last = False
                while not last:
                    data, last = await chunks.next()
                    yield _output(self._writer.piece(data, last=last), headers)
                    headers = {}
        finally:
            exchange.cancel()

    def _failed(self, error: ServingError, answer: Answer) -> Output:
        return _output(self._writer.failure(error, answer.body), {"Content-Type": answer.content_type})


class Chunks:
    """Where the bytes of a stream gather until djl_python fetches them."""

    def __init__(self) -> None:
        self._data: list[bytes] = []
        self._last = False
        self._written = asyncio.Event()

    def write(self, data: bytes, *, last: bool = False) -> None:
        self._data.append(data)
        self._last = last
        self._written.set()

    async def next(self) -> tuple[bytes, bool]:
        """What has gathered, and whether that is all."""
        await self._written.wait()
        self._written.clear()
        data = b"".join(self._data)
        self._data.clear()
        return data, self._last


def _output(value: bytes, headers: Mapping[str, str]) -> Output:
    output = Output()
    for name, text in headers.items():
        output.add_property(name, text)
    return output.add(value, key="data")
