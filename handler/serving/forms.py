"""Parses forms (multipart/form-data) with small text fields and files, which are held in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from handler.core.errors import InvalidPayload
from handler.core.media import Upload

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_PARTS = 64  # maximum number of parts; OpenAI's routes have about ten
_MOST_TEXT = 1 << 20  # maximum size of a part that is not a file, in bytes
_MOST_BOUNDARY = 70  # maximum characters (RFC 2046, section 5.1.1)


Parts = dict[str, str | Upload | list[str]]


def read_form(body: bytes, content_type: str) -> Parts:
    """Return the parts of a form by name. If several parts have the same name, the last one wins, as in JSON. Text
    parts whose name ends with `[]` are collected in a list instead.

    Raises:
        InvalidPayload: the body is not a valid form, or has too many parts.
    """
    form = FormReader(content_type)
    form.feed(body)
    return form.end()


class FormReader:
    """An incremental form parser, which collects the parts of a form.

    Args:
        write: called with each chunk of the only file in the form. If `write` is None, files are collected like other
            parts.

    Raises:
        InvalidPayload: the content type has no valid boundary.
    """

    def __init__(self, content_type: str, write: Callable[[memoryview], None] | None = None) -> None:
        from python_multipart.multipart import MultipartParser, parse_options_header

        boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
        if not 0 < len(boundary) <= _MOST_BOUNDARY:
            raise InvalidPayload(f"multipart/form-data needs a boundary of 1 to {_MOST_BOUNDARY} characters")
        self._parser = MultipartParser(boundary, self._callbacks)
        self._parts: Parts = {}
        self._ended = False
        self._write = write
        self._number = self._num_written = 0
        self._options: dict[bytes, bytes] = {}
        self._field, self._value = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Parse the next chunk of the body.

        Raises:
            InvalidPayload: the body is not a valid form, or has too many parts.
        """
        from python_multipart.exceptions import FormParserError

        try:
            self._parser.write(data)
        except (FormParserError, ValueError):
            raise _no_form() from None

    def end(self) -> Parts:
        """Return the parts by name, like `read_form`.

        Raises:
            InvalidPayload: the form is incomplete.
        """
        if not self._ended:
            raise _no_form()
        return self._parts

    @property
    def _callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._header,
            "on_headers_finished": self._open,
            "on_part_data": lambda data, start, end: self._take(memoryview(data)[start:end]),
            "on_part_end": self._part,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        self._number += 1
        if self._number > MAX_PARTS:
            raise InvalidPayload(f"the form has more than {MAX_PARTS} parts")
        self._headers, self._data = {}, bytearray()

    def _header(self) -> None:
        self._headers[bytes(self._field).lower()] = bytes(self._value)
        self._field, self._value = bytearray(), bytearray()

    def _open(self) -> None:
        """Choose the function that receives the data of the current part."""
        from python_multipart.multipart import parse_options_header

        self._options = parse_options_header(self._headers.get(b"content-disposition", b""))[1]
        self._take: Callable[[memoryview], None] = self._data.extend
        if self._write is not None and b"filename" in self._options:
            self._num_written += 1
            if self._num_written > 1:
                raise InvalidPayload("the form has more than one file")
            self._take = self._write

    def _part(self) -> None:
        options = self._options
        name = options.get(b"name", b"").decode(errors="replace")
        if not name:
            raise InvalidPayload("a part of the form has no name")
        if b"filename" in options:
            self._parts[name] = Upload(bytes(self._data), options[b"filename"].decode(errors="replace"))
            return
        if len(self._data) > _MOST_TEXT:
            raise InvalidPayload(
                f"{name[:64]!r} is longer than {_MOST_TEXT} bytes, the limit for text fields of a form; send it as a "
                "file, with a filename"
            )
        try:
            text = self._data.decode()
        except UnicodeDecodeError:
            raise InvalidPayload(f"{name[:64]!r} must be UTF-8 text") from None
        if not name.endswith("[]"):
            self._parts[name] = text
        elif isinstance(texts := self._parts.setdefault(name, []), list):
            texts.append(text)

    def _end(self) -> None:
        self._ended = True


def _no_form() -> InvalidPayload:
    return InvalidPayload("the body is not valid multipart/form-data, or is incomplete")
