"""Forms (multipart/form-data) of small texts and files, which stay in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from handler.core.errors import InvalidPayload
from handler.core.media import Upload

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_MOST_PARTS = 64  # OpenAI's routes have some ten
_MOST_TEXT = 1 << 20  # bytes of a part that is no file
_MOST_BOUNDARY = 70  # characters: RFC 2046, section 5.1.1


Parts = dict[str, str | Upload | list[str]]


def read_form(body: bytes, content_type: str) -> Parts:
    """Return the parts by name; of two with a name the last counts, as in JSON. Texts of a name with `[]` are a list.

    Raises:
        InvalidPayload: the body is no such form, or has too many parts.
    """
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser, parse_options_header

    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not 0 < len(boundary) <= _MOST_BOUNDARY:
        raise InvalidPayload(f"content type multipart/form-data needs a boundary of 1 to {_MOST_BOUNDARY} characters")
    form = _Form()
    try:
        parser = MultipartParser(boundary, form.callbacks)
        parser.write(body)
        parser.finalize()
    except (FormParserError, ValueError):
        raise InvalidPayload("the body is not of the type multipart/form-data, or breaks off") from None
    if not form.ended:
        raise InvalidPayload("the body is not of the type multipart/form-data, or breaks off")
    return form.parts


class _Form:
    """Gathers what the parser tells of."""

    def __init__(self) -> None:
        self.parts: Parts = {}
        self.ended = False
        self._number = 0
        self._field, self._value = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._data = bytearray()

    @property
    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._header,
            "on_part_data": lambda data, start, end: self._data.extend(memoryview(data)[start:end]),
            "on_part_end": self._part,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        self._number += 1
        if self._number > _MOST_PARTS:
            raise InvalidPayload(f"the form has more than {_MOST_PARTS} parts")
        self._headers, self._data = {}, bytearray()

    def _header(self) -> None:
        self._headers[bytes(self._field).lower()] = bytes(self._value)
        self._field, self._value = bytearray(), bytearray()

    def _part(self) -> None:
        from python_multipart.multipart import parse_options_header

        options = parse_options_header(self._headers.get(b"content-disposition", b""))[1]
        name = options.get(b"name", b"").decode(errors="replace")
        if not name:
            raise InvalidPayload("a part of the form has no name")
        if b"filename" in options:
            self.parts[name] = Upload(bytes(self._data))
            return
        if len(self._data) > _MOST_TEXT:
            raise InvalidPayload(f"{name[:64]!r}: a form's text may have {_MOST_TEXT} bytes; send a file with a name")
        try:
            text = self._data.decode()
        except UnicodeDecodeError:
            raise InvalidPayload(f"{name[:64]!r} must be UTF-8 text") from None
        if not name.endswith("[]"):
            self.parts[name] = text
        elif isinstance(texts := self.parts.setdefault(name, []), list):
            texts.append(text)

    def _end(self) -> None:
        self.ended = True
