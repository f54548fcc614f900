"""Split an answer's body into its JSON documents and the text around them, whatever the framing is."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import orjson

from handler.core.nesting import is_too_deep

_DECODER = json.JSONDecoder()
_BEGIN = re.compile(r"(?!\[DONE\])[{\[]")
_BEGIN_BYTES = re.compile(rb"(?!\[DONE\])[{\[]")


class NotJson(ValueError):
    """The body holds no JSON object or list, or a broken one."""


class Documents(NamedTuple):
    """The JSON objects and lists of a body, and the text before, between and after them: one more than documents."""

    values: list[Any]
    glue: list[str]


def read_documents(body: bytes) -> Documents:
    """Read a body.

    Raises:
        NotJson: it is text.
    """
    try:
        found = _by_lines(body)
    except ValueError:  # a document over several lines, NaN, a number of more than 64 bits
        found = _by_place(body)
    if not found.values:
        raise NotJson("no JSON object or list")
    return found


def _by_lines(body: bytes) -> Documents:
    """Read at most one document a line: 20 times as fast as looking for the end of each."""
    values: list[Any] = []
    glue: list[str] = []
    text: list[bytes] = []
    for line in body.splitlines(keepends=True) if b"\n" in body.strip() else [body]:
        begin = _BEGIN_BYTES.search(line)
        if begin is None:
            text.append(line)
            continue
        document = line[begin.start() :].rstrip()
        values.append(_bounded(orjson.loads(document), document))
        glue.append(b"".join([*text, line[: begin.start()]]).decode())
        text = [line[begin.start() + len(document) :]]
    return Documents(values, [*glue, b"".join(text).decode()])


def _bounded(value: Any, text: str | bytes) -> Any:
    """Return the value, which functions that call themselves may follow."""
    if is_too_deep(value, text):
        raise NotJson("too deep")
    return value


def _by_place(body: bytes) -> Documents:
    values: list[Any] = []
    glue: list[str] = []
    try:
        text, at = body.decode(), 0
        while begin := _BEGIN.search(text, at):
            glue.append(text[at : begin.start()])
            value, at = _DECODER.raw_decode(text, begin.start())
            values.append(_bounded(value, text[begin.start() : at]))
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)) from None
    return Documents(values, [*glue, text[at:]])
