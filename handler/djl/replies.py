"""Answers as the bytes of DJL's worker protocol (contract djl.md, sections 1.2 and 1.4)."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from djl_python import Output

from handler.core.errors import ServingError
from handler.core.framing import dumps
from handler.djl.versions import MAX_FIELD, Dialect
from handler.protocols.base import HttpResponse, front_end_error
from handler.serving.preprocess import ignored_header
from handler.serving.rolling import Piece
from handler.serving.slots import Place

_MAX_REASON = 1000
"""Characters of an error that becomes an HTTP reason phrase; SageMaker takes 4,096 bytes of headers in all."""

_COUNT, _SIZE = struct.Struct(">h"), struct.Struct(">i")


class Sent(Output):  # type: ignore[misc]
    """An answer that is already in bytes, written at once: djl_python asks no more of it than `send`."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data = data

    def send(self, cl_socket: Any) -> None:
        cl_socket.sendall(self._data)


class Unsent(Output):  # type: ignore[misc]
    """An answer that nobody waits for."""

    def send(self, cl_socket: Any) -> None:
        pass


class PieceWriter:
    """Makes the bytes of a step: a map of strings for each request, and the headers of those that begin."""

    def __init__(self, dialect: Dialect) -> None:
        string = dialect.string
        self._dialect = dialect
        self._start = _COUNT.pack(200) + string(b"OK")
        self._map = _COUNT.pack(2) + string(b"data")
        self._more = string(b"last") + string(b"false")
        self._last = string(b"last") + string(b"true")
        self._key = string(b"data")

    def step(self, pieces: Sequence[Piece]) -> bytes:
        """The whole answer to a step."""
        headers: list[bytes] = []
        values: list[bytes] = []
        string, length = self._dialect.string, self._dialect.length
        around = len(self._map) + length.size + len(self._more)
        key, size, more = self._key, _SIZE.pack, self._more
        for index, piece in enumerate(pieces):
            if piece.first or piece.last:
                value = self.value(piece)
                values.append(key + size(len(value)) + value)
                for name, text in headers_of(piece.place).items() if piece.first else ():
                    headers.append(string(f"batch_{index}_{name}".encode()) + string(text.encode()))
            else:  # nearly every piece
                data = piece.data
                num = len(data)
                values += (key, size(around + num), self._map, length.pack(num), data, more)
        return b"".join((self._start, _COUNT.pack(len(headers)), *headers, _COUNT.pack(len(pieces)), *values))

    def value(self, piece: Piece) -> bytes:
        """What Java reads of one request."""
        if piece.first and piece.place.error is not None:
            return self.failure(HttpResponse(piece.place.status, piece.place.content_type, piece.data))
        return self.piece(piece.data, last=piece.last)

    def piece(self, data: bytes, *, last: bool) -> bytes:
        end = self._last if last else self._more
        return b"".join((self._map, self._dialect.length.pack(len(data)), data, end))

    def failure(self, answer: HttpResponse) -> bytes:
        """Nothing was sent of this request: its HTTP status can still be its own."""
        if answer.status < 400:  # some dialects tell errors under 200
            return self.piece(answer.body, last=True)
        event = answer.body.startswith(b"data:")
        body = answer.body.removeprefix(b"data:").strip() if event else answer.body
        value = json.loads(body)
        told = value["error"]
        reason = one_line(told["message"] if isinstance(told, dict) else told)  # OpenAI has an object
        if self._dialect.json_errors:  # Java looks for the status in the body; the reason phrase is what that says
            as_it_is = "code" in value and reason == value["error"]
            text = body.decode() if as_it_is else json.dumps({**value, "code": answer.status, "error": reason})
            return dumps({"data": text, "last": True})
        fields = {"data": "", "last": "true", "code": str(answer.status), "error": reason}
        string = self._dialect.string
        return _COUNT.pack(len(fields)) + b"".join(string(k.encode()) + string(v.encode()) for k, v in fields.items())


def whole(place: Place) -> Output:
    """All of a place's answer, outside of any batch."""
    message = one_line(place.error.message) if place.error is not None else "OK"
    body, headers, limit = place.take(), headers_of(place), MAX_FIELD
    if len(body) <= limit:
        return output(body, headers, status=place.status, message=message)
    pieces = iter([body[at : at + limit] for at in range(0, len(body), limit)])
    return streamed(pieces, headers)


def streamed(pieces: Iterator[bytes], headers: Mapping[str, str]) -> Output:
    made = Output()
    for name, value in headers.items():
        made.add_property(name, value)
    return made.add_stream_content(pieces, None)


def refusal(error: ServingError) -> Output:
    """A failure that has no dialect."""
    headers = {"Content-Type": "application/json"}
    return output(dumps(front_end_error(error)), headers, status=error.status, message=one_line(error.message))


def output(body: bytes, headers: Mapping[str, str], *, status: int = 200, message: str = "OK") -> Output:
    made = Output(code=status, message=message)
    for name, value in headers.items():
        made.add_property(name, value)
    return made.add(body, key="data")


def headers_of(place: Place) -> dict[str, str]:
    return {"Content-Type": place.content_type, **ignored_header(place.ignored)}


def one_line(message: str) -> str:
    """Fit for an HTTP reason phrase, where a line break would end the head."""
    return " ".join(message.split())[:_MAX_REASON]
