"""Requests in flight on one engine: a synchronous core without I/O of its own. Hosts drive it, one `step` at a time."""

from __future__ import annotations

import itertools
import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from handler.core.errors import GenerationFailed, Overloaded, ServingError
from handler.core.sequence import SequenceState, alternatives
from handler.core.text import Prompt
from handler.core.values import Delta, Finish, Request, Token
from handler.engines.base import Output, Step, SteppedEngine
from handler.scheduler.lora.registry import AdapterRegistry

log = logging.getLogger("handler.batcher")

_LOOK = 0.25  # seconds between looks for requests past their time, as far as somebody steps this as often


@dataclass
class _Active:
    """One accepted request, queued or in the engine."""

    id: int
    request: Request
    prompt: Prompt
    start_by: float
    end_by: float
    started: Callable[[], None]
    keys: list[int] = field(default_factory=list)
    unfinished: int = 0


class _Place:
    """One request of the engine's: a sequence of ours, or a beam search with several of them."""

    __slots__ = ("active", "first", "generations", "single")

    def __init__(self, active: _Active, first: int, generations: list[SequenceState]) -> None:
        self.active = active
        self.first = first  # the number of its first sequence
        self.generations: list[SequenceState | None] = list(generations)  # None: that sequence has ended
        self.single = generations[0]


class Batcher:
    """Submit, step, cancel, reset.

    Ids are unique for the life of the process. Each request needs as many places in the engine as it has sequences;
    requests wait in order until there is room. A request's failure ends that request; an engine's failure ends those
    in the engine, and those that wait go on waiting for the next one.

    Args:
        engine: where the requests go.
        adapters: the model's; by default it has none.
        max_active: sequences in the engine at once (`option.max_rolling_batch_size`).
        max_queued: requests that may wait (`job_queue_size`).
        queue_timeout: seconds that a request may wait for its first step (`option.predict_timeout`).
        time_limit: seconds that a request may take in all (`option.request_time_limit`); 0 is no limit.
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
        self._look_at = 0.0  # when to look for requests past their time again
        self._ids = itertools.count(1)
        self._keys = itertools.count(1)
        self._queue: dict[int, _Active] = {}  # in order of arrival
        self._places: dict[int, _Place] = {}  # by the engine's key
        self._running: dict[int, _Active] = {}
        self._adapters = AdapterRegistry() if adapters is None else adapters
        self._adapters.bind(
            engine,
            self._keys,
            lambda: [active.request for active in (*self._running.values(), *self._queue.values())],
        )

    @property
    def ready(self) -> bool:
        """The engine takes requests."""
        return self._engine.ready

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_active(self) -> int:
        """Sequences in the engine."""
        return len(self._places)

    @property
    def idle(self) -> bool:
        return not self._running and not self._queue

    def check_room(self) -> None:
        """Raises `Overloaded` when one more request would not even be queued."""
        if len(self._queue) >= self._max_queued:
            raise Overloaded(f"the queue is full: {self._max_queued} requests wait (job_queue_size)")

    def submit(self, request: Request, prompt: Prompt, started: Callable[[], None] = lambda: None) -> int:
        """Accept a request; its deltas come from later steps under the id returned.

        Args:
            started: called when the engine gets it, perhaps before this returns.

        Raises:
            Overloaded: the queue is full.
            InvalidPayload: its adapter was unregistered since the request was read.
        """
        self.check_room()
        request = self._adapters.current(request)
        now = time.monotonic()
        active = _Active(next(self._ids), request, prompt, now + self._queue_timeout, now + self._time_limit, started)
        self._queue[active.id] = active
        self._admit()
        return active.id

    def cancel(self, id: int) -> None:
        """Forget a request; nothing more comes for it. Unknown ids are ignored."""
        active = self._running.get(id)
        if active is not None:
            for key in active.keys:
                self._engine.cancel(key)
            self._forget(active)
            self._admit()
        else:
            self._queue.pop(id, None)

    def reset(self) -> None:
        """Forget everything."""
        self._queue.clear()
        for active in list(self._running.values()):
            self.cancel(active.id)

    def step(self, timeout: float = 0.0) -> list[Delta]:
        """What the engine's steps have brought, waiting up to `timeout` seconds for it."""
        try:
            steps = self._engine.step(timeout)
        except Exception as error:  # the engine is foreign code: tell every client once, keep serving
            return self._fail_all(error)
        deltas: list[Delta] = []
        for step in steps:
            self._deliver_columns(step, deltas)
            for output in step.others:
                self._deliver(output, deltas)
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK
            deltas += self._expire(now)
        if self._queue:
            self._admit()
        self._adapters.drop_unused()
        return deltas

    def _deliver_columns(self, step: Step, deltas: list[Delta]) -> None:
        """The hot path: one token more for each of many sequences."""
        places = self._places
        for key, id, logprob in zip(step.keys, step.ids, step.logprobs, strict=True):
            place = places.get(key)
            if place is None:  # cancelled while the step was under way
                continue
            token = place.single.push(id, logprob)
            if place.single.stopped:
                self._engine.cancel(key)  # a stop string, which the engine does not know
                deltas.append(Delta(place.active.id, place.first, (token,), Finish.STOP))
                self._end_sequence(place, key, 0)
            else:
                deltas.append(Delta(place.active.id, place.first, (token,)))

    def _deliver(self, output: Output, deltas: list[Delta]) -> None:
        place = self._places.get(output.key)
        if place is None:
            return self._adapters.take(output)
        id, sequence = place.active.id, place.first + output.sequence
        if output.finish is Finish.ERROR:
            self.cancel(id)
            error = GenerationFailed(f"request failed in the engine: {output.error}")
            deltas.append(Delta(id, sequence, (), Finish.ERROR, error))
            return
        generation = place.generations[output.sequence]
        if generation is None:
            return
        tokens, finish = generation.feed(output.ids, output.logprobs, output.finish, output.tops)
        prefill = None
        if output.prompt_logprobs is not None and sequence == 0:
            prefill = _prompt_tokens(place.active.prompt, output)
        if finish is not None:
            if output.finish is None:
                self._engine.cancel(output.key)
            self._end_sequence(place, output.key, output.sequence)
        deltas.append(Delta(id, sequence, tokens, finish, None, prefill, output.logits))

    def _admit(self) -> None:
        """Move waiting requests into the engine, in order, as long as they fit."""
        while self._queue and self._engine.ready:
            active = next(iter(self._queue.values()))
            need = active.request.sampling.num_sequences
            if self._places and len(self._places) + need > self._max_active:
                return
            del self._queue[active.id]
            self._start(active)

    def _start(self, active: _Active) -> None:
        active.started()
        sampling = active.request.sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=random.getrandbits(53))
        active.unfinished = sampling.num_sequences
        self._running[active.id] = active
        # Beams are one search; several samples are that many requests, each with a seed of its own.
        width = active.unfinished if sampling.num_beams > 1 else 1
        for first in range(0, active.unfinished, width):
            key = next(self._keys)
            active.keys.append(key)
            self._places[key] = _Place(active, first, [SequenceState(active.prompt, sampling) for _ in range(width)])
            own = replace(
                sampling,
                seed=sampling.seed_of(first),
                prompt_logprobs=sampling.prompt_logprobs and first == 0,
            )
            self._engine.add(key, active.prompt.ids, own, active.request.adapter)

    def _end_sequence(self, place: _Place, key: int, index: int) -> None:
        place.generations[index] = None
        if not any(place.generations):
            del self._places[key]
        place.active.unfinished -= 1
        if not place.active.unfinished:
            del self._running[place.active.id]

    def _forget(self, active: _Active) -> None:
        self._running.pop(active.id, None)
        for key in active.keys:
            self._places.pop(key, None)

    def _fail_all(self, error: Exception) -> list[Delta]:
        if not isinstance(error, ServingError):
            log.exception("the engine raised")
            error = GenerationFailed(f"engine failure: {error!r}")
        lost = list(self._running.values())
        for active in lost:
            self._forget(active)
        self._adapters.lose_engine(error)
        return [Delta(active.id, 0, (), Finish.ERROR, error) for active in lost]

    def _expire(self, now: float) -> list[Delta]:
        """End requests that waited too long, or took too long."""
        late = [active for active in self._queue.values() if active.start_by < now]
        endless = [active for active in self._running.values() if active.end_by < now]
        waited = Overloaded(f"waited {self._queue_timeout:g} s for the engine (option.predict_timeout)")
        took = GenerationFailed(f"not finished within {self._time_limit:g} s (option.request_time_limit)")
        for active in late + endless:
            self.cancel(active.id)
        return [Delta(active.id, 0, (), Finish.ERROR, waited) for active in late] + [
            Delta(active.id, 0, (), Finish.ERROR, took) for active in endless
        ]


def _prompt_tokens(prompt: Prompt, output: Output) -> list[Token]:
    vocabulary = prompt.vocabulary
    assert output.prompt_logprobs is not None
    tops = output.prompt_tops or [()] * len(prompt.ids)
    return [
        Token(id, vocabulary.text(id), logprob, id in vocabulary.special, alternatives(vocabulary, top))
        for id, logprob, top in zip(prompt.ids, output.prompt_logprobs, tops, strict=True)
    ]
