"""Large request bodies, read in a process of their own.

Parsing JSON holds the GIL until it is done, and so does freeing what came of it: a list of 30 million numbers stops
all other requests for seconds. So a copy of a small process parses, checks how much there is, and sends only what is
little enough, in parts that take milliseconds each to unpickle.
"""

from __future__ import annotations

import gc
import io
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

from handler.core.errors import NotJson, TooLarge, Unavailable
from handler.core.values import Request
from handler.core.words import client_words
from handler.engines.process.sandbox import LimitExceeded, MemoryLimitExceeded, NotRun, Purpose, Sandbox
from handler.engines.process.sandbox_tasks import Job, Limits, Work
from handler.protocols.kernel.readers.body import decode_in_python, decode_text
from handler.serving.turns import Quota, TurnThreads

T = TypeVar("T")

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
_QUICK = 1 << 22  # bytes up to which a body takes little time
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
        """Have a function called on one of the threads; those for small bodies go first.

        Args:
            size: of the body, in bytes.

        Raises:
            Overloaded: too many wait.
        """
        slow = size > _QUICK
        self._waiting.take(1, before=1 if slow else 0)  # the spare places are for quick ones
        future = self._threads.submit(partial(function, *arguments), size, slow=slow)
        future.add_done_callback(lambda _: self._waiting.give_back(1))
        return future

    def decode(self, body: bytes, *, plain: bool, unique_keys: bool) -> Any:
        """Decode a body. Call it on one of the threads: the process ends with the thread that started it.

        Args:
            plain: it is text, the value of `inputs`.
            unique_keys: as in `readers.body.decode`.

        Raises:
            NotJson: as `readers.body.decode`.
            TooLarge: it holds too much, or to read it takes too much.
            Unavailable: the process cannot be had.
        """
        memory = _MEMORY + _MEMORY_FACTOR * len(body)
        job = Job(_Form(plain, unique_keys), Limits(SECONDS, memory, _PATIENCE, _NICE), len(body))
        try:
            parts = self._process.run(job, body)
        except MemoryLimitExceeded:
            raise TooLarge(f"the body needs more than {memory >> 20} MiB to be read") from None
        except LimitExceeded:
            raise TooLarge(f"the body needs more than {SECONDS:g} s to be read, or breaks what reads it") from None
        except NotRun as error:
            raise Unavailable(f"the body cannot be read: {client_words(str(error))}") from None
        return _Unpickler(parts.pop(), parts).load()

    @property
    def pid(self) -> int | None:
        """The process's id; None where it does not run."""
        return self._process.pid

    def close(self) -> None:
        """End the process."""
        self._process.close()
        self._threads.shutdown()


def is_long(request: Request) -> bool:
    """Whether a thread that turns its prompt into ids is busy with it for so long that others must not wait."""
    contents = (message["content"] for message in request.messages)
    return sum(map(_length, (request.prompt, request.pair or "", request.prompt_ids or (), *contents))) >= LONG


def _length(content: Sequence[Any]) -> int:
    """Return the length of a text, of ids, or of a message's parts."""
    return len(content) if not isinstance(content, list) else sum(len(part.get("text", "")) for part in content)


# -- in the process ----------------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """How a body is read: arguments of `LargeBodies.decode`."""

    plain: bool
    unique_keys: bool


def _make() -> Work:
    return _read


def _read(form: _Form, data: memoryview) -> Iterator[Any]:
    """Parts of the value, and at last its pickle, which names them."""
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
    """Raise TooLarge where a value holds more than what can be handled between two tokens of others."""
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
                    raise TooLarge(f"the body has a text of {len(member)} characters; at most {MAX_TEXT} are read")
            else:
                num_numbers += 1
        if num_values > MAX_VALUES:
            raise TooLarge(f"the body holds more than {MAX_VALUES} texts, names, lists and objects")
        if num_numbers > MAX_NUMBERS:
            raise TooLarge(f"the body holds more than {MAX_NUMBERS} numbers")


class _Pickler(pickle.Pickler):
    """Leaves long texts, and long lists of numbers, to `parts`."""

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
        """Texts and lists in their order, a list that is longer than a part in several."""
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
    """The other end of `_Pickler`."""

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
