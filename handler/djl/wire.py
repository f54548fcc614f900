"""DJL's worker protocol: the requests in an Input, and answers as bytes.

As ai.djl.python 0.25 to 0.36 writes and reads it; `DjlVersion` holds what differs.
"""

from __future__ import annotations

import json
import re
import select
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import djl_python
from djl_python import Input, Output

from handler.config import environment
from handler.core.errors import ServingError
from handler.core.framing import dumps
from handler.djl.batches import Item, Piece
from handler.protocols.kernel.errors import FRONT_END, HttpResponse, retry_headers
from handler.serving.head import QUERY_ADAPTER
from handler.serving.task import RequestTask, ignored_header

MAX_FIELD = environment.netty_buffer_bytes() // 2  # room for what is around it
"""Largest field that Java accepts, in bytes; after a larger one it ends the worker with all its requests."""

_OF_HTTP = frozenset(
    {"host", "connection", "content-length", "content-type", "user-agent", "x-request-id", "requestid"}
)
"""A client's own properties; in a batch, Java puts its prefix before them."""

_RECEIVE_BYTES = 1 << 16  # Python makes room for as many at each call

_COUNT, _INT = struct.Struct(">H"), struct.Struct(">i")
"""Of fields, and of bytes."""

_WRAP = 1 << 16
"""Java writes the low 16 bits of a count, and 256 new requests may have 70,000 headers: each of SageMaker's custom
attributes is one. Java's map of properties is sorted, so that `handler` comes after every `batch_...`: while it is
missing, this many more follow. Contents are in the order of the requests: while the last one's are missing too.
A string's length had 16 bits before 0.28: a content's key goes on while no number of bytes comes after it."""

_BATCH = b"batch_"

_NO_SIZE = 0x09000000
"""No content has as many bytes; four of a text's are at least that number."""

_FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")
"""Content types whose fields each become a content; the client chooses their names and number."""

_SOON = 0.5  # seconds in which more of a call comes, where its count leaves open whether any does


def is_of_http(properties: Mapping[Any, Any]) -> bool:
    """Return whether properties are a client's headers, not Java's own."""
    return not _OF_HTTP.isdisjoint(str(name).lower() for name in properties)


class DjlVersion(NamedTuple):
    """The differences between versions; no other code compares versions.

    Attributes:
        length: of a string: two bytes before 0.28, four since.
        json_errors: a piece that is JSON of `data` and `last`, where `data` is JSON with `code` and `error`, sets the
            request's status and keeps the body; since 0.29 `code` and `error` in the piece's map do, and make the body.
        commits_early: a first piece without bytes begins the answer, with its status; since 0.29 it is ignored.
        always_steps: a rolling batch is stepped whenever option.rolling_batch is there, be it `disable`.
        steps_all_ranks: a step goes to all ranks of an MPI world, and the last one's answer counts, unless
            option.rolling_batch is `trtllm`.
        passes_headers: a rolling batch's answers have the headers that the worker gives them.
        names_requests: the answers of LMI's rolling batch have Java's id of their request in a header `requestId`.
        metric_types: a [METRICS] line may end with its type: c, g or h, a histogram.
    """

    length: struct.Struct
    json_errors: bool
    commits_early: bool
    always_steps: bool
    steps_all_ranks: bool
    passes_headers: bool
    names_requests: bool
    metric_types: bool

    @property
    def max_piece(self) -> int:
        """Bytes of a piece in a map of strings."""
        return 32_000 if self.length.size == 2 else MAX_FIELD

    def string(self, text: bytes) -> bytes:
        return self.length.pack(len(text)) + text


def installed_version() -> DjlVersion:
    """Return the version of the djl_python that runs us."""
    probe = bytearray()
    Output.write_utf8(probe, "")
    version = tuple(int(part) for part in djl_python.__version__.split("-")[0].split(".")[:2])
    return DjlVersion(
        length=struct.Struct(">h" if len(probe) == 2 else ">i"),
        json_errors=version < (0, 29),
        commits_early=version < (0, 29),
        always_steps=version < (0, 28),
        steps_all_ranks=version < (0, 29),
        passes_headers=version >= (0, 28),
        names_requests=version >= (0, 30),
        metric_types=version >= (0, 29),
    )


def read_ahead(version: DjlVersion) -> None:
    """Make djl_python read each Input with a `Reader`."""
    reader = Reader(version.length)
    Input.read = lambda inputs, conn: reader.read(inputs, conn)


class _Message(NamedTuple):
    """`size` is in bytes."""

    properties: dict[str | None, str | None]
    keys: list[str | None]
    values: list[bytearray]
    size: int


class Reader:
    """Receives all available bytes at once; djl_python receives each field of a request separately.

    A continuing request has three fields and no bytes; 128 of them are 400 system calls a step. While no request joins
    or leaves, a step's bytes equal those of the step before, and are not parsed.

    Args:
        length: of a string.
    """

    def __init__(self, length: struct.Struct) -> None:
        self._length = length
        self._source: Any = None
        self._received = bytearray()  # what lies after the last message
        self._last = _Message({}, [], [], 0)
        self._bytes_of_last = b""  # empty: they are not kept
        self._after_form = False  # more contents of the last message may lie there than its count said

    def read(self, inputs: Input, conn: Any) -> None:
        """Fill an Input from the connection, as its own `read` does.

        Raises:
            ValueError: the connection has ended, or the data is not a call. djl_python ends the worker then.
        """
        if conn is not self._source:
            self._source, self._received = conn, bytearray()
        received = self._received
        if not received:
            self._receive(1)
        if not (self._bytes_of_last and received.startswith(self._bytes_of_last)):
            message = self._next_message()
            kept = message.size <= _RECEIVE_BYTES  # a large one would stay in memory until the next one comes
            self._bytes_of_last = bytes(received[: message.size]) if kept else b""
            self._last = message if kept else _Message({}, [], [], 0)
        else:
            message = self._last
        del received[: message.size]
        inputs.properties.update(message.properties)
        inputs.content.keys, inputs.content.values = message.keys[:], message.values[:]
        inputs.function_name = message.properties.get("handler")

    def _next_message(self) -> _Message:
        if self._after_form:
            self._skip_contents()
        count, at = self._number(_COUNT, 0)
        properties: dict[str | None, str | None] = {}
        while True:
            for _ in range(count):
                key, at = self._string(at)
                properties[key], at = self._string(at)
            if "handler" in properties:  # Java names the function in each call
                break
            count = _WRAP
        last = _last_request(properties)
        form = _is_form(properties, last)
        count, at = self._number(_COUNT, at)
        keys: list[str | None] = []
        values: list[bytearray] = []
        while True:
            at = self._contents(count, at, keys, values)
            whole = any(key and key.startswith(last) for key in reversed(keys)) if last else not (form and self._short)
            if whole or not self._has_more(at):
                break
            count = _WRAP
        self._after_form = form and not self._short
        return _Message(properties, keys, values, at)

    def _contents(self, count: int, at: int, keys: list[str | None], values: list[bytearray]) -> int:
        """Read `count` contents; return where the next field begins."""
        for _ in range(count):
            key, size, start = self._key(at)
            at = start + size
            self._receive(at)
            keys.append(key)
            values.append(self._received[start:at])
        return at

    def _key(self, at: int) -> tuple[str | None, int, int]:
        """Return a content's key, the number of its value's bytes, and where they begin."""
        length, start = self._number(self._length, at)
        if length < -1:
            length += _WRAP
        size, begin = self._number(_INT, start + max(length, 0))
        while self._short and not 0 <= size < _NO_SIZE:
            length += _WRAP
            size, begin = self._number(_INT, start + length)
        return None if length < 0 else self._received[start : start + length].decode(), size, begin

    def _skip_contents(self) -> None:
        """Skip a form's contents beyond the count.

        Java puts no mark between calls. One begins with the number of its properties and the length of a key, which are
        small; the number is 0 if it was cut, in a batch. A content begins with the length of its key, in four bytes.
        """
        while True:
            count, at = self._number(_COUNT, 0)
            size, at = self._number(_INT, at)
            self._receive(at + len(_BATCH))
            if 0 <= size < _WRAP and (count or self._received.startswith(_BATCH, at)):
                return
            del self._received[: self._contents(_WRAP, 0, [], [])]

    @property
    def _short(self) -> bool:
        """Return whether strings have 16-bit lengths. Such a Java side waits for the answer to each call."""
        return self._length.size == 2

    def _has_more(self, at: int) -> bool:
        """Return whether more than `at` bytes have arrived, or soon arrive: after a whole batch Java sends nothing
        more.
        """
        return len(self._received) > at or bool(select.select([self._source], [], [], _SOON)[0])

    def _string(self, at: int) -> tuple[str | None, int]:
        """Return a string, and where the next field begins."""
        size, start = self._number(self._length, at)
        if size < 0:
            return None, start
        end = start + size
        self._receive(end)
        return self._received[start:end].decode(), end

    def _number(self, number: struct.Struct, at: int) -> tuple[int, int]:
        """Return a number, and where the next field begins."""
        end = at + number.size
        self._receive(end)
        return number.unpack_from(self._received, at)[0], end

    def _receive(self, size: int) -> None:
        """Receive until `size` bytes are available."""
        while (missing := size - len(self._received)) > 0:
            more = self._source.recv(max(_RECEIVE_BYTES, missing))
            if not more:
                raise ValueError("Connection disconnected")
            self._received += more


def _last_request(properties: Mapping[str | None, str | None]) -> str:
    """Return how the contents of a batch's last request begin; "" if the call is no batch."""
    size = properties.get("batch_size")
    if not size or not size.isdecimal() or is_of_http(properties):
        return ""
    return f"batch_{int(size) - 1:03d}."


def _is_form(properties: Mapping[str | None, str | None], prefix: str) -> bool:
    """Return whether the request whose properties have this prefix is a form."""
    name = f"{prefix}content-type"
    kinds = [value.lower() for key, value in properties.items() if key and value and key.lower() == name]
    return any(kind.startswith(_FORMS) for kind in kinds)


_MAX_REASON = 1000
"""Characters of an error that becomes an HTTP reason phrase; SageMaker takes 4,096 bytes of headers in all."""

_SHORT, _SIZE = struct.Struct(">h"), struct.Struct(">i")

_BATCH_KEY = re.compile(r"batch_(\d{3,})\.(.*)", re.DOTALL)  # from 1,000 on, Java writes as many digits as it needs


def is_batch(inputs: Input) -> bool:
    """Return whether Java made this Input of several requests, or is stepping a rolling batch.

    A request that is alone has its client's headers for properties and its query's names for keys, before its body:
    they may be called `batch_size` and `batch_000.data`.
    """
    properties, keys = inputs.get_properties(), inputs.get_content().get_keys()
    return (
        "batch_size" in properties
        and bool(keys)
        and keys[0].startswith("batch_")
        and keys[-1].startswith("batch_")
        and not is_of_http(properties)
    )


def single(inputs: Input) -> Item:
    """Return the only request in an Input; query parameters are next to its body."""
    headers = {str(key).lower(): str(value) for key, value in inputs.get_properties().items()}
    content = inputs.get_content()
    body = content.get("data")
    if body is None:
        body = content.value_at(0) if content.size() else b""
    elif (adapter := content.get("adapter")) is not None:
        headers[QUERY_ADAPTER] = _text(adapter)
    return Item(bytes(body), headers)


def batched(inputs: Input) -> dict[int, Item]:
    """Return a batch's requests that contain anything, by task.

    In a rolling batch those are the new ones, which have headers and a seed: for others the Java side sends only an
    empty body.
    """
    content = inputs.get_content()
    keys, values = content.get_keys(), content.get_values()
    properties = inputs.get_properties()
    bodies: dict[int, bytes] = {}
    headers: dict[int, dict[str, str]] = {}
    if len(keys) > int(properties["batch_size"]) or any(values):
        for key, value in zip(keys, values, strict=True):
            if match := _BATCH_KEY.fullmatch(key):
                index, name = int(match[1]), match[2]
                if name == "data" and value:
                    bodies.setdefault(index, bytes(value))
                elif name == "seed":
                    headers.setdefault(index, {})
                elif name == "adapter":
                    headers.setdefault(index, {})[QUERY_ADAPTER] = _text(value)
    for key, value in properties.items():
        if match := _BATCH_KEY.fullmatch(key):
            headers.setdefault(int(match[1]), {})[match[2].lower()] = value
    return {index: Item(bodies.get(index, b""), headers.get(index, {})) for index in bodies.keys() | headers.keys()}


def _text(value: Any) -> str:
    """Decode a value of the query."""
    return bytes(value).decode("utf-8", "replace")


class Sent(Output):  # type: ignore[misc]
    """Answers that are already in bytes, written at once: djl_python only calls their `send`.

    Args:
        then: called when they are written, on the thread that did.
    """

    def __init__(self, data: bytes, then: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._data = data
        self._then = then

    def send(self, cl_socket: Any) -> None:
        cl_socket.sendall(self._data)
        self._then()


class Unsent(Output):  # type: ignore[misc]
    """An answer that is not sent, as nobody waits for it."""

    def send(self, cl_socket: Any) -> None:
        pass


class PieceWriter:
    """Encodes answers: a map of strings for each piece, and the headers of requests that begin."""

    def __init__(self, version: DjlVersion) -> None:
        string = version.string
        self._version = version
        self._start = _SHORT.pack(200) + string(b"OK")
        self._map = _SHORT.pack(2) + string(b"data")
        self._more = string(b"last") + string(b"false")
        self._last = string(b"last") + string(b"true")
        self._key = string(b"data")

    def step(self, pieces: Sequence[Piece], instead: Callable[[Piece, Exception], Piece]) -> bytes:
        """Return the whole answer to a step.

        Args:
            instead: returns the piece to write instead of one that cannot be written.
        """
        headers: list[bytes] = []
        values: list[bytes] = []
        length = self._version.length
        around = len(self._map) + length.size + len(self._more)
        key, size, more = self._key, _SIZE.pack, self._more
        for index, piece in enumerate(pieces):
            if piece.first or piece.last:
                try:
                    own, value = self._edge(index, piece)
                except Exception as bug:  # one answer must not stop the others
                    own, value = self._edge(index, instead(piece, bug))
                headers += own
                values.append(key + size(len(value)) + value)
            else:  # nearly every piece
                data = piece.data
                num = len(data)
                values += (key, size(around + num), self._map, length.pack(num), data, more)
        return b"".join((self._start, _SHORT.pack(len(headers)), *headers, _SHORT.pack(len(pieces)), *values))

    def _edge(self, index: int, piece: Piece) -> tuple[list[bytes], bytes]:
        """Return the headers and the value of a piece that begins or ends an answer."""
        string, headers = self._version.string, self._headers(piece.task) if piece.first else {}
        own = [string(f"batch_{index}_{name}".encode()) + string(text.encode()) for name, text in headers.items()]
        return own, self.value(piece)

    def _headers(self, task: RequestTask) -> dict[str, str]:
        """Return the headers of an answer in a rolling batch."""
        id = task.header("requestid") if self._version.names_requests else ""
        return {**headers_of(task), **({"requestId": id} if id else {})}

    def message(self, piece: Piece, id: str) -> bytes:
        """Return a whole answer of async mode; `id` is DJL's id of the request."""
        headers = {**(headers_of(piece.task) if piece.first else {}), "request_tracking_id": id}
        string, value = self._version.string, self.value(piece)
        properties = [string(name.encode()) + string(text.encode()) for name, text in headers.items()]
        content = (_SHORT.pack(1), self._key, _SIZE.pack(len(value)), value)
        return b"".join((self._start, _SHORT.pack(len(properties)), *properties, *content))

    def value(self, piece: Piece) -> bytes:
        """Return what Java reads of one request."""
        if piece.first and piece.task.error is not None:
            answer = HttpResponse(piece.task.status, piece.task.content_type, piece.data)
            return self.failure(answer, piece.task.error)
        return self.piece(piece.data, last=piece.last)

    def piece(self, data: bytes, *, last: bool) -> bytes:
        end = self._last if last else self._more
        return b"".join((self._map, self._version.length.pack(len(data)), data, end))

    def failure(self, answer: HttpResponse, failed: ServingError) -> bytes:
        """Return the failure of a request of which nothing was sent, so that it can have its own HTTP status.

        Args:
            failed: why; its message is the reason phrase of dialects whose body has no `error`.
        """
        if answer.status < 400:  # some dialects tell errors under 200
            return self.piece(answer.body, last=True)
        event = answer.body.startswith(b"data:")
        body = answer.body.removeprefix(b"data:").strip() if event else answer.body
        value = json.loads(body)
        error = value.get("error", failed.message)
        reason = one_line(error["message"] if isinstance(error, dict) else error)  # OpenAI has an object
        if self._version.json_errors:  # Java looks for the status in the body; the reason phrase is what that says
            as_it_is = "code" in value and reason == error
            text = body.decode() if as_it_is else json.dumps({**value, "code": answer.status, "error": reason})
            return dumps({"data": text, "last": True})
        fields = {"data": "", "last": "true", "code": str(answer.status), "error": reason}
        string = self._version.string
        return _SHORT.pack(len(fields)) + b"".join(string(k.encode()) + string(v.encode()) for k, v in fields.items())


def whole(task: RequestTask) -> Output:
    """Return all of a finished answer, outside of any batch."""
    message = one_line(task.error.message) if task.error is not None else "OK"
    body, headers, limit = task.take(), headers_of(task), MAX_FIELD
    if len(body) <= limit:
        return output(body, headers, status=task.status, message=message)
    pieces = iter([body[at : at + limit] for at in range(0, len(body), limit)])
    return streamed(pieces, headers)


def streamed(pieces: Iterator[bytes], headers: Mapping[str, str]) -> Output:
    answer = Output()
    for name, value in headers.items():
        answer.add_property(name, value)
    return answer.add_stream_content(pieces, None)


def refusal(error: ServingError) -> Output:
    """Return a failure in no dialect."""
    answer, message = FRONT_END.whole(error), one_line(error.message)
    headers = {"Content-Type": answer.content_type, **dict(answer.headers)}
    return output(answer.body, headers, status=answer.status, message=message)


def output(body: bytes, headers: Mapping[str, str], *, status: int = 200, message: str = "OK") -> Output:
    answer = Output(code=status, message=message)
    for name, value in headers.items():
        answer.add_property(name, value)
    return answer.add(body, key="data")


def headers_of(task: RequestTask) -> dict[str, str]:
    """Return the headers of an answer. Of the dialect's own headers, only those of errors and sessions are kept.

    A request about a session needs no engine.
    """
    passes = task.error is not None or task.parsed is None or not task.parsed.requests
    own = task.dialect_headers() if passes else ()
    return {
        "Content-Type": task.content_type,
        **ignored_header(task.ignored),
        **dict(own),
        **dict(retry_headers(task.status, task.retry_after)),
    }


def one_line(message: str) -> str:
    """Return the message in one line, for an HTTP reason phrase, where a line break would end the head."""
    return " ".join(message.split())[:_MAX_REASON]
