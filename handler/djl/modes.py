"""The modes in which DJL calls its worker: with steps of a rolling batch, whole batches, or single requests (async)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

from djl_python import Input, Output

from handler.core.errors import (
    GenerationFailed,
    InternalError,
    InvalidPayload,
    NotFound,
    ServingError,
    Unavailable,
    serving_error,
)
from handler.core.framing import JSON, dumps
from handler.core.loop import wait_for
from handler.djl.batches import (
    DynamicBatch,
    Item,
    Piece,
    RollingBatch,
    close,
    next_piece,
    seconds_early,
    start_items,
)
from handler.djl.shared_adapters import LOOK, SharedAdapters
from handler.djl.turns import IN_ORDER, ResponseOrder
from handler.djl.wire import (
    MAX_FIELD,
    DjlVersion,
    PieceWriter,
    Sent,
    batched,
    headers_of,
    is_batch,
    is_of_http,
    on_one_line,
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
from handler.serving.request.task import RequestTask

# -- DJL's calls about LoRA adapters -----------------------------------------------------------------------------------
# Java's PyAdapter sends an Input with the properties `name` and `src` (and `pin`), and the query of the management call
# as contents. Java 0.36 answers the client with the Output's status and message. In async mode, Java answers 200
# without waiting for the worker, unless an error has arrived by then. Java 0.28 never waits for the worker. If Java
# does not wait, only the log says why a call failed. Up to 0.30, Java calls every worker; since 0.31, it calls one.

log = logging.getLogger("handler.djl")

_DONE = {"register": "registered", "update": "updated", "unregister": "unregistered"}
"""Maps each kind of call to the verb in its message ("Adapter NAME registered"), as in DJL's own handlers."""

_CHOSEN = "property handler: a request cannot choose the function that answers it"


class AdapterCalls:
    """Runs DJL's calls that change LoRA adapters, one at a time and in order.

    Args:
        shared: the adapters of all workers, or None if this worker shares none.
    """

    def __init__(self, model: ServedModel, shared: SharedAdapters | None = None) -> None:
        self._model = model
        self._shared = shared
        self._turn = asyncio.Lock()
        self._under_way: dict[asyncio.Future[None], str] = {}  # the adapters' names

    async def answer(self, inputs: Input, change: str) -> tuple[str, dict[str, Any]]:
        """Register, update or unregister an adapter.

        Args:
            change: "register", "update" or "unregister".

        Returns:
            A message that describes the change, and the value of the response.

        Raises:
            ServingError: if the call fails. The error is logged, and nothing has changed.
        """
        name = str(inputs.get_properties().get("name") or "")
        end = asyncio.get_running_loop().create_future()
        self._under_way[end] = name
        try:
            async with self._turn, contextlib.nullcontext() if self._shared is None else self._shared.change(name):
                return await self._change(inputs, change)
        except ServingError as error:
            log.warning("the call to %s %r failed: %s", change, name, on_one_line(error.public))
            raise
        finally:
            del self._under_way[end]
            end.set_result(None)

    async def catch_up(self, item: Item) -> None:
        """Wait for unfinished calls about any adapter that a request may name, and for those of other workers."""
        earlier = [end for end, name in self._under_way.items() if _mentions(item, name)]
        if earlier:
            await asyncio.wait(earlier)
        deadline = time.monotonic() + self._model.config.predict_timeout
        while self._shared is not None and (name := self._shared.changing()) and _mentions(item, name):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(LOOK)
        if self.is_behind:
            await self.take_over()

    @property
    def is_behind(self) -> bool:
        """Whether other workers have changed adapters."""
        return self._shared is not None and self._shared.is_behind

    async def take_over(self) -> None:
        """Take over the changes of other workers."""
        async with self._turn:
            if self._shared is not None:
                await self._shared.take_over()

    async def _change(self, inputs: Input, change: str) -> tuple[str, dict[str, Any]]:
        if is_of_http(inputs.get_properties()):  # a client's header `handler` has selected this function
            raise InvalidPayload(_CHOSEN)
        adapters = self._model.adapters
        adapters.registry.check()
        call = _read_call(inputs, refuse_unknown=self._model.config.unknown_parameters == "refuse")
        name = required(call.name, "name")
        done = f"Adapter {inputs.get_properties().get('alias') or name} {_DONE[change]}"
        value: dict[str, Any] = {"status": done}
        if change == "unregister":
            with contextlib.suppress(NotFound):  # Java lists an adapter even if its registration has failed
                adapters.unregister(name)
        elif change == "update":
            await adapters.update(name, call.src, preload=call.preload)
        else:  # DJL Serving itself registers every adapter in the model's `adapters/`
            src, preload = required(call.src, "src"), call.preload is not False
            value["id"] = (await adapters.register(name, src, preload=preload, again=True)).number
        return done, value


def _mentions(item: Item, name: str) -> bool:
    """Return whether a request contains an adapter's name, either as a header value or as a string in the JSON body."""
    return bool(name) and (name in item.headers.values() or f'"{name}"'.encode() in item.body)


def _read_call(inputs: Input, *, refuse_unknown: bool) -> AdapterCall:
    properties, content = inputs.get_properties(), inputs.get_content()
    values: dict[str, Any] = {
        str(key): bytes(value).decode(errors="replace")
        for key, value in zip(content.get_keys(), content.get_values(), strict=True)
    }
    values.pop("alias", None)
    values |= {name: properties[name] for name in ("name", "src", "pin") if name in properties}
    call = read_adapter_call(values, refuse_unknown=refuse_unknown)
    if call.ignored:
        names = on_one_line(", ".join(map(repr, call.ignored)))
        log.warning("a call about an adapter has parameters without effect: %s", names)
    return call


_JSON = {"Content-Type": JSON.content_type}

_BUSY = (
    "a call about an adapter arrived while requests were running, and is refused: DJL Serving has lost the response to "
    "a step or to this call. After option.predict_timeout it will restart this worker, or refuse all requests. Change "
    "adapters while no request is running, or with option.async_mode=true"
)

_NEXT_STEP = 0.2  # seconds within which Java makes a step if it is not waiting for the response to one


class Passive:
    """The mode of the idle ranks of an MPI world, which return empty Outputs. Rank 0 runs the engine and responds."""

    def answer(self, inputs: Input) -> Output:
        """Answer a call that contains one or more requests, or a step of a rolling batch."""
        return Output()

    def change_adapter(self, inputs: Input, change: str) -> Output:
        """Answer a call about an adapter. `change` is "register", "update" or "unregister"."""
        return Output()


def seconds_of_call(predict_timeout: float) -> float:
    """Return the maximum duration of a call in seconds, because Java kills the worker after `predict_timeout`."""
    return max(0.1, predict_timeout - 1.0)


class _Stepped:
    """Base class of the modes in which the worker's event loop runs within DJL's calls."""

    def __init__(
        self, model: ServedModel, loop: WorkerLoop, turns: ResponseOrder, shared: SharedAdapters | None
    ) -> None:
        self._loop = loop
        self._seconds = seconds_of_call(model.config.predict_timeout)
        self._adapters = AdapterCalls(model, shared)
        self._turns = turns

    def change_adapter(self, inputs: Input, change: str) -> Output:
        """Change an adapter, and wait for the engine. The tokens of running requests queue up until then."""
        return self._turns.of(self._change_adapter(inputs, change))

    def _change_adapter(self, inputs: Input, change: str) -> Output:
        try:
            with self._loop.lock:
                call = wait_for(self._adapters.answer(inputs, change), self._seconds)
                done, value = self._loop.run(call)
            return output(dumps(value), _JSON, message=on_one_line(done))
        except asyncio.TimeoutError:
            reason = f"not finished within {self._seconds:g} s (option.predict_timeout)"
            return refusal(GenerationFailed(reason))
        except Exception as error:  # djl_python and Java would write their own text
            return refusal(serving_error(error))

    def _take_over_adapters(self) -> None:
        """Take over other workers' changes of adapters, before requests are opened."""
        if self._adapters.is_behind:
            try:
                self._loop.run(wait_for(self._adapters.take_over(), self._seconds))
            except asyncio.TimeoutError:
                log.error("other workers' changes of adapters could not be taken over within %g s", self._seconds)


class Rolling(_Stepped):
    """The mode in which each call is one step of all live requests."""

    def __init__(
        self,
        model: ServedModel,
        loop: WorkerLoop,
        version: DjlVersion,
        turns: ResponseOrder = IN_ORDER,
        shared: SharedAdapters | None = None,
    ) -> None:
        super().__init__(model, loop, turns, shared)
        self._batch = RollingBatch(model, loop, commits_early=version.commits_early, max_piece=version.max_piece)
        self._writer = PieceWriter(version)

    def answer(self, inputs: Input) -> Output:
        if not is_batch(inputs):  # a client's header `handler` has bypassed the rolling batch
            return self._turns.of(refusal(InvalidPayload(_CHOSEN)))
        properties = inputs.get_properties()
        size = int(properties["batch_size"])
        with self._loop.lock:
            try:
                if properties.get("reset_rollingbatch") == "true":
                    self._batch.reset()
                if new := batched(inputs):
                    self._take_over_adapters()
                answer = self._sent(self._batch.step(size, new))
            except Exception as error:  # Java would fail every request with its own text
                log.exception("a step of the rolling batch failed because of a bug")
                answer = self._sent(self._batch.fail(size, InternalError.of(error)))
        return self._turns.of(answer)

    def _sent(self, pieces: Sequence[Piece]) -> Sent:
        return Sent(self._writer.step(pieces, self._batch.fail_piece))

    def change_adapter(self, inputs: Input, change: str) -> Output:
        """Change an adapter, or refuse to while there are requests, because Java then drops the worker.

        If Java had made a step before this call, it waits only for this response. Otherwise it makes a step now, and
        waits only for the response to the step.
        """
        if self._batch.num_requests:
            log.error("%s", _BUSY)
            return self._turns.of(_without_contents(refusal(Unavailable(_BUSY))), _NEXT_STEP)
        return self._turns.of(_without_contents(self._change_adapter(inputs, change)))


def _without_contents(answer: Output) -> Output:
    """Return the response to a call about an adapter in a rolling batch. Java reads only its status and message.

    If Java takes it for the response to a step, all requests of the step fail. Contents would end Java's thread.
    """
    return Output(code=answer.code, message=answer.message)


class Dynamic(_Stepped):
    """The mode in which each call is a whole batch, answered when all of its requests are finished."""

    def __init__(
        self,
        model: ServedModel,
        loop: WorkerLoop,
        turns: ResponseOrder = IN_ORDER,
        shared: SharedAdapters | None = None,
    ) -> None:
        super().__init__(model, loop, turns, shared)
        self._batch = DynamicBatch(model, loop, self._seconds)
        self._streaming = model.config.enable_streaming

    def answer(self, inputs: Input) -> Output:
        return self._turns.of(self._answer(inputs))

    def _answer(self, inputs: Input) -> Output:
        try:
            with self._loop.lock:
                self._take_over_adapters()
                if is_batch(inputs):
                    return self._answer_batch(inputs)
                if self._streaming:
                    return self._stream(single(inputs))
                with self._batch.run([single(inputs)])[0] as task:
                    return whole(task)
        except Exception as error:  # djl_python and Java would write their own text
            return refusal(serving_error(error))

    def _answer_batch(self, inputs: Input) -> Output:
        """Answer a batch. The whole batch has a single status, so a failed request is reported only in its body."""
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
                message = f"the response has {len(body)} bytes; the maximum in a batch is {MAX_FIELD}"
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
        """Yield the chunks of a response. djl_python requests each chunk after it has written the previous chunk."""
        last = False
        with task:
            while not last:
                with self._loop.lock:
                    data, last = self._batch.next_bytes(task)
                if data:
                    yield data


class LoadFailed(Exception):
    """A model that cannot be loaded. The reason has been logged."""


class Reloading:
    """The mode of a worker that replaces another one, while a thread loads its model.

    The load call has already been answered (see `DjlVersion.calls_early`). Calls wait for the model.

    Args:
        loaded: a future of the mode of the loaded model. Its exception is LoadFailed.
        seconds: a function that returns the maximum duration of a call in seconds.
    """

    def __init__(
        self,
        loaded: futures.Future[Rolling | Dynamic],
        version: DjlVersion,
        seconds: Callable[[], float],
        turns: ResponseOrder,
    ) -> None:
        self._loaded = loaded
        self._seconds = seconds
        self._turns = turns
        self._writer = PieceWriter(version)

    def answer(self, inputs: Input) -> Output:
        try:
            mode = self._wait()
        except ServingError as error:
            return self._turns.of(self._refused(inputs, error))
        return mode.answer(inputs)

    def change_adapter(self, inputs: Input, change: str) -> Output:
        try:
            mode = self._wait()
        except ServingError as error:
            return self._turns.of(_without_contents(refusal(error)))
        return mode.change_adapter(inputs, change)

    def _wait(self) -> Rolling | Dynamic:
        """Wait for the mode of the loaded model.

        If the model cannot be loaded, end this process, so that Java starts another one. Java only does this when a
        process ends during a call.
        """
        seconds = self._seconds()
        try:
            return self._loaded.result(seconds)
        except futures.TimeoutError:
            message = f"the model is being loaded again; not ready after {seconds:g} s (option.predict_timeout)"
            raise Unavailable(message) from None
        except LoadFailed:
            raise SystemExit(1) from None

    def _refused(self, inputs: Input, error: ServingError) -> Output:
        if not is_batch(inputs):
            return refusal(error)
        return Sent(self._writer.refused_step(int(inputs.get_properties()["batch_size"]), error))


class Async:
    """The async mode, in which each call opens a request. The response to the first call never ends, and contains the
    output of all requests.

    djl_python has an unlimited queue of Outputs and switches between threads for each Output. Each Output therefore
    contains pieces of all requests that have bytes to send, and the next Output is created only after the previous
    Output has been written.
    """

    def __init__(self, model: ServedModel, version: DjlVersion, shared: SharedAdapters | None = None) -> None:
        self._model = model
        self._adapters = AdapterCalls(model, shared)
        self._writer = PieceWriter(version)
        self._ids: dict[RequestTask, str] = {}  # DJL's ids of the unfinished requests
        self._with_bytes: dict[RequestTask, None] = {}
        self._answered: list[RequestTask] = []  # requests whose last pieces are taken but not yet written
        self._wake_up = asyncio.Event()

    async def outputs(self, started: Output) -> AsyncIterator[Output]:
        """Yield `started`, the response to the first call, and then the output of all requests."""
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
        """Open a request, and return an empty iterator, because `outputs` yields the request's output."""
        item = single(inputs)
        await self._adapters.catch_up(item)
        (task,) = start_items(self._model, [item], self._mark_ready)
        self._ids[task] = item.headers.get("request_tracking_id", "")
        if task.begun:  # refused before its id was set
            self._mark_ready(task)
        return _no_outputs()

    async def change_adapter(self, inputs: Input, change: str) -> Output:
        try:
            _, value = await self._adapters.answer(inputs, change)
            return output(self._writer.piece(dumps(value), last=True), _JSON)
        except Exception as bug:  # Java could not read djl_python's own error response
            error = serving_error(bug)
            answer = FRONT_END.whole(error)
            return output(self._writer.failure(answer, error), {**_JSON, **dict(answer.headers)})

    def _mark_ready(self, task: RequestTask) -> None:
        self._with_bytes[task] = None
        self._wake_up.set()

    def _take_pieces(self) -> bytes:
        """Take the available output of all requests."""
        tasks, self._with_bytes = self._with_bytes, {}
        return b"".join(message for task in tasks if self._is_due(task) for message in self._messages(task))

    def _is_due(self, task: RequestTask) -> bool:
        """Return whether a request's bytes may be sent now. If they may not, set a timer to send them later."""
        early = seconds_early(task)
        if early:
            asyncio.get_running_loop().call_later(early, self._mark_ready, task)
        return not early

    def _messages(self, task: RequestTask) -> Iterator[bytes]:
        """Yield a request's messages. If a message cannot be written, end the request with an error."""
        id = self._ids.get(task)
        if id is None:
            return  # the request has been answered
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
