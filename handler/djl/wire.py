"""DJL's worker protocol: the requests in an Input, and answers as bytes.

As ai.djl.python 0.25 to 0.36 writes and reads it; `versions.py` holds what differs.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from djl_python import Input, Output

from handler.core.errors import ServingError
from handler.core.framing import dumps
from handler.djl.batches import Item, Piece
from handler.djl.versions import MAX_FIELD, DjlVersion, is_of_http
from handler.protocols.kernel.errors import FRONT_END
from handler.protocols.kernel.http_response import HttpResponse, retry_headers
from handler.serving.preprocess import QUERY_ADAPTER, ignored_header
from handler.serving.request_task import RequestTask

_MAX_REASON = 1000
"""Characters of an error that becomes an HTTP reason phrase; SageMaker takes 4,096 bytes of headers in all."""

_COUNT, _SIZE = struct.Struct(">h"), struct.Struct(">i")

_BATCH_KEY = re.compile(r"batch_(\d{3,})\.(.*)", re.DOTALL)  # from 1,000 on, Java writes as many digits as it needs


def is_batch(inputs: Input) -> bool:
    """Whether Java made this Input of several requests, or is stepping a rolling batch.

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
    """A request that is alone in its Input; query parameters lie beside its body."""
    headers = {str(key).lower(): str(value) for key, value in inputs.get_properties().items()}
    content = inputs.get_content()
    body = content.get("data")
    if body is None:
        body = content.value_at(0) if content.size() else b""
    elif (adapter := content.get("adapter")) is not None:
        headers[QUERY_ADAPTER] = _text(adapter)
    return Item(bytes(body), headers)


def batched(inputs: Input) -> dict[int, Item]:
    """The requests of a batch that say anything, by their task.

    In a rolling batch those are the new ones, which come with their headers and a seed: of the others the Java side
    sends nothing but an empty body.
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
    """Answers that are already in bytes, written at once: djl_python asks no more of them than `send`.

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
    """An answer that nobody waits for."""

    def send(self, cl_socket: Any) -> None:
        pass


class PieceWriter:
    """Makes the bytes of answers: a map of strings for each piece, and the headers of requests that begin."""

    def __init__(self, version: DjlVersion) -> None:
        string = version.string
        self._version = version
        self._start = _COUNT.pack(200) + string(b"OK")
        self._map = _COUNT.pack(2) + string(b"data")
        self._more = string(b"last") + string(b"false")
        self._last = string(b"last") + string(b"true")
        self._key = string(b"data")

    def step(self, pieces: Sequence[Piece], instead: Callable[[Piece, Exception], Piece]) -> bytes:
        """The whole answer to a step.

        Args:
            instead: returns the piece to write in the place of one that cannot be written.
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
        return b"".join((self._start, _COUNT.pack(len(headers)), *headers, _COUNT.pack(len(pieces)), *values))

    def _edge(self, index: int, piece: Piece) -> tuple[list[bytes], bytes]:
        """The headers and the value of a piece that begins or ends an answer."""
        string, headers = self._version.string, self._headers(piece.task) if piece.first else {}
        own = [string(f"batch_{index}_{name}".encode()) + string(text.encode()) for name, text in headers.items()]
        return own, self.value(piece)

    def _headers(self, task: RequestTask) -> dict[str, str]:
        """The headers of an answer in a rolling batch."""
        id = task.header("requestid") if self._version.names_requests else ""
        return {**headers_of(task), **({"requestId": id} if id else {})}

    def message(self, piece: Piece, id: str) -> bytes:
        """A whole answer of async mode, where `id` is DJL's for the request."""
        headers = {**(headers_of(piece.task) if piece.first else {}), "request_tracking_id": id}
        string, value = self._version.string, self.value(piece)
        properties = [string(name.encode()) + string(text.encode()) for name, text in headers.items()]
        content = (_COUNT.pack(1), self._key, _SIZE.pack(len(value)), value)
        return b"".join((self._start, _COUNT.pack(len(properties)), *properties, *content))

    def value(self, piece: Piece) -> bytes:
        """What Java reads of one request."""
        if piece.first and piece.task.error is not None:
            answer = HttpResponse(piece.task.status, piece.task.content_type, piece.data)
            return self.failure(answer, piece.task.error)
        return self.piece(piece.data, last=piece.last)

    def piece(self, data: bytes, *, last: bool) -> bytes:
        end = self._last if last else self._more
        return b"".join((self._map, self._version.length.pack(len(data)), data, end))

    def failure(self, answer: HttpResponse, failed: ServingError) -> bytes:
        """Nothing was sent of this request: its HTTP status can still be its own.

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
        return _COUNT.pack(len(fields)) + b"".join(string(k.encode()) + string(v.encode()) for k, v in fields.items())


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
    """A failure that has no dialect."""
    answer, message = FRONT_END.whole(error), one_line(error.message)
    headers = {"Content-Type": answer.content_type, **dict(answer.headers)}
    return output(answer.body, headers, status=answer.status, message=message)


def output(body: bytes, headers: Mapping[str, str], *, status: int = 200, message: str = "OK") -> Output:
    answer = Output(code=status, message=message)
    for name, value in headers.items():
        answer.add_property(name, value)
    return answer.add(body, key="data")


def headers_of(task: RequestTask) -> dict[str, str]:
    """Return the headers of an answer. Of a dialect's own, those of errors pass, and those about sessions.

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
    """Fit for an HTTP reason phrase, where a line break would end the head."""
    return " ".join(message.split())[:_MAX_REASON]
