"""Fair turns for work that costs computing time, and large bodies on threads."""

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
from handler.protocols.kernel.body import decode_in_python, decode_text

T = TypeVar("T")

_SWEEP = 64  # waiting, up to which those that nobody wants any more may stay


class Quota:
    """An amount that all requests share. Thread-safe.

    Args:
        most: for all of them.
        spare: beyond `most`, for those that take no more than `small` each: large ones cannot shut them out.
        words: the message for a request that finds too little left.
        beside: a request may take any amount while all others have taken no more than this; by default never.
    """

    def __init__(self, most: int, spare: int, small: int, words: str, beside: int = -1) -> None:
        self.most, self._beside = most, beside
        self._spare, self._small, self._words = spare, small, words
        self.lock = threading.RLock()  # the collector may give something back while a thread takes some
        self.taken = 0

    def take(self, amount: int, before: int = 0) -> None:
        """Take an amount for a request that has taken some `before`.

        Raises:
            Overloaded: there is too little left.
        """
        with self.lock:
            if self.taken + amount > self.most and not self._has_room(amount, before):
                raise Overloaded(self._words)
            self.taken += amount

    def give_back(self, amount: int) -> None:
        with self.lock:
            self.taken -= amount

    def _has_room(self, amount: int, before: int) -> bool:
        """Return whether there is room beyond `most` for a request that is small, or nearly alone."""
        if before + amount <= self._small and self.taken + amount <= self.most + self._spare:
            return True
        return self.taken - before <= self._beside


BODY_MEMORY = 3
"""Bytes of memory per byte of a body: most decoded bodies need it in addition. So a complete body is read."""


class Share:
    """One request's share of a quota, until it is given back or nothing refers to it. Thread-safe."""

    def __init__(self, quota: Quota) -> None:
        self._quota, self.size = quota, 0

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *error: object) -> None:
        self.give_back()

    def take(self, amount: int) -> None:
        """Take an amount. Raises Overloaded if too little is left."""
        with self._quota.lock:
            self._quota.take(amount, self.size)
            self.size += amount

    def set(self, size: int) -> None:
        """Grow or shrink to a size.

        Raises:
            Overloaded: as `take`.
        """
        with self._quota.lock:
            if size > self.size:
                self.take(size - self.size)
            else:
                self.give_back(self.size - size)

    def give_back(self, amount: int | None = None) -> None:
        """Give back a part, or all."""
        with self._quota.lock:
            amount = self.size if amount is None else amount
            self.size -= amount
            self._quota.give_back(amount)

    __del__ = give_back


class Flow:
    """One request's use so far, in virtual time.

    Args:
        owner: of the request; "" for none.
    """

    def __init__(self, owner: Hashable = "") -> None:
        self.owner = owner
        self.finish = 0.0


class _Waiting(NamedTuple):
    finish: float
    number: int  # ties go by arrival
    start: float
    cost: float
    kind: str
    wanted: Future[Any]
    begin: Callable[[], None]


class _Account:
    """An owner's use, until it has no more work queued or running.

    Attributes:
        used: in virtual time, including work that has a slot.
        claimed: the expected cost of work that has a slot, as part of it.
        now: the virtual time among its requests.
        num_begun: number of its jobs that have a slot.
        queues: heaps of waiting work, by kind.
    """

    def __init__(self) -> None:
        self.used = self.claimed = self.now = 0.0
        self.num_begun = 0
        self.queues: dict[str, list[_Waiting]] = {}


class Turns:
    """A number of slots. Thread-safe.

    Owners take them in turn by the work used so far, and so do the requests of one owner by the work requested: small
    work never waits for large (start-time fair queueing).

    Args:
        slots: at a time.
        most: returns how many slots one kind of work may have at a time.
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
        """Call `begin` when there is a slot, on any thread. `leave` gives the slot back.

        Args:
            flow: of the request.
            cost: of the work as far as it is known, in any unit; `charge` corrects it.
            wanted: the work is dropped if this is cancelled before.
        """
        with self._lock:
            closed = self._closed
            if not closed:
                account = self._accounts.setdefault(flow.owner, _Account())
                if not account.queues:  # it saves nothing up
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
        """Charge a request and its owner for work that has a slot, beyond its cost at the beginning."""
        with self._lock:
            self._accounts[flow.owner].used += cost
            flow.finish += cost

    def leave(self, flow: Flow, cost: float, kind: str) -> None:
        """Release the slot of work that had some `cost` at its beginning."""
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
        """Cancel all waiting work, and any that enters later."""
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
        """Wait for a slot and hold it."""
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
            if not turn.cancel():  # it has been granted
                self.leave(flow, cost, kind)

    def _grant(self) -> None:
        while (waiting := self._next()) is not None:
            waiting.begin()  # without the lock

    def _next(self) -> _Waiting | None:
        """Take the first that may have a slot out of the queues."""
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
            self._now = max(self._now, account.used - account.claimed)  # else a claim, corrected, leaves others behind
            account.now = max(account.now, waiting.start)
            account.used += waiting.cost
            account.claimed += waiting.cost
            account.num_begun += 1
            return waiting

    def _firsts(self) -> Iterator[tuple[_Account, _Waiting]]:
        """Yield the first of each owner that may have a slot."""
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
        """Drop an owner's account if it has no more work here."""
        account = self._accounts[owner]
        if not account.queues and not account.num_begun:
            del self._accounts[owner]

    def _sweep(self) -> None:
        """Drop all work that is no longer wanted: whenever the number has doubled, so that the amortized cost is
        small.
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
    """Threads that take requests' work in turn.

    Args:
        slots: at a time.
        slow_slots: those of them that may have slow work.
    """

    def __init__(self, slots: int, slow_slots: int, name: str) -> None:
        self._turns = Turns(slots, lambda kind: slow_slots if kind == _SLOW else slots)
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix=name)

    def submit(self, call: Callable[[], T], cost: float, *, slow: bool = False, flow: Flow | None = None) -> Future[T]:
        """Make a call on a thread. Until it begins, it can be cancelled.

        Args:
            cost: of the call as far as it is known, in any unit.
            slow: it may take long.
            flow: of a request with several calls, or with an owner.
        """
        future: Future[T] = Future()
        kind, flow = _SLOW if slow else _QUICK, flow or Flow()
        self._turns.enter(flow, cost, kind, future, partial(self._begin, future, call, flow, cost, kind))
        return future

    def charge(self, flow: Flow, cost: float) -> None:
        """Charge a request's owner for a running call, beyond its initial cost."""
        self._turns.charge(flow, cost)

    def shutdown(self) -> None:
        """Cancel the calls that have not begun."""
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
        except RuntimeError:  # it has been shut down
            future.cancel()
            self._turns.leave(flow, cost, kind)


# -- large request bodies, read in a process of their own --------------------------------------------------------------
# Parsing JSON holds the GIL until it is done, and so does freeing what came of it: a list of 30 million numbers stops
# all other requests for seconds. So a copy of a small process parses, checks how much there is, and sends only what is
# little enough, in parts that take milliseconds each to unpickle.

LARGE = 1 << 20  # bytes from which on a body is read here

MAX_VALUES = 1 << 17  # objects, lists, texts and names of a large body
MAX_NUMBERS = 1 << 21
MAX_TEXT = 1 << 23  # characters of one text

SECONDS = 20.0  # of computing
_PATIENCE = 120.0  # seconds by the clock
_MEMORY = 256 << 20  # bytes, and
_MEMORY_FACTOR = 12  # for each of the body's
_NICE = 2
_THREADS, _SLOW_THREADS = 3, 2  # bodies that are read at a time, and those of them that may take long
_QUICK_BODY = 1 << 22  # bytes up to which a body takes little time
MAX_WAITING = 16  # bodies, those being read included; so many more of quick ones

LONG = 1 << 18  # characters of a prompt, or ids

_SHORT = 64  # characters of a text, and numbers of a list, that are not sent apart
_PART = 1 << 16  # characters or numbers in a part, about

_PURPOSE = Purpose("large request bodies", "are read")
_NUMBERS = {int, float}


class LargeBodies:
    """Reads large bodies, on threads that wait for the process. It is started by the first one. Thread-safe."""

    def __init__(self) -> None:
        self._process = Sandbox(_make, _PURPOSE)
        self._threads = TurnThreads(_THREADS, _SLOW_THREADS, "large-bodies")
        self._waiting = Quota(MAX_WAITING, MAX_WAITING, 1, f"{MAX_WAITING} large request bodies are being read")

    def submit(self, size: int, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function on one of the threads; those for small bodies go first.

        Args:
            size: of the body, in bytes.

        Raises:
            Overloaded: too many wait.
        """
        slow = size > _QUICK_BODY
        self._waiting.take(1, before=1 if slow else 0)  # the spare places are for quick ones
        future = self._threads.submit(partial(function, *arguments), size, slow=slow)
        future.add_done_callback(lambda _: self._waiting.give_back(1))
        return future

    def decode(self, body: bytes, *, plain: bool, unique_keys: bool) -> Any:
        """Decode a body. Call it on one of the threads: the process ends with the thread that started it.

        Args:
            plain: it is text, the value of `inputs`.
            unique_keys: as in `body.decode`.

        Raises:
            NotJson: as `body.decode`.
            TooLarge: it contains too much, or reading it takes too much.
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
        return _Unpickler(parts.pop(), parts).load()

    @property
    def pid(self) -> int | None:
        """The process's id; None if it does not run."""
        return self._process.pid

    def close(self) -> None:
        """End the process."""
        self._process.close()
        self._threads.shutdown()


def is_long(request: Request) -> bool:
    """Return whether tokenizing a prompt keeps a thread busy for so long that others must not wait."""
    contents = (message["content"] for message in request.messages)
    return sum(map(_length, (request.prompt, request.pair or "", request.prompt_ids or (), *contents))) >= LONG


def _length(content: Sequence[Any]) -> int:
    """Return the length of a text, of ids, or of a message's parts."""
    return len(content) if not isinstance(content, list) else sum(len(part.get("text", "")) for part in content)


# -- in the process ----------------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """How to read a body: arguments of `LargeBodies.decode`."""

    plain: bool
    unique_keys: bool


def _make() -> Work:
    return _read


def _read(form: _Form, data: memoryview) -> Iterator[Any]:
    """Yield the parts of the value, and finally its pickle, which refers to them."""
    gc.disable()  # there is nothing to be found, in millions of objects
    # By orjson it would take more memory than the limit allows for: it keeps its own tree beside the value.
    value = {"inputs": decode_text(data)} if form.plain else decode_in_python(data, unique_keys=form.unique_keys)
    check_amount(value)
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except RecursionError:  # it takes more of the stack than parsing
        raise NotJson("the body is not valid JSON: nested too deeply") from None
    yield from pickler.parts()
    yield file.getvalue()


def check_amount(value: Any) -> None:
    """Raise TooLarge if a value contains more than can be handled between two tokens of other requests."""
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
    """Pickles a body except for long strings and long lists of numbers, which `parts` sends unpickled."""

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
        """Yield the strings and lists in order, a long list in several parts."""
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
    """Restores what `_Pickler` has pickled."""

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
