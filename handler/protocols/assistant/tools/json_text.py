"""Finds the end of the JSON arguments of a tool call, and converts the plain text of parameters to JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

from handler.core.framing import is_json, is_too_deep, loads
from handler.core.numbers import is_digits


class JsonEnd:
    """Finds the end of a JSON object or list that arrives in pieces.

    Args:
        depth: the number of objects and lists that are already open.
        stop: a character that JSON allows only in strings. Outside of strings, it ends the JSON, which is then invalid.

    Attributes:
        quoted: whether the text so far ends within a string.
    """

    def __init__(self, depth: int = 0, stop: str = "") -> None:
        self._signs = re.compile(rf'["\\{{}}\[\]{stop}]')
        self._depth = depth
        self.quoted = False
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """Return the index after the end in the next piece of text, or None if the piece does not contain the end."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = self._signs.search(text, at)
            if match is None:
                return None
            sign, at = match[0], match.end()
            if sign == '"':
                self.quoted = not self.quoted
            elif sign == "\\":
                self._escaped = self.quoted
            elif not self.quoted:
                if sign not in "{[]}":
                    return at - 1
                self._depth += 1 if sign in "{[" else -1
                if self._depth <= 0:
                    return at
        return None


_CONTROLS = re.compile(r'"|\\.?|[\x00-\x1f]', re.DOTALL)


class ControlEscapes:
    """Escapes the control characters in the strings of a JSON text that arrives in pieces.

    Models write newlines in strings without escaping them, which JSON does not allow.
    """

    def __init__(self) -> None:
        self.quoted = False
        self._escapes = False  # whether the last character is a backslash that escapes the next one

    def feed(self, text: str) -> str:
        if not text or (not self._escapes and _CONTROLS.search(text) is None):
            return text
        parts, start, first = [], 0, int(self._escapes)
        self._escapes = False
        for match in _CONTROLS.finditer(text, first):
            sign = match[0]
            if sign == '"':
                self.quoted = not self.quoted
            elif sign[0] == "\\":
                self._escapes = len(sign) == 1
            elif self.quoted:
                parts += [text[start : match.start()], _escape(sign)]
                start = match.end()
        return "".join([*parts, text[start:]]) if parts else text


def dumps(value: Any) -> str:
    text = _ENCODER.encode(value)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which can only be written as an escape
        return json.dumps(value)
    return text


_ENCODER = json.JSONEncoder(ensure_ascii=False)


def is_object(text: str) -> bool:
    """Return whether text is a JSON object that every client can read and that may be sent back in a request.

    Many clients refuse numbers that overflow a float, and lone surrogates. The nesting in requests is limited.
    """
    try:
        value: Any = loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and not is_too_deep(value, text)


PYTHON_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
"""Maps the character after a backslash to the character that the escape stands for in Python."""

STRING = frozenset({"string"})
_STRING_OR_NULL = frozenset({"string", "null"})
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_BOOLEANS = {"true": "true", "1": "true", "false": "false", "0": "false"}


def as_json(text: str, types: frozenset[str]) -> str:
    """Convert the plain text of a parameter to JSON of a type that its schema allows.

    Text that fits none of the types is returned unchanged if it is JSON, and as a string otherwise. Objects, lists and
    null may be in Python notation, which the chat templates of several models use.
    """
    plain = text.strip()
    if "null" in types and (plain.lower() == "null" or plain == "None"):
        return "null"
    if "number" in types and NUMBER.fullmatch(plain):
        return plain
    if "integer" in types and NUMBER.fullmatch(plain) and is_digits(plain.lstrip("-")):
        return plain
    if "boolean" in types and plain.lower() in _BOOLEANS:
        return _BOOLEANS[plain.lower()]
    if types & {"object", "array"} and plain[:1] in ("{", "["):
        value = _json(plain) or _json(_PYTHON.sub(_from_python, plain))
        if value is not None:
            return value
    if not types or "string" in types:
        return dumps(text)
    return _json(plain) or dumps(text)


_PYTHON = re.compile(r"""'([^'\\]*(?:\\.[^'\\]*)*)'?|"([^"\\]*(?:\\.[^"\\]*)*)"?|\b(?:True|False|None)\b""", re.DOTALL)
_PYTHON_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_WORDS = {"True": "true", "False": "false", "None": "null"}


def _from_python(literal: re.Match[str]) -> str:
    """Return the JSON of a Python string, True, False or None.

    A string without a closing quote extends to the end of the text, so that the search takes linear time.
    """
    text = literal[1] if literal[1] is not None else literal[2]
    return _WORDS[literal[0]] if text is None else dumps(_PYTHON_ESCAPE.sub(_unescape, text))


def _unescape(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2] or escape[3]
    if code is None:
        return PYTHON_ESCAPES.get(escape[4], escape[4] if escape[4] in "\\'\"" else escape[0])
    return chr(int(code, 16)) if int(code, 16) <= sys.maxunicode else escape[0]


def _json(text: str) -> str | None:
    """Return JSON text with control characters escaped, or None if the text is not JSON."""
    text = ControlEscapes().feed(text)
    return text if is_json(text) else None


class ParameterValue:
    """Converts the plain text of a parameter, which arrives in pieces, to JSON.

    A string is written as it arrives. A value that may have another type is written once it is complete.

    Args:
        types: the types in the schema of the parameter. If there are none, the value is a string.
        write: the function that receives the JSON text.
        trim: whether to drop a newline before the text and a newline after it.
    """

    def __init__(self, types: frozenset[str], write: Callable[[str], None], *, trim: bool = False) -> None:
        self._types = types or STRING
        self._write = write
        self._trim = trim  # whether a newline before the text may still follow
        self._trims = trim
        self._pieces: list[str] = []  # text that is not written yet
        self._start = ""  # the start of the text while it may be null
        self._streams = False

    def feed(self, text: str) -> None:
        if self._trim and text:
            text, self._trim = text.removeprefix("\n"), False
        self._pieces.append(text)
        if self._streams or self._is_string(text):
            text = "".join(self._pieces)
            held = "\n" if self._trims and text.endswith("\n") else ""
            self._write(("" if self._streams else '"') + _escape(text.removesuffix(held)))
            self._pieces, self._streams = [held], True

    def close(self) -> None:
        text = "".join(self._pieces)
        text = text.removesuffix("\n") if self._trims else text
        self._write(_escape(text) + '"' if self._streams else as_json(text, self._types))

    def _is_string(self, text: str) -> bool:
        """Return whether the value is a string, based on the text that has arrived so far."""
        if self._types != _STRING_OR_NULL:
            return self._types == STRING
        start = (self._start + text).lstrip()
        word = start.rstrip()
        self._start = word if word == start else f"{word} "  # a single space at the end, so that it stays short
        return not ("null".startswith(word.lower()) or "None".startswith(word))


def _escape(text: str) -> str:
    return dumps(text)[1:-1]
