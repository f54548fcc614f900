"""The ways in which DJL calls its worker: a step of a rolling batch, a whole batch, or a request of its own (async)."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Sequence

from djl_python import Input, Output

from handler.config.loader import Config
from handler.core.errors import GenerationFailed, InternalError, InvalidPayload, serving_error
from handler.djl.adapter_calls import AsyncAdapters
from handler.djl.replies import PieceWriter, Sent, headers_of, output, refusal, streamed, whole
from handler.djl.requests import batched, is_batch, single
from handler.djl.versions import MAX_FIELD, Dialect
from handler.http.streaming import GatheredBody
from handler.protocols.base import HttpResponse, ParsedRequest
from handler.serving.preprocess import ignored_header, request_id
from handler.serving.rolling import RollingHost
from handler.serving.route_override import named_dialect
from handler.serving.service import Service
from handler.serving.slots import Item, Place, pieces
from handler.serving.steps import StepDriver

log = logging.getLogger("handler.djl")


class Passive:
    """A rank of an MPI world that is not the first: the engine runs beside rank 0, which answers."""

    def answer(self, inputs: Input) -> Output:
        return Output()


class Rolling:
    """A call is one step of every live request."""

    def __init__(self, driver: StepDriver, dialect: Dialect) -> None:
        self._lock = driver.lock
        self._rolling = RollingHost(driver, commits_early=dialect.commits_early, max_piece=dialect.max_piece)
        self._writer = PieceWriter(dialect)

    @property
    def is_stepping(self) -> bool:
        """Whether Java has a step under way, or is about to: it always does while there are requests."""
        return self._rolling.num_places > 0

    def answer(self, inputs: Input) -> Output:
        if not is_batch(inputs):  # only a `handler` of the client's own comes past the rolling batch
            return refusal(InvalidPayload("property handler: a request cannot choose the function that answers it"))
        properties = inputs.get_properties()
        size = int(properties["batch_size"])
        with self._lock:
            try:
                if properties.get("reset_rollingbatch") == "true":
                    self._rolling.reset()
                return Sent(self._writer.step(self._rolling.step(size, batched(inputs))))
            except Exception as error:  # left to Java, it would fail every client with a text of its own
                log.exception("a step failed: a bug")
                return Sent(self._writer.step(self._rolling.fail(size, InternalError.of(error))))


class Dynamic:
    """A call is a whole batch, answered when all of it is done."""

    def __init__(self, driver: StepDriver, config: Config) -> None:
        self._driver = driver
        self._streaming = config.enable_streaming
        self._seconds = max(0.1, config.predict_timeout - 1.0)  # then Java kills the worker

    def answer(self, inputs: Input) -> Output:
        try:
            if is_batch(inputs):
                return self._batch(inputs)
            return self._stream(single(inputs)) if self._streaming else whole(self._run([single(inputs)])[0])
        except Exception as error:
            return refusal(serving_error(error))

    def _run(self, items: Sequence[Item]) -> list[Place]:
        with self._driver.lock:
            return self._driver.run(items, self._seconds)

    def _batch(self, inputs: Input) -> Output:
        """One status for all: a failure is told in its own body."""
        found = batched(inputs)
        size = int(inputs.get_properties()["batch_size"])
        made = Output()
        for index, place in enumerate(self._run([found.get(index, Item(b"", {})) for index in range(size)])):
            body = place.take()
            if len(body) > MAX_FIELD:
                error = GenerationFailed(
                    f"the answer has {len(body)} bytes; in a batch at most {MAX_FIELD} are possible"
                )
                body = self._driver.refused(error).take()
            made.add(body, key="data", batch_index=index)
        return made.add_property("Content-Type", "application/json")

    def _stream(self, item: Item) -> Output:
        with self._driver.lock:
            place = self._driver.begin(item, self._seconds)
        if place.error is not None:
            return whole(place)
        return streamed(self._chunks(place), headers_of(place))

    def _chunks(self, place: Place) -> Iterator[bytes]:
        """Ends when the answer does; djl_python asks for the next one when the last is written."""
        last = False
        while not last:
            with self._driver.lock:
                if not place.unsent:
                    self._driver.step(0.1)
                data = place.take()
                last = place.finished and not place.unsent
            if data:
                yield data


class Async:
    """Every request is a task of its own on djl_python's event loop; each piece is an Output with a request's map."""

    def __init__(self, service: Service, adapters: AsyncAdapters, dialect: Dialect) -> None:
        self._service = service
        self._adapters = adapters
        self._writer = PieceWriter(dialect)

    async def answer(self, inputs: Input) -> AsyncIterator[Output]:
        item = single(inputs)
        return self._outputs(item, request_id(item.headers))

    async def _outputs(self, item: Item, id: str) -> AsyncIterator[Output]:
        """Ends with a last piece, whatever happens: without one, Java lets the client wait."""
        service, headers = self._service, item.headers
        schema, body = None, None
        try:
            await self._adapters.catch_up(item)
            schema = named_dialect(headers, service.schema.name, service.config.model_name, service.intake.routes)
            service.intake.check_headers(headers, schema)
            service.check_room()
            decoded = await service.decode(item.body, headers, schema)
            body = decoded.value
            call = await service.parse(decoded, len(item.body), headers, schema)
            del item, decoded  # neither they nor the value are kept while the answer is sent
            body = None
            async for made in self._answer(call, id):
                yield made
        except Exception as error:
            failure = serving_error(error)
            yield self._failed(service.refuse(failure, id, body, schema))

    async def _answer(self, call: ParsedRequest, id: str) -> AsyncIterator[Output]:
        service = self._service
        exchange = service.exchange(call, id)
        headers = {"Content-Type": call.reply.content_type, **ignored_header(call.ignored)}
        try:
            await exchange.begun
            if exchange.failure is not None and exchange.answer is not None:
                yield self._failed(exchange.answer)
            elif exchange.answer is not None:
                for data, last in pieces(exchange.answer.body, MAX_FIELD):
                    yield output(self._writer.piece(data, last=last), headers)
            else:
                chunks = GatheredBody()
                exchange.stream_to(chunks)
                last = False
                while not last:
                    gathered, last = await chunks.next()
                    for data, end in pieces(gathered, MAX_FIELD):
                        yield output(self._writer.piece(data, last=last and end), headers)
                        headers = {}
        finally:
            exchange.cancel()

    def _failed(self, answer: HttpResponse) -> Output:
        return output(self._writer.failure(answer), {"Content-Type": answer.content_type})
