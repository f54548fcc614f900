"""Fair scheduling of work that needs CPU time, and the decoding of large bodies."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import io
import itertools
import pickle
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

from handler.core.errors import NotJson, Overloaded, TooLarge, Unavailable, client_words
from handler.core.loop import settle
from handler.core.values import Request
from handler.engines.process.sandbox import (
    Job,
    LimitExceeded,
    Limits,
    MemoryLimitExceeded,
    NotRun,
    Purpose,
    Sandbox,
    Work,
)
from handler.protocols.kernel.body import decode_in_python, decode_text, value_size

T = TypeVar("T")

_SWEEP = 64  # number of waiting jobs up to which cancelled ones may stay in the queues


class Quota:
    """An amount, for example of memory, that all requests share. Thread-safe.

    Args:
        most: total amount.
        spare: additional amount for requests that take at most `small`, so that large requests cannot block them.
        small: maximum amount of a small request.
        words: error message for a request that cannot get its amount.
        beside: a request may take any amount while all others together have taken no more than this. By default, it may
            not. The spare amount is left to small requests even then.
    """

    def __init__(self, most: int, spare: int, small: int, words: str, beside: int = -1) -> None:
        self.most, self._beside = most, beside
        self._spare, self._small, self._words = spare, small, words
        self.lock = threading.RLock()  # the collector may give something back while a thread takes some
        self.taken = 0
        self._taken_by_large = 0

    def change(self, before: int, after: int, *, large: bool | None = None) -> None:
        """Change the amount that a request has taken.

        Args:
            before: amount that the request has taken so far.
            after: amount that it takes from now on.
            large: whether the request is large. By default, its amount decides.

        Raises:
            Overloaded: too little is left.
        """
        with self.lock:
            taken = self.taken + after - before
            by_large = self._taken_by_large
            by_large += after * self._is_large(after, large) - before * self._is_large(before, large)
            if after > before and taken > self.most:
                reserved = taken - max(0, by_large - self.most)  # large requests never take the spare amount
                has_room = not self._is_large(after, large) and reserved <= self.most + self._spare
                if not has_room and self.taken - before > self._beside:
                    raise Overloaded(self._words)
            self.taken, self._taken_by_large = taken, by_large

    def _is_large(self, amount: int, large: bool | None) -> bool:
        return amount > self._small if large is None else large


BODY_MEMORY = 3
"""Bytes of memory to reserve per byte of a body while it is received, which is enough to decode most bodies too."""


class Share:
    """A request's share of a quota, which is given back at the latest when this object is deleted. Thread-safe."""

    def __init__(self, quota: Quota) -> None:
        self._quota, self.size = quota, 0

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *error: object) -> None:
        self.give_back()

    def take(self, amount: int) -> None:
        """Increase the share by an amount.

        Raises:
            Overloaded: too little is left.
        """
        with self._quota.lock:
            self.set(self.size + amount)

    def set(self, size: int) -> None:
        """Set the size of the share.

        Raises:
            Overloaded: too little is left.
        """
        with self._quota.lock:
            self._quota.change(self.size, size)
            self.size = size

    def give_back(self, amount: int | None = None) -> None:
        """Give back an amount, by default the complete share."""
        with self._quota.lock:
            self.set(0 if amount is None else self.size - amount)

    __del__ = give_back


class Flow:
    """The state of a request in fair queueing.

    Args:
        owner: owner of the request, or "" without one.

    Attributes:
        finish: virtual time at which the request's latest work ends.
    """

    def __init__(self, owner: Hashable = "") -> None:
        self.owner = owner
        self.finish = 0.0


class _Waiting(NamedTuple):
    finish: float
    number: int  # order of arrival, which decides ties
    start: float
    cost: float
    kind: str
    wanted: Future[Any]
    begin: Callable[[], None]


class _Account:
    """The state of an owner in fair queueing, as long as the owner has waiting or running work.

    Attributes:
        used: cost of all work of the owner, including work that is running.
        claimed: the part of `used` that is the expected cost of running work.
        now: virtual time among the owner's requests.
        num_begun: number of running jobs.
        queues: heaps of waiting jobs, by kind.
    """

    def __init__(self) -> None:
        self.used = self.claimed = self.now = 0.0
        self.num_begun = 0
        self.queues: dict[str, list[_Waiting]] = {}


class Turns:
    """Slots for concurrent work, which are assigned fairly (start-time fair queueing). Thread-safe.

    The next slot goes to the owner whose work has cost least so far, and among the requests of an owner by the cost of
    their work. Small jobs therefore never wait for large ones.

    Args:
        slots: number of slots.
        most: returns the maximum number of slots for a kind of work.
    """

    def __init__(self, slots: int, most: Callable[[str], int]) -> None:
        self._free, self._most = slots, most
        self._lock = threading.Lock()
        self._taken = Counter[str]()
        self._accounts: dict[Hashable, _Account] = {}
        self._num_waiting, self._sweep_at = 0, _SWEEP
        self._now, self._number = 0.0, 0
        self._closed = False

    def enter(self, flow: Flow, cost: float, kind: str, wanted: Future[Any], begin: Callable[[], None]) -> None:
        """Queue work, and call `begin` on any thread when it gets a slot. The caller must return the slot with `leave`.

        Args:
            flow: state of the request.
            cost: expected cost of the work, in any unit. `charge` corrects it.
            kind: kind of the work.
            wanted: if this future is cancelled before the work gets a slot, the work is dropped.
            begin: starts the work.
        """
        with self._lock:
            closed = self._closed
            if not closed:
                account = self._accounts.setdefault(flow.owner, _Account())
                if not account.queues:  # an idle owner gets no credit for the time without work
                    account.used = max(account.used, self._now)
                start = max(flow.finish, account.now)
                flow.finish = start + cost
                self._number += 1
                waiting = _Waiting(flow.finish, self._number, start, cost, kind, wanted, begin)
                heapq.heappush(account.queues.setdefault(kind, []), waiting)
                self._num_waiting += 1
                if self._num_waiting > self._sweep_at:
                    self._sweep()
        if closed:
            wanted.cancel()
        self._grant()

    def charge(self, flow: Flow, cost: float) -> None:
        """Charge a request and its owner for running work, in addition to its expected cost."""
        with self._lock:
            self._accounts[flow.owner].used += cost
            flow.finish += cost

    def leave(self, flow: Flow, cost: float, kind: str) -> None:
        """Return the slot of work whose expected cost was `cost`."""
        with self._lock:
            self._free += 1
            self._taken[kind] -= 1
            if not self._taken[kind]:
                del self._taken[kind]
            account = self._accounts[flow.owner]
            account.num_begun -= 1
            account.claimed -= cost
            self._forget(flow.owner)
        self._grant()

    def close(self) -> None:
        """Cancel all waiting work, and all work that is queued later."""
        with self._lock:
            self._closed = True
            waiting = []
            for owner, account in list(self._accounts.items()):
                waiting += [one for queue in account.queues.values() for one in queue]
                account.queues.clear()
                self._forget(owner)
            self._num_waiting = 0
        for one in waiting:
            one.wanted.cancel()

    @contextlib.asynccontextmanager
    async def turn(self, flow: Flow, cost: float, kind: str) -> AsyncIterator[None]:
        """Wait for a slot, and use it during the block."""
        turn: Future[None] = Future()

        def begin() -> None:
            if turn.set_running_or_notify_cancel():
                turn.set_result(None)
            else:
                self.leave(flow, cost, kind)

        self.enter(flow, cost, kind, turn, begin)
        try:
            await asyncio.wrap_future(turn)
            yield
        finally:
            if not turn.cancel():  # the slot was assigned
                self.leave(flow, cost, kind)

    def _grant(self) -> None:
        while (waiting := self._next()) is not None:
            waiting.begin()  # not within the lock

    def _next(self) -> _Waiting | None:
        """Assign a free slot to the next job, and remove the job from its queue. Return None if there is none."""
        with self._lock:
            if not self._free:
                return None
            firsts = [(account.used + one.cost, one.number, one, account) for account, one in self._firsts()]
            if not firsts:
                return None
            *_, waiting, account = min(firsts)
            self._pop(account, waiting.kind)
            self._free -= 1
            self._taken[waiting.kind] += 1
            self._now = max(self._now, account.used - account.claimed)  # not with claims, which may be corrected later
            account.now = max(account.now, waiting.start)
            account.used += waiting.cost
            account.claimed += waiting.cost
            account.num_begun += 1
            return waiting

    def _firsts(self) -> Iterator[tuple[_Account, _Waiting]]:
        """Yield each owner's account with the owner's first job of a kind that may use another slot."""
        for owner, account in list(self._accounts.items()):
            for kind in list(account.queues):
                while (queue := account.queues.get(kind)) and queue[0].wanted.cancelled():
                    self._pop(account, kind)
            self._forget(owner)
            allowed = [queue[0] for kind, queue in account.queues.items() if self._taken[kind] < self._most(kind)]
            if allowed:
                yield account, min(allowed)

    def _pop(self, account: _Account, kind: str) -> None:
        queue = account.queues[kind]
        heapq.heappop(queue)
        self._num_waiting -= 1
        if not queue:
            del account.queues[kind]

    def _forget(self, owner: Hashable) -> None:
        """Delete an owner's account if it has no work left."""
        account = self._accounts[owner]
        if not account.queues and not account.num_begun:
            del self._accounts[owner]

    def _sweep(self) -> None:
        """Remove cancelled work from the queues. This runs when the number of waiting jobs has doubled, so its
        amortized cost is small.
        """
        self._num_waiting = 0
        for owner, account in list(self._accounts.items()):
            for kind, queue in list(account.queues.items()):
                wanted = [waiting for waiting in queue if not waiting.wanted.cancelled()]
                heapq.heapify(wanted)
                if wanted:
                    account.queues[kind] = wanted
                else:
                    del account.queues[kind]
                self._num_waiting += len(wanted)
            self._forget(owner)
        self._sweep_at = max(_SWEEP, 2 * self._num_waiting)


_QUICK, _SLOW = "quick", "slow"


class TurnThreads:
    """A thread pool that schedules calls fairly.

    Args:
        slots: number of threads.
        slow_slots: maximum number of threads for slow calls.
        name: prefix of the threads' names.
    """

    def __init__(self, slots: int, slow_slots: int, name: str) -> None:
        self._turns = Turns(slots, lambda kind: slow_slots if kind == _SLOW else slots)
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix=name)

    def submit(self, call: Callable[[], T], cost: float, *, slow: bool = False, flow: Flow | None = None) -> Future[T]:
        """Make a call on a thread. The returned future can be cancelled until the call starts.

        Args:
            call: function to call.
            cost: expected cost of the call, in any unit.
            slow: whether the call may take long.
            flow: state of the request, needed if it has an owner or several calls.
        """
        future: Future[T] = Future()
        kind, flow = _SLOW if slow else _QUICK, flow or Flow()
        self._turns.enter(flow, cost, kind, future, partial(self._begin, future, call, flow, cost, kind))
        return future

    def charge(self, flow: Flow, cost: float) -> None:
        """Charge a request and its owner for a running call, in addition to its expected cost."""
        self._turns.charge(flow, cost)

    def shutdown(self) -> None:
        """Cancel all calls that have not started."""
        self._turns.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, future: Future[T], call: Callable[[], T], flow: Flow, cost: float, kind: str) -> None:
        def work() -> None:
            try:
                if future.set_running_or_notify_cancel():
                    settle(future, call)
            finally:
                self._turns.leave(flow, cost, kind)

        try:
            self._threads.submit(work).add_done_callback(lambda done: done.cancelled() and future.cancel())
        except RuntimeError:  # the pool has been shut down
            future.cancel()
            self._turns.leave(flow, cost, kind)


# -- large request bodies, which are decoded in a separate process -----------------------------------------------------
# Parsing JSON and freeing the result both keep the GIL until they are done: a list of 30 million numbers would stop all
# other requests for seconds. Therefore a fork of a small process parses a large body and checks its amount of data. It
# sends back only values within the limits, in parts that take milliseconds each to unpickle.

LARGE = 1 << 20  # minimum bytes of a body that is decoded in the separate process

MAX_VALUES = 1 << 17  # maximum number of objects, lists, strings and names in a large body
MAX_NUMBERS = 1 << 21
MAX_TEXT = 1 << 23  # maximum characters of a string
MOST_DECODED = MAX_VALUES * 240 + MAX_NUMBERS * 40
"""Maximum bytes of a large body's decoded value, besides its characters."""

SECONDS = 20.0  # limit of CPU time for decoding a body
_PATIENCE = 120.0  # limit of wall-clock seconds
_MEMORY = 256 << 20  # memory limit of the process, in bytes,
_MEMORY_FACTOR = 12  # plus this many for each byte of the body
_NICE = 2
_THREADS, _SLOW_THREADS = 3, 2  # bodies that are decoded concurrently: in total, and those that may take long
_QUICK_BODY = 1 << 22  # maximum size of a body that is decoded quickly, in bytes
MAX_WAITING = 16  # maximum number of bodies that wait or are being decoded; the same number of quick ones in addition

LONG = 1 << 18  # minimum characters or ids of a long prompt

_SHORT = 64  # strings and lists of numbers up to this length are pickled with the rest
_PART = 1 << 16  # approximate number of characters or numbers in a part

_PURPOSE = Purpose("large request bodies", "are read")
_NUMBERS = {int, float}


class LargeBodies:
    """The decoder of large bodies, which uses a separate process and threads that wait for it. Thread-safe.

    The process is started for the first large body.
    """

    def __init__(self) -> None:
        self._process = Sandbox(_make, _PURPOSE)
        self._threads = TurnThreads(_THREADS, _SLOW_THREADS, "large-bodies")
        self._waiting = Quota(MAX_WAITING, MAX_WAITING, 1, f"{MAX_WAITING} large request bodies are being read")

    def submit(self, size: int, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function on one of the threads. Calls for small bodies go first.

        Args:
            size: size of the body, in bytes.
            function: function to call with `arguments`.

        Raises:
            Overloaded: too many large bodies are waiting.
        """
        slow = size > _QUICK_BODY
        self._waiting.change(0, 1, large=slow)  # only quick bodies may use the spare amount
        future = self._threads.submit(partial(function, *arguments), size, slow=slow)
        future.add_done_callback(lambda _: self._waiting.change(1, 0, large=slow))
        return future

    def decode(self, body: bytes, *, plain: bool, unique_keys: bool) -> tuple[Any, int]:
        """Return the decoded value of a body, and the bytes of memory that the value needs. This must be called on one
        of the threads, because the process ends with the thread that started it.

        Args:
            plain: whether the body is plain text, which becomes the value of `inputs`.
            unique_keys: whether repeated keys in an object are an error, as in `body.decode`.

        Raises:
            NotJson: the body is not valid JSON.
            TooLarge: the body contains too much, or needs too much time or memory.
            Unavailable: the process cannot be started.
        """
        memory = _MEMORY + _MEMORY_FACTOR * len(body)
        job = Job(_Form(plain, unique_keys), Limits(SECONDS, memory, _PATIENCE, _NICE), len(body))
        try:
            parts = self._process.run(job, body)
        except MemoryLimitExceeded:
            raise TooLarge(f"the body needs more than {memory >> 20} MiB to be read") from None
        except LimitExceeded:
            raise TooLarge(f"the body needs more than {SECONDS:g} s to be read, or crashes its parser") from None
        except NotRun as error:
            raise Unavailable(f"the body cannot be read: {client_words(str(error))}") from None
        value, size = _Unpickler(parts.pop(), parts).load()
        return value, size

    @property
    def pid(self) -> int | None:
        """Return the id of the process, or None if it is not running."""
        return self._process.pid

    def close(self) -> None:
        """Stop the process and the threads."""
        self._process.close()
        self._threads.shutdown()


def is_long(request: Request) -> bool:
    """Return whether a prompt is so long that other requests must not wait until it is tokenized."""
    contents = (message["content"] for message in request.messages)
    return sum(map(_length, (request.prompt, request.pair or "", request.prompt_ids or (), *contents))) >= LONG


def _length(content: Sequence[Any]) -> int:
    """Return the length of a string, of a sequence of ids, or of a message's text parts."""
    return len(content) if not isinstance(content, list) else sum(len(part.get("text", "")) for part in content)


# -- the code that runs in the process ---------------------------------------------------------------------------


class _Form(NamedTuple):
    """The format of a large body. The attributes are arguments of `LargeBodies.decode`."""

    plain: bool
    unique_keys: bool


def _make() -> Work:
    return _read


def _read(form: _Form, data: memoryview) -> Iterator[Any]:
    """Decode a body. Yield the parts with long strings and lists, and finally the pickle, which refers to them."""
    gc.disable()  # it would search millions of objects without finding garbage
    # orjson would exceed the memory limit, because it builds its own tree in addition to the value.
    value = {"inputs": decode_text(data)} if form.plain else decode_in_python(data, unique_keys=form.unique_keys)
    check_amount(value)
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump((value, value_size(value)))
    except RecursionError:  # pickling needs more stack than parsing
        raise NotJson("the body is not valid JSON: nested too deeply") from None
    yield from pickler.parts()
    yield file.getvalue()


def check_amount(value: Any) -> None:
    """Raise TooLarge if a value contains so much data that processing it would delay other requests."""
    num_values = num_numbers = 0
    pending: list[Any] = [[value]]
    while pending:
        item = pending.pop()
        members = itertools.chain(item, item.values()) if isinstance(item, dict) else item
        for member in itertools.islice(members, MAX_VALUES + MAX_NUMBERS + 1):
            if isinstance(member, str | list | dict):
                num_values += 1
                if not isinstance(member, str):
                    pending.append(member)
                elif len(member) > MAX_TEXT:
                    raise TooLarge(f"the body has a string of {len(member)} characters; at most {MAX_TEXT} are read")
            else:
                num_numbers += 1
        if num_values > MAX_VALUES:
            raise TooLarge(f"the body contains more than {MAX_VALUES} strings, names, lists and objects")
        if num_numbers > MAX_NUMBERS:
            raise TooLarge(f"the body contains more than {MAX_NUMBERS} numbers")


class _Pickler(pickle.Pickler):
    """A pickler that leaves out long strings and long lists of numbers, which `parts` yields instead."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._apart: list[str | list[Any]] = []

    def persistent_id(self, value: Any) -> int | None:
        is_text = type(value) is str
        if not is_text and type(value) is not list:
            return None
        if len(value) <= _SHORT or not (is_text or _NUMBERS.issuperset(map(type, value))):
            return None
        self._apart.append(value)
        return len(self._apart) - 1

    def parts(self) -> Iterator[list[tuple[int, Any]]]:
        """Yield the strings and lists that were left out, in order. A long list is split into several parts."""
        part: list[tuple[int, Any]] = []
        size = 0
        for index, value in enumerate(self._apart):
            step = len(value) if isinstance(value, str) else _PART
            for start in range(0, len(value), step):
                piece = value[start : start + step]
                part.append((index, piece))
                size += len(piece)
                if size >= _PART:
                    yield part
                    part, size = [], 0
        yield part


class _Unpickler(pickle.Unpickler):
    """The counterpart of `_Pickler`, which inserts the strings and lists from the parts."""

    def __init__(self, data: bytes, parts: list[list[tuple[int, Any]]]) -> None:
        super().__init__(io.BytesIO(data))
        self._found: dict[int, Any] = {}
        for part in parts:
            for index, piece in part:
                if index in self._found:
                    self._found[index].extend(piece)
                else:
                    self._found[index] = piece

    def persistent_load(self, pid: int) -> Any:
        return self._found.pop(pid)
