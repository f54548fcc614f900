"""Decodes large request bodies in a separate process."""

from __future__ import annotations

import gc
import io
import itertools
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

from handler.core.errors import NotJson, TooLarge, Unavailable, client_words
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
from handler.protocols.kernel.body import decode, decode_in_python, decode_text, decoded_size, value_size
from handler.serving.quota import Quota
from handler.serving.turns import Flow, TurnThreads

T = TypeVar("T")

# Parsing JSON and freeing the result both keep the GIL until they are done: a list of 30 million numbers would stop all
# other requests for seconds. Therefore a fork of a small process parses a large body and checks its amount of data. It
# sends back only values within the limits, in parts that take milliseconds each to unpickle.

LARGE = 1 << 20  # minimum bytes of a body that is decoded in the separate process

MAX_VALUES = 1 << 17  # maximum number of objects, lists, strings and names in a large body
MAX_NUMBERS = 1 << 21
MAX_TEXT = 1 << 23  # maximum characters of a string
MOST_DECODED = MAX_VALUES * 240 + MAX_NUMBERS * 40
"""Maximum size of the decoded value of a large body, in bytes, not counting its characters."""

SECONDS = 20.0  # limit of CPU time for decoding a body
_PATIENCE = 120.0  # limit of wall-clock seconds
MEMORY = 256 << 20  # memory limit of the process, in bytes,
MEMORY_FACTOR = 12  # plus this many for each byte of the body
_NICE = 2
_THREADS, _SLOW_THREADS = 3, 2  # bodies that are decoded concurrently: in total, and those that may take a long time
QUICK_BODY = 1 << 22  # maximum size of a body that is decoded quickly, in bytes
MAX_WAITING = 16  # maximum number of bodies that wait or are being decoded; in addition, as many quick bodies

_SHORT = 64  # strings and lists of numbers up to this length are pickled with the rest
_PART = 1 << 16  # approximate number of characters or numbers in a part

PURPOSE = Purpose("large request bodies", "are read")
_NUMBERS = {int, float}


class LargeBodies:
    """Decodes large bodies in a separate process, with threads that wait for it. Thread-safe.

    Attributes:
        process: the separate process. It starts when the first large body arrives.
    """

    def __init__(self) -> None:
        self.process = Sandbox(make_reader, PURPOSE)
        self._threads = TurnThreads(_THREADS, _SLOW_THREADS, "large-bodies")
        self._waiting = Quota(MAX_WAITING, MAX_WAITING, 1, f"{MAX_WAITING} large request bodies are being read")

    def submit(self, size: int, function: Callable[..., T], *arguments: Any, owner: str = "") -> Future[T]:
        """Call a function on one of the threads. Owners take turns, and an owner's calls for small bodies go first.

        Args:
            size: size of the body, in bytes.
            function: function to call with `arguments`.
            owner: owner of the request, or "" without an owner.

        Raises:
            Overloaded: too many large bodies are waiting.
        """
        slow = size > QUICK_BODY
        waiting = self._waiting.of(owner)
        waiting.change(0, 1, large=slow)  # only quick bodies may use the spare amount
        future = self._threads.submit(partial(function, *arguments), size, slow=slow, flow=Flow(owner))
        future.add_done_callback(lambda _: waiting.change(1, 0, large=slow))
        return future

    def read(self, body: bytes, *, unique_keys: bool = True) -> tuple[Any, int]:
        """Return the value of a JSON body of any size, and its size in memory, or 0 for a small body, which is decoded
        in this process. A large body must be read on one of the threads (see `decode`).
        """
        if len(body) < LARGE:
            return decode(body, unique_keys=unique_keys), 0
        return self.decode(body, plain=False, unique_keys=unique_keys)

    def decode(self, body: bytes, *, plain: bool, unique_keys: bool) -> tuple[Any, int]:
        """Return the decoded value of a body, and its size in memory, in bytes. This must be called on one of the
        threads, because the process ends with the thread that started it.

        Args:
            plain: whether the body is plain text, which is decoded as the value of `inputs`.
            unique_keys: whether repeated keys in an object are an error, as in `body.decode`.

        Raises:
            NotJson: the body is not valid JSON.
            TooLarge: the body contains too much data, or decoding takes too much time or memory.
            Unavailable: the process cannot be started.
        """
        memory = MEMORY + MEMORY_FACTOR * len(body)
        job = Job(BodyForm(plain, unique_keys), Limits(SECONDS, memory, _PATIENCE, _NICE), len(body))
        try:
            parts = self.process.run(job, body)
        except MemoryLimitExceeded:
            raise TooLarge(f"parsing the body needs more than {memory >> 20} MiB") from None
        except LimitExceeded:
            raise TooLarge(f"parsing the body takes more than {SECONDS:g} s, or crashes the parser") from None
        except NotRun as error:
            raise Unavailable(f"the body cannot be read: {client_words(str(error))}") from None
        value, size = _Unpickler(parts.pop(), parts).load()
        return value, size

    def close(self) -> None:
        """Stop the process and the threads."""
        self.process.close()
        self._threads.shutdown()


def max_decoded(body: bytes) -> int:
    """Return the maximum memory, in bytes, that the value which `LargeBodies.read` returns needs."""
    return decoded_size(body, MOST_DECODED if len(body) >= LARGE else sys.maxsize)


# -- the code that runs in the process ---------------------------------------------------------------------------


class BodyForm(NamedTuple):
    """The format of a large body. The attributes are the arguments of `LargeBodies.decode`."""

    plain: bool
    unique_keys: bool


def make_reader() -> Work:
    return read_parts


def read_parts(form: BodyForm, data: memoryview) -> Iterator[Any]:
    """Decode a body. Yield the long strings and lists in parts, and then the pickle that refers to them."""
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
    """A pickler that omits long strings and long lists of numbers, which `parts` yields instead."""

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
        """Yield the omitted strings and lists, in order. A long list is split into several parts."""
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
    """An unpickler that inserts the strings and lists that `_Pickler` has omitted."""

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
