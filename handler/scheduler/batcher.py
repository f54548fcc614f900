"""Batcher of the requests on one engine: synchronous and without I/O of its own; hosts call `step`."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator

from handler.core.errors import GenerationFailed, InternalError, Overloaded, ServingError
from handler.core.sequence import SequenceState
from handler.core.text import Prompt
from handler.core.values import Delta, Finish, Request, new_delta, new_token
from handler.engines.base import EngineRequest, Output, Step, engine_failure
from handler.scheduler.active import ActiveRequest, RunningRequest, TokenReceiver
from handler.scheduler.engine import SteppedEngine, join
from handler.scheduler.lora.registry import AdapterRegistry
from handler.scheduler.request_queue import RequestQueue

log = logging.getLogger("handler.batcher")

_MALFORMED = "request failed in the engine: it returned an id that the tokenizer does not have, or a malformed output"
_EXPIRY_INTERVAL = 0.25  # seconds between checks for requests past their time, if `step` is called as often


class Batcher:
    """Submit, step, cancel.

    Ids are unique for the life of the process. Requests wait in a `RequestQueue` until all their sequences fit into the
    engine. A request's failure ends that request. An engine's failure ends the requests in it; others wait for the next
    engine.

    Args:
        engine: runs the requests.
        adapters: the model's; by default none.
        max_active: sequences in the engine at once (`option.max_rolling_batch_size`).
        max_queued: requests that may wait (`job_queue_size`).
        queue_timeout: seconds that a request may wait for its first step (`option.predict_timeout`).
        time_limit: seconds that a request may take from its arrival (`option.request_time_limit`); 0 is no limit.

    Attributes:
        num_tokens: that have come so far.
        receivers, lines: the last step's lines, each with the receiver of its tokens; they precede the step's deltas.
    """

    def __init__(
        self,
        engine: SteppedEngine,
        adapters: AdapterRegistry | None = None,
        *,
        max_active: int = 32,
        max_queued: int = 1000,
        queue_timeout: float = 120.0,
        time_limit: float = 0.0,
    ) -> None:
        self._engine = engine
        self._max_active = max_active
        self._max_queued = max_queued
        self._queue_timeout = queue_timeout
        self._time_limit = time_limit or math.inf
        self._expire_at = 0.0  # time of the next check for requests past their time
        self.num_tokens = 0
        self.receivers: list[TokenReceiver] = []
        self.lines: list[bytes] = []
        self._ids = itertools.count(1)
        self._keys = itertools.count(1)
        self._queue = RequestQueue[ActiveRequest]()
        self._in_engine: dict[int, RunningRequest] = {}  # by the engine's key
        self._running: dict[int, ActiveRequest] = {}
        self._adapters = AdapterRegistry() if adapters is None else adapters
        self._adapters.bind(
            engine,
            self._keys,
            lambda: [active.request for active in (*self._running.values(), *self._queue)],
        )

    @property
    def ready(self) -> bool:
        """Whether the engine takes requests."""
        return self._engine.ready

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_active(self) -> int:
        """Number of the engine's requests: sequences and beam searches."""
        return len(self._in_engine)

    @property
    def idle(self) -> bool:
        return not self._running and not self._queue

    def check_room(self) -> None:
        """Raise `Overloaded` if the queue is full."""
        if len(self._queue) >= self._max_queued:
            raise Overloaded(f"the queue is full: {self._max_queued} requests wait (job_queue_size)")

    def submit(
        self, request: Request, prompt: Prompt, started: Callable[[], None] = lambda: None, *, follows: bool = False
    ) -> int:
        """Accept a request; later steps return its deltas under the returned id.

        Args:
            started: called when the engine gets the request, perhaps before this returns.
            follows: another request of the same body was accepted just before, which this one follows into a full
                queue too.

        Raises:
            Overloaded: the queue is full.
            InvalidPayload: its adapter was unregistered since the request was read.
        """
        if not follows:
            self.check_room()
        request = self._adapters.current(request)
        now = time.monotonic()
        ends = now + self._queue_timeout, now + self._time_limit
        active = ActiveRequest(next(self._ids), request, prompt, *ends, started)
        self._queue.add(active.id, request.priority, active, follows=follows)
        self._admit()
        return active.id

    def set_receiver(self, id: int, receiver: TokenReceiver) -> None:
        """Encode the tokens of a running request with one sequence by `receiver`, where nothing comes with them.

        All else still comes as deltas. Requests with several sequences, and unknown ids, are left as they are.
        """
        active = self._running.get(id)
        if active is not None and active.request.sampling.num_sequences == 1:
            self._in_engine[active.keys[0]].receiver = receiver

    def cancel(self, id: int) -> None:
        """Forget a request, without a further delta; unknown ids are ignored."""
        active = self._running.get(id)
        if active is not None:
            self._forget(active)
            self._admit()
        else:
            self._queue.discard(id)

    def step(self, timeout: float = 0.0) -> list[Delta]:
        """Return the deltas of the engine's steps, waiting up to `timeout` seconds for one."""
        self.receivers.clear()
        self.lines.clear()
        try:
            step = join(self._engine.step(timeout))
        except Exception as error:  # the engine is foreign code: fail its requests and keep serving
            return self._fail_all(error)
        deltas: list[Delta] = []
        self._deliver_columns(step, deltas)
        for output in step.others:
            self._deliver(output, deltas)
        now = time.monotonic()
        if now >= self._expire_at:
            self._expire_at = now + _EXPIRY_INTERVAL
            deltas += self._expire(now)
        if self._queue:
            self._admit()
        self._adapters.drop_unused()
        return deltas

    def _deliver_columns(self, step: Step, deltas: list[Delta]) -> None:
        """Deliver one token to each of many sequences; the hot path."""
        in_engine, receivers, lines = self._in_engine, self.receivers, self.lines
        self.num_tokens += len(step.ids)
        for key, id, logprob in zip(step.keys, step.ids, step.logprobs, strict=True):
            request = in_engine.get(key)
            if request is None:  # cancelled during the step
                self.num_tokens -= 1
                continue
            try:
                text = request.texts[id]
                if text is not None:
                    token = new_token((id, text, logprob, id in request.special, ()))
                else:
                    token = request.push(id, logprob)
            except Exception as error:
                deltas.append(self._malformed(request, error))
                continue
            if text is None and request.single.stopped:
                self._engine.cancel(key)  # a stop string, which the engine does not know
                deltas.append(Delta(request.id, request.first, (token,), Finish.STOP))
                self._end_sequence(request, key, 0)
                continue
            receiver = request.receiver
            if receiver is None:
                deltas.append(new_delta((request.id, request.first, (token,), None, None, None, None, None, None)))
                continue
            try:
                lines.append(receiver.line(token))
            except Exception as error:  # one client's answer must not stop the others'
                deltas.append(self._unwritten(request, error))
                continue
            receiver.num_tokens += 1
            receivers.append(receiver)

    def _deliver(self, output: Output, deltas: list[Delta]) -> None:
        request = self._in_engine.get(output.key)
        if request is None:
            return self._adapters.take(output)
        if output.finish is Finish.ERROR:
            return deltas.append(self._failed(request.id, request.first, output.failure))
        try:
            fed = request.feed(output)
        except Exception as error:
            return deltas.append(self._malformed(request, error))
        if fed is None:
            return
        tokens, finish, prefill = fed
        self.num_tokens += len(tokens)
        receiver = request.receiver
        if receiver is not None and finish is None and output.is_plain:
            try:
                self.lines.append(b"".join(map(receiver.line, tokens)))
            except Exception as error:  # one client's answer must not stop the others'
                return deltas.append(self._unwritten(request, error))
            receiver.num_tokens += len(tokens)
            return self.receivers.append(receiver)
        if finish is not None:
            if output.finish is None:
                self._engine.cancel(output.key)
            self._end_sequence(request, output.key, output.sequence)
        sequence = request.first + output.sequence
        own = (output.logits, output.vector, output.heard)
        deltas.append(Delta(request.id, sequence, tokens, finish, None, prefill, *own))

    def _failed(self, id: int, sequence: int, error: ServingError) -> Delta:
        """End a request that has failed; return its last delta."""
        self.cancel(id)
        return Delta(id, sequence, (), Finish.ERROR, error)

    def _malformed(self, request: RunningRequest, error: Exception) -> Delta:
        """End a request of which the engine returned nonsense; return its last delta."""
        log.error("the engine's output for a request is malformed: %r", error)
        return self._failed(request.id, request.first, GenerationFailed(_MALFORMED))

    def _unwritten(self, request: RunningRequest, error: Exception) -> Delta:
        """End a request whose line could not be made; return its last delta."""
        log.error("an answer could not be written: a bug", exc_info=error)
        return self._failed(request.id, request.first, InternalError.of(error))

    def _admit(self) -> None:
        """Start waiting requests, in order, as long as they fit into the engine."""
        while self._queue:
            first = self._queue.first()
            full = self._in_engine and len(self._in_engine) + first.request.sampling.num_sequences > self._max_active
            if full or not self._engine.admits(first.request, first.prompt):
                return
            active = self._queue.take()
            active.started()
            self._running[active.id] = active
            for engine_request in self._engine_requests(active):
                self._engine.add(engine_request)

    def _engine_requests(self, active: ActiveRequest) -> Iterator[EngineRequest]:
        """Make the engine's requests of one. Beams are one; several samples are several, each with its own seed."""
        request, prompt = active.request, active.prompt
        sampling = request.sampling.with_seed()
        active.unfinished = sampling.num_sequences
        width = active.unfinished if sampling.num_beams > 1 else 1
        for first in range(0, active.unfinished, width):
            key = next(self._keys)
            active.keys.append(key)
            self._in_engine[key] = RunningRequest(
                active, first, [SequenceState(prompt, sampling) for _ in range(width)]
            )
            own = sampling if first == 0 else sampling._replace(seed=sampling.seed_of(first), prompt_logprobs=False)
            media = None if prompt.media is None else prompt.media.file
            yield EngineRequest(key, prompt.ids, request.pooling or own, request.adapter, media)

    def _end_sequence(self, request: RunningRequest, key: int, index: int) -> None:
        request.sequences[index] = None
        if not any(request.sequences):
            del self._in_engine[key]
        request.active.unfinished -= 1
        if not request.active.unfinished:
            del self._running[request.active.id]

    def _forget(self, active: ActiveRequest) -> None:
        """Forget a request, in the engine too."""
        self._running.pop(active.id, None)
        for key in active.keys:
            self._engine.cancel(key)
            self._in_engine.pop(key, None)

    def _fail_all(self, error: Exception) -> list[Delta]:
        if not isinstance(error, ServingError):
            log.exception("the engine raised")
            error = engine_failure(error)
        lost = list(self._running.values())
        for active in lost:
            self._forget(active)
        self._adapters.lose_engine(error)
        return [Delta(active.id, 0, (), Finish.ERROR, error) for active in lost]

    def _expire(self, now: float) -> list[Delta]:
        """Fail requests that waited too long, or took too long."""
        late = [active for active in self._queue if active.start_by < now]
        overdue = [active for active in self._running.values() if active.end_by < now]
        not_started = Overloaded(f"waited {self._queue_timeout:g} s for the engine (option.predict_timeout)")
        not_finished = GenerationFailed(f"not finished within {self._time_limit:g} s (option.request_time_limit)")
        return [self._failed(active.id, 0, not_started) for active in late] + [
            self._failed(active.id, 0, not_finished) for active in overdue
        ]
