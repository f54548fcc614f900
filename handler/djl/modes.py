"""The ways in which DJL calls its worker: a step of a rolling batch, a whole batch, or a request of its own (async)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Protocol

from djl_python import Input, Output

from handler.core.errors import GenerationFailed, InternalError, InvalidPayload, NotFound, ServingError, serving_error
from handler.core.framing import JSON, dumps
from handler.djl.batches import (
    DynamicBatch,
    Item,
    Piece,
    RollingBatch,
    close,
    in_place_of,
    next_piece,
    open_items,
    seconds_early,
)
from handler.djl.wire import (
    MAX_FIELD,
    DjlVersion,
    PieceWriter,
    Sent,
    Unsent,
    batched,
    headers_of,
    is_batch,
    is_of_http,
    one_line,
    output,
    refusal,
    single,
    streamed,
    whole,
)
from handler.djl.worker_loop import WorkerLoop
from handler.protocols.kernel.errors import FRONT_END
from handler.scheduler.lora import AdapterCall, read_adapter_call, required
from handler.serving.model import ServedModel
from handler.serving.task import RequestTask

# -- DJL's calls about LoRA adapters: read what Java's PyAdapter sends, and change the adapters ------------------------
# An Input has the properties `name` and `src` (and `pin`), and the management call's query as contents. 0.36 makes the
# client's answer of the Output's status and message. In async mode it answers 200 without waiting for the worker,
# unless an error is there first; 0.28 always answers by itself. Then only the log says why a call failed.

log = logging.getLogger("handler.djl")

_DONE = {"register": "registered", "update": "updated", "unregister": "unregistered"}
"""DJL's own handlers' words; `alias` precedes them if SageMaker's user has given the adapter one."""


class AdapterCalls:
    """Makes changes one after another, in the order of the calls."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._turn = asyncio.Lock()
        self._under_way: dict[asyncio.Future[None], str] = {}  # the adapters' names

    async def answer(self, inputs: Input, what: str) -> tuple[str, dict[str, Any]]:
        """Do what a call asks for; return what was done, in words, and the answer's value.

        Args:
            what: register, update or unregister.

        Raises:
            ServingError: nothing has changed; the log has it.
        """
        name = inputs.get_properties().get("name")
        end = asyncio.get_running_loop().create_future()
        self._under_way[end] = str(name or "")
        try:
            async with self._turn:
                return await self._change(inputs, what)
        except ServingError as error:
            log.warning("the call to %s %r failed: %s", what, name, one_line(error.public))
            raise
        finally:
            del self._under_way[end]
            end.set_result(None)

    async def catch_up(self, item: Item) -> None:
        """Wait for the calls that came before a request and are about an adapter that it may name."""
        earlier = [end for end, name in self._under_way.items() if _mentions(item, name)]
        if earlier:
            await asyncio.wait(earlier)

    async def _change(self, inputs: Input, what: str) -> tuple[str, dict[str, Any]]:
        _check_caller(inputs)
        adapters = self._model.adapters
        adapters.registry.check()
        call = _read_call(inputs, refuse_unknown=self._model.config.unknown_parameters == "refuse")
        name = required(call.name, "name")
        done = f"Adapter {inputs.get_properties().get('alias') or name} {_DONE[what]}"
        value: dict[str, Any] = {"status": done}
        if what == "unregister":
            with contextlib.suppress(NotFound):  # Java lists it, as it answered a failed registration too early
                adapters.unregister(name)
        elif what == "update":
            await adapters.update(name, call.src, preload=call.preload)
        else:  # DJL Serving registers what lies in the model's `adapters/` by itself
            src, preload = required(call.src, "src"), call.preload is not False
            value["id"] = (await adapters.register(name, src, preload=preload, again=True)).number
        return done, value


def _mentions(item: Item, name: str) -> bool:
    """Return whether a header or a JSON string is this name, which has no character that JSON would escape."""
    return bool(name) and (name in item.headers.values() or f'"{name}"'.encode() in item.body)


def _check_caller(inputs: Input) -> None:
    """Refuse a call that a client made by a header of its own."""
    if is_of_http(inputs.get_properties()):
        raise InvalidPayload("property handler: a request cannot choose the function that answers it")


def _read_call(inputs: Input, *, refuse_unknown: bool) -> AdapterCall:
    """Read a call about an adapter."""
    properties, content = inputs.get_properties(), inputs.get_content()
    values: dict[str, Any] = {
        str(key): bytes(value).decode(errors="replace")
        for key, value in zip(content.get_keys(), content.get_values(), strict=True)
    }
    values.pop("alias", None)
    values |= {name: properties[name] for name in ("name", "src", "pin") if name in properties}
    call = read_adapter_call(values, refuse_unknown=refuse_unknown)
    if call.ignored:
        log.warning("an adapter's call: no effect: %s", one_line(", ".join(map(repr, call.ignored))))
    return call


_JSON = {"Content-Type": JSON.content_type}

_LOST_STEP = (
    "a call about an adapter came while requests were under way: DJL's rolling batch has lost its step's answer and "
    "will restart this worker after option.predict_timeout; with option.async_mode=true such calls are safe"
)
"""Java keeps one future for a connection: of two calls the later one replaces the earlier one's, and gets its answer.
If we answered both, one answer would be left over, and each later step would get the answer of the step before.
"""


class Mode(Protocol):
    """Answers DJL's calls."""

    def answer(self, inputs: Input) -> Output:
        """Answer requests."""

    def change_adapter(self, inputs: Input, what: str) -> Output:
        """Answer a call to register, update or unregister (`what`) an adapter."""


class Passive:
    """A rank of an MPI world that is not the first: the engine runs beside rank 0, which answers."""

    def answer(self, inputs: Input) -> Output:
        return Output()

    def change_adapter(self, inputs: Input, what: str) -> Output:
        return Output()


class _Stepped:
    """A mode in which the worker's event loop runs within DJL's calls."""

    def __init__(self, model: ServedModel, loop: WorkerLoop) -> None:
        self._loop = loop
        self._seconds = max(0.1, model.config.predict_timeout - 1.0)  # then Java kills the worker
        self._adapters = AdapterCalls(model)

    def change_adapter(self, inputs: Input, what: str) -> Output:
        """Wait for the engine; other requests' tokens queue meanwhile."""
        return _or_refusal(lambda: self._change_adapter(inputs, what))

    def _change_adapter(self, inputs: Input, what: str) -> Output:
        try:
            with self._loop.lock:
                call = asyncio.wait_for(self._adapters.answer(inputs, what), self._seconds)
                done, value = self._loop.run(call)
        except asyncio.TimeoutError:
            reason = f"not finished within {self._seconds:g} s (option.predict_timeout)"
            return refusal(GenerationFailed(reason))
        return output(dumps(value), _JSON, message=one_line(done))


def _or_refusal(answer: Callable[[], Output]) -> Output:
    """Return the answer, or a refusal if it raises: djl_python and Java would use their own text."""
    try:
        return answer()
    except Exception as error:  # one call must not end the worker
        return refusal(serving_error(error))


class Rolling(_Stepped):
    """A call is one step of every live request."""

    def __init__(self, model: ServedModel, loop: WorkerLoop, version: DjlVersion) -> None:
        super().__init__(model, loop)
        self._batch = RollingBatch(model, loop, commits_early=version.commits_early, max_piece=version.max_piece)
        self._writer = PieceWriter(version)

    def answer(self, inputs: Input) -> Output:
        if not is_batch(inputs):  # only a `handler` of the client's own comes past the rolling batch
            return refusal(InvalidPayload("property handler: a request cannot choose the function that answers it"))
        properties = inputs.get_properties()
        size = int(properties["batch_size"])
        with self._loop.lock:
            try:
                if properties.get("reset_rollingbatch") == "true":
                    self._batch.reset()
                return self._sent(self._batch.step(size, batched(inputs)))
            except Exception as error:  # left to Java, it would fail every client with a text of its own
                log.exception("a step failed: a bug")
                return self._sent(self._batch.fail(size, InternalError.of(error)))

    def _sent(self, pieces: Sequence[Piece]) -> Sent:
        return Sent(self._writer.step(pieces, self._batch.fail_one))

    def change_adapter(self, inputs: Input, what: str) -> Output:
        answer = super().change_adapter(inputs, what)
        if self._batch.num_requests:  # Java has a step under way, or is about to
            log.error("%s", _LOST_STEP)
            return Unsent()
        return answer


class Dynamic(_Stepped):
    """A call is a whole batch, answered when all of it is done."""

    def __init__(self, model: ServedModel, loop: WorkerLoop) -> None:
        super().__init__(model, loop)
        self._batch = DynamicBatch(model, loop, self._seconds)
        self._streaming = model.config.enable_streaming

    def answer(self, inputs: Input) -> Output:
        return _or_refusal(lambda: self._answer(inputs))

    def _answer(self, inputs: Input) -> Output:
        with self._loop.lock:
            if is_batch(inputs):
                return self._answer_batch(inputs)
            if self._streaming:
                return self._stream(single(inputs))
            with self._batch.run([single(inputs)])[0] as task:
                return whole(task)

    def _answer_batch(self, inputs: Input) -> Output:
        """Answer a batch with one status; a failure is reported in its own body."""
        items = batched(inputs)
        size = int(inputs.get_properties()["batch_size"])
        answers = Output()
        for index, task in enumerate(self._batch.run([items.get(index, Item(b"", {})) for index in range(size)])):
            answers.add(self._body_of(task), key="data", batch_index=index)
        return answers.add_property("Content-Type", "application/json")

    def _body_of(self, task: RequestTask) -> bytes:
        try:
            body = task.take()
            if len(body) > MAX_FIELD:
                message = f"the answer has {len(body)} bytes; in a batch at most {MAX_FIELD} are possible"
                raise GenerationFailed(message)
            return body
        except Exception as error:  # one request must not stop the others
            return self._batch.refused(serving_error(error))
        finally:
            close(task)

    def _stream(self, item: Item) -> Output:
        task = self._batch.begin(item)
        if task.error is None:
            return streamed(self._chunks(task), headers_of(task))
        with task:
            return whole(task)

    def _chunks(self, task: RequestTask) -> Iterator[bytes]:
        """Yield an answer's chunks; djl_python asks for the next one when the last is written."""
        last = False
        with task:
            while not last:
                with self._loop.lock:
                    data, last = self._batch.next_bytes(task)
                if data:
                    yield data


class Async:
    """A call opens a request; the first call's answer never ends, and carries the pieces of all requests.

    djl_python puts Outputs into a queue without a limit and takes a switch between threads for each. So one Output has
    a piece of every request that has bytes, and the next one is made when that is written: output that arrives
    meanwhile joins it.
    """

    def __init__(self, model: ServedModel, version: DjlVersion) -> None:
        self._model = model
        self._adapters = AdapterCalls(model)
        self._writer = PieceWriter(version)
        self._ids: dict[RequestTask, str] = {}  # DJL's, of all that are not answered to the end
        self._with_bytes: dict[RequestTask, None] = {}
        self._answered: list[RequestTask] = []  # their last pieces are taken, and not written yet
        self._wake_up = asyncio.Event()

    async def outputs(self, started: Output) -> AsyncIterator[Output]:
        """Answer the first call with `started`; then answer all requests."""
        yield started
        loop = asyncio.get_running_loop()
        while True:
            await self._wake_up.wait()
            self._wake_up.clear()
            if pieces := self._take_pieces():
                answered, self._answered = self._answered, []
                written = asyncio.Event()
                yield Sent(pieces, functools.partial(loop.call_soon_threadsafe, written.set))
                await written.wait()
                for task in answered:
                    close(task)

    async def answer(self, inputs: Input) -> AsyncIterator[Output]:
        """Open a request. It yields no Outputs of its own."""
        item = single(inputs)
        await self._adapters.catch_up(item)
        self._open(item)
        return _no_outputs()

    async def change_adapter(self, inputs: Input, what: str) -> Output:
        try:
            _, value = await self._adapters.answer(inputs, what)
            return output(self._writer.piece(dumps(value), last=True), _JSON)
        except Exception as bug:  # djl_python's own answer could not be read
            error = serving_error(bug)
            answer = FRONT_END.whole(error)
            return output(self._writer.failure(answer, error), {**_JSON, **dict(answer.headers)})

    def _open(self, item: Item) -> None:
        (task,) = open_items(self._model, [item], self._mark_ready)
        try:
            task.start(item.body)
        except Exception as bug:  # it must not stop the others
            task = in_place_of(task, bug, self._model)
        self._ids[task] = item.headers.get("request_tracking_id", "")
        if task.begun:  # refused before it had its id
            self._mark_ready(task)

    def _mark_ready(self, task: RequestTask) -> None:
        self._with_bytes[task] = None
        self._wake_up.set()

    def _take_pieces(self) -> bytes:
        """Take the output of all requests that have some."""
        tasks, self._with_bytes = self._with_bytes, {}
        return b"".join(message for task in tasks if self._is_due(task) for message in self._messages(task))

    def _is_due(self, task: RequestTask) -> bool:
        """Return whether its bytes may go now; if not, a timer sends them later."""
        early = seconds_early(task)
        if early:
            asyncio.get_running_loop().call_later(early, self._mark_ready, task)
        return not early

    def _messages(self, task: RequestTask) -> Iterator[bytes]:
        """Yield a request's messages; the last one always ends it, as Java would otherwise let the client wait."""
        id = self._ids.get(task)
        if id is None:
            return  # it is answered
        try:
            while task.unsent or task.finished:
                piece = next_piece(task, MAX_FIELD, commits=True)
                yield self._writer.message(piece, id)
                if piece.last:
                    break
            else:
                return
        except Exception as bug:
            close(task)
            with self._model.refused(serving_error(bug)) as failed:
                yield self._writer.message(next_piece(failed, None), id)
        del self._ids[task]
        self._answered.append(task)


async def _no_outputs() -> AsyncIterator[Output]:
    return
    yield
