"""The batcher, which schedules the requests of an engine. It is synchronous and does no I/O itself.

`EngineDriver` calls its `step`.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from handler.core.errors import GenerationFailed, InternalError, Overloaded, ServerLost, ServingError
from handler.core.fair_queue import OwnerTurns, Shares, share_is_left
from handler.core.text import Prompt, SequenceState, prompt_tokens
from handler.core.values import NO_EXTRAS, Delta, Extras, Finish, Request, Token, new_delta, new_token
from handler.engines.base import EngineRequest, Output, Step, engine_failure
from handler.scheduler.engine import SteppedEngine, join
from handler.scheduler.lora import AdapterRegistry

log = logging.getLogger("handler.batcher")

_MALFORMED = "request failed in the engine: it returned malformed output, or an id that the tokenizer does not have"
_EXPIRY_INTERVAL = 0.25  # minimum seconds between two checks for expired requests
PATIENCE = 10.0  # seconds after which an owner without started batch requests may displace another owner's request


class ClientChannel(Protocol):
    """The part of a client's connection that a fast path writes to."""

    def write_chunk(self, data: bytes) -> bool:
        """Write a chunk immediately. Return False if the connection cannot accept it now."""


class FastPath:
    """A shortcut that encodes the plain tokens of a response without creating a `Delta` for each token.

    Attributes:
        id: id that the batcher assigned to the request.
        encode: function that encodes a token as the next bytes of the stream, or stores it and returns b"".
        channel: connection to write the encoded bytes to, or None to pass all of them to `keep`.
        keep: called with encoded bytes that the channel cannot write immediately.
        num_tokens: number of tokens encoded so far.
    """

    __slots__ = ("channel", "encode", "id", "keep", "num_tokens")

    def __init__(
        self, id: int, encode: Callable[[Token], bytes], channel: ClientChannel | None, keep: Callable[[bytes], object]
    ) -> None:
        self.id = id
        self.encode = encode
        self.channel = channel
        self.keep = keep
        self.num_tokens = 0


@dataclass
class ActiveRequest:
    """An accepted request, either queued or running in the engine.

    Attributes:
        continued: whether it was queued again because the engine's server was lost before the first token.
    """

    id: int
    request: Request
    prompt: Prompt
    started: Callable[[], object]
    start_by: float = math.inf
    end_by: float = math.inf
    keys: list[int] = field(default_factory=list)
    unfinished: int = 0
    owner: str = ""
    continued: bool = False

    def failure(self, output: Output) -> ServingError:
        """Return the error of an output. If its labels are refused, the error contains the name of the question."""
        if output.refused and self.request.pooling is not None:
            output = output._replace(error=f"{self.request.names.prompt}: {output.error}")
        return output.failure


class RunningRequest:
    """An engine request that is running: a single sequence, or a beam search with several sequences.

    Everything that is needed to process a plain token is stored in this object itself, because each additional object
    would cost a cache miss per token.
    """

    __slots__ = ("active", "begun", "fast_path", "first", "id", "sequences", "single", "special", "token_texts")

    def __init__(self, active: ActiveRequest, first: int, sequences: Sequence[SequenceState]) -> None:
        self.active = active
        self.id = active.id
        self.first = first  # index of the first of `sequences` among the sequences of `active`
        self.sequences: list[SequenceState | None] = list(sequences)  # None for a sequence that has ended
        self.single = sequences[0]
        self.token_texts = self.single.texts
        self.special = self.single.special
        self.begun = False  # whether anything was returned as a delta, which comes before the fast path
        self.fast_path: FastPath | None = None  # None: all tokens are returned as deltas

    def push(self, id: int, logprob: float | None) -> Token:
        """Add a token to the request's only sequence."""
        token = self.single.push(id, logprob)
        self.token_texts = self.single.texts
        return token

    def feed(self, output: Output) -> tuple[list[Token], Finish | None, list[Token] | None] | None:
        """Add the engine's output to the sequence that it belongs to.

        Returns:
            A tuple of the new tokens, the finish reason (None if the sequence continues) and the prompt tokens (None if
            the output has no log-probabilities for them). If the sequence had already ended, the result is None.
        """
        state = self.sequences[output.sequence]
        if state is None:
            return None
        tokens, finish = state.feed(output.ids, output.logprobs, output.finish, output.tops)
        prefill = None
        if output.prompt_logprobs is not None and self.first + output.sequence == 0:
            prefill = prompt_tokens(self.active.prompt, output.prompt_logprobs, output.prompt_tops)
        self.token_texts = self.single.texts
        return tokens, finish, prefill


# -- queue of waiting requests: by priority, then round-robin over bodies, then by arrival; no request starves ---------


Item = TypeVar("Item")

MAX_OVERTAKES = 10
"""Maximum number of newer requests in a row that may leave the queue before the oldest request."""


class _Rank(NamedTuple):
    priority: int
    turn: int
    id: int


class RequestQueue(Generic[Item]):
    """A queue that returns items by priority, lowest number first, and items of equal priority in order of arrival.

    Bodies that contain several requests take turns: the second request of a body comes after the first request of every
    other waiting body.

    No request starves. After MAX_OVERTAKES newer requests in a row, the oldest request is returned regardless of its
    priority. The k-th oldest request is therefore among the next k * (MAX_OVERTAKES + 1) requests that are returned.
    """

    def __init__(self) -> None:
        self._items: dict[int, tuple[_Rank, Item]] = {}  # by id, in order of arrival
        self._order: list[_Rank] = []  # sorted
        self._last_turn = 0  # turn of the item that was added last
        self._overtakes = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        """Iterate over the items in order of arrival."""
        return (item for _, item in self._items.values())

    def add(self, id: int, priority: int, item: Item, *, follows: bool = False) -> None:
        """Add an item.

        Args:
            id: sequence number of the item in order of arrival, which breaks ties.
            follows: whether the item comes from the same body as the previously added item.
        """
        self._last_turn = self._last_turn + 1 if follows else self._next_turn(priority)
        rank = _Rank(priority, self._last_turn, id)
        self._items[id] = rank, item
        bisect.insort(self._order, rank)

    def _next_turn(self, priority: int) -> int:
        """Return the lowest turn among the waiting items of a priority, or 0 if there are none."""
        index = bisect.bisect_left(self._order, (priority,))
        following = self._order[index] if index < len(self._order) else None
        return 0 if following is None or following.priority != priority else following.turn

    def __getitem__(self, id: int) -> Item:
        return self._items[id][1]

    def first(self) -> Item:
        """Return the next item without removing it."""
        return self._items[self.first_id][1]

    @property
    def priority(self) -> int:
        """The priority of the next item."""
        return self._items[self.first_id][0].priority

    def take(self, id: int | None = None) -> Item:
        """Remove and return the next item, or the item with the given id."""
        if id is None:
            id = self.first_id
        self._overtakes = 0 if id == next(iter(self._items)) else self._overtakes + 1
        rank, item = self._items[id]
        self._remove(rank)
        return item

    def discard(self, id: int) -> None:
        """Remove an item. Unknown ids are ignored."""
        if id in self._items:
            self._remove(self._items[id][0])

    @property
    def first_id(self) -> int:
        """The id of the next item."""
        return next(iter(self._items)) if self._overtakes >= MAX_OVERTAKES else self._order[0].id

    def _remove(self, rank: _Rank) -> None:
        del self._items[rank.id]
        del self._order[bisect.bisect_left(self._order, rank)]


class OwnerQueues(Generic[Item]):
    """A `RequestQueue` for each owner. Owners take turns among the items of the lowest priority number.

    After MAX_OVERTAKES items in a row that are newer than the oldest one, the oldest item is next.
    """

    def __init__(self) -> None:
        self._queues = OwnerTurns[str, RequestQueue[Item]](RequestQueue)
        self._owners: dict[int, str] = {}  # by id, in order of arrival
        self._overtakes = 0
        self._next: str | None = None  # the owner whose turn is next, or None if this is not known

    def __len__(self) -> int:
        return len(self._owners)

    def __iter__(self) -> Iterator[Item]:
        """Iterate over the items in order of arrival."""
        return (self._queues[owner][id] for id, owner in self._owners.items())

    def add(self, id: int, priority: int, item: Item, owner: str = "", *, follows: bool = False) -> None:
        """Add an item. The arguments are those of `RequestQueue.add`."""
        self._queues[owner].add(id, priority, item, follows=follows)
        self._owners[id] = owner
        self._next = None

    def first(self) -> Item:
        """Return the next item without removing it."""
        owner = self._next_owner()
        return self._queues[owner][self._next_id(owner)]

    def take(self) -> Item:
        """Remove and return the next item."""
        owner = self._next_owner()
        id = self._next_id(owner)
        self._overtakes = 0 if id == next(iter(self._owners)) else self._overtakes + 1
        item = self._queues[owner].take(id)
        self._queues.end_turn(owner)
        del self._owners[id]
        self._next = None
        return item

    def discard(self, id: int) -> None:
        """Remove an item. Unknown ids are ignored."""
        owner = self._owners.pop(id, None)
        if owner is not None:
            self._queues[owner].discard(id)
            self._queues.drop_empty(owner)
            self._next = None

    def has_room(self, limit: int, owner: str) -> bool:
        """Return whether an owner may add an item to a queue with this limit. If the queue is full, an owner still has
        its equal share, as in `FairQueue`.
        """
        return share_is_left(limit, self._queues, owner, len(self), len(self._queues.get(owner, ())))

    def newest_of_largest(self, owner: str) -> int | None:
        """Return the id of the newest item of the owner with the most items, or None if `owner` would have as many with
        another item. Among owners with as many items, the one whose turn is last loses an item, as in `FairQueue`.
        """
        largest = max(reversed(self._queues), key=lambda other: len(self._queues[other]), default=owner)
        if largest == owner or len(self._queues[largest]) <= len(self._queues.get(owner, ())) + 1:
            return None
        return next(id for id, other in reversed(self._owners.items()) if other == largest)

    def _next_owner(self) -> str:
        if self._next is None:
            oldest = next(iter(self._owners.values()))
            lowest = min(self._queues, key=lambda owner: self._queues[owner].priority)
            self._next = oldest if self._is_oldest_due else lowest
        return self._next

    def _next_id(self, owner: str) -> int:
        """Return the id of the next item, which belongs to `owner`."""
        return next(iter(self._owners)) if self._is_oldest_due else self._queues[owner].first_id

    @property
    def _is_oldest_due(self) -> bool:
        return self._overtakes >= MAX_OVERTAKES


class Background:
    """Batch requests that have to wait before they enter the queue, so that there is room for other requests.

    Owners take turns: the next request comes from the owner with the fewest sequences in the queue and the engine.
    While there is no room for this request, only owners without any sequences may start a request before it, up to
    MAX_OVERTAKES times in a row.

    Args:
        most: maximum number of batch sequences in the queue and the engine. A request with more sequences starts alone.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting = OwnerTurns[str, dict[int, ActiveRequest]](dict)
        self._started: dict[int, ActiveRequest] = {}
        self._sequences = Shares[str]()  # of started requests, by owner
        self._overtakes = 0

    def __iter__(self) -> Iterator[ActiveRequest]:
        return (active for waiting in self._waiting.values() for active in waiting.values())

    def add(self, owner: str, active: ActiveRequest) -> None:
        self._waiting[owner][active.id] = active

    def take(self) -> ActiveRequest | None:
        """Remove and return the next request. Return None if no request is waiting, or there is no room for it."""
        if not self._waiting:
            return None
        for index, (owner, active) in enumerate(self._next()):
            num_sequences = active.request.sampling.num_sequences
            if not self._started or self._sequences.total() + num_sequences <= self._most:
                self._overtakes = self._overtakes + 1 if index else 0
                self._remove(owner, active.id)
                self._started[active.id] = active
                self._sequences.add(owner, num_sequences)
                return active
        return None

    def _next(self) -> Iterator[tuple[str, ActiveRequest]]:
        """Yield each owner that may start a request if there is room, with its oldest request, in order of turns."""
        for index, owner in enumerate(sorted(self._waiting, key=self._sequences.__getitem__)):
            if index and (owner in self._sequences or self._overtakes >= MAX_OVERTAKES):
                return
            yield owner, next(iter(self._waiting[owner].values()))

    def _remove(self, owner: str, id: int) -> None:
        del self._waiting[owner][id]
        self._waiting.end_turn(owner)

    def end(self, id: int) -> bool:
        """Remove a request, and return whether this makes room for other requests. Unknown ids are ignored."""
        active = self._started.pop(id, None)
        if active is None:
            for owner in [owner for owner, waiting in self._waiting.items() if id in waiting]:
                self._remove(owner, id)
            return False
        self._sequences.add(active.request.background or "", -active.request.sampling.num_sequences)
        return True

    def to_displace(self, now: float) -> ActiveRequest | None:
        """Return a started request that must make room, because an owner has waited too long for its first request.

        This is the newest request of the owner with the most sequences. Return None if no owner has waited too long, if
        the owner with the most sequences has no other request, or if its newest request would not make enough room.
        """
        for owner, first in self._next():
            if owner in self._sequences or first.start_by > now:
                continue
            largest = max(self._sequences, key=self._sequences.__getitem__, default="")
            started = [active for active in self._started.values() if active.request.background == largest]
            *others, newest = started or [first]
            room = self._most - self._sequences.total() + newest.request.sampling.num_sequences
            if others and first.request.sampling.num_sequences <= room:
                return newest
        return None


class WaitingRequests(OwnerQueues[ActiveRequest]):
    """The queue of requests for the engine, with its limits.

    Args:
        max_queued: maximum number of requests in the queue.
        max_background: maximum number of batch sequences in the queue and the engine.
        queue_timeout: maximum number of seconds in the queue.
        time_limit: maximum number of seconds from the time a request enters the queue to its end, or 0.

    Attributes:
        background: requests of batch files that have to wait before they enter the queue.
        displaced: ids of requests that had to leave the full queue, until the batcher returns their last deltas.
    """

    def __init__(self, max_queued: int, max_background: int, queue_timeout: float, time_limit: float) -> None:
        super().__init__()
        self._max_queued = max_queued
        self.queue_timeout = queue_timeout
        self.time_limit = time_limit or math.inf
        self.background = Background(max_background)
        self.displaced: list[int] = []

    def check_room(self, owner: str) -> int | None:
        """Return which request must leave the queue for a request of `owner`, or None if the queue has room.

        This is the newest request of the owner with the most requests in the queue.

        Raises:
            Overloaded: no other owner has more requests.
        """
        if len(self) < self._max_queued:
            return None
        newest = self.newest_of_largest(owner)
        if newest is None:
            raise self.overload()
        return newest

    def overload(self) -> Overloaded:
        """Return the error of a request for which the queue has no room."""
        return Overloaded(f"the queue is full (job_queue_size={self._max_queued})")

    def enqueue(self, active: ActiveRequest, owner: str, *, follows: bool = False) -> None:
        """Add a request, and set its deadlines. The arguments are those of `Batcher.submit`."""
        self.set_deadlines(active)
        self.add(active.id, active.request.priority, active, owner, follows=follows)

    def set_deadlines(self, active: ActiveRequest) -> None:
        """Set when a request that enters the queue, or starts past it, must start and end."""
        now, limit = time.monotonic(), active.request.time_limit
        active.start_by = now + (self.queue_timeout if limit is None else limit)
        active.end_by = now + (self.time_limit if limit is None else limit)


class Batcher:
    """A queue of requests in front of an engine. It starts requests in order and returns their deltas step by step.

    Request ids are unique for the lifetime of the process. A request waits in `WaitingRequests` until the engine has
    room for all its sequences. If a request fails, only that request ends. If the engine fails, all running requests
    end, and queued requests wait for the next engine. If the engine has only lost the server that it
    had started, running requests without any token wait too, but only once.

    Args:
        engine: engine that runs the requests.
        adapters: the model's LoRA adapters; none by default.
        max_active: maximum number of sequences in the engine (`option.max_rolling_batch_size`).
        max_queued: maximum number of waiting requests (`job_queue_size`).
        max_background: maximum number of batch sequences in the queue and the engine (`option.batches_concurrency`).
        queue_timeout: maximum number of seconds that a request waits for the engine (`option.predict_timeout`).
        time_limit: maximum number of seconds from `submit` to the end of a request (`option.request_time_limit`); 0
            disables the limit. Only requests that are running in the engine are ended. For a request from a batch file,
            the time starts when the request moves from `Background` to the queue.

    Attributes:
        num_tokens: number of tokens generated so far.
        fast_paths: fast paths that encoded tokens in the last step.
        lines: encoded tokens of the last step, one item for each of `fast_paths`. They come before the deltas of the
            step.
    """

    def __init__(
        self,
        engine: SteppedEngine,
        adapters: AdapterRegistry | None = None,
        *,
        max_active: int = 32,
        max_queued: int = 1000,
        max_background: int = 16,
        queue_timeout: float = 120.0,
        time_limit: float = 0.0,
    ) -> None:
        self._engine = engine
        self._max_active = max_active
        self._expire_at = 0.0  # time of the next check for expired requests
        self.num_tokens = 0
        self.fast_paths: list[FastPath] = []
        self.lines: list[bytes] = []
        self._ids = itertools.count(1)
        self._keys = itertools.count(1)
        self._waiting = WaitingRequests(max_queued, max_background, queue_timeout, time_limit)
        self._in_engine: dict[int, RunningRequest] = {}  # by the engine's key
        self._running: dict[int, ActiveRequest] = {}
        self._adapters = AdapterRegistry() if adapters is None else adapters
        self._adapters.bind(
            engine,
            self._keys,
            lambda: [active.request for active in (*self._running.values(), *self._waiting, *self._waiting.background)],
        )

    @property
    def ready(self) -> bool:
        return self._engine.ready

    @property
    def num_queued(self) -> int:
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        """The number of engine requests: single sequences and beam searches."""
        return len(self._in_engine)

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting

    def check_room(self, owner: str = "") -> None:
        """Raise `Overloaded` if the queue is full, and no other owner has more requests in it."""
        self._waiting.check_room(owner)

    def _make_room(self, owner: str) -> None:
        """If the queue is full, end a request of another owner, as in `WaitingRequests.check_room`."""
        displaced = self._waiting.check_room(owner)
        if displaced is not None:
            self.cancel(displaced)
            self._waiting.displaced.append(displaced)

    def submit(
        self,
        request: Request,
        prompt: Prompt,
        started: Callable[[], object] = lambda: None,
        owner: str = "",
        *,
        follows: bool = False,
    ) -> int:
        """Accept a request, and return the id that identifies its deltas.

        If the queue is full, the newest request of another owner may have to leave it.

        Args:
            owner: owner of the request, or "" without an owner.
            started: called when the engine gets the request, possibly before `submit` returns.
            follows: whether this request comes from the same body as the previously accepted request. If so, it is
                accepted even if the queue is full.

        Raises:
            Overloaded: the queue is full.
            InvalidPayload: the request's adapter was unregistered after the request was read.
        """
        if request.adapter is not None:
            request = request._replace(adapter=self._adapters.current(request.adapter))
        if not follows:
            self._make_room(owner)
        active = ActiveRequest(next(self._ids), request, prompt, started, owner=owner)
        if request.background is not None:
            active.start_by = time.monotonic() + PATIENCE
            self._waiting.background.add(request.background, active)
            self._admit()
        elif not self._waiting and self._has_room(active):
            self._waiting.set_deadlines(active)
            self._start(active)
        else:
            self._waiting.enqueue(active, owner, follows=follows)
            self._admit()
        return active.id

    def set_fast_path(self, id: int, fast_path: FastPath) -> None:
        """Encode the plain tokens of a running request with `fast_path`.

        Other output of the request is still returned as deltas. Requests with several sequences and unknown ids are
        ignored.
        """
        active = self._running.get(id)
        if active is not None and active.request.sampling.num_sequences == 1:
            self._in_engine[active.keys[0]].fast_path = fast_path

    def cancel(self, id: int) -> None:
        """Cancel a request, so that no further deltas are returned for it. Unknown ids are ignored."""
        active = self._running.get(id)
        if active is not None:
            self._forget(active)
            self._admit()
        else:
            self._waiting.discard(id)
            if self._waiting.background.end(id):
                self._admit()

    def step(self, timeout: float = 0.0) -> list[Delta]:
        """Return the deltas of all completed engine steps, after waiting up to `timeout` seconds for the first step."""
        self.fast_paths.clear()
        self.lines.clear()
        deltas: list[Delta] = []
        if self._waiting.displaced:
            deltas += [self._failed(id, 0, self._waiting.overload()) for id in self._waiting.displaced]
            self._waiting.displaced.clear()
        try:
            step = join(self._engine.step(timeout))
        except Exception as error:  # the engine is foreign code: fail its requests and keep serving
            return [*deltas, *self._fail_all(error)]
        self._deliver_columns(step, deltas)
        for output in step.others:
            self._deliver(output, deltas)
        now = time.monotonic()
        if now >= self._expire_at:
            self._expire_at = now + _EXPIRY_INTERVAL
            deltas += self._expire(now)
        self._admit()
        if self._adapters.leaving:
            self._adapters.drop_unused()
        return deltas

    def _deliver_columns(self, step: Step, deltas: list[Delta]) -> None:
        """Deliver the tokens in the step's columns, one per sequence. This is the hot path.

        `RequestTask._open_fast_path` sets the fast path of a stream after the first token.
        """
        in_engine, fast_paths, lines = self._in_engine, self.fast_paths, self.lines
        self.num_tokens += len(step.ids)
        for key, id, logprob in zip(step.keys, step.ids, step.logprobs, strict=True):
            request = in_engine.get(key)
            if request is None:  # cancelled during the step
                self.num_tokens -= 1
                continue
            try:
                text = request.token_texts[id]
                if text is not None:
                    token = new_token((id, text, logprob, id in request.special, ()))
                else:
                    token = request.push(id, logprob)
            except Exception as error:
                deltas.append(self._malformed(request, error))
                continue
            if text is None and request.single.stopped:
                self._engine.cancel(key)  # the engine does not know of stop strings
                extras = Extras(stop=request.single.stopped)
                deltas.append(Delta(request.id, request.first, (token,), Finish.STOP, extras=extras))
                self._end_sequence(request, key, 0)
                continue
            fast_path = request.fast_path
            if fast_path is None:
                request.begun = True
                deltas.append(new_delta((request.id, request.first, (token,), None, None, None, None)))
                continue
            try:
                line = fast_path.encode(token)
            except Exception as error:  # one client's response must not stop the others
                deltas.append(self._unwritten(request, error))
                continue
            fast_path.num_tokens += 1
            if line:
                lines.append(line)
                fast_paths.append(fast_path)

    def _deliver(self, output: Output, deltas: list[Delta]) -> None:
        request = self._in_engine.get(output.key)
        if request is None:
            return self._adapters.take(output)
        if output.finish is Finish.ERROR:
            return deltas.append(self._failed(request.id, request.first, request.active.failure(output)))
        try:
            fed = request.feed(output)
        except Exception as error:
            return deltas.append(self._malformed(request, error))
        if fed is None:
            return
        tokens, finish, prefill = fed
        request.begun = True
        self.num_tokens += len(tokens)
        fast_path = request.fast_path
        if fast_path is not None and finish is None and output.is_plain:
            return self._write(request, fast_path, tokens, deltas)
        extras = output.extras
        if finish is not None:
            if (state := request.sequences[output.sequence]) is not None and state.stopped:
                extras = (extras or NO_EXTRAS)._replace(stop=state.stopped)
            if output.finish is None:
                self._engine.cancel(output.key)
            self._end_sequence(request, output.key, output.sequence)
        sequence = request.first + output.sequence
        deltas.append(Delta(request.id, sequence, tokens, finish, None, prefill, extras))

    def _write(
        self, request: RunningRequest, fast_path: FastPath, tokens: Sequence[Token], deltas: list[Delta]
    ) -> None:
        try:
            line = b"".join(map(fast_path.encode, tokens))
        except Exception as error:  # one client's response must not stop the others
            return deltas.append(self._unwritten(request, error))
        fast_path.num_tokens += len(tokens)
        if line:
            self.lines.append(line)
            self.fast_paths.append(fast_path)

    def _failed(self, id: int, sequence: int, error: ServingError) -> Delta:
        """Cancel a failed request and return its last delta."""
        self.cancel(id)
        return Delta(id, sequence, (), Finish.ERROR, error)

    def _malformed(self, request: RunningRequest, error: Exception) -> Delta:
        """Cancel a request for which the engine returned malformed output, and return its last delta."""
        log.error("the engine returned malformed output for a request: %r", error)
        return self._failed(request.id, request.first, GenerationFailed(_MALFORMED))

    def _unwritten(self, request: RunningRequest, error: Exception) -> Delta:
        """Cancel a request whose tokens could not be encoded, and return its last delta."""
        log.error("a bug in the server: a response could not be encoded", exc_info=error)
        return self._failed(request.id, request.first, InternalError.of(error))

    def _admit(self) -> None:
        """Start waiting requests in order until the engine has no room for the next one."""
        while (active := self._waiting.background.take()) is not None:
            self._waiting.enqueue(active, active.request.background or "")
        while self._waiting and self._has_room(self._waiting.first()):
            self._start(self._waiting.take())

    def _has_room(self, active: ActiveRequest) -> bool:
        """Return whether the engine has room for a request now. If so, the request must be started next."""
        request = active.request
        if self._in_engine and len(self._in_engine) + request.sampling.num_sequences > self._max_active:
            return False
        return self._engine.admits(request, active.prompt)

    def _start(self, active: ActiveRequest) -> None:
        active.started()
        self._running[active.id] = active
        for engine_request in self._engine_requests(active):
            self._engine.add(engine_request)

    def _engine_requests(self, active: ActiveRequest) -> Iterator[EngineRequest]:
        """Yield one engine request for a beam search, or one per sample. The samples' seeds differ if a seed is set."""
        request, prompt = active.request, active.prompt
        sampling = request.sampling
        active.unfinished = sampling.num_sequences
        active.keys.clear()
        width = active.unfinished if sampling.num_beams > 1 else 1
        for first in range(0, active.unfinished, width):
            key = next(self._keys)
            active.keys.append(key)
            self._in_engine[key] = RunningRequest(
                active, first, [SequenceState(prompt, sampling) for _ in range(width)]
            )
            own = sampling if first == 0 else sampling._replace(seed=sampling.seed_of(first), prompt_logprobs=False)
            media = None if prompt.media is None else prompt.media.file
            pooling = request.pooling and request.pooling._replace(cache_salt=sampling.cache_salt)
            yield EngineRequest(key, prompt.ids, pooling or own, request.adapter, media)

    def _end_sequence(self, request: RunningRequest, key: int, index: int) -> None:
        request.sequences[index] = None
        if not any(request.sequences):
            del self._in_engine[key]
        request.active.unfinished -= 1
        if not request.active.unfinished:
            self._end_background(self._running.pop(request.active.id))

    def _end_background(self, active: ActiveRequest) -> None:
        if active.request.background is not None:
            self._waiting.background.end(active.id)

    def _forget(self, active: ActiveRequest) -> None:
        """Remove a request and cancel its sequences in the engine."""
        self._running.pop(active.id, None)
        self._end_background(active)
        for key in active.keys:
            self._engine.cancel(key)
            self._in_engine.pop(key, None)

    def _fail_all(self, error: Exception) -> list[Delta]:
        if not isinstance(error, ServingError):
            log.exception("the engine raised an exception")
            error = engine_failure(error)
        lost: list[ActiveRequest] = []
        for active in list(self._running.values()):
            if isinstance(error, ServerLost) and self._can_continue(active):
                self._queue_again(active)
            else:
                self._forget(active)
                lost.append(active)
        self._adapters.lose_engine(error)
        return [Delta(active.id, 0, (), Finish.ERROR, error) for active in lost]

    def _can_continue(self, active: ActiveRequest) -> bool:
        """Return whether the next engine can compute a request: once, as the request may be the cause of a failure."""
        running = [self._in_engine.get(key) for key in active.keys]
        return not active.continued and all(one is not None and not one.begun for one in running)

    def _queue_again(self, active: ActiveRequest) -> None:
        """Put a running request without any token back into the queue. It is still the oldest of its owner there."""
        active.continued = True
        active.start_by = min(time.monotonic() + self._waiting.queue_timeout, active.end_by)
        del self._running[active.id]
        for key in active.keys:
            del self._in_engine[key]
        owner = active.request.background or active.owner
        self._waiting.add(active.id, active.request.priority, active, owner)

    def _expire(self, now: float) -> list[Delta]:
        """Fail requests that exceed the queue timeout or the time limit, or must make room for others' batches."""
        displaced = self._waiting.background.to_displace(now)
        late = [active for active in self._waiting if active.start_by < now]
        overdue = [active for active in self._running.values() if active.end_by < now]
        deltas = []
        for active in late:
            text = f"the request waited {self._waiting.queue_timeout:g} s for the engine (option.predict_timeout)"
            deltas.append(self._failed(active.id, 0, Overloaded(text)))
        for active in overdue:
            text = f"the request was not finished within {self._waiting.time_limit:g} s (option.request_time_limit)"
            deltas.append(self._failed(active.id, 0, GenerationFailed(text)))
        if displaced is not None:
            text = "request stopped to make room for another API key's batch (option.batches_concurrency)"
            deltas.append(self._failed(displaced.id, 0, Overloaded(text)))
        return deltas
