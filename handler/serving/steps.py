"""Drives a batcher without an event loop: a host that is called step by step (DJL's) opens places and steps them."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from handler.core.errors import GenerationFailed, ServingError, Unavailable, serving_error
from handler.core.framing import JSON
from handler.core.text import Prompt
from handler.core.values import Delta, Finish, Request
from handler.plugins.formatter_thread import SteppedFormatterThread, ThreadedReply
from handler.protocols.base import HttpResponse, ParsedRequest, Schema
from handler.scheduler.batcher import Batcher
from handler.serving.large_bodies import LARGE
from handler.serving.preprocess import Decoded, Intake, check_guide, request_id
from handler.serving.route_override import named_dialect
from handler.serving.slots import Item, Place
from handler.serving.stats import Record

log = logging.getLogger("handler.steps")

_TOKENIZE_ASIDE = 1 << 13  # bytes of a body, from which on it is tokenized while the neighbours' tokens go on
_POLL = 0.002  # seconds between looks at what is being tokenized

Encoded = tuple[Request, Prompt]


class _Read(NamedTuple):
    """A request whose body was read: its call or why it is refused, and as much of it as its dialect is known by."""

    item: Item
    schema: Schema | None
    outcome: ParsedRequest | Exception
    body: Any


class _Encoding(NamedTuple):
    """What is waited for before a call's requests go to the engine: their prompts, and what is wrong with a guide."""

    encoded: Future[list[Encoded]]
    trials: Sequence[Future[str] | None]

    def done(self) -> bool:
        return self.encoded.done() and all(trial is None or trial.done() for trial in self.trials)


def _done(encoded: list[Encoded]) -> Future[list[Encoded]]:
    future: Future[list[Encoded]] = Future()
    future.set_result(encoded)
    return future


class StepDriver:
    """Opens places and steps them. Use it, and its places, under its `lock`: `look_after` has a thread of its own.

    Args:
        batcher: the requests in flight.
        intake: reads requests.
        log_prompts: `option.log_prompts`.
    """

    def __init__(self, batcher: Batcher, intake: Intake, *, log_prompts: bool = False) -> None:
        self.batcher = batcher
        self._intake = intake
        self._log_prompts = log_prompts
        self.lock = threading.Lock()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self.sinks: dict[int, Callable[[Delta], None]] = {}  # by the batcher's id
        self._reading: dict[Place, Future[_Read]] = {}  # large bodies
        self._encoding: dict[Place, _Encoding] = {}
        self._formatters = SteppedFormatterThread() if intake.runs_model_py else None
        self._places: dict[Place, None] = {}

    # -- places --------------------------------------------------------------------------------------------------

    def open(self, item: Item) -> Place:
        """Accept one request; one that is refused is finished at once, with its status and body."""
        place = Place(Record(request_id(item.headers), log_prompts=self._log_prompts))
        self._places[place] = None
        intake = self._intake
        schema: Schema | None = None
        try:
            schema = named_dialect(item.headers, intake.schema.name, intake.model_name, intake.routes)
            intake.check_headers(item.headers, schema)
            self.batcher.check_room()
            if schema is None and self._formatters is not None and (title := intake.input_formatter):
                place.content_type = JSON.content_type  # until it is known
                arrived = functools.partial(self._arrived, place, item)
                self._formatters.run(arrived, title, intake.decode, item.body, item.headers)
            elif len(item.body) >= LARGE:
                place.content_type = JSON.content_type  # until it is known
                self._reading[place] = intake.large_bodies.submit(self._read, item, schema)
            else:
                self._begin(place, self._read(item, schema))
        except Exception as error:
            self._refuse(place, error, None, schema)
        return place

    def open_all(self, items: Sequence[Item]) -> list[Place]:
        """Accept requests, after a look at the engine: one that died meanwhile must not take them along."""
        self.step(0.0)
        return [self.open(item) for item in items]

    def refused(self, error: ServingError) -> Place:
        """A place that is answered with `error`."""
        place = Place(Record("-"))
        place.refuse(self._intake.schema.refused(error), error)
        return place

    def reset(self) -> None:
        """Forget every request."""
        for place in list(self._places):
            self._end(place, "cancelled")

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the engine's next message and hand out what it brought."""
        if self._reading:
            self._begin_read()
        if self._encoding:
            self._submit_encoded()
        if self._reading or self._encoding:
            timeout = min(timeout, _POLL)
        formatters = self._formatters
        if formatters is not None and formatters.num_pending:
            timeout = min(timeout, _POLL)
        sinks = self.sinks
        for delta in self.batcher.step(timeout):
            if sink := sinks.get(delta.id):
                sink(delta)
        if formatters is not None:
            formatters.settle()

    def begin(self, item: Item, seconds: float) -> Place:
        """Open a place and wait until its answer has begun, at most `seconds`."""
        (place,) = self.open_all([item])
        self._step_until([place], lambda: place.begun, seconds)
        return place

    def run(self, items: Sequence[Item], seconds: float) -> list[Place]:
        """Answer all of `items`, whole; what takes longer than `seconds` is ended with an error."""
        places = self.open_all(items)
        self._step_until(places, lambda: all(place.finished for place in places), seconds)
        return places

    def _step_until(self, places: Sequence[Place], done: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                error = GenerationFailed(f"not finished within {seconds:g} s (option.predict_timeout)")
                for place in places:
                    self._fail(place, error)
                return
            self.step(min(0.1, left))

    def look_after(self, period: float) -> None:
        """From now on step at least every `period` seconds.

        Between its calls a worker stands still; so an engine that dies meanwhile is started again before the next
        request comes, not after.
        """

        def step() -> None:
            while True:
                time.sleep(period)
                try:
                    with self.lock:
                        self.step(0.0)
                except Exception:
                    log.exception("a bug")

        threading.Thread(target=step, name="look-after", daemon=True).start()

    # -- one request ---------------------------------------------------------------------------------------------

    def _read(self, item: Item, schema: Schema | None) -> _Read:
        """Thread-safe."""
        return self._parse(item, schema, functools.partial(self._intake.decode, item.body, item.headers, schema))

    def _parse(self, item: Item, schema: Schema | None, decode: Callable[[], Decoded]) -> _Read:
        """Raises nothing. Thread-safe."""
        body: Any = None
        try:
            decoded = decode()
            body = decoded.value
            return _Read(item, schema, self._intake.parse(decoded, item.headers, schema), body)
        except Exception as error:
            return _Read(item, schema, error, body)

    def _begin_read(self) -> None:
        for place, reading in list(self._reading.items()):
            if reading.done():
                del self._reading[place]
                self._begin(place, reading.result())

    def _begin(self, place: Place, read: _Read) -> None:
        """Raises nothing."""
        if isinstance(read.outcome, Exception):
            return self._refuse(place, read.outcome, read.body, read.schema)
        try:
            self._start(place, read.item, read.outcome)
        except Exception as error:
            self._refuse(place, error, read.body, read.schema)

    def _arrived(self, place: Place, item: Item, decoding: Future[Decoded]) -> None:
        """A model.py's input formatter has read it."""
        if place.finished:
            return
        self._begin(place, self._parse(item, None, decoding.result))

    def _refuse(self, place: Place, error: Exception, body: Any, schema: Schema | None) -> None:
        """End a request that could not be read, in the form of its dialect."""
        refused = functools.partial((schema or self._intake.schema).refused, body=body, context=self._intake.context)
        self._fail(place, serving_error(error), refused)

    def _start(self, place: Place, item: Item, call: ParsedRequest) -> None:
        if self._formatters is not None and call.formatter:
            deliver = functools.partial(self._deliver, place)
            place._threaded = ThreadedReply(call.reply, call.formatter, self._formatters, deliver)
            call = call._replace(reply=place._threaded)
        place._call = place._record.call = call
        place.ignored = call.ignored
        place.content_type = call.reply.content_type
        small = len(item.body) < _TOKENIZE_ASIDE
        submit = self._intake.large_bodies.submit if len(item.body) >= LARGE else self._threads.submit
        encoded = _done(self._encode(call)) if small else submit(self._encode, call)
        encoding = _Encoding(encoded, [self._intake.try_guide(request) for request in call.requests])
        if encoding.done():
            self._submit(place, call, encoding)
        else:
            self._encoding[place] = encoding

    def _encode(self, call: ParsedRequest) -> list[Encoded]:
        return [self._intake.encode(request) for request in call.requests]

    def _submit_encoded(self) -> None:
        for place, encoding in list(self._encoding.items()):
            if encoding.done():
                del self._encoding[place]
                call = place._call
                assert call is not None, "only what was read is encoded"
                try:
                    self._submit(place, call, encoding)
                except Exception as error:
                    self._fail(place, serving_error(error))

    def _submit(self, place: Place, call: ParsedRequest, encoding: _Encoding) -> None:
        encoded = encoding.encoded.result()
        for request, trial in zip(call.requests, encoding.trials, strict=True):
            if trial is not None:
                check_guide(request, trial.result())
        deliver = functools.partial(self._deliver, place) if place._threaded is None else place._threaded.put
        for index, (request, prompt) in enumerate(encoded):
            place._record.num_prompt_tokens += len(prompt.ids)
            call.reply.start(index, len(prompt.ids))
            id = self.batcher.submit(request, prompt)
            place._ids.append(id)
            self.sinks[id] = functools.partial(deliver, index)

    def _deliver(self, place: Place, index: int, delta: Delta) -> None:
        """One delta of request number `index` of a place's call: the hot path, once a token."""
        try:
            if delta.error is not None:
                return self._fail(place, delta.error)
            place._record.note(delta)
            place.begun = True
            assert place._call is not None, "only what was read is answered"
            reply = place._call.reply
            if data := reply.feed(index, delta):
                place.unsent.append(data)
            if reply.finished:
                self._end(place, "ok")
        except Exception as error:  # one client's answer must not stop the others'
            self._fail(place, serving_error(error))

    def _fail(
        self, place: Place, error: ServingError, refused: Callable[[ServingError], HttpResponse] | None = None
    ) -> None:
        """End one request with `error`, in the way that what was sent so far allows.

        Args:
            refused: how its dialect says it of one that could not be read; None: as the configured one does.
        """
        if place.finished:
            return
        record, call = place._record, place._call
        record.error = error.public
        outcome = "overloaded" if isinstance(error, Unavailable) else "failed" if place._ids else "refused"
        self._end(place, outcome)
        if call is None:
            return place.refuse((refused or self._intake.schema.refused)(error), error)
        if not call.streams or not (place.committed or place.unsent):
            return place.refuse(call.reply.refused(error), error)
        place.unsent.append(call.reply.feed(0, Delta(0, 0, (), Finish.ERROR, error)))

    def _end(self, place: Place, outcome: str) -> None:
        place.finished = place.begun = True
        self._places.pop(place, None)
        self._reading.pop(place, None)
        self._encoding.pop(place, None)
        if place._threaded is not None:
            place._threaded.close()
        for id in place._ids:
            if self.sinks.pop(id, None) is not None:
                self.batcher.cancel(id)
        place._record.close(outcome)
