"""DJL's worker protocol, with functions that read requests from an Input and encode responses as bytes.

The protocol is that of ai.djl.python 0.25 to 0.36. `DjlVersion` contains the differences between versions.
"""

from __future__ import annotations

import json
import re
import select
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import djl_python
from djl_python import Input, Output

from handler.config import environment
from handler.core.errors import ServingError
from handler.core.framing import dumps
from handler.core.numbers import is_digits
from handler.djl.batches import Item, Piece
from handler.protocols.kernel.errors import FRONT_END, HttpResponse, retry_headers
from handler.serving.head import QUERY_ADAPTER
from handler.serving.request.task import RequestTask, ignored_header

MAX_FIELD = environment.netty_buffer_bytes() // 2  # the rest is for the other fields
"""Maximum size of a field, in bytes. If a field is larger, Java ends the worker and all of its requests."""

_OF_HTTP = frozenset(
    {"host", "connection", "content-length", "content-type", "user-agent", "x-request-id", "requestid"}
)
"""Names of properties that occur only among a client's own headers. In a batch, Java adds a prefix to header names."""

_RECEIVE_BYTES = 1 << 16  # Python allocates this many bytes in each call

_COUNT, _INT = struct.Struct(">H"), struct.Struct(">i")
"""The encodings of a field count and of a byte count."""

_WRAP = 1 << 16
"""The modulus of the 16-bit numbers in which Java writes larger counts and lengths.

256 new requests may have 70,000 headers, because each of SageMaker's custom attributes is a header. Java sorts its map
of properties, so `handler` comes after every `batch_...`: as long as `handler` is missing, another 65,536 properties
follow. Contents are in the order of the requests: as long as the last request has no contents, more contents
follow. Before 0.28, the length of a string also had 16 bits: a content's key continues as long as the number after it
is not a valid number of bytes.
"""

_BATCH = b"batch_"

_NO_SIZE = 0x09000000
"""A number greater than the size of any content. Four bytes of text, read as a number, are at least this large."""

_FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")
"""Content types of forms. Java sends each field as a content, so the client chooses the number and the names."""

_SOON = 0.5  # seconds to wait for more of a call if its count may have wrapped


def is_of_http(properties: Mapping[Any, Any]) -> bool:
    """Return whether properties are a client's headers instead of Java's own properties."""
    return not _OF_HTTP.isdisjoint(str(name).lower() for name in properties)


class DjlVersion(NamedTuple):
    """The differences between versions of DJL Serving. Other code of this package does not compare versions.

    Attributes:
        length: the encoding of a string's length, which takes two bytes before 0.28 and four bytes since.
        json_errors: whether a failed piece is a JSON object with `data` and `last`. Its `data` is JSON with `code` and
            `error`, which determine the status of the request; the same JSON is the body. Since 0.29, a failed piece is
            a map with `code` and `error`, from which Java creates the body.
        commits_early: whether an empty first piece starts the response and commits its status. Since 0.29, Java ignores
            an empty piece.
        always_steps: whether Java steps a rolling batch whenever option.rolling_batch is set, even to `disable`.
        steps_all_ranks: whether Java sends a step to all ranks of an MPI world and uses the last rank's response. It
            does not if option.rolling_batch is `trtllm`.
        passes_headers: whether the responses of a rolling batch have the headers that the worker sets.
        names_requests: whether the responses of LMI's rolling batch have a header `requestId` with Java's request ID.
        metric_types: whether a [METRICS] line may end with a type: c (counter), g (gauge) or h (histogram).
        calls_early: whether Java calls a worker that replaces another before the worker has answered the load call.
        tells_all_workers: whether Java tells each worker of a change of an adapter. Since 0.31, it tells one of them.
    """

    length: struct.Struct
    json_errors: bool
    commits_early: bool
    always_steps: bool
    steps_all_ranks: bool
    passes_headers: bool
    names_requests: bool
    metric_types: bool
    calls_early: bool
    tells_all_workers: bool

    @property
    def max_piece(self) -> int:
        """The maximum number of bytes in a piece."""
        return 32_000 if self.length.size == 2 else MAX_FIELD

    def string(self, text: bytes) -> bytes:
        return self.length.pack(len(text)) + text


def installed_version() -> DjlVersion:
    """Return the version of the djl_python package that runs this worker."""
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
        calls_early=version < (0, 30),
        tells_all_workers=version < (0, 31),
    )


def read_ahead(version: DjlVersion) -> Reader:
    """Make djl_python read each Input with a `Reader`, and return the reader."""
    reader = Reader(version.length)
    Input.read = lambda inputs, conn: reader.read(inputs, conn)
    return reader


class _Message(NamedTuple):
    properties: dict[str | None, str | None]
    keys: list[str | None]
    values: list[bytearray]
    size: int  # bytes


class Reader:
    """Reader of Inputs that receives all available bytes at once. djl_python receives each field separately.

    A continuing request has three fields without content, so 128 requests would take 400 system calls per step. As long
    as no request joins or leaves, each step has the same bytes as the previous step, which are not parsed again.

    Args:
        length: the encoding of a string's length.
    """

    def __init__(self, length: struct.Struct) -> None:
        self._length = length
        self._source: Any = None
        self._received = bytearray()  # the bytes after the last message
        self._last = _Message({}, [], [], 0)
        self._bytes_of_last = b""  # empty if the last message is too large to keep
        self._after_form = False  # whether the last message may have more contents than its count says

    def read(self, inputs: Input, conn: Any) -> None:
        """Read a call from the connection into an Input. This replaces `Input.read`.

        Raises:
            ValueError: if the connection was closed or the data is not a call. djl_python then ends the worker.
        """
        if conn is not self._source:
            self._source, self._received = conn, bytearray()
        received = self._received
        if not received:
            self._receive(1)
        if not (self._bytes_of_last and received.startswith(self._bytes_of_last)):
            message = self._next_message()
            is_small = message.size <= _RECEIVE_BYTES  # a large message would stay in memory until the next call
            self._bytes_of_last = bytes(received[: message.size]) if is_small else b""
            self._last = message if is_small else _Message({}, [], [], 0)
        else:
            message = self._last
        del received[: message.size]
        inputs.properties.update(message.properties)
        inputs.content.keys, inputs.content.values = message.keys[:], message.values[:]
        inputs.function_name = message.properties.get("handler")

    def has_next(self, seconds: float = 0.0) -> bool:
        """Return whether Java has made another call than the last one read, or makes one within `seconds`."""
        if self._received or self._source is None:
            return bool(self._received)
        if seconds:
            select.select([self._source], [], [], seconds)
        try:
            return bool(self._source.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:  # there is no call, or no connection any more
            return False

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
        """Read `count` contents, and return the position of the next field."""
        for _ in range(count):
            key, size, start = self._key(at)
            at = start + size
            self._receive(at)
            keys.append(key)
            values.append(self._received[start:at])
        return at

    def _key(self, at: int) -> tuple[str | None, int, int]:
        """Return a content's key, and the size and position of its value."""
        length, start = self._number(self._length, at)
        if length < -1:
            length += _WRAP
        size, begin = self._number(_INT, start + max(length, 0))
        while self._short and not 0 <= size < _NO_SIZE:
            length += _WRAP
            size, begin = self._number(_INT, start + length)
        return None if length < 0 else self._received[start : start + length].decode(), size, begin

    def _skip_contents(self) -> None:
        """Skip the contents of a form that exceed its count.

        Java writes no separator between calls. A call begins with the number of its properties (0 if the number has
        wrapped, which only happens in a batch) and the length of a key, which are both small. A content begins with the
        length of its key in four bytes.
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
        """Return whether strings have 16-bit lengths. If so, Java waits for the response to each call."""
        return self._length.size == 2

    def _has_more(self, at: int) -> bool:
        """Return whether more than `at` bytes arrive within `_SOON`. None arrive if the batch is already complete."""
        return len(self._received) > at or bool(select.select([self._source], [], [], _SOON)[0])

    def _string(self, at: int) -> tuple[str | None, int]:
        """Return a string, and the position of the next field."""
        size, start = self._number(self._length, at)
        if size < 0:
            return None, start
        end = start + size
        self._receive(end)
        return self._received[start:end].decode(), end

    def _number(self, number: struct.Struct, at: int) -> tuple[int, int]:
        """Return a number, and the position of the next field."""
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
    """Return the prefix of the keys of a batch's last request, or "" if the call is not a batch."""
    size = properties.get("batch_size")
    if not size or not is_digits(size) or is_of_http(properties):
        return ""
    return f"batch_{int(size) - 1:03d}."


def _is_form(properties: Mapping[str | None, str | None], prefix: str) -> bool:
    """Return whether the request whose properties have this prefix is a form."""
    name = f"{prefix}content-type"
    kinds = [value.lower() for key, value in properties.items() if key and value and key.lower() == name]
    return any(kind.startswith(_FORMS) for kind in kinds)


_MAX_REASON = 1000
"""Maximum number of characters in an HTTP reason phrase. SageMaker accepts at most 4,096 bytes of headers in total."""

_BATCH_KEY = re.compile(r"batch_([0-9]{3,})\.(.*)", re.DOTALL)  # more digits from 1,000 on


def is_load(inputs: Input) -> bool:
    """Return whether this Input is Java's first call, which has the model's properties and no contents."""
    return not inputs.get_content().size() and not is_of_http(inputs.get_properties())


def is_batch(inputs: Input) -> bool:
    """Return whether this Input is a batch that Java made, or a step of a rolling batch.

    The properties of a single request are the client's headers, and its keys are the query parameters, followed by the
    body. A client may therefore use the names `batch_size` and `batch_000.data`.
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
    """Return the only request in an Input. Its body and its query parameters are separate contents."""
    headers = {str(key).lower(): str(value) for key, value in inputs.get_properties().items()}
    content = inputs.get_content()
    body = content.get("data")
    if body is None:
        body = content.value_at(0) if content.size() else b""
    elif (adapter := content.get("adapter")) is not None:
        headers[QUERY_ADAPTER] = _text(adapter)
    return Item(bytes(body), headers)


def batched(inputs: Input) -> dict[int, Item]:
    """Return the requests of a batch that are not empty, by index.

    In a rolling batch, these are the new requests, which have headers and a seed. For all others, Java sends only an
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
    return bytes(value).decode("utf-8", "replace")


class Sent(Output):  # type: ignore[misc]
    """Encoded responses that are written in a single call. djl_python only calls `send`.

    Args:
        then: a callback that is called after the responses have been written, on the thread that wrote them.
    """

    def __init__(self, data: bytes, then: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._data = data
        self._then = then

    def send(self, cl_socket: Any) -> None:
        cl_socket.sendall(self._data)
        self._then()


class PieceWriter:
    """Encoder of responses: a map of strings for each piece, and the headers of responses that begin."""

    def __init__(self, version: DjlVersion) -> None:
        string = version.string
        self._version = version
        self._start = _COUNT.pack(200) + string(b"OK")
        self._map = _COUNT.pack(2) + string(b"data")
        self._more = string(b"last") + string(b"false")
        self._last = string(b"last") + string(b"true")
        self._key = string(b"data")

    def step(self, pieces: Sequence[Piece], instead: Callable[[Piece, Exception], Piece]) -> bytes:
        """Return the complete response to a step.

        Args:
            instead: a function that takes a piece that cannot be written and its exception, and returns the piece to
                write instead.
        """
        headers: list[bytes] = []
        values: list[bytes] = []
        length = self._version.length
        around = len(self._map) + length.size + len(self._more)
        key, size, more = self._key, _INT.pack, self._more
        for index, piece in enumerate(pieces):
            if piece.first or piece.last:
                try:
                    item_headers, value = self._edge(index, piece)
                except Exception as bug:  # one response must not stop the others
                    item_headers, value = self._edge(index, instead(piece, bug))
                headers += item_headers
                values.append(self._content(value))
            else:  # nearly every piece
                data = piece.data
                num = len(data)
                values += (key, size(around + num), self._map, length.pack(num), data, more)
        return b"".join((self._start, _COUNT.pack(len(headers)), *headers, _COUNT.pack(len(pieces)), *values))

    def loaded(self) -> bytes:
        """Return the response to the load call."""
        return self._start + _COUNT.pack(0) + _COUNT.pack(0)

    def refused_step(self, size: int, error: ServingError) -> bytes:
        """Return a response to a step that ends all of its requests, of which there are `size`, with an error."""
        value = self.failure(FRONT_END.whole(error), error)
        return b"".join((self._start, _COUNT.pack(0), _COUNT.pack(size), self._content(value) * size))

    def _edge(self, index: int, piece: Piece) -> tuple[list[bytes], bytes]:
        """Return the headers and the value of a piece that begins or ends a response."""
        string, headers = self._version.string, self._headers(piece.task) if piece.first else {}
        encoded = [string(f"batch_{index}_{name}".encode()) + string(text.encode()) for name, text in headers.items()]
        return encoded, self.value(piece)

    def _headers(self, task: RequestTask) -> dict[str, str]:
        """Return the headers of a response in a rolling batch."""
        id = task.header("requestid") if self._version.names_requests else ""
        return {**headers_of(task), **({"requestId": id} if id else {})}

    def message(self, piece: Piece, id: str) -> bytes:
        """Return a message of async mode, which contains one piece. `id` is DJL's ID of the request."""
        headers = {**(headers_of(piece.task) if piece.first else {}), "request_tracking_id": id}
        string, value = self._version.string, self.value(piece)
        properties = [string(name.encode()) + string(text.encode()) for name, text in headers.items()]
        return b"".join((self._start, _COUNT.pack(len(properties)), *properties, _COUNT.pack(1), self._content(value)))

    def value(self, piece: Piece) -> bytes:
        """Encode a piece: its output, or the request's failure if the piece is the first."""
        if piece.first and piece.task.error is not None:
            answer = HttpResponse(piece.task.status, piece.task.content_type, piece.data)
            return self.failure(answer, piece.task.error)
        return self.piece(piece.data, last=piece.last)

    def _content(self, value: bytes) -> bytes:
        return b"".join((self._key, _INT.pack(len(value)), value))

    def piece(self, data: bytes, *, last: bool) -> bytes:
        end = self._last if last else self._more
        return b"".join((self._map, self._version.length.pack(len(data)), data, end))

    def failure(self, answer: HttpResponse, failed: ServingError) -> bytes:
        """Encode the failure of a request that has sent no output yet, so that the failure can set the HTTP status.

        Args:
            failed: the error. Its message is the reason phrase if the body has no `error`.
        """
        if answer.status < 400:  # some dialects report errors with status 200
            return self.piece(answer.body, last=True)
        event = answer.body.startswith(b"data:")
        body = answer.body.removeprefix(b"data:").strip() if event else answer.body
        value = json.loads(body)
        error = value.get("error", failed.message)
        reason = on_one_line(error["message"] if isinstance(error, dict) else error)  # OpenAI's error is an object
        if self._version.json_errors:  # Java reads the status and the reason phrase from the body
            as_it_is = "code" in value and reason == error
            text = body.decode() if as_it_is else json.dumps({**value, "code": answer.status, "error": reason})
            return dumps({"data": text, "last": True})
        fields = {"data": "", "last": "true", "code": str(answer.status), "error": reason}
        string = self._version.string
        return _COUNT.pack(len(fields)) + b"".join(string(k.encode()) + string(v.encode()) for k, v in fields.items())


def whole(task: RequestTask) -> Output:
    """Return the complete response to a request outside of any batch."""
    message = on_one_line(task.error.message) if task.error is not None else "OK"
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
    """Return an error response in the front end's own format."""
    answer, message = FRONT_END.whole(error), on_one_line(error.message)
    headers = {"Content-Type": answer.content_type, **dict(answer.headers)}
    return output(answer.body, headers, status=answer.status, message=message)


def output(body: bytes, headers: Mapping[str, str], *, status: int = 200, message: str = "OK") -> Output:
    answer = Output(code=status, message=message)
    for name, value in headers.items():
        answer.add_property(name, value)
    return answer.add(body, key="data")


def headers_of(task: RequestTask) -> dict[str, str]:
    """Return the headers of a response. The API's own headers are included only for errors and session requests."""
    # A request about a session has nothing for the engine.
    passes = task.error is not None or task.parsed is None or not task.parsed.requests
    dialect_headers = task.dialect_headers() if passes else ()
    return {
        "Content-Type": task.content_type,
        **ignored_header(task.ignored),
        **dict(dialect_headers),
        **dict(retry_headers(task.status, task.retry_after)),
    }


def on_one_line(message: str) -> str:
    """Return the message as a single line, because a line break in an HTTP reason phrase would end the headers."""
    return " ".join(message.split())[:_MAX_REASON]
